"""The operations that decide speed and exactness: each as a PyTorch reference that runs anywhere, and as a Triton kernel.

    picture -> bytes -> name_ref (what the operation means) -> _name_kernel -> name (the launcher that the engine calls)

A launcher takes its reference's arguments and `impl`: "torch" is the reference, "triton" the kernel, "auto" the kernel for
CUDA tensors and under TRITON_INTERPRET=1. Lengths, positions, seeds and draft lengths are tensors on the device. Nothing here
draws a random number of its own: noise is Philox words, a function of (seed, vocabulary id, index, stream, round).
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # no wheels for this platform: the references serve

    def jit(function=None, **options):
        return function if function else jit


IMPLEMENTATIONS = ("auto", "triton", "torch")


def on_triton(impl: str, x: torch.Tensor) -> bool:
    """Whether a call on x goes to the Triton kernel; float64 always goes to the reference."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}: choose {', '.join(IMPLEMENTATIONS)}")
    if impl == "torch" or x.dtype == torch.float64:
        return False
    return impl == "triton" or x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


# ----------------------------------------------------------------------------------------------------------------------
# Random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
#
#     counter (id // 2, index, stream, round)     key = seed (64 bits)
#     words    w0  w1  w2  w3
#              `-id even-' `-id odd-'   two words make the 64-bit uniform of one vocabulary id
#              `accept draw: w0 of id 0

