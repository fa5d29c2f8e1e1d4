"""What bench.py measures: modes interleaved run by run, and a row of figures for each: speed, work, prediction, quality.

    done, interrupted = measure(config, modes, groups, temperature, bar)
    row = summary(config, name, modes, done, groups, temperature, roof, decode_text)
    print(table([row, ..]))

config is bench.BenchConfig: of it, how often to run, how many tokens, the seed, and the bounds of gates.
"""

import functools
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

import kernels
import quality
from auto import weights_read
from decode import PREFILL_CHUNK, Generation, Sampler, SamplingParams, heed, near_tie, pack
from metrics import add_up, percentiles, phase_seconds
from model import GPT, GPTConfig, Matrix
from rounds import runs_alone
from speculative import ExitDrafter, HeadDrafter, ModelDrafter
from tokenizer import Tokenizer


class Variant(NamedTuple):
    """The target in a dtype, or quantised under bfloat16 activations, and what drafts for it."""

    name: str  # in front of its modes' names; empty where there is one
    model: GPT
    tokenizer: Tokenizer | None  # None of random weights
    drafter: object | None


class Mode(NamedTuple):
    """A way to decode a batch of prompts, and what it promises: plain's text, plain's law, few wrong exits, or nothing."""

    decode: Callable[[list[list[int]], SamplingParams], list[Generation]]
    variant: Variant | None = None  # None of a peer
    plain: str = "plain"  # the mode whose text or law it promises
    promise: str | None = None  # "text", "law", "exits"
    drafter: object | None = None
    draft_len: int | str | None = None
    risk: float | None = None  # of the certificate: share of a sequence's tokens that may differ
    clip: float | None = None  # of the certificate: what a sequence counts at most
    audited: Callable[[list[list[int]], SamplingParams], list[Generation]] | None = None


class Group(NamedTuple):
    """Prompts that are decoded together."""

    first: int  # index of the first of them in the list
    prompts: list[list[int]]
    items: list  # as the file has them


class Text(NamedTuple):
    """What plain and a mode made of a prompt, with the same seed."""

    prompt: list[int]
    plain: Generation
    run: Generation
    seed: int


class Measured(NamedTuple):
    """What one mode did on one group."""

    runs: list[Generation]  # not timed, audited where that can be
    seen: "Seen | None"  # of early exit, and the first mode beside it; None: not seen from here
    seconds: list[float]  # of a token, in each timed run
    timed: list[list[Generation]]


def token_seconds(runs: list[Generation]) -> float:
    """Seconds per token of a batch, prefill apart."""
    seconds = max(run.stats.seconds for run in runs) - runs[0].stats.prefill_seconds
    return seconds / max(sum(len(run.tokens) for run in runs), 1)


def measure(config, modes: dict[str, Mode], groups: list[Group], temperature: float, bar):
    """{mode: what it did}, by group, and whether Ctrl-C, or the end of another engine's process, cut it short: then with the
    groups that were complete.

    1. one run of each mode on each group, not timed: warm-up, tokens, acceptance; of early exit another, for its calls
    2. `repeats` timed runs of each, interleaved, each time beginning with another mode
    """
    done, names, exits = [], list(modes), any(mode.promise == "exits" for mode in modes.values())
    try:
        for group in groups:
            sampling = SamplingParams(config.max_new_tokens, temperature, seed=seeds_of(config, group))
            found = {}
            for name, mode in modes.items():
                runs = heed((mode.audited or mode.decode)(group.prompts, sampling))
                watched = exits and mode.variant and (mode.promise == "exits" or name == names[0])
                seen = calls_of(mode, group.prompts, sampling) if watched else None
                found[name] = Measured(runs, seen, [], [])
                bar.update()
            for repeat in range(config.repeats):
                first = repeat % len(names)
                for name in names[first:] + names[:first]:
                    runs = heed(modes[name].decode(group.prompts, sampling))
                    found[name].seconds.append(token_seconds(runs))
                    found[name].timed.append(runs)
                    bar.update()
            done.append(found)
    except KeyboardInterrupt:
        return done, True
    except OSError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return done, True
    return done, False


