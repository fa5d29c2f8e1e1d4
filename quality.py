"""Is the text still what it should be: a set of questions with graders, and the gates that stand beside every speed.

    items = read_items()                                        # prompts/quality.json
    passed = [grade(item, text) for item, text in zip(items, texts)]
    difference, interval = paired_difference(passed, passed_of_plain)
    gate = distribution_gate(model, sampling, runs)             # {"kind", "verdict", "value", "bound", "why"}

    promise of a mode                            what may part from plain         gate
    temperature 0, or coupled                    nothing, or behind a near-tie    identity_gate (near_tie, race_gap)
    rejection above temperature 0                the text, not its law            distribution_gate
    early exit, and whatever else approximates   a bounded share of tokens        disagreement_gate

A gate has three verdicts: passed, failed, and unsure, where the sample is too small to say.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import kernels
from decode import DecodeStats, Generation, Sampler, SamplingParams, near_tie
from model import GPT
from tokenizer import Tokenizer, apply_chat

ITEMS = Path(__file__).parent / "prompts" / "quality.json"
GROUPS = ("factual", "code", "refusal", "copy")

# ------------------------------------------------------------------------------------------------------------ graders


def plainly(text: str) -> str:
    """Case folded, runs of blanks as one, typewriter's quotes."""
    return " ".join(text.casefold().translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}).split())


def mentions(text: str, phrase: str) -> bool:
    """Whether the phrase stands in the text as whole words; a number not within a longer one (12 in 12.5)."""
    before, phrase = r"(?<!\w)", plainly(phrase)
    if phrase[0].isdigit():
        before += r"(?<!\d[.,])(?<!-)"
    return re.search(before + re.escape(phrase) + r"(?!\w)(?![.,]\d)", plainly(text)) is not None


REFUSAL = re.compile(
    r"\b(?:i|we)(?:'m|'re| am| are)?(?: \w+ly| just| also| have to| must)? (?:can't|cannot|can not|couldn't|could not"
    r"|won't|will not|unable to|not able to|not (?:going|allowed|permitted|comfortable|capable|programmed|designed)"
    r"|don't (?:have|know)|do not (?:have|know)|have no|decline|refuse)\b"
    r"|\bsorry, but (?:i|that|this|it|no|there)\b"
    r"|\b(?:no one|nobody) (?:can|could) (?:know|predict|foresee)|\b(?:no one|nobody) knows\b"
    r"|\bno way to (?:know|predict)"
    r"|\b(?:is|it's|that's) (?:impossible|not possible|illegal|unethical|against the law)\b"
)


def refuses(text: str) -> bool:
    """Whether the answer declines, or says that it cannot be given. Who declines says so at the beginning."""
    return REFUSAL.search(plainly(text)[:300]) is not None


# Runs in a child of its own, which says by a random word in a file that the code passed: an exit status or a line of
# output might be the code's.
JUDGE = """
import contextlib, json, resource, sys
task = json.load(sys.stdin)
for name, most in {"AS": 2**29, "CPU": 5, "FSIZE": 2**20, "NPROC": 0, "CORE": 0}.items():
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
names = {"__name__": "answer"}
exec(task["code"], names)
for arguments, result in task["cases"]:
    assert json.loads(json.dumps(names[task["function"]](*arguments))) == result
with open(task["file"], "w") as file:
    file.write(task["word"])
"""


