"""The one generation loop: prefill, then rounds of step -> commit -> stop -> stream, until every row has ended.

    state of a row     tokens  [ prompt ............ | new ...... ]     `length` = len(tokens), all committed
                       cache   [ length - 1 positions held        ]     the last token has not been run yet
    a round            step(batch, rows, cap) -> a Block of tokens per row; commit keeps what comes before a stop

A step that emits one plain token is all that `generate` needs. Speculation and early exit supply other steps
(speculative.py, early_exit.py), never another loop.
"""

from __future__ import annotations

import math
import os
import re
import stat
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import NamedTuple

import torch

import kernels
from model import GPT, KVCache
from rounds import RoundStep, runs_alone

PREFILL_CHUNK = 512  # tokens per pass while reading a prompt: bounds the (T, S) scores


def _whole(x) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


@dataclass
class SamplingParams:
    """How tokens are drawn: penalty -> bias -> temperature -> top-k -> top-p -> min-p, then where decoding stops."""

    max_new_tokens: int = 100
    temperature: float = 1.0  # 0 is argmax
    top_k: int = 0  # 0 is off; ties at the cut are kept
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | Sequence[int] = 0  # row i uses seed + i; or one seed per row
    stop_tokens: Sequence[int] = ()
    stop_strings: Sequence[str] = ()

    def __post_init__(self):
        def need(ok: bool, name: str, allowed: str):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {allowed}")

        def real(x):
            return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)

        need(_whole(self.max_new_tokens) and self.max_new_tokens >= 0, "max_new_tokens", "an integer >= 0")
        need(real(self.temperature) and self.temperature >= 0, "temperature", "a number >= 0 (0 is greedy)")
        need(_whole(self.top_k) and self.top_k >= 0, "top_k", "an integer >= 0 (0 is off)")
        need(real(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 is off)")
        need(real(self.min_p) and 0 <= self.min_p <= 1, "min_p", "from 0 to 1 (0 is off)")
        need(real(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "above 0 (1 is off)")
        good_bias = isinstance(self.logit_bias, dict) and all(
            _whole(i) and i >= 0 and (real(b) or b == -math.inf) for i, b in self.logit_bias.items()
        )
        need(good_bias, "logit_bias", "{token id: number or -inf}")
        seeds = [self.seed] if _whole(self.seed) else self.seed
        need(isinstance(seeds, Sequence) and all(map(_whole, seeds)), "seed", "an integer, or one per row")
        for name, what in (("stop_tokens", "a list of token ids"), ("stop_strings", "a list of non-empty strings")):
            need(isinstance(getattr(self, name), (list, tuple, set, frozenset)), name, what)
        need(all(_whole(t) and t >= 0 for t in self.stop_tokens), "stop_tokens", "a list of token ids")
        need(all(isinstance(s, str) and s for s in self.stop_strings), "stop_strings", "a list of non-empty strings")

    def row_seeds(self, n_rows: int) -> list[int]:
        """One seed per row, as signed 64-bit integers."""
        if _whole(self.seed):
            seeds = [self.seed + i for i in range(n_rows)]
        elif len(self.seed) != n_rows:
            raise ValueError(f"seed has {len(self.seed)} values for {n_rows} prompts: give one integer, or one per row")
        else:
            seeds = list(self.seed)
        return [(int(s) + 2**63) % 2**64 - 2**63 for s in seeds]


@dataclass
class DecodeStats:
    """Counters of one row. Prefill counts as no round and no pass.

    Times are in seconds; those of prefill, drafting and verifying are the batch's, whole, in each of its rows. Where the
    device runs rounds by itself, verifying is all of a round, as long as the host waited for it.
    """

    rounds: int = 0
    target_passes: int = 0
    corrected: int = 0
    bonus: int = 0
    plain: int = 0
    exited: int = 0
    accepted_histogram: list[int] = field(default_factory=list)  # [i]: rounds that accepted i drafts
    drafted_histogram: list[int] = field(default_factory=list)
    exit_histogram: dict[int, int] = field(default_factory=dict)  # {layers that ran before the exit: tokens}
    reasons: dict[str, int] = field(default_factory=dict)  # {why a round drafted as it did: rounds}, of speculation
    layer_passes: int = 0  # layers run, drafting by exits and flushes included, however many rows rode along
    audited: int = 0  # exited tokens that the full head judged later
    audit_disagreed: int = 0
    audit_nats: float = 0.0  # by how much those raise the negative log-likelihood, before temperature and filters
    tightened: int = 0  # times that the guard of early exit made its thresholds stricter while the row was decoded
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    first_token_seconds: float | None = None  # from the call, prefill included
    token_seconds: list[float] = field(default_factory=list)  # time of each token since the one before it
    seconds: float = 0.0  # from the call to the row's last token

    @property
    def accepted(self) -> int:
        return sum(n * rounds for n, rounds in enumerate(self.accepted_histogram))

    @property
    def drafted(self) -> int:
        """Verified drafts, rejected ones too; not those behind a stop."""
        return sum(n * rounds for n, rounds in enumerate(self.drafted_histogram))

    @property
    def accepted_by_position(self) -> list[int]:
        return [sum(self.accepted_histogram[i + 1 :]) for i in range(len(self.accepted_histogram) - 1)]

    @property
    def drafted_by_position(self) -> list[int]:
        return [sum(self.drafted_histogram[i + 1 :]) for i in range(len(self.drafted_histogram) - 1)]

    @property
    def tokens(self) -> int:
        return self.accepted + self.corrected + self.bonus + self.plain + self.exited

    @property
    def mean_layers(self) -> float | None:
        return self.layer_passes / self.tokens if self.tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the rounds: all tokens over all time behind prefill; None without tokens."""
        elapsed = self.seconds - self.prefill_seconds
        return self.tokens / elapsed if self.tokens and elapsed > 0 else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def alpha(self) -> float | None:
        """Chance that the next draft is accepted, given that it was judged: the acceptance that papers speak of."""
        judged = self.accepted + self.corrected
        return self.accepted / judged if judged else None

    @property
    def mean_accepted_length(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None

    def to_dict(self) -> dict:
        return asdict(self) | {
            name: getattr(self, name) for name, x in vars(DecodeStats).items() if type(x) is property
        }

    def add_reason(self, reason: str, wanted: int, n_drafted: int) -> None:
        """Why a round drafted as it did; "no draft" where it wanted some and got none."""
        reason = "no draft" if wanted > n_drafted == 0 else reason
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def add_block(self, block: Block, kept: int, stopped: bool) -> None:
        """Count a round of which the first `kept` tokens were committed; stopped: the last of them is a stop."""
        sources = block.sources[:kept]
        self.rounds += 1
        self.target_passes += 1
        self.layer_passes += block.layer_passes
        self.corrected += sources.count("corrected")
        self.bonus += sources.count("bonus")
        self.plain += sources.count("plain")
        self.exited += sources.count("exit")
        _count(self.accepted_histogram, sources.count("draft"))
        _count(self.drafted_histogram, min(block.n_drafted, kept) if stopped else block.n_drafted)
        for source, layers in zip(sources, block.layers_run):
            if source == "exit":
                self.exit_histogram[layers] = self.exit_histogram.get(layers, 0) + 1


def _count(histogram: list[int], i: int) -> None:
    histogram.extend([0] * (i + 1 - len(histogram)))
    histogram[i] += 1


@dataclass
class Generation:
    """What one row generated; the lists hold one entry per new token."""

    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    logprobs: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # "plain" | "draft" | "corrected" | "bonus" | "exit"
    layers_run: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" | "length" | "context" | "interrupted"
    stats: DecodeStats = field(default_factory=DecodeStats)


class Block(NamedTuple):
    """What a step offers for one row: tokens in order, to be cut at the first stop."""

    tokens: list[int]
    logprobs: list[float]
    sources: list[str]
    layers_run: list[int]
    n_drafted: int
    layer_passes: int


class Sampler:
    """Owns processing and noise, so that no step and no drafter touches a random number.

    histories are the rows' committed tokens, live; the index of a token in its sequence is its place in the history.
    """

    def __init__(self, sampling: SamplingParams, histories: list[list[int]], model: GPT, coupled: bool = False):
        config, device = model.config, model.device
        self.sampling, self.histories, self.vocab_size, self.device = sampling, histories, config.vocab_size, device
        self.impl = model.impl
        self.seeds = torch.tensor(sampling.row_seeds(len(histories)), dtype=torch.int64, device=device)
        self.rounds = [0] * len(histories)
        self.n_marked = [0] * len(histories)  # tokens of each history that `seen` holds: histories only grow
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(len(histories), self.vocab_size, dtype=torch.bool, device=device)
        self.coupled = coupled
        self.judge_drafts(None)
        self.law = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        unknown = [i for i in sampling.logit_bias if i >= config.n_vocab_used]
        if unknown:
            raise ValueError(f"logit_bias names token {unknown[0]}: the vocabulary ends at {config.n_vocab_used - 1}")
        self.bias = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias.items())
            self.bias = torch.zeros(self.vocab_size, dtype=torch.float64)
            self.bias[list(ids)] = torch.tensor(values, dtype=torch.float64)
            self.bias = self.bias.to(device)

    def _at(self, rows, offset: int = 0):
        return torch.tensor([len(self.histories[row]) + offset for row in rows], device=self.device)

    def _rounds(self, rows):
        return torch.tensor([self.rounds[row] for row in rows], device=self.device)

    def penalised(self, rows, logits: torch.Tensor, ahead: torch.Tensor | None = None) -> torch.Tensor:
        """Penalty and bias on logits (B, T, V); position t has seen the history and ahead[:, :t] (B, T-1)."""
        seen = None
        if self.seen is not None:
            news = [(row, token) for row in rows for token in self.histories[row][self.n_marked[row] :]]
            if news:
                self.seen[tuple(torch.tensor(news, device=self.device).T)] = True
            for row in rows:
                self.n_marked[row] = len(self.histories[row])
            seen = self.seen if list(rows) == list(range(len(self.seen))) else self.seen[rows]
        return kernels.penalise(logits, seen, ahead, self.sampling.repetition_penalty, self.bias, self.impl)

    def sample(self, rows, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """The plain step: logits (B, V) -> tokens and their log-probabilities."""
        logits = self.penalised(rows, logits[:, None])[:, 0]
        tokens, log_probs, _ = kernels.sample_token(
            logits, self.seeds[rows], self._at(rows), **self.law, impl=self.impl
        )
        log_probs = log_probs.tolist()
        for row, log_prob in zip(rows, log_probs):
            check_drawn(row, log_prob)
        return tokens.tolist(), log_probs

    def full_tokens(self, row: int, logits: torch.Tensor, first_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a plain step would have drawn at indices first_index .. of a row's history, from logits (T, V).

        Returns tokens (T,) and the logits after penalty and bias (T, V).
        """
        history = self.histories[row]
        at = torch.arange(first_index, first_index + len(logits), device=self.device)
        seen = None
        if self.seen is not None:
            seen = torch.zeros(logits.shape, dtype=torch.bool, device=self.device)
            for t in range(len(logits)):
                seen[t, history[: first_index + t]] = True
        penalty = self.sampling.repetition_penalty
        logits = kernels.penalise(logits[:, None], seen, None, penalty, self.bias, self.impl)[:, 0]
        tokens, _, _ = kernels.sample_token(logits, self.seeds[[row] * len(at)], at, **self.law, impl=self.impl)
        return tokens, logits

    def draft(self, rows, logits: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Propose one token per row from a drafter's logits (B, V), after drafts drafted (B, j) of this round.

        Returns tokens (B,) and the law they were drawn from as processed logits (B, V), None where it is one-hot. Under the
        coupled rule the draft races with the noise that the target will use there.
        """
        tokens, law = self._draft(rows, logits, drafted)
        if self.worth is not None:
            sure = kernels.confidence(logits if law is None else law).tolist()
            for row, confidence in zip(rows, sure):
                self.confidences.setdefault(row, []).append(confidence)
        return tokens, law

    def judge_drafts(self, worth) -> None:
        """Before a round's drafts: worth(rows, confidences) says whether another is wanted; None: always."""
        self.worth, self.confidences = worth, {}

    def more(self, rows) -> bool:
        """Whether rows should draft on. It looks at the laws of the drafts before, never at what will be drawn next, so that
        sampling stays lossless."""
        return self.worth is None or self.worth(rows, [list(x) for x in zip(*(self.confidences[row] for row in rows))])

    def _draft(self, rows, logits, drafted):
        logits = kernels.fit_vocabulary(logits.to(self.device), self.vocab_size)
        n_before = drafted.shape[1]
        if self.seen is not None or self.bias is not None:
            logits = self.penalised(rows, logits[:, None].expand(-1, n_before + 1, -1), drafted)[:, -1]
        if self.sampling.temperature == 0:
            return kernels.full_precision(logits).argmax(-1), None  # of bfloat16 it takes five times as long on a CPU
        stream, rounds = (kernels.SAMPLE, None) if self.coupled else (kernels.DRAFT, self._rounds(rows))
        tokens, _, processed = kernels.sample_token(
            logits, self.seeds[rows], self._at(rows, n_before), **self.law, stream=stream, rounds=rounds, keep_law=True,
            impl=self.impl,
        )  # fmt: skip
        return tokens, processed

    def verify(self, rows, logits, drafts, draft_logits, n_drafted: list[int]):
        """Judge drafts (B, K) on the target's logits (B, K+1, V): lists of tokens, n_accepted, log-probabilities per row."""
        if drafts.shape[1] == 0:  # the same token, at a plain step's price
            tokens, log_probs = self.sample(rows, logits[:, 0])
            return [[token] for token in tokens], [0] * len(rows), [[log_prob] for log_prob in log_probs]
        logits = self.penalised(rows, logits, drafts)
        if draft_logits is not None:
            draft_logits = kernels.fit_vocabulary(draft_logits, self.vocab_size)
        tokens, n_accepted, log_probs = kernels.accept_draft(
            logits,
            draft_logits,
            drafts,
            torch.tensor(n_drafted, device=self.device),
            self.seeds[rows],
            self._at(rows),
            self._rounds(rows),
            **self.law,
            verify="coupled" if self.coupled else "rejection",
            impl=self.impl,
        )
        return tokens.tolist(), n_accepted.tolist(), log_probs.tolist()


def check_drawn(row: int, log_prob: float) -> None:
    """NaN, +inf and a law without a token all reach the log-probability of what was drawn."""
    if not math.isfinite(log_prob):
        raise ValueError(f"row {row}: the model's logits hold NaN or +inf, or allow no token; none can be drawn")


def pack(tokens: list[list[int]], starts: list[int], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged rows -> tokens, positions (B, T) int64, padded at the right with 0 and -1."""
    width = max(map(len, tokens))
    if all(len(ids) == width for ids in tokens):
        positions = [list(range(start, start + width)) for start in starts]
        return torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
    padded = [ids + [0] * (width - len(ids)) for ids in tokens]
    positions = [list(range(start, start + len(ids))) + [-1] * (width - len(ids)) for ids, start in zip(tokens, starts)]
    return torch.tensor(padded, device=device), torch.tensor(positions, device=device)


def read_tokens(
    model: GPT,
    cache: KVCache,
    tokens: list[list[int]],
    starts: list[int],
    hidden: list[list[torch.Tensor]] | None = None,
) -> torch.Tensor | None:
    """Run ragged tokens from position starts[i] through all layers, in chunks: x (B, C) behind the last token of each row.

    None where there is nothing to read. A row without tokens gets an unspecified x. hidden[i] receives all of row i's x, (n, C)
    of each chunk.
    """
    longest = max(map(len, tokens), default=0)
    x_last = None
    for begin in range(0, longest, PREFILL_CHUNK):
        part = [ids[begin : begin + PREFILL_CHUNK] for ids in tokens]
        ids, positions = pack(part, [start + begin for start in starts], model.device)
        x = model.run_layers(model.embed(ids, positions), cache, positions, 0, model.config.n_layer)
        for kept, ids, rows in zip(hidden or (), part, x):
            kept.append(rows[: len(ids)])
        last = x[range(len(part)), [len(p) - 1 for p in part]]
        ended = torch.tensor([len(p) > 0 for p in part], device=model.device)[:, None]
        x_last = last if x_last is None else torch.where(ended, last, x_last)
    return x_last


@torch.inference_mode()
def pick_threads(model: GPT, seconds: float = 0.5) -> int:
    """Try steps of one token with 1, 2, 4 .. all cores for about `seconds`, set PyTorch to the fastest count and return it.

    A step is many short operators, which wait for one another's threads; where cores are few or busy, fewer threads win.
    Long passes have other needs: the fastest count for 64 tokens goes to model.prefill_threads, which Batch.prefill obeys.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = sorted({1 << i for i in range(n_cores.bit_length())} | {n_cores})
    if model.device.type != "cpu" or len(counts) == 1:
        return torch.get_num_threads()
    widths = (1, min(64, model.config.block_size))
    cache = model.new_cache(1, widths[1])
    times: dict[tuple[int, int], list[float]] = {(width, count): [] for width in widths for count in counts}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or min(map(len, times.values())) < 3:
        for (width, count), taken in times.items():  # interleaved: a busy moment hits them all
            torch.set_num_threads(count)
            for _ in range(3 if width == 1 else 1):  # the first of them wakes threads up, and is as good as any later
                began = time.perf_counter()
                ids, positions = pack([[0] * width], [0], model.device)
                x = model.run_layers(model.embed(ids, positions), cache, positions, 0, model.config.n_layer)
                model.logits(x[:, -1])
                taken.append(time.perf_counter() - began)
    best = [min(counts, key=lambda count: statistics.median(times[width, count])) for width in widths]
    torch.set_num_threads(best[0])
    model.prefill_threads = best[1]
    return best[0]


@torch.inference_mode()
def compare_on_text(model: GPT, reference: GPT, tokens: torch.Tensor) -> dict[str, float]:
    """What quantisation costs: tokens (N, T) of held-out text, read by the model and by the one it stands for.

    perplexity of both, agreement (share of positions with the same likeliest token), kl (nats, reference to model).
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for row in tokens:
        laws = [
            kernels.full_precision(m(row[None].to(m.device))[0, :-1]).log_softmax(-1).cpu() for m in (model, reference)
        ]
        own, true = laws
        nats = [-law.gather(1, row[1:, None].cpu()).sum() for law in laws]
        apart = (true.exp() * (true - own)).nan_to_num(0).sum()  # padded ids: 0 * (-inf - -inf)
        sums += torch.tensor([*nats, (own.argmax(-1) == true.argmax(-1)).sum(), apart], dtype=torch.float64)
    nats, reference_nats, agreement, kl = (sums / (tokens.shape[0] * (tokens.shape[1] - 1))).tolist()
    return {
        "perplexity": math.exp(nats),
        "reference_perplexity": math.exp(reference_nats),
        "agreement": agreement,
        "kl": kl,
    }


class Batch:
    """All that the steps share: the rows' tokens, the target's cache, the sampler, and what has been generated."""

    def __init__(self, model: GPT, prompts, sampling: SamplingParams, tokenizer=None, coupled: bool = False):
        config = model.config
        for row, prompt in enumerate(prompts):
            if not hasattr(prompt, "__len__") or isinstance(prompt, (str, bytes)):
                raise ValueError(f"prompts[{row}] is {prompt!r}: each prompt is a list of token ids")
            if len(prompt) == 0:
                raise ValueError(f"prompts[{row}] is empty: give at least one token (a start token where there is one)")
            if len(prompt) > config.block_size:
                raise ValueError(
                    f"prompts[{row}] has {len(prompt)} tokens: the model's context holds {config.block_size}; shorten it"
                )
            prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            for token in prompt:
                if not _whole(token) or not 0 <= token < config.n_vocab_used:
                    raise ValueError(
                        f"prompts[{row}] holds token {token!r}: ids run from 0 to {config.n_vocab_used - 1}"
                    )
        if sampling.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: pass tokenizer=..., or use stop_tokens")
        self.model, self.sampling, self.tokenizer = model, sampling, tokenizer
        self.tokens = [list(map(int, prompt)) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.generations = [Generation() for _ in prompts]
        self.sampler = Sampler(sampling, self.tokens, model, coupled)
        # the longest that a row can become: no cache needs more
        self.capacity = max(
            (min(n + sampling.max_new_tokens, config.block_size) for n in self.prompt_lengths), default=1
        )
        self.cache = model.new_cache(len(prompts), self.capacity)
        self.prompt_hidden: list[list[torch.Tensor]] | None = None  # of each prompt but its last token, (n, C) a chunk
        self.stop_tokens = frozenset(sampling.stop_tokens)
        self.stop_width = max((len(s.encode()) for s in sampling.stop_strings), default=0)
        self._view = (list(range(len(prompts))), self.cache)
        self.started = time.perf_counter()
        self.last_token_at = [self.started] * len(prompts)

    def rows_cache(self, rows: list[int]) -> KVCache:
        """The cache of some rows; made anew only when the rows change."""
        if self._view[0] != rows:
            self._view = (list(rows), self.cache.rows(rows))
        return self._view[1]

    def room(self, row: int) -> int:
        """Tokens that the row may still commit: its budget, and the target's context."""
        length, prompt_length = len(self.tokens[row]), self.prompt_lengths[row]
        return min(self.sampling.max_new_tokens - (length - prompt_length), self.model.config.block_size - length)

    def prefill(self, keep_hidden: bool = False) -> None:
        """Read all of each prompt but its last token, which the first round runs; keep_hidden: for a step that wants it."""
        reading = [[] if out.finish_reason else ids[:-1] for ids, out in zip(self.tokens, self.generations)]
        if keep_hidden:
            self.prompt_hidden = [[] for _ in reading]
        n_threads = torch.get_num_threads()
        torch.set_num_threads(getattr(self.model, "prefill_threads", None) or n_threads)
        try:
            read_tokens(self.model, self.cache, reading, [0] * len(reading), self.prompt_hidden)
        finally:
            torch.set_num_threads(n_threads)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # or the clock would charge the first round for it
        for out in self.generations:
            out.stats.prefill_seconds = time.perf_counter() - self.started

    def end_reason(self, row: int) -> str | None:
        """Why the row ends after its last token, if it does: "stop", else "length", else "context"."""
        tokens, prompt_length = self.tokens[row], self.prompt_lengths[row]
        n_new = len(tokens) - prompt_length
        if n_new and tokens[-1] in self.stop_tokens:
            return "stop"
        if n_new and self.stop_width:
            # every token holds at least one byte, so a string that ends here lies within stop_width tokens
            tail = self.tokenizer.decode(tokens[max(prompt_length, len(tokens) - self.stop_width) :])
            if any(s in tail for s in self.sampling.stop_strings):
                return "stop"
        if n_new >= self.sampling.max_new_tokens:
            return "length"
        return "context" if len(tokens) >= self.model.config.block_size else None

    def commit(self, row: int, block: Block) -> list[int]:
        """Append the block's tokens up to the first stop; returns those that were kept."""
        out = self.generations[row]
        kept = 0
        for token in block.tokens:
            self.tokens[row].append(token)
            kept += 1
            out.finish_reason = self.end_reason(row)
            if out.finish_reason:
                break
        out.logprobs += block.logprobs[:kept]
        out.sources += block.sources[:kept]
        out.layers_run += block.layers_run[:kept]
        out.stats.add_block(block, kept, out.finish_reason == "stop")
        now = time.perf_counter()
        if out.stats.first_token_seconds is None:
            out.stats.first_token_seconds = now - self.started
        out.stats.token_seconds += [now - self.last_token_at[row]] + [0.0] * (kept - 1)
        out.stats.seconds = now - self.started
        self.last_token_at[row] = now
        self.sampler.rounds[row] += 1
        return block.tokens[:kept]

    def judged(
        self, row: int, tokens: list[int], log_probs: list[float], n_accepted: int, n_drafted: int, layer_passes: int
    ) -> Block:
        """The block of a round in which n_accepted of n_drafted tokens held, and one more was drawn; what follows is cut."""
        n = n_accepted + 1
        for log_prob in log_probs[:n]:
            check_drawn(row, log_prob)
        last = "plain" if n_drafted == 0 else "corrected" if n_accepted < n_drafted else "bonus"
        sources, n_layer = ["draft"] * n_accepted + [last], self.model.config.n_layer
        return Block(tokens[:n], log_probs[:n], sources, [n_layer] * n, n_drafted, layer_passes)

    def finish(self) -> list[Generation]:
        for row, out in enumerate(self.generations):
            out.finish_reason = out.finish_reason or "interrupted"
            n_known = len(out.layers_run)  # an interruption may fall between two of the lists
            out.tokens = self.tokens[row][self.prompt_lengths[row] :][:n_known]
            out.logprobs, out.sources = out.logprobs[:n_known], out.sources[:n_known]
            if self.tokenizer is not None:
                out.text = self.tokenizer.decode(out.tokens)
                found = [at for s in self.sampling.stop_strings if (at := out.text.find(s)) >= 0]
                if out.finish_reason == "stop" and found:
                    out.text = out.text[: min(found)]
        return self.generations


@torch.inference_mode()
def near_tie(
    model: GPT, tokens: list[int], drawn: Sequence[int], repetition_penalty: float = 1.0
) -> tuple[float, float]:
    """How far the worse of drawn is below the best logit behind tokens, and below what distance they tie in the model's dtype."""
    logits = model(torch.tensor([tokens], device=model.device))[:, -1]
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[0, tokens] = True
    logits = kernels.penalise(logits[:, None], seen, None, repetition_penalty, None)[0, 0]
    n_ulps = 4 if model.dtype.itemsize == 2 else 32  # rounding that a pass was seen to gather, and a margin
    apart = (logits.max() - logits[list(drawn)].min()).item()
    return apart, n_ulps * torch.finfo(model.dtype).eps * logits[logits.isfinite()].abs().max().item()


def heed(generations: list[Generation]) -> list[Generation]:
    """Ctrl-C ends a generation without an error; where part of a result is no result, it goes on from here."""
    if any(out.finish_reason == "interrupted" for out in generations):
        raise KeyboardInterrupt
    return generations


class Control:
    """What is asked from outside in the middle of a request. The file says one of

        plain          no round is optimised: the kill switch, as is NANOSPEC_PLAIN set to something other than 0
        k=2            at most two drafts a round; k=0 is plain
        auto           as started; so does an empty file, or none

    Anything else, or a file that cannot be read, is one warning, and as started.
    """

    SETTLED = 2.0  # seconds: a second write within one tick of a file system's clock may leave the same stamp

    def __init__(self, path: str | None):
        self.path, self.stamp, self.asked, self.warned = path, None, None, False

    def cap(self) -> int | None:
        """The most drafts of the round that begins now: 0 is a plain round, None as started. One stat, unless the file changed."""
        if os.environ.get("NANOSPEC_PLAIN", "0") not in ("", "0"):
            return 0
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp != self.stamp:
                self.asked = self.read(found.st_mode)
                self.stamp = stamp if time.time() - found.st_mtime > self.SETTLED else None
        except FileNotFoundError:
            self.asked = self.stamp = None
        except OSError as error:
            self.asked = self.stamp = None
            self.warn(error.strerror)
        return self.asked

    def read(self, mode: int) -> int | None:
        if not stat.S_ISREG(mode):  # to open a pipe would wait for its other end
            self.warn("it is no ordinary file")
            return None
        with open(self.path, errors="replace") as file:
            text = file.read(4096).strip()
        k = re.fullmatch(r"k\s*=\s*([0-9]{1,9})", text)
        if text not in ("", "auto", "plain") and k is None:
            self.warn(f"{text[:40]!r} is none of plain, k=N and auto")
        return 0 if text == "plain" else int(k[1]) if k else None

    def warn(self, what: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(f"--control {self.path}: {what}; decoding goes on as started", stacklevel=2)


def capped(k: int, cap: int | None) -> int:
    return k if cap is None else min(k, cap)


class PlainStep:
    """One token per row: run the last committed token, sample from the full model's logits."""

    def start(self, batch: Batch) -> None:
        pass

    def __call__(self, batch: Batch, rows: list[int], cap: int | None) -> list[Block]:
        model, n_layer = batch.model, batch.model.config.n_layer
        began = time.perf_counter()
        lengths = [len(batch.tokens[row]) for row in rows]
        ids, positions = pack([batch.tokens[row][-1:] for row in rows], [n - 1 for n in lengths], model.device)
        x = model.run_layers(model.embed(ids, positions), batch.rows_cache(rows), positions, 0, n_layer)
        tokens, log_probs = batch.sampler.sample(rows, model.logits(x[:, 0]))
        for row in rows:
            batch.generations[row].stats.verify_seconds += time.perf_counter() - began
        return [Block([t], [lp], ["plain"], [n_layer], 0, n_layer) for t, lp in zip(tokens, log_probs)]

    def commit(self, batch: Batch, rows: list[int], kept: list[list[int]]) -> None:
        pass


def plain_step(model: GPT, sampling: SamplingParams):
    """PlainStep, or where the device can go on alone its counterpart in rounds.py: the same tokens."""
    return RoundStep() if runs_alone(model, sampling) else PlainStep()


@torch.inference_mode()
def run_loop(
    model: GPT, prompts, sampling: SamplingParams, step, tokenizer=None, on_tokens=None, control: str | None = None
) -> list[Generation]:
    """Decode all prompts with `step`.

    1. prefill: read prompt[:-1], emit nothing, so that there is no special first token
    2. round: the step offers a block per active row, from no more drafts than the control file allows; 0 is a plain round
    3. commit: cut at the first stop token, stop string, budget or context end; stream what was kept
    4. tell the step what was kept; rows that ended take no further part
    Ctrl-C ends with what was committed, finish_reason "interrupted".
    """
    batch, asked = Batch(model, prompts, sampling, tokenizer, getattr(step, "coupled", False)), Control(control)
    for row, out in enumerate(batch.generations):
        out.finish_reason = batch.end_reason(row)
    try:
        rows = [row for row, out in enumerate(batch.generations) if out.finish_reason is None]
        if rows:
            batch.prefill(getattr(step, "wants_hidden", False))
            step.start(batch)
            while rows:
                blocks = step(batch, rows, asked.cap())
                kept = [batch.commit(row, block) for row, block in zip(rows, blocks)]
                if on_tokens is not None:
                    for row, tokens in zip(rows, kept):
                        on_tokens(row, tokens)
                step.commit(batch, rows, kept)
                rows = [row for row in rows if batch.generations[row].finish_reason is None]
    except KeyboardInterrupt:
        pass
    return batch.finish()


def generate(
    model: GPT,
    prompts: list[list[int]],
    sampling: SamplingParams,
    tokenizer=None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    *,
    control: str | None = None,
) -> list[Generation]:
    """Plain decoding: one token per pass. prompts are token-id lists, ragged; on_tokens(row, ids) streams.

    control names a file that is looked at every round (see Control); here it changes nothing.
    """
    return run_loop(model, prompts, sampling, plain_step(model, sampling), tokenizer, on_tokens, control)