def seeds_of(config, group: Group) -> list[int]:
    return [config.seed + group.first + i for i in range(len(group.prompts))]


def texts_of(config, group: Group, plain: list[Generation], batch: list[Generation]) -> list[Text]:
    return list(map(Text, group.prompts, plain, batch, seeds_of(config, group)))


class Ceilings(NamedTuple):
    """What the device can do, measured in the same run: a copy, and a product of large matrices."""

    bytes_per_second: float
    flops_per_second: float


@torch.inference_mode()
def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    cuda = device.type == "cuda"
    n_bytes, width = (2**30, 8192) if cuda else (2**27, 1024)
    source, matrix = (
        torch.ones(n_bytes, dtype=torch.uint8, device=device),
        torch.ones(width, width, device=device, dtype=dtype),
    )
    target = torch.empty_like(source)

    def fastest(act) -> float:
        times = []
        for _ in range(6):
            began = time.perf_counter()
            act()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    return Ceilings(
        2 * n_bytes / fastest(lambda: target.copy_(source)), 2 * width**3 / fastest(lambda: matrix @ matrix)
    )


class Work(NamedTuple):
    """What a run's passes need, counted from shapes: bytes of weights, keys and values read, operations, bytes held."""

    read: float
    flops: float
    held: int


def work_of(mode: Mode, prompts: list[list[int]], batch: list[Generation]) -> Work:
    """Of prompts decoded together: a pass reads the weights once, whoever rides along, and the cache of each. Too much where
    several drafters take turns: nobody knows whose drafts they were, so each one is charged to all of them."""
    model, shape, rows = mode.variant.model, mode.variant.model.config, [run.stats for run in batch]
    layer, head = matrix_bytes(model.blocks) / shape.n_layer, kernels.n_bytes(model.output_weight)
    position = 2 * shape.n_kv_head * shape.head_dim * model.dtype.itemsize  # keys and values, of a layer
    longest = max(rows, key=lambda stats: stats.layer_passes)
    read = longest.layer_passes * layer + longest.target_passes * head + longest.drafted * draft_bytes(mode.drafter)
    contexts = [len(ids) + s.tokens / 2 for ids, s in zip(prompts, rows)]
    read += sum(s.layer_passes * position * context for context, s in zip(contexts, rows))
    flops = sum(
        (s.rounds + s.drafted) * operations(shape, context, shape.n_layer, shape.vocab_size)
        + s.drafted * draft_operations(mode.drafter, context)
        for context, s in zip(contexts, rows)
    )
    longest_text = max(len(ids) + len(run.tokens) for ids, run in zip(prompts, batch))
    held = (
        model.weight_bytes()
        + draft_bytes(mode.drafter, own=True)
        + len(batch) * longest_text * position * shape.n_layer
    )
    return Work(read, flops, int(held))


def matrix_bytes(module: torch.nn.Module) -> int:
    return sum(kernels.n_bytes(part.weight) for part in module.modules() if isinstance(part, Matrix))


def draft_bytes(drafter, own: bool = False) -> int:
    """Weights that a draft reads, beside the target's own layers; own: those that the target does not hold."""
    if isinstance(drafter, ExitDrafter):
        return 0 if own else kernels.n_bytes(drafter.model._exit_output[0])
    if isinstance(drafter, ModelDrafter):
        return drafter.model.weight_bytes()
    if isinstance(drafter, HeadDrafter):
        return matrix_bytes(drafter.head) + kernels.n_bytes(drafter.head.output)
    parts = [*getattr(drafter, "drafters", ()), getattr(drafter, "drafter", None)]
    return sum(draft_bytes(part, own) for part in parts if part is not None)


def operations(shape: GPTConfig, context: float, n_layer: int, n_outputs: int, n_more: int = 0) -> float:
    """Of one token behind `context` others: its products with layers, outputs and n_more weights, and its attention."""
    attention = 4 * shape.n_head * shape.head_dim * context * n_layer  # scores, and their sum of values
    return 2 * (weights_read(shape, n_layer, n_outputs) + n_more) + attention