def runs_right(text: str, wanted: dict, seconds: float = 5.0) -> bool:
    """Whether the first code block of an answer (all of it where there is none) defines what passes its cases.

    A separate interpreter (-I) in an empty folder, with limits on time, memory, files and processes: a guard against
    accidents of a model's code, not against an attacker.
    """
    block = re.search(r"```[^\n]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as kept:
        file, word = Path(kept) / "verdict", secrets.token_hex(16)
        task = {"code": block[1] if block else text, "file": str(file), "word": word, **wanted}
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", JUDGE], cwd=folder, env={}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            child.communicate(json.dumps(task).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # what it may have started, too
            except ProcessLookupError:
                pass
            child.wait()
        return file.exists() and file.read_text() == word


def bare(text: str) -> str:
    """Without the quotes, the code fence and the full stop that people overlook around an answer."""
    return text.strip(" \n`\"'“”.")


def _words(x) -> bool:
    return isinstance(x, list) and len(x) > 0 and all(isinstance(word, str) and word.strip() for word in x)


def _text(x) -> bool:
    return isinstance(x, str) and bool(x.strip())


def _program(x) -> bool:
    if not isinstance(x, dict) or set(x) != {"function", "cases"} or not isinstance(x["cases"], list):
        return False
    cases = [isinstance(case, list) and len(case) == 2 and isinstance(case[0], list) for case in x["cases"]]
    return isinstance(x["function"], str) and x["function"].isidentifier() and len(cases) > 0 and all(cases)


# kind: (what its value must be, whether it is that, whether a text passes)
KINDS = {
    "any": ("a list of phrases", _words, lambda text, words: any(mentions(text, word) for word in words)),
    "all": ("a list of phrases", _words, lambda text, words: all(mentions(text, word) for word in words)),
    "none": ("a list of phrases", _words, lambda text, words: not any(mentions(text, word) for word in words)),
    "refuses": ("true or false", lambda x: isinstance(x, bool), lambda text, wanted: refuses(text) == wanted),
    "python": ('{"function": name, "cases": [[arguments, result], ...]}', _program, runs_right),
    "equals": ("a text", _text, lambda text, wanted: bare(text) == bare(wanted)),
    "contains": ("a text", _text, lambda text, wanted: wanted in text),
    "lines": ("a number of lines", lambda x: type(x) is int and x > 0,
              lambda text, n: sum(bool(line.strip()) for line in text.splitlines()) == n),
}  # fmt: skip


def check_item(item) -> None:
    """ValueError, in one line that names it, for an item that cannot be graded."""

    def need(ok: bool, what: str):
        if not ok:
            raise ValueError(f"quality item {json.dumps(item, default=str)[:80]}: {what}")

    need(isinstance(item, dict) and _text(item.get("user")), '"user" must be a message')
    need(item.get("group") in GROUPS, f'"group" must be one of {", ".join(GROUPS)}')
    need(isinstance(item.get("check"), dict) and len(item["check"]) > 0, '"check" must be {kind: value, ...}')
    for kind, wanted in item["check"].items():
        need(kind in KINDS, f"check {kind!r} is none of {', '.join(KINDS)}")
        need(KINDS[kind][1](wanted), f"check {kind!r} must be {KINDS[kind][0]}")


def read_items(path: str | Path = ITEMS) -> list[dict]:
    """The quality set: {"user": message, "group", "check": {kind: value}, "right": [answers], "wrong": [answers]}."""
    try:
        items = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(items, list) or not items:
        raise ValueError(f"{path}: it must hold a JSON list of items")
    for item in items:
        check_item(item)
    return items


def grade(item: dict, text: str) -> bool:
    """Whether an answer, without the template's end mark, passes all checks of its item."""
    check_item(item)
    return all(KINDS[kind][2](text, wanted) for kind, wanted in item["check"].items())


# --------------------------------------------------------------------------------------------------------- statistics


def bootstrap(values: Sequence[float], n: int = 2000, seed: int = 0, per: Sequence[float] | None = None):
    """95% percentile interval (low, high) of the mean of values (N,), or of sum(values) / sum(per), over sequences.

    Whole sequences are drawn again, because the tokens of one depend on each other (Efron and Tibshirani 1993). It
    knows only what it has seen: from few sequences, or from equal ones, it is too narrow.
    """
    values, per = np.asarray(values, float), np.ones(len(values)) if per is None else np.asarray(per, float)
    if len(values) == 0 or len(values) != len(per) or not (per > 0).all():
        raise ValueError(f"values are {len(values)} and per {len(per)}: as many, at least one, and per above 0")
    drawn = np.random.default_rng(seed).integers(len(values), size=(n, len(values)))
    low, high = np.percentile(values[drawn].sum(1) / per[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)


def paired_difference(passed: Sequence[bool], baseline: Sequence[bool]) -> tuple[float, tuple[float, float]]:
    """Pass rate minus the baseline's on the same prompts, and its 95% interval (Bonett and Price 2012).

    Only prompts on which the two differ tell them apart. One is added to either kind of them, so that the interval
    stays honest where there are none: a bootstrap would then be certain.
    """
    n = len(passed)
    if n == 0 or n != len(baseline):
        raise ValueError(f"passed are {n} and baseline {len(baseline)}: give the same prompts, at least one")
    won = sum(a and not b for a, b in zip(passed, baseline))
    lost = sum(b and not a for a, b in zip(passed, baseline))
    centre = (won - lost) / (n + 2)
    reach = 1.96 * math.sqrt(((won + lost + 2) / (n + 2) - centre**2) / (n + 2))
    return (won - lost) / n, (max(centre - reach, -1.0), min(centre + reach, 1.0))


def chi_square_p(counts: np.ndarray) -> float:
    """P-value of counts under equal chances (Pearson 1900)."""
    expected = counts.sum() / counts.size
    halves = torch.tensor([(counts.size - 1) / 2, ((counts - expected) ** 2).sum() / expected / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def kolmogorov_p(u: np.ndarray) -> float:
    """P-value of u (N,) being uniform on [0, 1] (Kolmogorov 1933, with the correction for small N of Stephens 1970)."""
    n, u = len(u), np.sort(u)
    distance = max((np.arange(1, n + 1) / n - u).max(), (u - np.arange(n) / n).max())
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if scaled < 0.3:  # the series converges slowly there, to 1
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(max(2 * sum(terms), 0.0), 1.0)


# -------------------------------------------------------------------------------------------------------------- gates


def _gate(kind: str, verdict: str, value: float, bound: float, why: str) -> dict:
    return {"kind": kind, "verdict": verdict, "value": value, "bound": bound, "why": why}


def parting(prompt, plain, other, gap) -> tuple[str, str]:
    """How a text parts from plain's: "same", "tie" or "fault"; and where."""
    plain, other = list(plain), list(other)
    if plain == other:
        return "same", ""
    shorter = min(len(plain), len(other))
    at = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
    where = f"parts at token {at + 1}"
    if gap is None or at == shorter:  # the same tokens up to an end are no tie
        return "fault", where
    apart, bound = gap([*prompt, *plain[:at]], (plain[at], other[at]))
    return "tie" if apart <= bound else "fault", f"{where}, where what decides is {apart:.2g} apart (bound {bound:.2g})"


def identity_gate(pairs, gap: Callable[[int, list[int], tuple[int, int]], tuple[float, float]] | None = None) -> dict:
    """Texts must be plain's. pairs: (prompt, plain's tokens, the mode's tokens).

    The first difference of pair i is excused where gap(i, ids before it, its two tokens) -> (distance, bound) is within
    its bound: near_tie's at temperature 0, race_gap's above; what follows a tie is another text. gap None: exact, as in
    float64, where nothing is excused. Value: the share of texts that part without excuse.
    """
    found = [parting(*pair, gap and partial(gap, i)) for i, pair in enumerate(pairs)]
    if not found:
        raise ValueError("pairs are empty: give at least one (prompt, plain's tokens, the mode's tokens)")
    kinds = [kind for kind, _ in found]
    why = (
        f"{len(kinds) - kinds.count('same')} of {len(kinds)} texts part from plain's, {kinds.count('tie')} at near-ties"
    )
    faults = [f"; text {i + 1} {where}" for i, (kind, where) in enumerate(found) if kind == "fault"]
    verdict = "failed" if faults else "passed"
    return _gate("identity", verdict, len(faults) / len(kinds), 0.0, "".join([why, *faults[:1]]))


def survivors(z: torch.Tensor, slack: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which tokens (V,) the filters of process_logits_ref keep, where each had its own logit z (V,) higher by slack.

    slack above 0: that may be kept if logits move by so much against one another; below 0: that are kept even so.
    What lies in front of a token under top-p may move too: its odds count e^-slack times.
    """
    raised, kept = z + slack, z > -torch.inf
    ordered = z.sort(descending=True).values
    if 0 < top_k < len(z):  # a token that sinks is followed by the next, one that rises displaces the last
        kept = kept & (raised >= ordered[top_k - (slack > 0)])
    if top_p < 1:
        mass, n_above = z.exp(), len(z) - torch.searchsorted(ordered.flip(0), raised, right=True)
        order = z.argsort(descending=True)

        def above(mass: torch.Tensor) -> torch.Tensor:
            return torch.cat((mass.new_zeros(1), mass[order].cumsum(0)))[n_above]

        own = mass if slack < 0 else 0.0  # a token that sinks is not in front of itself
        front, rest = above(mass) - own, mass[kept].sum() - above(mass * kept) + own
        kept = kept & (front < rest * (top_p / (1 - top_p) * math.exp(min(slack, 99.0))))
    if min_p > 0:
        rival = torch.where(z == ordered[0], ordered[min(1, len(z) - 1)], ordered[0])
        kept = kept & (raised >= rival + math.log(min_p))
    return kept


@torch.inference_mode()
def race_gap(
    model: GPT, sampling: SamplingParams, seed: int, tokens: list[int], drawn: Sequence[int]
) -> tuple[float, float]:
    """near_tie above temperature 0: by how much the race's winner behind tokens leads the worse of drawn, and the bound.

    Plain and coupled decoding draw argmin(E / p) with the same noise E of a seed and an index (kernels.race), so in finite
    precision they part only where log(p / E) of both tokens is within rounding of the best. sampling and seed: the row's.
    A token whose logit lies within the bound of a filter's cut may be kept or not: it may be drawn, and beats nobody.
    Another that is cut is infinitely far.
    """
    bound = near_tie(model, tokens, drawn, sampling.repetition_penalty)[1] / sampling.temperature
    sampler = Sampler(replace(sampling, seed=[seed]), [tokens], model)
    logits = sampler.penalised([0], model(torch.tensor([tokens], device=model.device))[:, -1:])[0, 0].double()
    z = (logits - logits.max()) / sampling.temperature
    ids, index = torch.arange(len(z), device=z.device), torch.tensor([len(tokens)], device=z.device)
    noise = kernels.race_noise(sampler.seeds, index, kernels.SAMPLE, torch.zeros_like(index), ids[None])[0]
    score = z - noise.log()
    filters = (sampling.top_k, sampling.top_p, sampling.min_p)
    possible, certain = survivors(z, bound, *filters), survivors(z, -bound, *filters)
    drawn = torch.tensor(drawn, device=z.device)
    if not possible[drawn].all():
        return math.inf, bound
    return float((score[certain].max() if certain.any() else score[drawn].min()) - score[drawn].min()), bound


def hidden_states(model: GPT, prompt, tokens, depths=()) -> dict[int, torch.Tensor]:
    """One pass without a cache: {layers run: x (T, C)} of the positions that tokens (T,) came from; all layers too."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    x, first, found = model.embed(ids, positions), 0, {}
    for depth in sorted({*depths, model.config.n_layer}):
        x = model.run_layers(x, None, positions, first, depth)
        found[depth], first = x[0, len(prompt) - 1 :], depth
    return found


def log_laws(model: GPT, sampling: SamplingParams, prompt, tokens, *logits: torch.Tensor) -> list[torch.Tensor]:
    """Of each logits (T, V): the log of the law that sampling draws tokens (T,) from, each behind those before it."""
    sampler = Sampler(replace(sampling, seed=0), [list(prompt)], model)  # owns the processing; no number is drawn
    ahead = torch.tensor([tokens[:-1]], dtype=torch.int64, device=model.device)
    seen = [sampler.penalised([0], x[None], ahead)[0] for x in logits]
    return [kernels.process_logits_ref(x, **sampler.law).double().log_softmax(-1) for x in seen]


def integral_transform(law: torch.Tensor, tokens: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """u (T,) = mass before the token + v * its own mass, in falling order of law (T, V); uniform if drawn from it."""
    own = law.gather(-1, tokens[:, None])
    ids = torch.arange(law.shape[-1], device=law.device)
    before = (law > own) | ((law == own) & (ids < tokens[:, None]))
    return (torch.where(before, law, 0.0).sum(-1) + v * own[:, 0]).clamp(0, 1 - 1e-12)


BINS, LEAST_TOKENS, LEAST_P = 20, 300, 0.001


@torch.inference_mode()
def distribution_gate(model: GPT, sampling: SamplingParams, runs, seed: int = 0) -> dict:
    """Tokens must come from the full model's processed law. runs: (prompt, tokens), each with a seed of its own.

    The randomised probability integral transform of each token, given those before it, is uniform and independent when
    they do (Rosenblatt 1952). Value: the smallest p-value of three tests, times three (Bonferroni): chi-square on
    20 bins, Kolmogorov's, and chi-square on neighbours in 5 x 5 bins, which hears of noise used twice.
    Runs must be of a fixed number of tokens: a budget may cut them anywhere, but to pick by where they stopped would
    select texts.
    """
    if sampling.temperature == 0:
        raise ValueError("temperature is 0: there is no law to test; use identity_gate")
    generator, parts, n_impossible = torch.Generator().manual_seed(seed), [], 0
    for prompt, tokens in runs:
        if not len(tokens):
            continue
        x = hidden_states(model, prompt, tokens)[model.config.n_layer]
        law = log_laws(model, sampling, prompt, tokens, model.logits(x))[0].exp()
        drawn = torch.tensor(tokens, device=law.device)
        n_impossible += int((law.gather(-1, drawn[:, None]) == 0).sum())
        v = torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(law.device)
        parts.append(integral_transform(law, drawn, v).cpu().numpy())
    n = sum(map(len, parts))
    if n_impossible and model.dtype == torch.float64:  # else rounding may move a filter's cut: they count as the rarest
        return _gate("distribution", "failed", 0.0, LEAST_P, f"{n_impossible} of {n} tokens have probability 0")
    if n < LEAST_TOKENS:
        return _gate("distribution", "unsure", 1.0, LEAST_P, f"{n} tokens are too few: at least {LEAST_TOKENS}")
    u = np.concatenate(parts)
    pairs = np.concatenate([part[: len(part) // 2 * 2].reshape(-1, 2) for part in parts])
    cells = (pairs * 5).astype(int) @ [5, 1]
    p_values = {
        "chi-square": chi_square_p(np.bincount((u * BINS).astype(int), minlength=BINS)),
        "Kolmogorov": kolmogorov_p(u),
        "neighbours": chi_square_p(np.bincount(cells, minlength=25)) if len(cells) >= 125 else 1.0,
    }
    p = min(1.0, len(p_values) * min(p_values.values()))
    why = f"{n} tokens of {len(parts)} runs: " + ", ".join(f"{name} p = {x:.2g}" for name, x in p_values.items())
    why += f"; {n_impossible} of probability 0" if n_impossible else ""
    return _gate("distribution", "failed" if p < LEAST_P else "passed", p, LEAST_P, why)


LEAST_SEQUENCES = 10  # a bootstrap over fewer is too narrow to promise anything
NOTICED = 3  # times the certified risk: a check passes that would have noticed so much
WORSE = 2.5  # times that: the loss of the sequence that is imagined beside those that were seen


def certified_interval(losses: Sequence[float], risk: float, clip: float) -> tuple[float, float]:
    """95% interval of the expected loss of a sequence, from losses (N,) each at most clip, as certificates count them.

    A bootstrap knows only what it has seen, so one more sequence is imagined: without loss for the lower end, and WORSE
    than what must be noticed for the upper. At the certified risk the lower end then lies above it in 2.5% of checks at
    most, and at NOTICED times the risk the upper end lies below that in 5% at most, from LEAST_SEQUENCES sequences of 64
    tokens on whose expected losses vary no more than their mean (simulated in tests/test_quality.py). Where the clip hides
    so much, or there are fewer, nothing would be noticed: the upper end is 1.
    """
    blind = NOTICED * risk >= clip or len(losses) < LEAST_SEQUENCES
    return bootstrap([*losses, 0.0])[0], 1.0 if blind else bootstrap([*losses, min(WORSE * NOTICED * risk, clip)])[1]


def sequences_missing(n: int, suffices: Callable[[np.ndarray], bool]) -> str:
    """How many more sequences like the n that were seen would suffice; suffices(index of each, again and again)."""
    for wanted in sorted({max(LEAST_SEQUENCES, math.ceil(n * 1.1**i)) for i in range(1, 31)}):
        if wanted > n and suffices(np.arange(wanted) % n):
            return f"about {wanted - n} more like them would tell"
    return "more like them would not tell"


def disagreement_gate(stats: Sequence[DecodeStats], bound: float, nats_bound: float, clip: float | None = None) -> dict:
    """The audit's share of tokens that differ, and its nats per token, within their bounds; stats: one per sequence.

    By hand (clip None): the share of all tokens. Passed where the upper ends of both 95% intervals are within the bounds,
    failed where a lower end is above its own, else unsure.

    Certified: bound is the certificate's risk, of the share in a sequence, which counts at most clip. The certificate is
    the evidence, from sequences of its own, and this is a check against it: failed where the lower end is above the risk;
    passed where it is not and the upper end is below NOTICED times the risk, so that a mode as bad as that would have been
    noticed; else unsure. Nats are judged as by hand.
    """
    stats = [s for s in stats if s.tokens]
    if any(s.exited > s.audited for s in stats):
        raise ValueError("stats hold exits that nobody judged: decode with audit=True and kv_fill recompute")
    if not stats:
        return _gate("disagreement", "unsure", 0.0, bound, "no tokens")
    n_tokens, wrong, nats = (
        np.array([getattr(s, x) for s in stats]) for x in ("tokens", "audit_disagreed", "audit_nats")
    )
    losses = wrong / n_tokens if clip is None else np.minimum(wrong / n_tokens, clip)

    def intervals(index: np.ndarray):
        of_nats = bootstrap(nats[index], per=n_tokens[index])
        if clip is None:
            return bootstrap(wrong[index], per=n_tokens[index]), of_nats
        return certified_interval(losses[index], bound, clip), of_nats

    most = bound if clip is None else NOTICED * bound

    def suffices(index: np.ndarray) -> bool:
        (_, share), (_, lost) = intervals(index)
        return share <= most and lost <= nats_bound and len(index) >= LEAST_SEQUENCES

    seen = np.arange(len(stats))
    share, lost = intervals(seen)
    failed = share[0] > bound or lost[0] > nats_bound
    verdict = "failed" if failed else "passed" if suffices(seen) else "unsure"
    why = f"{share[0]:.2%} to {share[1]:.2%} of tokens differ, {bound:.2%} may; {lost[0]:.3g} to {lost[1]:.3g} nats per"
    why += f" token, {nats_bound:.3g} may; {len(stats)} sequences"
    if clip is not None:
        why += f", a check of the certificate: {most:.2%} must be noticed"
    if verdict == "unsure":
        why += f"; too few, {sequences_missing(len(stats), suffices)}"
    value = wrong.sum() / n_tokens.sum() if clip is None else losses.mean()
    return _gate("disagreement", verdict, float(value), bound, why)


@torch.inference_mode()
def text_figures(
    model: GPT, prompt, generation: Generation, sampling: SamplingParams, reference: GPT | None = None
) -> dict[str, float | None]:
    """How far a text strayed, by one pass without a cache: means in nats per token, None without tokens.

    kl     KL(law that drew the token || the full model's law), summed over the vocabulary. A token that left at an
           exit was drawn by that exit's head, any other by the full model (0). Laws after penalty, bias and temperature
           (1 for 0), before top-k, top-p and min-p, which would make it infinite. Exact for kv_fill "recompute"
    nll    negative log-likelihood of the text under the full model's own softmax
    reference  the model to compare with instead of the full model, such as the one that was quantised
    """
    tokens, n_layer = generation.tokens, model.config.n_layer
    if not tokens:
        return {"kl": None, "nll": None}
    depths = [n if source == "exit" else n_layer for n, source in zip(generation.layers_run, generation.sources)]
    hidden = hidden_states(model, prompt, tokens, depths)
    drew = full = model.logits(hidden[n_layer])
    if min(depths) < n_layer:
        drew = full.clone()
    for depth in set(depths) - {n_layer}:
        at = [i for i, x in enumerate(depths) if x == depth]
        drew[at] = model.logits(hidden[depth][at], depth)
    if reference is not None:
        full = reference.logits(hidden_states(reference, prompt, tokens)[reference.config.n_layer])
        full = kernels.fit_vocabulary(full.to(drew.device), drew.shape[-1])
    unfiltered = replace(sampling, temperature=sampling.temperature or 1.0, top_k=0, top_p=1.0, min_p=0.0)
    own, true = log_laws(model, unfiltered, prompt, tokens, drew, full)
    kl = torch.where(own > -torch.inf, own.exp() * (own - true), 0.0).sum(-1).mean()  # 0 * (-inf - -inf) of padding
    nll = -full.double().log_softmax(-1).gather(-1, torch.tensor(tokens, device=full.device)[:, None]).mean()
    return {"kl": float(kl), "nll": float(nll)}


# -------------------------------------------------------------------------------------------------------------- prompts


def read_prompts(source: str) -> list[str | dict]:
    """A JSON list of texts and {"user": message} in a file, or under keys of it: FILE:KEY,KEY. Checks of items are checked."""
    name, _, keys = (source, "", "") if Path(source).exists() or ":" not in source else source.rpartition(":")
    try:
        texts = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--prompts: {source}: {str(error).splitlines()[0]}") from None
    if keys:  # a key that is not there, or holds no list, leaves None
        lists = [texts.get(key) if isinstance(texts, dict) else None for key in keys.split(",")]
        texts = [text for part in lists for text in (part if isinstance(part, list) else [None])]
    sound = isinstance(texts, list) and texts
    if not sound or not all(isinstance(x.get("user") if isinstance(x, dict) else x or None, str) for x in texts):
        raise ValueError(f'--prompts: {source} must hold a JSON list of texts, or of messages {{"user": text}}')
    for item in texts:
        if isinstance(item, dict) and "check" in item:
            check_item(item)
    return texts


def spelled(tokenizer: Tokenizer, prompt: str | dict) -> list[int]:
    """Ids of a text to go on with, or of a {"user": message} in the model's template."""
    text = prompt if isinstance(prompt, str) else apply_chat(tokenizer, [{"role": "user", "content": prompt["user"]}])
    return tokenizer.encode(text, special=True)
