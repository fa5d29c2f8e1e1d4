"""Measure the ways to decode against plain decoding: speed beside quality, interleaved, as ratios.

    python bench.py                                                   # bundled models, temperature 0, one table
    python bench.py --draft-len 2,4,6 --exit-threshold 0.8,0.9,0.95   # one row for each value
    python bench.py --dtype bfloat16 --out results/bench.json         # keep the result

Every repetition runs all modes on a prompt before the next prompt (plain, a, b, ..., plain, a, b, ...), and a mode is
compared with the plain run beside it, so that a machine whose speed drifts does not favour one of them. Prints the table,
then one JSON line.
"""

import dataclasses
import functools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from checkpoint import BUNDLED, check_pair, flag, listed, load_checkpoint, parse_flags, write_atomically
from decode import Generation, SamplingParams, generate, heed
from early_exit import check_thresholds, early_exit_generate
from model import GPT
from sample import commit
from speculative import ExitDrafter, ModelDrafter, NGramDrafter, speculative_generate


@dataclasses.dataclass
class BenchConfig:
    model: str = flag("stdlib", "the target: a bundled name or a path")
    draft: str = flag("stdlib-draft", "the drafter; its speed matters as much as its acceptance")
    prompts: str = flag("", "a JSON list of texts; the bundled model's own when empty")
    max_new_tokens: int = flag(128, "per prompt; more steady the medians and take longer")
    repeats: int = flag(5, "runs of each mode on each prompt; more narrow the spread")
    temperature: float = flag(0.0, "0 compares tokens exactly; above, acceptance falls")
    seed: int = flag(0, "of the first prompt; the others count on")
    draft_len: tuple[int, ...] = flag(
        (4,), "drafts per round: more win more where acceptance is high", parse=listed(int)
    )
    exit_layer: tuple[int, ...] = flag(
        (), "exits that may end a pass (all): each one asked costs a head", parse=listed(int)
    )
    exit_threshold: tuple[float, ...] = flag(
        (0.9,), "confidence to exit: lower is faster and differs more", parse=listed(float)
    )
    verify: str = flag("rejection", "coupled gives plain's tokens at any temperature", choices=("rejection", "coupled"))
    device: str = flag("auto", "cpu, cuda, or auto")
    dtype: str = flag("auto", "float32 or bfloat16; auto is float32 on a CPU")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice")
    out: str = flag("", "file for the result")

    def __post_init__(self):
        for name, least, most in (("repeats", 1, 10**6), ("max_new_tokens", 1, 10**6), ("threads", 0, 1024)):
            if not least <= getattr(self, name) <= most:
                flag_name = name.replace("_", "-")
                raise ValueError(f"--{flag_name} is {getattr(self, name)}: it must be from {least} to {most}")
        if self.out and (not Path(self.out).absolute().parent.is_dir() or Path(self.out).is_dir()):
            raise ValueError(f"--out {self.out}: it must be a file in a folder that is there")
        SamplingParams(temperature=self.temperature, seed=self.seed)
        check_thresholds(self.exit_threshold, self.exit_threshold)
        if min(self.draft_len, default=0) < 0:
            raise ValueError(f"--draft-len is {self.draft_len}: each must be an integer >= 0")


