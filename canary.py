"""Is what users get still what plain decoding says? Decode requests with and without an optimisation, and count.

    python bench.py canary --mode speculative --n 16
    python bench.py canary --mode early-exit --n 16       # against the certificate

Exit status 1 says above the bound and nothing else, so that a scheduler can act on it.
"""

import copy
import dataclasses
import json
import math
import sys
import time
import traceback

from tqdm import tqdm

import quality
from certificate import certified
from checkpoint import BUNDLED, flag, parse_flags
from decode import heed
from metrics import aggregate
from sample import Config, Session, n_same


@dataclasses.dataclass
class CanaryConfig(Config):
    """sample.py's flags, so that requests are decoded as they are served, and what to compare."""

    mode: str = flag("speculative", "what is compared with plain", ("speculative", "early-exit", "auto"))
    verify: str = flag("coupled", "coupled promises plain's text; rejection does at --temperature 0 alone",
                       ("rejection", "coupled"))  # fmt: skip
    prompts: str = flag(
        "", "a JSON list of texts and {user: message}: FILE, FILE:KEY or FILE:KEY,KEY; the bundled model's when empty"
    )
    n: int = flag(16, "requests: evenly spaced prompts of the list; more find rarer faults")
    bound: float | None = flag(None, "most that may differ, of 1 (0; early exit: the certificate's risk)", parse=float)

    def __post_init__(self):
        self.temperature = 0.0 if self.temperature is None else self.temperature
        super().__post_init__()
        if self.prompt is not None or self.num_samples != 1 or self.chat or self.metrics:
            raise ValueError(
                "texts come from --prompts: the canary knows no --prompt, --num-samples, --chat and --metrics"
            )
        if self.n < 1:
            raise ValueError(f"--n is {self.n}: it must be at least 1")
        if self.mode != "early-exit" and self.verify == "rejection" and self.temperature > 0:
            raise ValueError("--verify rejection keeps the law, not the text: choose coupled, or --temperature 0")
        if self.mode == "early-exit" and self.kv_fill == "propagate":
            raise ValueError("--kv-fill propagate cannot be audited: choose recompute")
        if self.mode == "early-exit" and self.bound is None and self.exit_threshold is not None:
            raise ValueError(
                "--bound is missing: the share of tokens in which exits by --exit-threshold may differ, such as 0.02"
            )
        if self.bound is not None and not 0 <= self.bound <= 1:
            raise ValueError(f"--bound is {self.bound}: it must be from 0 to 1")


def parting_gap(session: Session, plain: list[int], other: list[int], at: int) -> tuple[float, float]:
    """How far apart what decides at token `at` is, and below what that is a near-tie; no end of a text is one."""
    before = session.prompt + plain[:at]
    if at == min(len(plain), len(other)):
        return math.inf, 0.0
    drawn = plain[at], other[at]
    if session.sampling.temperature == 0:
        return session.gap(before, drawn)
    return quality.race_gap(session.model, session.sampling, session.sampling.seed, before, drawn)