SAMPLE, DRAFT, ACCEPT, RESAMPLE = 0, 1, 2, 3  # streams: no two draws of a position share noise

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_ref(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox 4x32-10: counter (4, ...) and key (2, ...), int64 that hold 32-bit words -> (4, ...) words, same layout.

    The last dimensions broadcast. A 32 x 32 bit product fits in int64 up to its sign bit, which the mask drops.
    """
    shape = torch.broadcast_shapes(counter.shape[1:], key.shape[1:])
    counter = counter.expand(4, *shape)
    expand = (2,) + (1,) * len(shape)
    multipliers = torch.tensor(_MULTIPLIERS, device=counter.device).view(expand)
    weyl = torch.tensor(_WEYL, device=counter.device).view(expand)
    left, right = counter[0::2], counter[1::2].flip(0)  # (c0, c2) are multiplied, (c3, c1) wait for the other's product
    for round_key in [((key + i * weyl) & _MASK).flip(0) for i in range(10)]:
        product = left * multipliers
        # c0 <- hi(c2) ^ c1 ^ k0, c2 <- hi(c0) ^ c3 ^ k1: computed in the order (c2, c0), then turned round
        high = (product >> 32).bitwise_and_(_MASK)
        left = high.bitwise_xor_(right).bitwise_xor_(round_key).flip(0)
        right = product.bitwise_and_(_MASK)
    return torch.stack((left[0], right[1], left[1], right[0]))


def _words(seeds: torch.Tensor, index: torch.Tensor, stream: int, rounds: torch.Tensor, half_ids: torch.Tensor):
    """Philox words (4, N, M) for rows with seeds, index, rounds (N,) at vocabulary pairs half_ids (M,) or (N, M)."""
    half_ids = half_ids.expand(len(seeds), half_ids.shape[-1])
    column = [x[:, None].expand_as(half_ids) for x in (index, torch.full_like(index, stream), rounds)]
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))[:, :, None]
    return philox_ref(torch.stack((half_ids, *column)), key)


def accept_uniform(seeds: torch.Tensor, index: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
    """The uniform (N,) float32 in [0, 1) that decides whether the draft at `index` is accepted; never 1."""
    word = _words(seeds, index, ACCEPT, rounds, torch.zeros(1, dtype=torch.int64, device=seeds.device))[0, :, 0]
    return ((word >> 16).float() * 2.0**-16 + (word & 0xFFFF).float() * 2.0**-32).clamp_(max=1.0 - 2.0**-24)


def _exponential(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Exponential noise E = -log1p(-u), float64, from two 32-bit words; u is kept away from 0 and 1."""
    u = (high.double() * 2.0**-32).add_(low.double() * 2.0**-64).clamp_(2.0**-64, 1.0 - 2.0**-53)
    return u.neg_().log1p_().neg_()


def race(probs: torch.Tensor, seeds: torch.Tensor, index: torch.Tensor, stream: int, rounds: torch.Tensor):
    """Draw one token per row by the exponential race argmax(prob / E), which is the Gumbel-max rule.

    probs (N, V), any scale, rows need not sum to 1; seeds, index, rounds (N,) int64 -> (N,) int64. Noise is computed for
    tokens of non-zero probability only: a filtered row costs what its survivors cost.
    """
    n_rows, n_vocab = probs.shape
    alive = probs > 0
    if int(alive.sum()) * 4 > n_rows * n_vocab:  # dense: one counter serves the two ids of a pair
        half_ids = torch.arange((n_vocab + 1) // 2, device=probs.device)
        w0, w1, w2, w3 = _words(seeds, index, stream, rounds, half_ids)
        high, low = torch.stack((w0, w2), -1).flatten(1), torch.stack((w1, w3), -1).flatten(1)
        score = probs / _exponential(high[:, :n_vocab], low[:, :n_vocab])
        return score.masked_fill_(~alive, -1.0).argmax(-1)
    row, ids = alive.nonzero(as_tuple=True)
    w0, w1, w2, w3 = _words(seeds[row], index[row], stream, rounds[row], (ids // 2)[:, None]).squeeze(-1)
    odd = ids % 2 == 1
    noise = _exponential(torch.where(odd, w2, w0), torch.where(odd, w3, w1))
    score = torch.full((n_rows, n_vocab), -1.0, dtype=torch.float64, device=probs.device)
    score[row, ids] = probs[row, ids] / noise
    return score.argmax(-1)


# ----------------------------------------------------------------------------------------------------------------------
# Logits -> the distribution that is sampled
#
#     penalty -> bias -> temperature -> top-k -> top-p -> min-p        plain, draft and verify rows all go this way
#     bytes: V reads and writes per row and filter; off filters cost nothing and change no bit


def full_precision(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def penalise_ref(logits: torch.Tensor, seen: torch.Tensor | None, penalty: float, bias: torch.Tensor | None):
    """Repetition penalty (Keskar et al. 2019) on ids in seen (N, V) bool, then bias (V,): logits (N, V) -> (N, V)."""
    logits = full_precision(logits)
    if seen is not None:
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits if bias is None else logits + bias.to(logits.dtype)


def process_logits_ref(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
):
    """Temperature, top-k, top-p and min-p: logits (..., V) -> logits (..., V), -inf where a token cannot be drawn.

    softmax of the result is the law that is sampled. All tokens tied at a cut are kept, so the law does not depend on
    the order of the vocabulary. temperature 0 is the law of argmax (ties to the lowest id): 0 there, -inf elsewhere.
    float32 at least; float64 stays float64.
    """
    logits = full_precision(logits)
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)
    # the maximum is subtracted first: a small temperature then overflows to -inf, never to +inf; one that the dtype would
    # round to 0 would divide 0 by 0
    temperature = max(temperature, torch.finfo(logits.dtype).tiny)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    n_vocab = logits.shape[-1]
    if 0 < top_k < n_vocab:
        cut = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < cut, -torch.inf)
    if top_p < 1:
        probs = logits.softmax(-1)
        ordered = probs.sort(-1, descending=True).values
        needed = ordered.cumsum(-1) - ordered < top_p  # the shortest prefix that reaches top_p
        needed[..., 0] = True  # also where top_p is too small for the dtype
        cut = ordered.masked_fill(~needed, 2.0).amin(-1, keepdim=True)
        logits = logits.masked_fill(probs < cut, -torch.inf)
    if min_p > 0:
        logits = logits.masked_fill(logits < math.log(min_p), -torch.inf)  # the best token stands at 0
    return logits


def penalise(logits, seen, penalty, bias, impl: str = "auto"):
    return penalise_ref(logits, seen, penalty, bias)


# ----------------------------------------------------------------------------------------------------------------------
# sample_token: one token per row
#
#     bytes: one row of logits read per token


def sample_token_ref(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    index: torch.Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stream: int = SAMPLE,
    rounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw the token at `index` of each row.

    logits (N, V) after penalty and bias; seeds, index, rounds (N,) int64 -> tokens (N,) int64, their log-probabilities
    (N,) under the law they were drawn from (at temperature 0: log_softmax of the logits), and that law as processed
    logits (N, V), None at temperature 0, where it is one-hot.
    """
    logits = full_precision(logits)
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, _log_prob(logits, tokens), None
    processed = process_logits_ref(logits, temperature, top_k, top_p, min_p)
    rounds = torch.zeros_like(index) if rounds is None else rounds
    tokens = race(processed.softmax(-1), seeds, index, stream, rounds)
    return tokens, _log_prob(processed, tokens), processed


def _log_prob(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)


def sample_token(
    logits, seeds, index, temperature, top_k=0, top_p=1.0, min_p=0.0, stream=SAMPLE, rounds=None, impl: str = "auto"
):
    return sample_token_ref(logits, seeds, index, temperature, top_k, top_p, min_p, stream, rounds)


# ----------------------------------------------------------------------------------------------------------------------
# accept_draft: verification of K drafted tokens
#
#     drafts           d1   d2   d3            target rows    t0   t1   t2   t3
#     judged by        t0   t1   t2            accepted: d1, d2; d3 rejected -> drawn anew from t2 (corrected)
#                                              all accepted                 -> drawn from t3 (bonus)
#     bytes: (K + 1) V logits of the target and K V of the drafter, read once; two rows race


def accept_draft_ref(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_tokens: torch.Tensor,
    n_drafted: torch.Tensor,
    seeds: torch.Tensor,
    index: torch.Tensor,
    rounds: torch.Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    verify: str = "rejection",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Judge drafts and draw the token after them (Leviathan et al. 2023, Chen et al. 2023; coupled: Daliri et al. 2024).

    target_logits (B, K+1, V) after penalty and bias, not yet processed; draft_logits (B, K, V) processed, None when
    drafts are one-hot; draft_tokens (B, K), n_drafted (B,) in 0..K; index (B,) of the first drafted token; rounds (B,).
    Returns tokens (B, K+1) int64, -1 behind the last one; n_accepted (B,); log-probabilities (B, K+1) of the tokens under
    the target's law.

    1. the target's law at each of the K+1 positions
    2. accept drafts from the left: rejection, while u * draft_prob < target_prob; coupled and temperature 0, while the
       draft is the target's own token
    3. one more token: the correction where a draft fell, else the bonus; a k = 0 row draws exactly a plain token
    """
    n_rows, n_slots, _ = target_logits.shape
    device = target_logits.device
    slots = torch.arange(n_slots, device=device)
    offered = slots[:-1] < n_drafted[:, None]  # (B, K)
    if temperature == 0 or verify == "coupled":
        if temperature == 0:
            law = full_precision(target_logits)
            own = law.argmax(-1)
        else:
            law = process_logits_ref(target_logits, temperature, top_k, top_p, min_p)
            at = (index[:, None] + slots).flatten()
            own = race(
                law.softmax(-1).flatten(0, 1), seeds.repeat_interleave(n_slots), at, SAMPLE, torch.zeros_like(at)
            ).view(n_rows, n_slots)
        n_accepted = ((own[:, :-1] == draft_tokens) & offered).long().cumprod(-1).sum(-1)
        tokens = own
    else:
        law = process_logits_ref(target_logits, temperature, top_k, top_p, min_p)
        probs = law.softmax(-1)
        n_accepted = torch.zeros_like(n_drafted)
        if n_slots > 1:
            draft_prob = torch.ones_like(probs[:, :-1, 0])
            if draft_logits is not None:
                draft_probs = full_precision(draft_logits).softmax(-1)
                draft_prob = draft_probs.gather(-1, draft_tokens[..., None]).squeeze(-1)
            target_prob = probs[:, :-1].gather(-1, draft_tokens[..., None]).squeeze(-1)
            at = index[:, None] + slots[:-1]
            uniform = accept_uniform(
                seeds.repeat_interleave(n_slots - 1), at.flatten(), rounds.repeat_interleave(n_slots - 1)
            ).view_as(at)
            n_accepted = ((uniform * draft_prob < target_prob) & offered).long().cumprod(-1).sum(-1)
        tokens = torch.cat((draft_tokens, draft_tokens.new_zeros(n_rows, 1)), 1)
        fell = n_accepted < n_drafted
        for stream, chosen in ((SAMPLE, ~fell), (RESAMPLE, fell)):
            row = chosen.nonzero().squeeze(-1)
            if not len(row):
                continue
            slot = n_accepted[row]
            mass = probs[row, slot]
            if stream == RESAMPLE:
                if draft_logits is None:
                    residual = mass.scatter(-1, draft_tokens[row, slot][:, None], 0.0)
                else:
                    residual = (mass - draft_probs[row, slot]).clamp_(min=0)
                mass = torch.where(residual.sum(-1, keepdim=True) > 0, residual, mass)
            own_round = rounds[row] if stream == RESAMPLE else torch.zeros_like(rounds[row])
            tokens[row, slot] = race(mass, seeds[row], index[row] + slot, stream, own_round)
    log_probs = _log_prob(law, tokens)
    return tokens.masked_fill(slots > n_accepted[:, None], -1), n_accepted, log_probs


class RowState(NamedTuple):
    """What a round on the device advances without the host: (B,) int64 tensors, changed in place by accept_draft."""

    lengths: torch.Tensor  # committed tokens
    limits: torch.Tensor  # a row is live while lengths < limits
    rounds: torch.Tensor
    last: torch.Tensor  # (B, 2): the last two committed tokens


def accept_draft(
    target_logits, draft_logits, draft_tokens, n_drafted, seeds, index, rounds, temperature,
    top_k=0, top_p=1.0, min_p=0.0, verify="rejection", state: RowState | None = None, impl: str = "auto",
):  # fmt: skip
    """accept_draft_ref, then, where state is given, its commit: live rows advance, others get tokens of -1."""
    tokens, n_accepted, log_probs = accept_draft_ref(
        target_logits,
        draft_logits,
        draft_tokens,
        n_drafted,
        seeds,
        index,
        rounds,
        temperature,
        top_k,
        top_p,
        min_p,
        verify,
    )
    if state is not None:
        tokens = commit_ref(state, tokens, n_accepted)
    return tokens, n_accepted, log_probs


def commit_ref(state: RowState, tokens: torch.Tensor, n_accepted: torch.Tensor) -> torch.Tensor:
    """Advance the live rows by n_accepted + 1 tokens of (B, K+1); returns tokens, -1 throughout in rows that are not live."""
    live = state.lengths < state.limits
    n_new = torch.where(live, n_accepted + 1, 0)
    history = torch.cat((state.last, tokens), 1)
    state.last.copy_(history.gather(1, n_new[:, None] + torch.arange(2, device=tokens.device)))
    state.lengths.add_(n_new)
    state.rounds.add_(live.long())
    return tokens.masked_fill(~live[:, None], -1)


# ----------------------------------------------------------------------------------------------------------------------
# exit_confidence: how sure an exit head is
#
#     x (N, C) -- norm -- weight (V, C) --> logits, never written --> token, its log-probability, confidence
#     bytes: the weight once, V * C * element size (of exit_vocab's rows where there is one), whatever N


CONFIDENCES = ("max_prob", "margin", "entropy")


def confidence(logits: torch.Tensor, kind: str = "max_prob") -> torch.Tensor:
    """Confidence (N,) in [0, 1] from raw logits (N, V), higher is surer.

    max_prob, margin (of the two best probabilities) or entropy (1 - H / log of the number of tokens that can be drawn).
    """
    logits = full_precision(logits)
    if kind == "max_prob":
        return (logits.amax(-1) - logits.logsumexp(-1)).exp()
    probs = logits.softmax(-1)
    if kind == "margin":
        best = probs.topk(2).values
        return best[..., 0] - best[..., 1]
    if kind == "entropy":
        n_possible = (logits > -torch.inf).sum(-1).clamp(min=2)  # padding makes no head surer
        return 1 - torch.special.entr(probs).sum(-1) / n_possible.to(logits.dtype).log()
    raise ValueError(f"confidence is {kind!r}: choose {', '.join(CONFIDENCES)}")


def exit_confidence_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    vocab: torch.Tensor | None = None,
    n_used: int | None = None,
    kind: str = "max_prob",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best token of an exit head and how sure the head is: x (N, C), weight (V, C) -> (N,) tokens, log_probs, confidence.

    vocab: sorted ids (int64) that the head knows; ids from n_used on are padding. Ties go to the lowest id.
    """
    logits = linear_ref(x, weight if vocab is None else weight[vocab], norm=norm)
    if vocab is None and n_used is not None:
        logits = logits[..., :n_used]
    logits = full_precision(logits)
    best = logits.argmax(-1)
    tokens = best if vocab is None else vocab[best]
    return tokens, _log_prob(logits, best), confidence(logits, kind)


def exit_confidence(x, weight, norm=None, vocab=None, n_used=None, kind="max_prob", impl: str = "auto"):
    return exit_confidence_ref(x, weight, norm, vocab, n_used, kind)


# ----------------------------------------------------------------------------------------------------------------------
# linear: a product with the few rows of a decode or verify step
#
#     norm(x) (n, in)    weight (out, in)   read once, whatever n: a step of n rows should cost what one row costs
#     bytes: out * in * element size


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm where bias is None, over the last dimension."""

    weight: torch.Tensor  # (C,)
    bias: torch.Tensor | None
    eps: float


class QuantizedWeight(NamedTuple):
    """Weight-only quantisation of a matrix (out, in): scale * n + offset, n an integer."""

    data: torch.Tensor  # int8 (out, in); or int4, packed (out, in // 8) int32
    scale: torch.Tensor  # (out,), or per group (out, in // group)
    offset: torch.Tensor | None  # per group
    bits: int
    group: int  # in where there is one scale per row


def norm_ref(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.bias is None:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


ACTIVATIONS = (None, "gelu", "swiglu")


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + activation(norm(x) @ weight.T + bias): x (..., in), weight (out, in) -> (..., out), in the dtype of x.

    activation "gelu" is the tanh form (GPT-2); "swiglu" takes the first half of out as the gate: silu(gate) * rest, (..., out // 2).
    """
    if norm is not None:
        x = norm_ref(x, norm)
    y = _product(x, weight, bias)
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n_rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 0 < n_rows < 8:
        return F.linear(x, weight, bias)
    # MKL's product of few float32 rows takes up to twice the time of the same product turned round, and one column
    # takes longer than two (LOG.md)
    rows = x.reshape(n_rows, -1)
    rows = torch.cat((rows, rows)) if n_rows == 1 else rows
    y = (weight @ rows.t()).t()[:n_rows].contiguous().view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def linear(x, weight, bias=None, norm=None, activation=None, residual=None, impl: str = "auto") -> torch.Tensor:
    return linear_ref(x, weight, bias, norm, activation, residual)


# ----------------------------------------------------------------------------------------------------------------------
# decode_attention: rotary embedding, cache append and attention of T new rows
#
#     positions of a row   0 1 2 3 4 5 6 7 8           block_table[row]   page 4, page 1, ...
#     cache                [ . . . . . . ] n n n       the new rows are written first, then row t sees 0 .. its own
#     row t = 0            x x x x x x x               position; slots behind it may hold anything, NaN included, and
#     row t = 1            x x x x x x x x             are never read: a mask would turn NaN into 0 * NaN
#     chunks of CHUNK keys  |---- 0 ----|---- 1 ----|-- 2 -      one program per chunk and kv head: its queries are the T new
#                           (out, lse)  (out, lse)  (out, lse)   rows of the group's heads. Then one program per row and head
#                                `-----------+-----------`       merges the chunks that the row sees
#     bytes: K and V of the row's length once, 2 * S * G * D * element size, while T * H / G rows fit a tile of 16 (H = G)
#     or 32 (H > G); further tiles find them in the L2, and the append is a launch before. Partial outputs: 8 * (D + 1) per
#     query row and chunk (6% of K and V at T = 1, H = 4 G, D = 128, bfloat16)
#
# A row's bits depend on its position and what it sees, not on what rides along: CHUNK is a constant, key tiles start at
# multiples of BLOCK_N, the tile's height does not depend on T, and tiles that a row does not see leave it as it is.
#
# int8 K and V: one scale per token and kv head, (n_pages, page_size, G) float32; x is about scale * n, n in -127 .. 127.
# Not claimed for gfx942, which needs twice the registers of bfloat16 there.


class RowPlan(NamedTuple):
    """Where one row of a batch reads and writes, on the host: made once per pass, used by every layer."""

    row: int
    first: int  # index in T of the row's first real position
    n: int  # real positions in T
    start: int  # position of the first; the row's memory holds 0 .. start + n - 1
    slots: slice | torch.Tensor  # of those positions in the flattened pages: a slice when the pages are consecutive


def plan_rows(positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> list[RowPlan]:
    """positions (B, T), -1 for padding at either end, else rising by one; block_table (B, max_pages) -> plans of the rows."""
    plans = []
    capacity = block_table.shape[1] * page_size
    for row, at in enumerate(positions.tolist()):
        first = next((t for t, p in enumerate(at) if p >= 0), len(at))
        n = sum(p >= 0 for p in at)
        if n == 0:
            continue
        start, end = at[first], at[first] + n
        if at[first : first + n] != list(range(start, end)):
            raise ValueError(f"positions of row {row} must rise by one, with -1 at the ends only, not {at}")
        if end > capacity:
            raise ValueError(f"position {end - 1} of row {row} is beyond the cache's capacity of {capacity}")
        used = block_table[row, : -(-end // page_size)].tolist()
        if used == list(range(used[0], used[0] + len(used))):
            slots = slice(used[0] * page_size, used[0] * page_size + end)
        else:
            at_token = torch.arange(end, device=positions.device)
            slots = block_table[row].long()[at_token // page_size] * page_size + at_token % page_size
        plans.append(RowPlan(row, first, n, start, slots))
    return plans


def rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021), half-split: x (..., heads, D), cos and sin (..., 1, D), sin signed (-, +)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def quantise_kv_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 of each head: x (..., D) -> n (..., D) int8, scale (...) float32, with x ~ scale * n; zeros stay zeros."""
    x = x.float()
    scale = x.abs().amax(-1) / 127
    return (x / scale.masked_fill(scale == 0, 1.0)[..., None]).round().to(torch.int8), scale


def append_kv_ref(
    k, v, k_cache, v_cache, block_table, positions, scales=None, plans: list[RowPlan] | None = None
) -> None:
    """Write k, v (B, T, G, D) of one layer into k_cache, v_cache (n_pages, page_size, G, D) at positions (B, T).

    Into int8 caches they go quantised, with their scales into scales = (k_scale, v_scale), each (n_pages, page_size, G).
    """
    plans = plan_rows(positions, block_table, k_cache.shape[1]) if plans is None else plans
    for new, cache, scale in zip((k, v), (k_cache, v_cache), scales or (None, None)):
        if scale is not None:
            new, new_scale = quantise_kv_ref(new)
        for row, first, n, start, slots in plans:
            target = slice(slots.start + start, slots.stop) if isinstance(slots, slice) else slots[start:]
            cache.flatten(0, 1)[target] = new[row, first : first + n]
            if scale is not None:
                scale.flatten(0, 1)[target] = new_scale[row, first : first + n]


def decode_attention_ref(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    n_head: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    plans: list[RowPlan] | None = None,
) -> torch.Tensor:
    """Rotate, append and attend: qkv (B, T, H+2G, D), one layer's pages (n_pages, page_size, G, D) -> (B, T, H, D).

    block_table (B, max_pages) int32, positions (B, T) int64; cos, sin (B, T, 1, D) at the positions, None with learned
    positions; scales (k_scale, v_scale) of int8 caches. plans is plan_rows(...) of the pass where the caller has it.
    Outputs at padding are unspecified.
    """
    n_kv = k_cache.shape[2]
    plans = plan_rows(positions, block_table, k_cache.shape[1]) if plans is None else plans
    if cos is not None:
        qk = rotate_ref(qkv[:, :, : n_head + n_kv], cos, sin)
        q, k = qk[:, :, :n_head], qk[:, :, n_head:]
    else:
        q, k = qkv[:, :, :n_head], qkv[:, :, n_head : n_head + n_kv]
    append_kv_ref(k, qkv[:, :, n_head + n_kv :], k_cache, v_cache, block_table, positions, scales, plans)
    out = []
    for row, first, n, start, slots in plans:
        memory = [pages.flatten(0, 1)[slots] for pages in (k_cache, v_cache)]  # (S, G, D)
        if scales is not None:
            memory = [
                (n_cache.float() * scale.flatten(0, 1)[slots][..., None]).to(q.dtype)
                for n_cache, scale in zip(memory, scales)
            ]
        out.append(attend_ref(q[row, first : first + n], *memory, start))
    if len(plans) == len(qkv) and all(plan.n == qkv.shape[1] for plan in plans):
        return out[0][None] if len(out) == 1 else torch.stack(out)
    result = q.new_zeros(q.shape)
    for plan, rows_out in zip(plans, out):
        result[plan.row, plan.first : plan.first + plan.n] = rows_out
    return result


def attend_ref(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Causal grouped-query attention: q (T, H, D) at positions start .. start+T-1 over k, v (start+T, G, D) -> (T, H, D)."""
    n_new, n_head, head_dim = q.shape
    n_kv = k.shape[1]
    if q.dtype in (torch.float32, torch.float64) and n_new <= 16:
        # few rows: two batched products over the kv heads, all query heads of a group at once
        q = q.view(n_new, n_kv, -1, head_dim).permute(1, 2, 0, 3)  # (G, R, T, D)
        scores = q.reshape(n_kv, -1, head_dim) @ k.permute(1, 2, 0)  # (G, R*T, S)
        scores *= head_dim**-0.5
        if n_new > 1:
            ahead = torch.ones(n_new, n_new, dtype=torch.bool, device=q.device).triu_(1)
            scores.view(n_kv, -1, n_new, start + n_new)[..., start:].masked_fill_(ahead, -torch.inf)
        out = scores.softmax(-1) @ v.transpose(0, 1)  # (G, R*T, D)
        return out.view(n_kv, -1, n_new, head_dim).permute(2, 0, 1, 3).reshape(n_new, n_head, head_dim)
    mask = None
    if start > 0 and n_new > 1:
        mask = torch.ones(n_new, start + n_new, dtype=torch.bool, device=q.device).tril_(start)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=start == 0 and n_new > 1,
        enable_gqa=n_kv != n_head,
    )  # accumulates in float32
    return out[0].transpose(0, 1)


def causal_attention_ref(qkv: torch.Tensor, n_head: int, n_kv: int, cos=None, sin=None) -> torch.Tensor:
    """Training and scoring, no cache: qkv (B, T, H+2G, D), each row causal within itself -> (B, T, H, D)."""
    q, k, v = qkv.split((n_head, n_kv, n_kv), 2)
    if cos is not None:
        q, k = rotate_ref(q, cos, sin), rotate_ref(k, cos, sin)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=n_kv != n_head
    )
    return out.transpose(1, 2)


@jit
def _load_heads(x, cos, sin, token, head, stride, real, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads (rows, BLOCK_D) of x at tokens (rows,) int64, rotated in float32 and rounded once; 0 where not real."""
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = real[:, None] & (d < D)
    at = token[:, None] * stride + head[:, None] * D
    heads = tl.load(x + at + d, mask=mask, other=0.0)
    if cos is not None:
        rolled = tl.load(x + at + (d + D // 2) % D, mask=mask, other=0.0)
        turn = token[:, None] * D + d
        c, s = tl.load(cos + turn, mask=mask, other=0.0), tl.load(sin + turn, mask=mask, other=0.0)
        # an explicit fma: which of the two products the compiler fuses must not depend on the kernel around
        heads = tl.fma(rolled.to(tl.float32), s.to(tl.float32), heads.to(tl.float32) * c.to(tl.float32)).to(heads.dtype)
    return heads


@jit
def _page_slot(table, position, real, PAGE: tl.constexpr):
    """Slots (n,) int64 of positions in the flattened pages; int64 before anything multiplies it: caches pass 2^31 elements."""
    page = tl.load(table + position // PAGE, mask=real, other=0)
    return page.to(tl.int64) * PAGE + position % PAGE


@jit
def _store_heads(x, cache, scales, at, real, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write heads x (rows, BLOCK_D) to cache rows `at` = slot * G + head (rows,) int64, quantised as quantise_kv_ref does."""
    d = tl.arange(0, BLOCK_D)[None, :]
    if scales is not None:
        x = x.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)
        tl.store(scales + at, scale, mask=real)
        x = tl.div_rn(x, tl.where(scale == 0, 1.0, scale)[:, None])
        x = (
            x + 12582912.0
        ) - 12582912.0  # 1.5 * 2^23: float32 has no bits left for fractions, so this rounds to nearest even
    tl.store(cache + at[:, None] * D + d, x.to(cache.dtype.element_ty), mask=real[:, None] & (d < D))


@jit(do_not_specialize=["n_new", "max_pages", "n_chunks"])
def _attention_kernel(
    qkv, k_cache, v_cache, k_scale, v_scale, block_table, positions, cos, sin, partial, partial_lse,
    n_new, max_pages, n_chunks, stride: tl.constexpr, SCALE: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) // G
    g = tl.program_id(1) % G
    start = tl.program_id(0) * CHUNK
    table = block_table + row * max_pages
    t = tl.arange(0, BLOCK_T)
    position = tl.load(positions + row * n_new + t, mask=t < n_new, other=-1).to(tl.int32)
    length = tl.max(position, 0) + 1
    if start >= length:
        return

    # 1. this chunk's new keys and values go to the cache; no other program of the launch touches these slots
    new = (position >= start) & (position < start + CHUNK)
    if (tl.num_programs(2) == 1) & (tl.max(new.to(tl.int32), 0) > 0):
        token, zero = row * n_new + t, tl.zeros_like(t)
        at = _page_slot(table, position, new, PAGE) * G + g
        k = _load_heads(qkv, cos, sin, token, zero + (G * GROUP + g), stride, new, D, BLOCK_D)
        v = _load_heads(qkv, None, None, token, zero + (G * GROUP + G + g), stride, new, D, BLOCK_D)
        _store_heads(k, k_cache, k_scale, at, new, D, BLOCK_D)
        _store_heads(v, v_cache, v_scale, at, new, D, BLOCK_D)
        # the loop below reads them back, through other threads than those that wrote them: a new key then takes the same
        # path as an old one, and a row's bits do not depend on whether its keys came in this launch
        tl.debug_barrier()

    # 2. BLOCK_M query rows against the chunk: row m is head m % GROUP of new token m // GROUP
    d = tl.arange(0, BLOCK_D)[None, :]
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < n_new * GROUP
    token = row * n_new + m // GROUP
    limit = tl.load(positions + token, mask=real, other=-1).to(tl.int32)
    q = _load_heads(qkv, cos, sin, token, g * GROUP + m % GROUP, stride, real, D, BLOCK_D)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n0 in range(0, CHUNK, BLOCK_N):
        n = start + n0 + tl.arange(0, BLOCK_N)
        held = n < length  # slots behind may hold NaN, and pages there may be anyone's: they are not loaded
        at = _page_slot(table, n, held, PAGE) * G + g
        mask = held[:, None] & (d < D)
        k = tl.load(k_cache + at[:, None] * D + d, mask=mask, other=0)
        v = tl.load(v_cache + at[:, None] * D + d, mask=mask, other=0)
        if k_scale is not None:
            k, v = k.to(tl.float32).to(q.dtype), v.to(tl.float32).to(q.dtype)  # exact; the scales wait
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        if k_scale is not None:
            scores *= tl.load(k_scale + at, mask=held, other=0.0)[None, :]
        scores = tl.where(n[None, :] <= limit[:, None], scores, -float("inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(highest == -float("inf"), 0.0, highest)  # -inf - -inf is NaN
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if k_scale is not None:
            # 128 * scale is about v's largest entry, so that the product is as far from float16's limits as v itself
            weights *= tl.load(v_scale + at, mask=held, other=0.0)[None, :] * 128.0
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
        best = highest
    if k_scale is not None:
        acc *= 1 / 128
    seen = limit >= start  # other rows have nothing here, and the merge does not ask for it
    at = (tl.program_id(1).to(tl.int64) * n_chunks + tl.program_id(0)) * (n_new * GROUP) + m
    total = tl.where(seen, total, 1.0)
    tl.store(partial + at[:, None] * D + d, acc / total[:, None], mask=seen[:, None] & (d < D))
    tl.store(partial_lse + at, best + tl.log2(total), mask=seen)


@jit(do_not_specialize=["n_new", "n_chunks"])
def _merge_kernel(
    partial, partial_lse, positions, out, n_new, n_chunks, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.load(positions + token).to(tl.int32)
    n_seen = (limit + CHUNK) // CHUNK  # 0 at padding
    row, t = token // n_new, token % n_new
    first = (row * G + head // GROUP) * n_chunks * (n_new * GROUP) + t * GROUP + head % GROUP
    d = tl.arange(0, BLOCK_D)
    best = -float("inf")
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    done = 0
    while done < n_seen:
        chunk = done + tl.arange(0, BLOCK_S)
        at = first + chunk.to(tl.int64) * (n_new * GROUP)
        seen = chunk < n_seen
        lse = tl.load(partial_lse + at, mask=seen, other=-float("inf"))
        values = tl.load(partial + at[:, None] * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        highest = tl.maximum(best, tl.max(lse, 0))
        weights, shrink = tl.exp2(lse - highest), tl.exp2(best - highest)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        best = highest
        done += BLOCK_S
    acc = acc / tl.where(n_seen > 0, total, 1.0)
    tl.store(out + (token * (G * GROUP) + head) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


@jit(do_not_specialize=["n_new", "max_pages"])
def _append_kernel(
    k, v, k_cache, v_cache, k_scale, v_scale, block_table, positions, cos, sin, n_new, max_pages,
    k_stride: tl.constexpr, v_stride: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.arange(0, BLOCK_T)
    token, head = row * n_new + t, tl.zeros_like(t) + g
    position = tl.load(positions + token, mask=t < n_new, other=-1).to(tl.int32)
    new = position >= 0
    at = _page_slot(block_table + row * max_pages, position, new, PAGE) * G + g
    keys = _load_heads(k, cos, sin, token, head, k_stride, new, D, BLOCK_D)
    values = _load_heads(v, None, None, token, head, v_stride, new, D, BLOCK_D)
    _store_heads(keys, k_cache, k_scale, at, new, D, BLOCK_D)
    _store_heads(values, v_cache, v_scale, at, new, D, BLOCK_D)


MAX_ROWS = 16  # new rows of a sequence that one attention kernel takes
CHUNK = 128  # keys per program: a constant, or a row's bits would depend on the length, the batch or the card


def _flat_rows(x: torch.Tensor) -> torch.Tensor:
    """x (B, T, heads, D) as (B * T, heads, D) whose heads are dense: a view, unless its layout is an unusual one."""
    x = x.flatten(0, 1)
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def decode_attention(
    qkv, k_cache, v_cache, block_table, positions, n_head, cos=None, sin=None, scales=None, plans=None,
    impl: str = "auto",
):  # fmt: skip
    """decode_attention_ref for up to MAX_ROWS new rows per sequence; outputs at padding are 0."""
    n_rows, n_new, _, head_dim = qkv.shape
    if n_new > MAX_ROWS or not on_triton(impl, qkv):
        return decode_attention_ref(qkv, k_cache, v_cache, block_table, positions, n_head, cos, sin, scales, plans)
    page_size, n_kv = k_cache.shape[1:3]
    group, max_pages = n_head // n_kv, block_table.shape[1]
    n_chunks = triton.cdiv(max_pages * page_size, CHUNK)
    positions, block_table = positions.contiguous(), block_table.contiguous()
    cos, sin = (None, None) if cos is None else (cos.contiguous(), sin.contiguous())
    block_m = 16 if group == 1 else 32  # whatever T is: another tile may add up in another order
    n_tiles = triton.cdiv(n_new * group, block_m)
    if n_tiles > 1:  # no one program can both write the new keys and be alone in reading them: one launch more
        k, v = qkv[:, :, n_head : n_head + n_kv], qkv[:, :, n_head + n_kv :]
        _append(k, v, k_cache, v_cache, block_table, positions, cos, sin, scales)
    qkv, sizes = _flat_rows(qkv), (n_rows * n_kv, n_chunks, n_new * group, head_dim)
    partial, partial_lse = (qkv.new_empty(size, dtype=torch.float32) for size in (sizes, sizes[:3]))
    out = qkv.new_empty(n_rows, n_new, n_head, head_dim)
    block_d = _block_d(head_dim)
    # 4096 elements of K and of V on their way: three or more programs share a multiprocessor, and none spills a register
    block_n = 16 if qkv.dtype == torch.float32 else min(64, 4096 // block_d)
    shape = {"G": n_kv, "GROUP": group, "D": head_dim, "CHUNK": CHUNK, "BLOCK_D": block_d}
    _attention_kernel[n_chunks, n_rows * n_kv, n_tiles](
        qkv, k_cache, v_cache, *(scales or (None, None)), block_table, positions, cos, sin, partial, partial_lse,
        n_new, max_pages, n_chunks, stride=qkv.stride(0), SCALE=head_dim**-0.5 * math.log2(math.e), PAGE=page_size,
        BLOCK_T=MAX_ROWS, BLOCK_M=block_m, BLOCK_N=block_n, **shape,
        num_warps=8 if block_d == 256 else 4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    _merge_kernel[n_rows * n_new, n_head](
        partial, partial_lse, positions, out, n_new, n_chunks, BLOCK_S=16, **shape, num_warps=4, enable_fp_fusion=True
    )
    return out


def append_kv(k, v, k_cache, v_cache, block_table, positions, scales=None, plans=None, impl: str = "auto") -> None:
    """append_kv_ref; up to MAX_ROWS new rows per sequence are one launch."""
    if k.shape[1] > MAX_ROWS or not on_triton(impl, k):
        return append_kv_ref(k, v, k_cache, v_cache, block_table, positions, scales, plans)
    _append(k, v, k_cache, v_cache, block_table.contiguous(), positions.contiguous(), None, None, scales)


def _append(k, v, k_cache, v_cache, block_table, positions, cos, sin, scales) -> None:
    n_rows, n_new, n_kv, head_dim = k.shape
    k, v = _flat_rows(k), _flat_rows(v)
    _append_kernel[n_rows, n_kv](
        k, v, k_cache, v_cache, *(scales or (None, None)), block_table, positions, cos, sin, n_new, block_table.shape[1],
        k_stride=k.stride(0), v_stride=v.stride(0), G=n_kv, D=head_dim, PAGE=k_cache.shape[1], BLOCK_T=MAX_ROWS,
        BLOCK_D=_block_d(head_dim), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


rotate = rotate_ref
causal_attention = causal_attention_ref
