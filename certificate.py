"""What is promised of early exit's thresholds: tests with a guarantee (Learn-then-Test; Angelopoulos et al. 2021), the
certificate that a checkpoint keeps, and the guard that watches in use.

    one unit     a sequence decoded with exits on; tokens of one text depend on each other, and are no sample
    its loss     min(X, clip), X the share of its tokens that differ from the full model's, or nats lost per token
    a setting    thresholds; settings are ordered from the strictest to the loosest before their tests see any data
    its test     p-value of "expected loss > risk" from the n losses; what is rejected may be used
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch

import kernels
from decode import SamplingParams
from model import GPT


def hoeffding_bentkus_p(losses: Sequence[float], risk: float) -> float:
    """P-value of "the mean of these independent losses (n,) in [0, 1] is above risk" (Bates et al. 2021)."""
    n, mean = len(losses), sum(losses) / len(losses)
    low = min(mean, risk)
    divergence = sum(a * math.log(a / b) for a, b in ((low, risk), (1 - low, 1 - risk)) if a > 0)
    chances = (
        math.exp(
            math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
            + k * math.log(risk) + (n - k) * math.log1p(-risk)
        )
        for k in range(min(math.ceil(n * mean), n) + 1)
    )  # fmt: skip
    return min(math.exp(-n * divergence), math.e * sum(chances), 1.0)


def betting_p(losses: Sequence[float], risk: float, delta: float) -> float:
    """P-value of the same by betting (Waudby-Smith and Ramdas 2024): 1 / the highest capital on the way.

    The gambler stakes a share of the capital, chosen from the losses before, on each loss in turn being below risk;
    delta is the level that it is tuned to. Sharper than Hoeffding-Bentkus where losses vary little.
    """
    n, capital, highest, total, squares = len(losses), 1.0, 1.0, 0.5, 0.25
    for i, loss in enumerate(losses, 1):
        variance = squares / i
        capital *= 1 + min(1.0, math.sqrt(2 * math.log(1 / delta) / (n * variance))) * (risk - loss)
        highest = max(highest, capital)
        total += loss
        squares += (loss - total / (i + 1)) ** 2
    return 1 / highest


def upper_bound(p_value: Callable[[float], float], delta: float) -> float:
    """The smallest risk in (0, 1) that p_value rejects at delta: a bound on the mean with confidence 1 - delta."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if p_value(middle) <= delta else (middle, high)
    return high


def fixed_sequence(p_values: Iterable[float], delta: float) -> int:
    """Index of the last hypothesis rejected, in their order, before the first that is not; -1 for none.

    Each is tested at delta itself: with chance 1 - delta the first true one stops the sequence, before any other.
    """
    last = -1
    for last_tested, p in enumerate(p_values):
        if p > delta:
            break
        last = last_tested
    return last


def first_passing(p_value: Callable[[int, float], float], candidate: int, delta: float) -> int:
    """The first setting that passes its test, from the candidate to stricter ones; -1 where none of MAX_TRIES does.

    Whoever tries again after a failure gets through by luck in the end: try k has the level delta / 2^k, so that all
    together err with chance delta. The data of p_value(setting, level) must not have chosen the candidate.
    """
    for k, setting in enumerate(range(candidate, -1, -1)[:MAX_TRIES], 1):
        if p_value(setting, delta / 2**k) <= delta / 2**k:
            return setting
    return -1


@dataclass
class Certificate:
    """Calibrated thresholds, what is promised of them, what was seen, and what it holds for.

    With probability 1 - delta over calibration sets the expected loss of a sequence, clipped at clip, is at most risk,
    for prompts like those of the calibration. No single sequence is bounded, and nothing is said of other prompts.
    """

    thresholds: list[float]  # one per exit; all above 1 where no setting passed: plain decoding
    agreement: float | None  # the setting: chance of agreeing with the full model that every exit asks for; None: plain
    loss: str  # "disagreement": share of tokens; "nll": nats per token
    risk: float
    delta: float
    clip: float
    level: float  # of the test that this setting passed: its part of delta
    n: int  # sequences tested
    empirical_risk: float  # their mean clipped loss
    clipped_share: float  # of sequences whose loss is above clip
    exited: float  # share of tokens that left early
    mean_layers: float  # per token, flushes included
    p_betting: float  # decides; the capital is its inverse
    p_hoeffding_bentkus: float
    bound_betting: float  # on the expected clipped loss, each with confidence 1 - level
    bound_hoeffding_bentkus: float
    tried: list[dict]  # settings tested by decoding, in order
    holds_for: dict
    data: str = ""
    date: str = ""

    def __str__(self) -> str:
        what = {
            "disagreement": "{:.3g} of the tokens differ from the full model's",
            "nll": "{:.3g} nats a token are lost",
        }
        promise = what[self.loss].format(self.risk)
        if self.agreement is None:
            return f"no setting was certified for at most {promise} (n {self.n}): thresholds above 1, plain decoding"
        return (
            f"with probability {1 - self.delta:g} at most {promise} (a sequence counts at most {self.clip:g};"
            f" n {self.n}, seen {self.empirical_risk:.2g}); {self.exited:.0%} exit, {self.mean_layers:.1f} layers run"
        )


IDENTITY = ("weights", "heads", "tokenizer")  # fingerprints, which say nothing to a reader
LOSSES = ("disagreement", "nll")
# Errors of 0.08% to 50%, each 1.4 times the one before: a step that a few hundred sequences can tell from the next.
AGREEMENTS = [1 - 0.5 / 1.4**i for i in reversed(range(20))]
MAX_TRIES = 5