def canary(config: CanaryConfig) -> dict:
    """Decode requests with and without the optimisation, and count what differs.

    1. plain and optimised, with the same seed; where the texts part first, and whether that is a near-tie
    2. disagreement of a request. Lossless modes: the share of its tokens from there on, 0 behind a near-tie (not in
       float64). Early exit: the share of its tokens in which the full model, with the same noise, disagrees
    3. above the bound: the mean of all. Without --bound, the lower end of the certificate's check, whose upper end says what
       so few requests may hide (quality.certified_interval)
    """
    texts = quality.read_prompts(config.prompts or str(BUNDLED / "stdlib" / "prompts.json"))
    n = config.n if config.temperature > 0 else min(config.n, len(texts))  # greedily, a prompt twice says nothing new
    asked = copy.copy(config)  # memory is planned for the longest; behind a space no text is the name of a file
    asked.prompt = " " + max((text if isinstance(text, str) else text["user"] for text in texts), key=len)
    session, bound, clip, certificate = Session(asked), config.bound or 0.0, 1.0, None
    if config.mode == "early-exit" and config.bound is None:
        certificate = certified(session.model, session.sampling, config.confidence, config.kv_fill)
        if certificate.loss != "disagreement":
            raise ValueError("--bound is missing: the certificate speaks of nats, not of tokens that differ")
        bound, clip = certificate.risk, certificate.clip
    plain_stats, stats, shares, parted, n_optimised = [], [], [], [], 0
    for i in tqdm(range(n), desc="canary", disable=None):
        session.prompt = quality.spelled(session.tokenizer, texts[i * len(texts) // n])
        session.sampling = dataclasses.replace(session.sampling, seed=config.seed + i)
        [plain] = heed(session.decode("plain"))
        [out] = heed(session.decode(config.mode, audit=True))
        plain_stats.append([plain.stats])
        stats.append([out.stats])
        n_optimised += len(out.sources) - out.sources.count("plain")
        at, n_tokens = n_same(plain, out), max(len(plain.tokens), len(out.tokens))
        excused = False
        if at < n_tokens:
            gap, tie = parting_gap(session, plain.tokens, out.tokens, at)
            excused = session.dtype != "float64" and gap <= tie
            parted.append({"request": i, "token": at, "gap": gap if math.isfinite(gap) else None, "near_tie": excused})
        if config.mode == "early-exit":
            shares.append(min(out.stats.audit_disagreed / max(len(out.tokens), 1), clip))
        else:
            shares.append(0.0 if excused else (n_tokens - at) / max(n_tokens, 1))
    if n_optimised == 0:
        raise ValueError(f"not one token came by {config.mode}: there is nothing to compare (is the kill switch on?)")
    disagreement, hidden = sum(shares) / n, None
    above = disagreement > bound
    if certificate is not None:  # a mean of few lies above its expectation every other time: it must be improbable
        low, hidden = quality.certified_interval(shares, bound, clip)
        above = low > bound
    return {
        "canary": config.mode,
        "requests": n,
        "same_text": n - len(parted),
        "parted": parted,
        "optimised_tokens": n_optimised,
        "disagreement": disagreement,
        "bound": bound,
        "above": above,
        "at_most": hidden,
        "plain": aggregate(plain_stats),
        "optimised": aggregate(stats),
    }


def canary_line(result: dict) -> str:
    ties = sum(part["near_tie"] for part in result["parted"])
    first = min((part["token"] for part in result["parted"]), default=None)
    where = "" if first is None else f", the earliest at token {first + 1}, {ties} at near-ties"
    hidden = result["at_most"] or 0.0
    few = (
        f" ({hidden:.2%} would not be noticed: see --n, and the certificate's clip)"
        if hidden > quality.NOTICED * result["bound"]
        else ""
    )
    return (f"canary {result['canary']}: {'ABOVE the bound' if result['above'] else 'within the bound'}: "
            f"{result['disagreement']:.3%} differ, {result['bound']:.3%} may{few}; {len(result['parted'])} of {result['requests']} "
            f"texts part from plain's{where}; {result['optimised_tokens']} of {result['optimised']['tokens']} tokens were "
            "optimised")  # fmt: skip


def run(config: CanaryConfig, environment: dict) -> int:
    """Exit status 1 says above the bound and nothing else, so that a scheduler can act on it."""
    began = time.perf_counter()
    try:
        result = canary(config)
        about = environment | {"seconds": time.perf_counter() - began, "flags": dataclasses.asdict(config)}
        if not config.json:
            print(canary_line(result))
        print(json.dumps(about | result), flush=True)
        return int(result["above"])
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001  a bug is no verdict, and Python alone would end with 1
        traceback.print_exc()
    return 2


def read_config(argv: list[str]) -> CanaryConfig:
    return parse_flags(CanaryConfig, argv, "bench.py canary", canary.__doc__)