def environment() -> dict:
    """Where and when a result was measured."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    return {
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
    }


class Mode(NamedTuple):
    """A way to decode one prompt; audited, where there is one, counts what the full model would have said instead."""

    decode: Callable[[list[int], SamplingParams], Generation]
    audited: Callable[[list[int], SamplingParams], Generation] | None = None


def modes_of(config: BenchConfig, model: GPT, draft_model: GPT | None) -> dict[str, Mode]:
    """Name -> mode, for plain and everything that the flags ask for."""

    def speculative(drafter, k: int) -> Mode:
        return Mode(lambda ids, sampling: speculative_generate(model, drafter, [ids], sampling, k, config.verify)[0])

    def early_exit(thresholds: list[float]) -> Mode:
        def decode(ids, sampling, audit=False):
            return early_exit_generate(model, [ids], sampling, thresholds, audit=audit)[0]

        return Mode(decode, functools.partial(decode, audit=True))

    modes = {"plain": Mode(lambda ids, sampling: generate(model, [ids], sampling)[0])}
    exits = model.config.exit_layers
    for k in config.draft_len:
        if draft_model is not None:
            modes[f"speculative k={k}"] = speculative(ModelDrafter(draft_model), k)
        modes[f"n-gram k={k}"] = speculative(NGramDrafter(), k)
        if exits:
            modes[f"exit {exits[0]} drafts k={k}"] = speculative(ExitDrafter(model, exits[0]), k)
    for threshold in config.exit_threshold if exits else ():
        thresholds = [threshold if e in (config.exit_layer or exits) else math.inf for e in exits]
        modes[f"early exit {threshold:g}"] = early_exit(thresholds)
    return modes


def token_seconds(run: Generation) -> float:
    """Seconds per token, prefill apart."""
    return (run.stats.seconds - run.stats.prefill_seconds) / max(len(run.tokens), 1)


def measure(config: BenchConfig, modes: dict[str, Mode], prompts: list[list[int]]) -> list[dict]:
    """One row per mode: medians over prompts and repetitions, ratios paired with the plain run beside them.

    1. one run of each mode on each prompt, not timed, for tokens, acceptance and layers; audited where that can be
    2. `repeats` timed runs of each, interleaved, each time beginning with another mode
    """
    counted = {name: [] for name in modes}
    seconds = {name: [] for name in modes}
    names, n_runs = list(modes), len(prompts) * len(modes) * (1 + config.repeats)
    with tqdm(total=n_runs, desc="bench", dynamic_ncols=True) as bar:
        for row, ids in enumerate(prompts):
            sampling = SamplingParams(config.max_new_tokens, config.temperature, seed=config.seed + row)
            for name, mode in modes.items():
                counted[name] += heed([(mode.audited or mode.decode)(ids, sampling)])
                bar.update()
            for repeat in range(config.repeats):
                first = repeat % len(names)
                for name in names[first:] + names[:first]:
                    seconds[name] += map(token_seconds, heed([modes[name].decode(ids, sampling)]))
                    bar.update()
    return [summary(name, counted[name], counted["plain"], seconds[name], seconds["plain"]) for name in names]


def summary(name: str, runs, plain_runs, seconds: list[float], plain_seconds: list[float]) -> dict:
    """A row: speed of the timed runs, counters of the others. `equal` compares with plain's text token by token."""
    ratios = sorted(theirs / ours for ours, theirs in zip(seconds, plain_seconds))
    stats = [run.stats for run in runs]
    n_tokens = sum(len(run.tokens) for run in runs)
    n_accepted, n_judged = sum(s.accepted for s in stats), sum(s.accepted + s.corrected for s in stats)
    pairs = list(zip(runs, plain_runs))
    n_equal = sum(x == y for run, plain in pairs for x, y in zip(run.tokens, plain.tokens))
    return {
        "mode": name,
        "tokens_per_second": 1 / statistics.median(seconds),
        "ratio_to_plain": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[len(ratios) * 3 // 4]],
        "tokens_per_target_pass": n_tokens / sum(s.target_passes for s in stats),
        "alpha": n_accepted / n_judged if n_judged else None,
        "mean_layers": sum(s.layer_passes for s in stats) / n_tokens,
        "exited": sum(s.exited for s in stats) / n_tokens,
        "equal": n_equal / sum(max(len(run.tokens), len(plain.tokens)) for run, plain in pairs),
        "texts_equal": sum(run.tokens == plain.tokens for run, plain in pairs),
        "texts": len(runs),
        "agreement": 1 - sum(s.audit_disagreed for s in stats) / n_tokens if any(s.audited for s in stats) else None,
    }


def table(rows: list[dict]) -> str:
    """The rows for people."""

    def cell(value, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = ["mode                tokens/s  to plain    quartiles  tokens/pass  alpha  layers  agreement  same text"]
    for row in rows:
        quartiles = "-".join(f"{ratio:.2f}" for ratio in row["ratio_quartiles"])
        lines.append(
            f"{row['mode']:20}{row['tokens_per_second']:8.1f}{row['ratio_to_plain']:9.2f}x{quartiles:>13}"
            f"{row['tokens_per_target_pass']:13.2f}{cell(row['alpha'], '.2f'):>7}{row['mean_layers']:8.1f}"
            f"{cell(row['agreement'], '.1%'):>11}{row['equal']:11.1%}"
        )
    return "\n".join(lines)


def read_prompts(file: Path) -> list[str]:
    try:
        texts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--prompts: {file}: {str(error).splitlines()[0]}") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"--prompts: {file} must hold a JSON list of texts")
    return texts


def main(argv=None) -> int:
    config = parse_flags(BenchConfig, argv, "bench.py", description=__doc__.split("\n\n")[0])
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        model, tokenizer = load_checkpoint(config.model, config.device, config.dtype)
        draft_model = None
        if config.draft not in ("", "none"):
            draft_model, draft_tokenizer = load_checkpoint(config.draft, config.device, config.dtype)
            check_pair(config.model, tokenizer, config.draft, draft_tokenizer)
        texts = read_prompts(Path(config.prompts) if config.prompts else BUNDLED / "stdlib" / "prompts.json")
        if tokenizer is None:
            raise ValueError(f"--model {config.model}: it has no tokenizer to read the prompts with")
        if not set(config.exit_layer) <= set(model.config.exit_layers):
            raise ValueError(f"--exit-layer is {config.exit_layer}: the exits are {model.config.exit_layers}")
        began = time.perf_counter()
        prompts = [tokenizer.encode(text) for text in texts]
        longest = max(map(len, prompts))
        if longest >= model.config.block_size:
            raise ValueError(
                f"--prompts: one has {longest} tokens, no room is left in a context of {model.config.block_size}"
            )
        rows = measure(config, modes_of(config, model, draft_model), prompts)
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    result = environment() | {"seconds": time.perf_counter() - began, "flags": dataclasses.asdict(config), "rows": rows}
    print(table(rows))
    print(json.dumps(result))
    if config.out:
        write_atomically(config.out, lambda p: p.write_text(json.dumps(result, indent=1) + "\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
