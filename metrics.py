"""What requests took and what served them: sums over many, JSON lines, Prometheus text.

    aggregate(batches)                                one dict for many requests
    MetricsFile("log.jsonl").add(requests, outs)      a line per request: neither prompt nor text
    MetricsFile("nanospec.prom").add(requests, outs)  counters and histograms that go on from what the file holds

A request is a dict of attributes, by OpenTelemetry's names for generative AI where there is one (gen_ai.request.model, ...),
and `optimization`: plain, speculative, early_exit or combined, as it was started. What served its tokens is counted beside
that: those of rounds that the kill switch made plain were served by plain.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from checkpoint import write_atomically
from decode import DecodeStats, Generation

PHASES = ("prefill", "draft", "verify", "other")


def add_up(parts: Iterable[DecodeStats]) -> DecodeStats:
    """Counters, histograms and times added, so that the rates and identities of one request hold for many."""
    total = DecodeStats()
    for stats in parts:
        for name, x in vars(stats).items():
            ours = getattr(total, name)
            if isinstance(x, dict):
                setattr(total, name, dict(Counter(ours) + Counter(x)))
            elif name == "token_seconds":
                ours.extend(x)
            elif isinstance(x, list):
                setattr(total, name, [a + b for a, b in zip_longest(ours, x, fillvalue=0)])
            elif isinstance(x, (int, float)) and name != "first_token_seconds":  # whose sum says nothing
                setattr(total, name, ours + x)
    return total


def phase_seconds(batch: Sequence[DecodeStats]) -> dict[str, float]:
    """Seconds of one batch by phase. Each row holds the batch's times up to its own end."""
    last = max(batch, key=lambda stats: stats.seconds)
    seconds = {phase: getattr(last, f"{phase}_seconds") for phase in PHASES[:-1]}
    return seconds | {"other": max(last.seconds - sum(seconds.values()), 0.0)}


def per_output_token(stats: DecodeStats) -> float | None:
    """Mean seconds of a token behind the first."""
    n = stats.tokens - 1
    return (stats.seconds - stats.first_token_seconds) / n if n > 0 else None


def percentiles(values: list[float]) -> dict[str, float] | None:
    """By nearest rank; None without values."""
    values = sorted(values)
    return {f"p{p}": values[math.ceil(p / 100 * len(values)) - 1] for p in (50, 95, 99)} if values else None