def draft_operations(drafter, context: float) -> float:
    """Of one drafted token, beside the target's own layers: those of an exit's are the verification's too."""
    if isinstance(drafter, (ExitDrafter, HeadDrafter)):
        shape = drafter.model.config if isinstance(drafter, ExitDrafter) else drafter.head.config
        n_outputs = shape.vocab_size if shape.exit_vocab is None else len(shape.exit_vocab)
        if isinstance(drafter, HeadDrafter):
            return operations(shape, context, 1, n_outputs, 2 * shape.n_embd**2)  # it fuses a token and a hidden state
        return operations(shape, context, 0, n_outputs, shape.n_embd**2 * ("draft" in shape.exit_adapters))
    if isinstance(drafter, ModelDrafter):
        shape = drafter.model.config
        return operations(shape, context, shape.n_layer, shape.vocab_size)
    parts = [*getattr(drafter, "drafters", ()), getattr(drafter, "drafter", None)]
    return sum(draft_operations(part, context) for part in parts if part is not None)


# Calls that a pass of early exit is made of: (what, rows of the batch, ..), as calls_of saw them and seconds_of times them.
#
#     ("layers", rows, width, layers)   width: of the row with most tokens, to which all are padded
#     ("head", rows, exit or not)       logits
#     ("asked", rows)                   an exit's confidence
#     ("draw", rows)                    those that leave at one depth are drawn together


class Seen(NamedTuple):
    """The calls of a run that was watched, and its seconds behind the prompts: inside of them, and between them."""

    calls: Counter
    inside: float
    between: float