def conditions(model: GPT, sampling: SamplingParams, confidence: str, kv_fill: str, max_parked: int) -> dict:
    """What a certificate holds for, as json can hold it. Seeds and stops are left out: any of them may come."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    held = None if model.cache_dtype in (None, model.dtype) else str(model.cache_dtype).removeprefix("torch.")
    return {
        **model.identity,
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": held,
        "confidence": confidence,
        "kv_fill": kv_fill,
        "max_parked": max_parked,
        **{name: getattr(sampling, name) for name in names},
        "logit_bias": {str(i): bias for i, bias in sampling.logit_bias.items()},
    }


def certified(
    model: GPT, sampling: SamplingParams, confidence="max_prob", kv_fill="recompute", max_parked: int = 8
) -> Certificate:
    """The certificate of the checkpoint that holds for this; ValueError that names what differs.

    Shorter generations than those of the calibration are taken as covered, longer ones are not.
    """
    remedy = "run train_exit_heads.py --stage calibrate"
    if not model.certificates:
        raise ValueError(
            f"threshold is None, and this checkpoint holds no calibrated ones: give a number, such as 0.9, or {remedy}"
        )
    now, found = conditions(model, sampling, confidence, kv_fill, max_parked), []
    for stored in model.certificates:
        then = stored["holds_for"]
        names = [name for name in {**now, **then} if then.get(name) != now.get(name)]
        if now["max_new_tokens"] <= then.get("max_new_tokens", -1):
            names = [name for name in names if name != "max_new_tokens"]
        found.append((len(names), names, stored))
    _, names, stored = min(found, key=lambda x: x[0])
    if names:
        then = stored["holds_for"]
        apart = [x if x in IDENTITY else f"{x} {then.get(x)} (now {now.get(x)})" for x in names]
        raise ValueError(
            f"threshold is None, and the calibrated ones are for another {', '.join(apart)}: give a number, or {remedy}"
        )
    try:
        return Certificate(**stored)
    except TypeError:
        raise ValueError(f"exits.json holds no certificate of this version: delete it, and {remedy}") from None


@dataclass(frozen=True)
class Guard:
    """An online test of early exit's audit while it decodes, and what it does when the test rejects.

    It bets against "at every token, whatever came before, the chance to differ from the full model's is at most risk".
    While that is true it is ever alarmed with chance delta at most, however long the call (Ville 1939; Waudby-Smith
    and Ramdas 2024). Alarmed, it makes the thresholds of all rows of the call one step stricter, warns in one line,
    counts that in stats.tightened, and begins anew. A step halves each threshold's distance to 1, which halves the
    errors where confidences are calibrated; after some ten steps decoding is plain. A certificate bounds the mean over
    sequences, so a sequence that is worse than most may alarm the guard without any breach.
    """

    risk: float
    delta: float = 0.05

    def __post_init__(self):
        for name in ("risk", "delta"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < value < 1:
                raise ValueError(f"{name} is {value!r}: it must be between 0 and 1")


class Watch:
    """The guard's memory: three gamblers' capitals, who expect a few more errors than the risk, more, and many more."""

    def __init__(self, guard: Guard, most_tokens: int):
        """most_tokens: of one flush; no bet may lose more than there is."""
        self.guard, self.n_wrong, self.n_tokens = guard, 0, 0
        self.bets = [share / (guard.risk * most_tokens) for share in (0.05, 0.2, 0.8)]
        self.capitals = [1.0] * len(self.bets)

    def hear(self, n_wrong: int, n_tokens: int) -> bool:
        """Bet on a flush; True where the mean capital has reached 1 / delta."""
        self.n_wrong, self.n_tokens = self.n_wrong + n_wrong, self.n_tokens + n_tokens
        won = n_wrong - self.guard.risk * n_tokens  # at most 0 on average, unless the guard has reason to be alarmed
        self.capitals = [capital * (1 + bet * won) for capital, bet in zip(self.capitals, self.bets)]
        return sum(self.capitals) >= len(self.capitals) / self.guard.delta


def stricter(thresholds: Sequence[float]) -> list[float]:
    """Thresholds at half their distance to 1; above 1 where that is closer than a confidence is good for."""
    return [2.0 if t > 1 - 2**-10 else (1 + t) / 2 for t in thresholds]


def fit_platt(confidence: torch.Tensor, agrees: torch.Tensor) -> tuple[float, float]:
    """Slope and bias of kernels.platt (Platt 1999): its chances are those that agrees (N,) bool is true."""
    x, agrees = kernels.logit(confidence.double()), agrees.double()
    inputs, start = torch.stack((x, torch.ones_like(x)), 1), torch.tensor([1.0, 0.0], dtype=torch.float64)

    def cost(scale):  # a little drawn to slope 1, bias 0: the data may separate
        guess = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ scale, agrees, reduction="sum")
        return guess + (scale - start).square().sum() / 2

    scale = start
    for _ in range(50):  # Newton's method; a step that would overshoot is halved
        chance = torch.sigmoid(inputs @ scale)
        weight = (chance * (1 - chance)).clamp(min=1e-9)[:, None]
        gradient = inputs.T @ (chance - agrees) + scale - start
        change = torch.linalg.solve((weight * inputs).T @ inputs + torch.eye(2, dtype=torch.float64), gradient)
        while change.abs().max() >= 1e-9 and cost(scale - change) > cost(scale):
            change = change / 2
        scale = scale - change
        if change.abs().max() < 1e-9:
            break
    return max(float(scale[0]), 1e-3), float(scale[1])