def memory_peak(device: torch.device | str) -> int | None:
    """Bytes: the most that CUDA gave out there, else the largest resident size of the process so far."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource  # where there is one

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def shares(counts: dict) -> dict:
    return {key: n / sum(counts.values()) for key, n in counts.items()}


def aggregate(batches: Iterable[Sequence[DecodeStats]], device: torch.device | str = "cpu") -> dict:
    """Figures over many requests; a batch is the statistics of the rows that one call decoded together.

    Times are in seconds. Tokens that are committed together are 0 apart; tokens_per_second is all tokens over the batches'
    time behind prefill. None where there is nothing to divide by.
    """
    batches = [list(batch) for batch in batches if len(batch)]
    rows = [stats for batch in batches for stats in batch]
    total, phases = add_up(rows), [phase_seconds(batch) for batch in batches]
    seconds = {f"{phase}_seconds": sum(part[phase] for part in phases) for phase in PHASES}
    decoding = sum(seconds.values()) - seconds["prefill_seconds"]
    return {"requests": len(rows)} | {name: x for name, x in total.to_dict().items() if "second" not in name} | {
        "share_by_drafted": shares(dict(enumerate(total.drafted_histogram))),
        "share_by_reason": shares(total.reasons),
        "first_token_seconds": percentiles([s.first_token_seconds for s in rows if s.first_token_seconds is not None]),
        "between_tokens_seconds": percentiles([gap for stats in rows for gap in stats.token_seconds[1:]]),
        **seconds,
        "tokens_per_second": total.tokens / decoding if total.tokens and decoding > 0 else None,
        "memory_peak_bytes": memory_peak(device),
    }  # fmt: skip


def served_by(optimization: str, out: Generation) -> dict[str, int]:
    """Tokens by what served them: plain rounds, and the optimisation."""
    n_plain = out.sources.count("plain")
    return {"plain": n_plain} | ({} if optimization == "plain" else {optimization: len(out.sources) - n_plain})


def request_record(request: dict, out: Generation, device: torch.device | str = "cpu") -> dict:
    return request | {
        "time": time.time(),
        "gen_ai.usage.output_tokens": len(out.tokens),
        "gen_ai.response.finish_reasons": [out.finish_reason],
        "gen_ai.server.request.duration": out.stats.seconds,
        "gen_ai.server.time_to_first_token": out.stats.first_token_seconds,
        "gen_ai.server.time_per_output_token": per_output_token(out.stats),
        "optimization_tokens": served_by(request["optimization"], out),
        "stats": aggregate([[out.stats]], device),
    }


class MetricsFile:
    """What --metrics names: Prometheus text where the name ends in .prom, else JSON lines.

    What goes wrong with it is one warning, and decoding goes on; the next request tries again. A .prom file is read, added
    to and replaced at each request: counters go on over processes that run one after another; two at once need two files.
    One that nanospec did not write is left alone.
    """

    def __init__(self, path: str | Path):
        self.path, self.warned = Path(path), False
        self.attempt(self.check)  # what cannot be written is better known before the wait

    def check(self) -> None:
        if self.path.suffix == ".prom":
            Prometheus(self.path)
        open(self.path, "ab+", buffering=0).close()  # as `append` does: to open a pipe for writing alone would wait

    def add(self, requests: Sequence[dict], outs: Sequence[Generation], device: torch.device | str = "cpu") -> None:
        """The requests of one batch, and what came of them."""
        self.attempt(self.expose if self.path.suffix == ".prom" else self.append, requests, outs, device)

    def attempt(self, act, *arguments) -> None:
        try:
            act(*arguments)
        except (OSError, ValueError) as error:
            if not self.warned:
                self.warned = True
                what = getattr(error, "strerror", None) or error
                warnings.warn(f"--metrics {self.path}: {what}; decoding goes on without", stacklevel=3)

    def expose(self, requests, outs, device) -> None:
        totals = Prometheus(self.path)
        totals.add(requests, outs, device)
        write_atomically(self.path, lambda path: path.write_bytes(totals.text().encode()))

    def append(self, requests, outs, device) -> None:
        records = [request_record(request, out, device) for request, out in zip(requests, outs)]
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        with open(self.path, "ab+", buffering=0) as file:  # one write: lines of two processes do not mix
            if file.seekable() and file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                lines = lines if file.read(1) == b"\n" else b"\n" + lines  # a full disk cut the line before
            if file.write(lines) < len(lines):
                raise OSError("the disk is full")


# Buckets of gen_ai.server.* are those of the conventions.
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
FAMILIES = {  # name: (type, or the buckets of a histogram; help)
    "nanospec_requests_total": ("counter", "Requests that ended."),
    "nanospec_input_tokens_total": ("counter", "Tokens of prompts."),
    "nanospec_output_tokens_total": ("counter", "Tokens committed, by what served them."),
    "nanospec_source_tokens_total": ("counter", "Tokens committed, by source."),
    "nanospec_exit_tokens_total": ("counter", "Tokens that left early, by layers run."),
    "nanospec_audited_tokens_total": ("counter", "Tokens that left early and were judged later, by verdict."),
    "nanospec_layer_passes_total": ("counter", "Layers run, flushes and drafting exits included."),
    "nanospec_round_reasons_total": ("counter", "Rounds, by the reason for their number of drafts."),
    "nanospec_seconds_total": ("counter", "Seconds by phase; a batch counts once."),
    "nanospec_drafted_per_round": (DRAFTS, "Drafts that were verified."),
    "nanospec_accepted_per_round": (DRAFTS, "Drafts that were accepted."),
    "nanospec_time_between_tokens_seconds": ((0, 0.0001, 0.001, 0.0025, 0.005, *PER_TOKEN), "0 within a round."),
    "gen_ai_server_request_duration_seconds": (tuple(2**i / 100 for i in range(14)), "To the last token."),
    "gen_ai_server_time_to_first_token_seconds": (
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10), "Prefill included."),
    "gen_ai_server_time_per_output_token_seconds": (PER_TOKEN, "Mean of the tokens behind the first."),
    "nanospec_memory_peak_bytes": ("gauge", "Of the process that wrote this last: CUDA's, or resident."),
}  # fmt: skip
HEADER = "# nanospec metrics, format 1"


class Prometheus:
    """Samples of the text format: {family: {name{label="value",...}: value}}, from a file where there is one."""

    def __init__(self, path: str | Path):
        self.samples: dict[str, dict[str, float]] = {family: {} for family in FAMILIES}
        text = Path(path).read_bytes().decode() if Path(path).exists() else ""
        if text and not (text.startswith(HEADER + "\n") and text.endswith("\n")):
            raise ValueError("nanospec did not write this, or not all of it: the file is left as it is")
        for line in text.split("\n"):
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                family = name.partition("{")[0]
                family = family if family in FAMILIES else family.rpartition("_")[0]  # a part of a histogram
                if family not in FAMILIES:
                    raise ValueError(f"{line[:60]!r} is none of nanospec's lines: the file is left as it is")
                self.samples[family][name] = float(value)

    def count(self, family: str, labels: dict, n: float, suffix: str = "") -> None:
        def escaped(value) -> str:
            text = str(value).encode("utf-8", "replace").decode()  # a path may hold bytes that are no text
            return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

        inside = ",".join(f'{key.replace(".", "_")}="{escaped(value)}"' for key, value in labels.items())
        name = f"{family}{suffix}{{{inside}}}"
        self.samples[family][name] = self.samples[family].get(name, 0.0) + n

    def observe(self, family: str, labels: dict, values: list[float]) -> None:
        for bound in (*FAMILIES[family][0], math.inf):
            le = {"le": "+Inf" if bound == math.inf else float(bound)}
            self.count(family, labels | le, sum(value <= bound for value in values), "_bucket")
        self.count(family, labels, sum(values), "_sum")
        self.count(family, labels, len(values), "_count")

    def add(self, requests: Sequence[dict], outs: Sequence[Generation], device: torch.device | str) -> None:
        for request, out in zip(requests, outs):
            stats = out.stats
            labels = {name: request[name] for name in ("gen_ai.request.model", "optimization")}
            agreed = {"agreed": stats.audited - stats.audit_disagreed, "disagreed": stats.audit_disagreed}
            for family, label, counts in (
                ("nanospec_requests_total", "finish_reason", {out.finish_reason: 1}),
                ("nanospec_output_tokens_total", "served_by", served_by(request["optimization"], out)),
                ("nanospec_source_tokens_total", "source", Counter(out.sources)),
                ("nanospec_exit_tokens_total", "layers", stats.exit_histogram),
                ("nanospec_audited_tokens_total", "verdict", agreed if stats.audited else {}),
                ("nanospec_round_reasons_total", "reason", stats.reasons),
            ):
                for value, n in counts.items():
                    self.count(family, labels | {label: value}, n)
            self.count("nanospec_input_tokens_total", labels, request["gen_ai.usage.input_tokens"])
            self.count("nanospec_layer_passes_total", labels, stats.layer_passes)
            for family, values in (
                ("nanospec_drafted_per_round", Counter(dict(enumerate(stats.drafted_histogram))).elements()),
                ("nanospec_accepted_per_round", Counter(dict(enumerate(stats.accepted_histogram))).elements()),
                ("nanospec_time_between_tokens_seconds", stats.token_seconds[1:]),
                ("gen_ai_server_request_duration_seconds", [stats.seconds]),
                ("gen_ai_server_time_to_first_token_seconds", [stats.first_token_seconds]),
                ("gen_ai_server_time_per_output_token_seconds", [per_output_token(stats)]),
            ):
                self.observe(family, labels, [value for value in values if value is not None])
        for phase, seconds in phase_seconds([out.stats for out in outs]).items():
            self.count("nanospec_seconds_total", labels | {"phase": phase}, seconds)
        self.samples["nanospec_memory_peak_bytes"] = {"nanospec_memory_peak_bytes": float(memory_peak(device) or 0)}

    def text(self) -> str:
        lines = [HEADER]
        for family, (kind, said) in FAMILIES.items():
            lines += [f"# HELP {family} {said}", f"# TYPE {family} {kind if isinstance(kind, str) else 'histogram'}"]
            lines += [f"{name} {float(value)!r}" for name, value in self.samples[family].items()]
        return "\n".join(lines) + "\n"