def calls_of(mode: Mode, prompts: list[list[int]], sampling: SamplingParams) -> Seen | None:
    """What a run, not audited, asks of the target behind its prompts. None where the device runs it by itself, unseen."""
    model, seen, draw = mode.variant.model, [], Sampler.sample
    if runs_alone(model, sampling):
        return None

    def timed(call: tuple, act, *how):
        began = time.perf_counter()
        out = act(*how)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seen.append((call, time.perf_counter() - began))
        return out

    def run_layers(x, cache, positions, first, last):
        call = ("layers", *x.shape[:2], last - first)
        return timed(call, GPT.run_layers, model, x, cache, positions, first, last)

    def logits(x, exit_layer=None, *how):
        return timed(("head", len(x), exit_layer is not None), GPT.logits, model, x, exit_layer, *how)

    def exit_confidence(x, *how):
        return timed(("asked", len(x)), GPT.exit_confidence, model, x, *how)

    def sample(self, rows, logits):
        return timed(("draw", len(rows)), draw, self, rows, logits)

    model.run_layers, model.logits, model.exit_confidence, Sampler.sample = run_layers, logits, exit_confidence, sample
    try:
        runs = heed(mode.decode(prompts, sampling))
    finally:
        del model.run_layers, model.logits, model.exit_confidence
        Sampler.sample = draw
    n_chunks = -(-(max(map(len, prompts)) - 1) // PREFILL_CHUNK)
    seen = seen[n_chunks:]
    inside, phases = sum(seconds for _, seconds in seen), phase_seconds([run.stats for run in runs])
    between = max(phases["draft"] + phases["verify"] - inside, 0.0)
    return Seen(Counter(call for call, _ in seen), inside, between)


@torch.inference_mode()
def seconds_of(calls: set[tuple[GPT, tuple]], temperature: float, n_rounds: int = 16) -> dict[tuple[GPT, tuple], float]:
    """What each call of a model takes alone, interleaved, in another order each time: what ran before leaves its weights in
    the cache. The lower quartile: interruptions are no part of a call."""
    acts = {(model, call): prepared(model, call, temperature) for model, call in calls}
    times, order = {key: [] for key in acts}, random.Random(0)
    for _ in range(n_rounds):
        for (model, call), act in order.sample(list(acts.items()), len(acts)):
            began = time.perf_counter()
            act()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times[model, call].append(time.perf_counter() - began)
    return {key: float(np.percentile(taken, 25)) for key, taken in times.items()}


def prepared(model: GPT, call: tuple, temperature: float) -> Callable[[], object]:
    """The call, ready to be made."""
    (what, rows, *shape), device, n_layer = call, model.device, model.config.n_layer
    width, n_run = shape if what == "layers" else (1, n_layer)
    at = min(63, model.config.block_size - width)
    ids, positions = pack([[0] * width] * rows, [at] * rows, device)
    cache, x = model.new_cache(rows, at + width), model.embed(ids, positions)
    for part in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if part is not None:
            part.zero_()  # what is read in front of the call must be numbers
    run = functools.partial(model.run_layers, x, cache, positions, 0, n_run)
    if what == "layers":
        return run
    x = run()[:, 0]
    if what == "asked":
        return functools.partial(model.exit_confidence, x, model.config.exit_layers[0])
    if what == "head":
        return functools.partial(model.logits, x, model.config.exit_layers[0] if shape[0] else None)
    sampler = Sampler(SamplingParams(temperature=temperature), [[0] * at for _ in range(rows)], model)
    return functools.partial(sampler.sample, list(range(rows)), model.logits(x))


def predicted(
    mode: Mode, batch, plain, priced: tuple[float, dict[str, float]] | None = None
) -> tuple[float, dict[str, float]] | None:
    """Speed to plain by the cost model, and what it leaves out, as factors that were measured in the same run.

    Speculation: (1 - alpha^(k + 1)) / (1 - alpha) tokens a round of k drafts (Leviathan et al. 2023), over the time of its drafts
    and its verification in plain passes. Early exit: seconds of plain's calls and of its own, at what each takes alone.
    "acceptance": acceptance that is no constant, tokens of a round by the model to those seen; "loop": all but drafts and passes;
    "calls in place", "between calls": in a run that was watched, what calls take beside what they take alone, and the rest of passes.
    """
    total = add_up(run.stats for run in batch)
    times, plain_times = (phase_seconds([run.stats for run in runs]) for runs in (batch, plain))
    passes, plain_passes = (t["draft"] + t["verify"] for t in (times, plain_times))
    if mode.variant is None or not plain_passes:  # a peer, or beside one: it does not tell
        return None
    loop = (1 + plain_times["other"] / plain_passes) / (1 + times["other"] / passes)
    n_plain = sum(len(run.tokens) for run in plain)
    if mode.promise == "exits":
        return priced and (total.tokens / n_plain * priced[0], {"loop": loop} | priced[1])
    judged = total.accepted + total.corrected
    alpha = total.accepted / judged if judged else 0.0
    by_model = sum(n * sum(alpha**i for i in range(k + 1)) for k, n in enumerate(total.drafted_histogram))
    ratio = by_model / passes * plain_passes / n_plain
    return ratio, {"acceptance": total.tokens / by_model, "loop": loop}


def by_calls(mode: Mode, first: Mode, ours: list[Measured], base: list[Measured], temperature: float) -> list:
    """Of each group how many times the seconds of the mode's calls plain's are, at what each takes alone, and what that leaves
    out; None where it does not tell."""
    if mode.promise != "exits" or any(found.seen is None for found in (*ours, *base)):
        return [None] * len(ours)
    models = first.variant.model, mode.variant.model
    pairs = [(b.seen, a.seen) for a, b in zip(ours, base)]
    kinds = {(model, call) for pair in pairs for model, seen in zip(models, pair) for call in seen.calls}
    alone, found = seconds_of(kinds, temperature), []
    for plain, own in pairs:
        before, after = (
            sum(n * alone[model, call] for call, n in seen.calls.items()) for model, seen in zip(models, (plain, own))
        )
        in_place = (plain.inside / before) / (own.inside / after)
        between = (1 + plain.between / plain.inside) / (1 + own.between / own.inside)
        found.append((before / after, {"calls in place": in_place, "between calls": between}))
    return found


def summary(config, name: str, modes: dict[str, Mode], done: list[dict[str, Measured]], groups: list[Group],
            temperature: float, roof: Ceilings, decode_text) -> dict:  # fmt: skip
    """A row: speed of the timed runs, counters and quality of the others. `equal` compares with plain's text token by token,
    where plain is the variant's own; speed is compared with the first mode of all."""
    mode, first = modes[name], next(iter(modes))
    ours, base = [found[name] for found in done], [found[first] for found in done]
    plains = [found[mode.plain if mode.plain in modes else first] for found in done]
    ratios = [theirs / own for a, b in zip(ours, base) for own, theirs in zip(a.seconds, b.seconds)]
    runs, plain_runs = ([run for found in part for run in found.runs] for part in (ours, plains))
    total, n_tokens = add_up(run.stats for run in runs), sum(len(run.tokens) for run in runs)
    seconds = statistics.median(x for found in ours for x in found.seconds)
    batches = [batch for found in ours for batch in found.timed]  # all times are theirs: they warm up and audit nothing
    timed = [run.stats for batch in batches for run in batch]
    firsts = [s.first_token_seconds for s in timed if s.first_token_seconds is not None]
    between = percentiles([t for s in timed for t in s.token_seconds[1:]])
    n_equal = sum(x == y for run, plain in zip(runs, plain_runs) for x, y in zip(run.tokens, plain.tokens))
    n_longest = sum(max(len(run.tokens), len(plain.tokens)) for run, plain in zip(runs, plain_runs))
    priced = by_calls(mode, modes[first], ours, base, temperature)
    pairs = [(*pair, price) for a, b, price in zip(ours, base, priced) for pair in zip(a.timed, b.timed)]
    guesses = [guess for pair in pairs if (guess := predicted(mode, *pair))]
    row = {
        "mode": name, "batch": len(groups[0].prompts), "temperature": temperature,
        "drafter": None if mode.drafter is None else name.rpartition(" k=")[0] or name, "draft_len": mode.draft_len,
        "tokens_per_second": 1 / seconds,
        "ratio_to_plain": statistics.median(ratios),
        "ratio_quartiles": np.percentile(ratios, [25, 75]).tolist(),
        "first_token_seconds": statistics.median(firsts) if firsts else None,
        "token_seconds_p50": between and between["p50"], "token_seconds_p95": between and between["p95"],
        "equal": n_equal / n_longest,
        "texts_equal": sum(run.tokens == plain.tokens for run, plain in zip(runs, plain_runs)), "texts": len(runs),
        "accepted_histogram": total.accepted_histogram, "accepted_by_position": total.accepted_by_position,
        "drafted_by_position": total.drafted_by_position, "exit_histogram": total.exit_histogram,
        "exited": total.exited / n_tokens, "alpha": total.alpha, "pass_rate": pass_rate(groups, runs, plain_runs, decode_text),
        "predicted_ratio": None, "prediction_terms": None, "agreement": None, "tokens_per_target_pass": None,
        "mean_layers": None, "bandwidth_share": None, "compute_share": None, "peak_bytes": None, "kl": None,
        "nll_difference": None, "gate": None, "time_shares": None, "timeline": [],
    }  # fmt: skip
    if mode.variant is None:
        return row
    works = [work_of(mode, group.prompts, found.runs) for found, group in zip(ours, groups)]
    read, flops = (sum(getattr(w, part) for w in works) / n_tokens for part in ("read", "flops"))
    phases = [phase_seconds([run.stats for run in batch]) for batch in batches]
    spent = {part: sum(p[part] for p in phases) for part in ("draft", "verify", "other")}
    n_rounds = sum(max(run.stats.rounds for run in batch) for batch in batches)
    starts = [0.0, *itertools.accumulate(spent.values())]
    texts = [text for group, a, b in zip(groups, ours, plains) for text in texts_of(config, group, b.runs, a.runs)]
    reference = next(mode.variant.model for mode in modes.values() if mode.variant)
    again = [
        text
        for group, a, b in zip(groups, ours, plains)
        for batch in a.timed
        for text in texts_of(config, group, b.runs, batch)
    ]
    row |= {
        "predicted_ratio": statistics.median(ratio for ratio, _ in guesses) if guesses else None,
        "prediction_terms": {key: statistics.median(t[key] for _, t in guesses) for _, terms in guesses[:1] for key in terms},
        "agreement": 1 - total.audit_disagreed / n_tokens if total.audited else None,
        "tokens_per_target_pass": n_tokens / total.target_passes,
        "mean_layers": total.layer_passes / n_tokens,
        "bandwidth_share": read / seconds / roof.bytes_per_second, "compute_share": flops / seconds / roof.flops_per_second,
        "peak_bytes": max(work.held for work in works),
        "time_shares": {part: x / sum(spent.values()) for part, x in spent.items()},
        "timeline": [{"what": part, "start": start / n_rounds, "seconds": x / n_rounds}
                     for (part, x), start in zip(spent.items(), starts) if x],
        "gate": gate(config, mode, groups, texts if mode.promise != "text" else texts + again, temperature),
    } | distance(mode, texts, temperature, reference)  # fmt: skip
    return row


def pass_rate(groups: list[Group], runs, plain_runs, decode_text) -> dict | None:
    """Of prompts with a check: answers that pass, and the difference to plain's with its 95% interval."""
    items = [item for group in groups for item in group.items]
    asked = [i for i, item in enumerate(items) if isinstance(item, dict) and "check" in item]
    if not asked or decode_text is None:
        return None
    passed, baseline = (
        [quality.grade(items[i], decode_text(part[i].tokens)) for i in asked] for part in (runs, plain_runs)
    )
    difference, interval = quality.paired_difference(passed, baseline)
    return {"passed": sum(passed), "asked": len(asked), "difference": difference, "interval": interval}


def gate(config, mode: Mode, groups: list[Group], texts: list[Text], temperature: float) -> dict | None:
    """The verdict on what the mode promises."""
    if mode.promise is None:
        return None
    model = mode.variant.model
    if mode.promise == "exits":
        if temperature == 0:  # the same prompt again is no other sequence
            texts = {tuple(text.prompt): text for text in texts}.values()
        bound = config.max_disagreement if mode.risk is None else mode.risk
        return quality.disagreement_gate([text.run.stats for text in texts], bound, config.max_nats, mode.clip)
    sampling = SamplingParams(config.max_new_tokens, temperature)
    if mode.promise == "law":
        found = quality.distribution_gate(model, sampling, [(text.prompt, text.run.tokens) for text in texts])
        return law_again(config, mode, groups, sampling, found) if found["verdict"] == "failed" else found

    def gap(i: int, ids: list[int], drawn: tuple[int, int]) -> tuple[float, float]:
        if temperature == 0:
            return near_tie(model, ids, drawn)
        return quality.race_gap(model, sampling, texts[i].seed, ids, drawn)

    pairs = [(text.prompt, text.plain.tokens, text.run.tokens) for text in texts]
    return quality.identity_gate(pairs, None if model.dtype == torch.float64 else gap)


OTHER_SEEDS = 10**6  # further on
DOUBTFUL = 0.05


def law_again(config, mode: Mode, groups: list[Group], sampling: SamplingParams, found: dict) -> dict:
    """A right law fails once in a thousand, and a table asks some twenty times: the same prompts with other seeds confirm a
    failure where they are doubtful too (below DOUBTFUL), or clear it."""
    runs = []
    for group in groups:
        seeds = [seed + OTHER_SEEDS for seed in seeds_of(config, group)]
        outs = heed(mode.decode(group.prompts, replace(sampling, seed=seeds)))
        runs += [(prompt, out.tokens) for prompt, out in zip(group.prompts, outs)]
    again = quality.distribution_gate(mode.variant.model, sampling, runs)
    verdict = "failed" if again["value"] < DOUBTFUL else "passed"
    return again | {"verdict": verdict, "why": f"{found['why']}; with other seeds {again['why']}"}


def distance(mode: Mode, texts: list[Text], temperature: float, reference: GPT) -> dict:
    """kl: of the law that drew each token from the reference's there, the first variant's full model. nll_difference: by how
    much less likely the variant's own full model finds the mode's tokens than what it would have drawn itself: 0 where nothing
    else draws. What promises the text or the law of another variant's plain is as far away as that: None."""
    model, n_tokens = mode.variant.model, sum(len(text.run.tokens) for text in texts)
    nats = sum(text.run.stats.audit_nats for text in texts) / n_tokens
    if mode.promise in ("text", "law") or (mode.promise is None and model is reference):
        return {"kl": 0.0 if model is reference else None, "nll_difference": nats}
    sampling = SamplingParams(temperature=temperature)
    kl = sum(
        quality.text_figures(model, text.prompt, text.run, sampling, reference)["kl"] * len(text.run.tokens)
        for text in texts
    )
    return {"kl": kl / n_tokens, "nll_difference": nats}


COLUMNS = (  # heading, width, how a row shows it
    ("tokens/s", 9, lambda r: f"{r['tokens_per_second']:.1f}"),
    ("to plain", 9, lambda r: f"{r['ratio_to_plain']:.2f}x"),
    ("quartiles", 11, lambda r: "-".join(f"{x:.2f}" for x in r["ratio_quartiles"])),
    ("predicted", 10, lambda r: f"{r['predicted_ratio']:.2f}"),
    ("first ms", 9, lambda r: f"{r['first_token_seconds'] * 1e3:.1f}"),
    ("p50 ms", 7, lambda r: f"{r['token_seconds_p50'] * 1e3:.1f}"),
    ("p95 ms", 7, lambda r: f"{r['token_seconds_p95'] * 1e3:.1f}"),
    ("alpha", 6, lambda r: f"{r['alpha']:.2f}"),
    ("/pass", 6, lambda r: f"{r['tokens_per_target_pass']:.2f}"),
    ("layers", 7, lambda r: f"{r['mean_layers']:.1f}"),
    ("memory", 7, lambda r: f"{r['bandwidth_share']:.0%}"),
    ("flops", 6, lambda r: f"{r['compute_share']:.0%}"),
    ("MB", 6, lambda r: f"{r['peak_bytes'] / 1e6:.0f}"),
    ("same text", 10, lambda r: f"{r['equal']:.1%}"),
    ("KL", 7, lambda r: f"{r['kl']:.4f}"),
    ("nats", 8, lambda r: f"{r['nll_difference']:.4f}"),
    ("agree", 7, lambda r: f"{r['agreement']:.1%}"),
    ("tasks", 7, lambda r: f"{r['pass_rate']['passed']}/{r['pass_rate']['asked']}"),
    ("gate", 22, lambda r: f"{r['gate']['kind']} {r['gate']['verdict'].upper() if r['gate']['verdict'] == 'failed' else r['gate']['verdict']}"),
)  # fmt: skip


def table(rows: list[dict]) -> str:
    """The rows for people: a block for each batch and temperature; no column that is empty."""

    def cell(show, row: dict) -> str:
        try:
            return show(row)
        except (KeyError, TypeError):  # a peer does not tell, an older result did not ask
            return "-"

    lines, width = [], max(len(row["mode"]) for row in rows) + 2
    columns = [(head, w, show) for head, w, show in COLUMNS if any(cell(show, row) != "-" for row in rows)]
    for (batch, temperature), part in itertools.groupby(rows, lambda row: (row.get("batch"), row.get("temperature"))):
        if batch is not None:
            lines += [""] * bool(lines) + [f"batch {batch}, temperature {temperature:g}"]
        lines.append(f"{'mode':{width}}" + "".join(f"{head:>{w}}" for head, w, _ in columns))
        for row in part:
            lines.append(f"{row['mode']:{width}}" + "".join(f"{cell(show, row):>{w}}" for _, w, show in columns))
    return "\n".join(lines)


def remarks(rows: list[dict]) -> list[str]:
    """Why a gate did not pass, and what explains a prediction that is off by more than a tenth."""
    said = []
    for row in rows:
        where = f"{row['mode']} (batch {row['batch']}, temperature {row['temperature']:g})"
        if row["gate"] and row["gate"]["verdict"] != "passed":
            said.append(f"{where}: {row['gate']['kind']} {row['gate']['verdict']}: {row['gate']['why']}")
        if row["predicted_ratio"] and abs(row["ratio_to_plain"] / row["predicted_ratio"] - 1) > 0.1:
            terms = row["prediction_terms"]
            rest = row["ratio_to_plain"] / row["predicted_ratio"] / math.prod(terms.values())
            named = ", ".join(f"{name} {x:.2f}" for name, x in (terms | {"the rest": rest}).items())
            said.append(
                f"{where}: {row['ratio_to_plain']:.2f} measured, {row['predicted_ratio']:.2f} predicted: {named}"
            )
    return said
