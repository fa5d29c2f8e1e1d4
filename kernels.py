"""The operations that decide speed and exactness: each as a PyTorch reference that runs anywhere, and as a Triton kernel.

    picture -> bytes -> name_ref (what the operation means) -> _name_kernel -> name (the launcher that the engine calls)

A launcher takes its reference's arguments and `impl`: "torch" is the reference, "triton" the kernel, "auto" the kernel for
CUDA tensors and under TRITON_INTERPRET=1. Lengths, positions, seeds and draft lengths are tensors on the device. Nothing here
draws a random number of its own: noise is Philox words, a function of (seed, vocabulary id, index, stream, round).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # no wheels for this platform: the references serve
    triton = None

    def jit(function=None, **options):
        return function if function else jit


IMPLEMENTATIONS = ("auto", "triton", "torch")


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_triton(impl: str, x: torch.Tensor) -> bool:
    """Whether a call on x goes to the Triton kernel; float64 always goes to the reference.

    So does bfloat16 where "auto" finds the interpreter, which computes with its bits as integers.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}: choose {', '.join(IMPLEMENTATIONS)}")
    if impl == "torch" or x.dtype == torch.float64:
        return False
    able = x.dtype != torch.bfloat16 if interpreted() else x.is_cuda
    return impl == "triton" or (triton is not None and able)


def _dense(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What a kernel reads without strides: copied only where the layout is another."""
    return tuple(x if x is None else x.contiguous() for x in tensors)


# ----------------------------------------------------------------------------------------------------------------------
# Programmatic dependent launch (Hopper and later): the next kernel of the stream is set up while this one ends
#
#     kernel 1   | waits | loop .................. | stores |
#     kernel 2             launched when all of 1 are here ^  | waits for the whole of 1 | loop ...
#
# The kernels of a layer take part. Each waits before it touches memory: what the one before writes it may read, and what
# the one before still reads it may write.


def _dependent() -> dict:
    """Launch options of a kernel that takes part, for the card of the call."""
    if isinstance(_linear_kernel, triton.JITFunction):  # not interpreted
        target = triton.runtime.driver.active.get_current_target()
        if target.backend == "cuda" and target.arch >= 90:
            return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@jit
def _wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def _launch_next(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


# ----------------------------------------------------------------------------------------------------------------------
# Random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
#
#     counter (id // 2, index, stream, round)     key = seed (64 bits)
#     words    w0  w1  w2  w3
#              `-id even-' `-id odd-'   two words make the 64-bit uniform of one vocabulary id
#              `accept draw: w0 of id 0

SAMPLE, DRAFT, ACCEPT, RESAMPLE = 0, 1, 2, 3  # streams: no two draws of a position share noise

_MASK = 0xFFFFFFFF


def philox(c0, c1, c2, c3, k0, k1):
    """Philox 4x32-10: a counter of four 32-bit words and a key of two -> four words; of integers, or NumPy uint64 arrays."""
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64 bits: the upper half is mixed in, the lower kept
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _MASK, p0 >> 32 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3


def _words(seeds: torch.Tensor, index: torch.Tensor, stream: int, rounds: torch.Tensor, half_ids: torch.Tensor):
    """Philox words (4, N, M) for rows with seeds, index, rounds (N,) at vocabulary pairs half_ids (M,) or (N, M).

    NumPy computes them, on the CPU: of steps so small PyTorch's calls take longer than the work.
    """
    ids, *columns = (x.cpu().numpy().view(np.uint64) for x in (half_ids, index, rounds, seeds))
    at, rounds, seeds = (column[:, None] for column in columns)
    words = np.stack(philox(ids, at, stream, rounds, seeds & _MASK, seeds >> 32))
    return torch.from_numpy(words.view(np.int64)).to(index.device)


def accept_uniform(seeds: torch.Tensor, index: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
    """The uniform (N,) float32 in [0, 1) that decides whether the draft at `index` is accepted; never 1."""
    rows = zip(index.tolist(), rounds.tolist(), seeds.tolist(), strict=True)
    words = [philox(0, at, ACCEPT, n, seed & _MASK, seed >> 32 & _MASK)[0] for at, n, seed in rows]
    uniform = torch.tensor([word * 2.0**-32 for word in words], dtype=torch.float32, device=seeds.device)
    return uniform.clamp_(max=1.0 - 2.0**-24)


def _exponential(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Exponential noise E = -log1p(-u), float64, from two 32-bit words; u is kept away from 0 and 1."""
    u = (high.double() * 2.0**-32).add_(low.double() * 2.0**-64).clamp_(2.0**-64, 1.0 - 2.0**-53)
    return u.neg_().log1p_().neg_()


def race_noise(seeds: torch.Tensor, index: torch.Tensor, stream: int, rounds: torch.Tensor, ids: torch.Tensor):
    """The exponential noise (N, M) float64 of tokens ids (N, M) in the races of N rows with seeds, index, rounds (N,)."""
    w0, w1, w2, w3 = _words(seeds, index, stream, rounds, ids // 2)
    odd = ids % 2 == 1
    return _exponential(torch.where(odd, w2, w0), torch.where(odd, w3, w1))


def race(probs: torch.Tensor, seeds: torch.Tensor, index: torch.Tensor, stream: int, rounds: torch.Tensor):
    """Draw one token per row by the exponential race argmax(prob / E), which is the Gumbel-max rule.

    probs (N, V), any scale, rows need not sum to 1; seeds, index, rounds (N,) int64 -> (N,) int64. Noise is computed for
    tokens of non-zero probability only: a filtered row costs what its survivors cost.
    """
    n_rows, n_vocab = probs.shape
    alive = probs > 0
    if int(torch.count_nonzero(alive)) * 4 > n_rows * n_vocab:  # dense: one counter serves the two ids of a pair
        half_ids = torch.arange((n_vocab + 1) // 2, device=probs.device)
        words = _words(seeds, index, stream, rounds, half_ids).movedim(0, -1)  # (N, V/2, 4)
        noise = _exponential(words[..., 0::2], words[..., 1::2]).flatten(1)
        return (probs / noise[:, :n_vocab]).argmax(-1)
    row, ids = alive.nonzero(as_tuple=True)
    noise = race_noise(seeds[row], index[row], stream, rounds[row], ids[:, None]).squeeze(-1)
    score = torch.full((n_rows, n_vocab), -1.0, dtype=torch.float64, device=probs.device)
    score[row, ids] = probs[row, ids] / noise
    return score.argmax(-1)


@jit
def _uniform(seed, index, round):
    """accept_uniform on the device; index may be a block."""
    zero = index.to(tl.int32) * 0
    word = tl.philox(seed, zero, index.to(tl.int32), zero + 2, zero + round.to(tl.int32))[0]  # 2: ACCEPT
    u = (word >> 16).to(tl.float32) * 2.0**-16 + (word & 0xFFFF).to(tl.float32) * 2.0**-32
    return tl.minimum(u, 1.0 - 2.0**-24)


@jit
def _speed(seed, first_id, index, stream, round, BLOCK: tl.constexpr):
    """1 / E of ids first_id .. first_id + BLOCK - 1, float64; one counter serves the two ids of a pair.

    Triton has no log1p: with w = 1 - u rounded, log1p(-u) is log(w) * u / (1 - w), and -u where w is 1, to 2 ulp (Kahan).
    """
    half_ids = first_id // 2 + tl.arange(0, BLOCK // 2)
    zero = half_ids * 0
    w0, w1, w2, w3 = tl.philox(seed, half_ids, zero + index.to(tl.int32), zero + stream, zero + round.to(tl.int32))
    high, low = tl.interleave(w0, w2), tl.interleave(w1, w3)
    u = high.to(tl.float64) * 2.0**-32 + low.to(tl.float64) * 2.0**-64
    u = tl.maximum(u, 2.0**-64)
    w = tl.maximum(1.0 - u, 2.0**-53)  # u is at most 1 - 2^-53: a literal that not every Triton keeps in float64
    return tl.where(w == 1.0, 1.0, 1.0 - w) / tl.where(w == 1.0, u, -tl.log(w) * u)


# ----------------------------------------------------------------------------------------------------------------------
# Logits -> the distribution that is sampled
#
#     penalty -> bias -> temperature -> top-k -> top-p -> min-p        plain, draft and verify rows all go this way
#     bytes: V reads and writes per row and filter; off filters cost nothing and change no bit


def full_precision(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def fit_vocabulary(logits: torch.Tensor, n_vocab: int) -> torch.Tensor:
    """Cut or pad the last dimension: models that pad one vocabulary differently still understand each other."""
    missing = n_vocab - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :n_vocab]


def penalise_ref(
    logits: torch.Tensor,
    seen: torch.Tensor | None,
    ahead: torch.Tensor | None,
    penalty: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Repetition penalty (Keskar et al. 2019), then bias (V,): logits (B, T, V) -> a new (B, T, V), float32 at least.

    Position t has seen the ids in seen (B, V) bool and the drafts ahead[:, :t] (B, T-1); no penalty where seen is None.
    """
    logits = full_precision(logits)
    if seen is not None:
        seen = seen[:, None].repeat(1, logits.shape[1], 1)
        for t in range(1, logits.shape[1]):
            seen[:, t] = seen[:, t - 1].scatter(1, ahead[:, t - 1 : t], True)
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits if bias is None else logits + bias.to(logits.dtype)


@jit
def _penalise_kernel(
    logits, seen, ahead, bias, out, batch_stride, row_stride, n_slots, n_vocab, n_load, penalty, BLOCK: tl.constexpr
):  # fmt: skip
    sequence, slot = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ids = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < n_vocab
    x = tl.load(logits + sequence * batch_stride + slot * row_stride + ids, mask=ids < n_load, other=0.0).to(tl.float32)
    if seen is not None:
        known = tl.load(seen + sequence * n_vocab + ids, mask=inside, other=0) != 0
        if ahead is not None:
            t = slot * 0
            while t < slot:
                known = known | (ids == tl.load(ahead + sequence * (n_slots - 1) + t))
                t += 1
        x = tl.where(known, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
    if bias is not None:
        x += tl.load(bias + ids, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (sequence * n_slots + slot) * n_vocab + ids, x, mask=inside)


def penalise(logits, seen, ahead, penalty, bias, impl: str = "auto"):
    if not on_triton(impl, logits):
        return penalise_ref(logits, seen, ahead, penalty, bias)
    if seen is None and bias is None:  # the kernels behind this one read any dtype
        return logits
    n_rows, n_slots, n_vocab = logits.shape
    logits, n_load = _readable(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    seen, ahead, bias = _dense(seen, ahead, bias)
    _penalise_kernel[n_rows, n_slots, triton.cdiv(n_vocab, RACE_BLOCK)](
        logits, seen, ahead, bias, out, *logits.stride()[:2], n_slots, n_vocab, n_load, float(penalty), RACE_BLOCK
    )
    return out


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


# Statistics of rows: what every program of the kernels below needs to know of a row without reading it
#
#     row       [ 4096 logits | 4096 | 4096 | ... ]     per block: maximum, sum of exp((logit - maximum) / T), best id
#     line      target rows 0 .. K, then draft rows 0 .. K-1 of a sequence: statistics are (B, lines, blocks)
#     bytes     each row once; with filters, the target rows once more, and again only blocks that reach the cut

STATS_BLOCK, RACE_BLOCK = 4096, 1024  # constants: the bits of a row may not depend on what rides along


def _readable(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x (..., V) with dense rows, and how many ids of a row may be read: whole vectors where the rows are padded."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    n_vocab = x.shape[-1]
    wide = -(-n_vocab // 16) * 16
    end = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape[:-1], x.stride()[:-1])) + wide
    padded = all(step % 16 == 0 for step in x.stride()[:-1]) and end * x.element_size() <= x.untyped_storage().nbytes()
    return x, wide if padded else n_vocab


@jit
def _load_logits(row, ids, n_vocab, n_load):
    """-inf outside the vocabulary. NaN counts as +inf: either makes the row's log-probabilities NaN, and is not drawn."""
    x = tl.load(row + ids, mask=ids < n_load, other=0.0).to(tl.float32)
    x = tl.where(ids < n_vocab, x, -float("inf"))
    return tl.where(x <= float("inf"), x, float("inf"))


@jit
def _scaled(x, maximum, temperature):
    """As in process_logits_ref, rounded alike: the cuts of both are the same."""
    return tl.div_rn(x - maximum, temperature)


@jit
def _law(x, maximum, mass, cut, temperature):
    """Scaled logits and probabilities."""
    z = _scaled(x, maximum, temperature)
    return z, tl.where(z >= cut, tl.exp(z) / mass, 0.0)


@jit
def _idle(sequence, slot, n_drafted, lengths, limits):
    """A slot behind the row's drafts, or a row that has ended: nothing to do."""
    idle = slot < 0
    if n_drafted is not None:
        idle = idle | (slot > tl.load(n_drafted + sequence))
    if lengths is not None:
        idle = idle | (tl.load(lengths + sequence) >= tl.load(limits + sequence))
    return idle


@jit
def _stats_kernel(
    target, draft, n_drafted, lengths, limits, maxima, sums, best, ticket,
    target_batch, target_row, draft_batch, draft_row, n_slots, n_lines, n_vocab, n_load, n_load_draft, n_blocks,
    temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    if line + block == 0:
        tl.store(ticket + sequence, 0)  # for the kernel behind this one
    # draft row t is needed where t < n_drafted, target row t where t <= n_drafted
    if _idle(sequence, tl.where(line < n_slots, line, line - n_slots + 1), n_drafted, lengths, limits):
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    if draft is None:  # noqa: SIM114 - joined, the last branch would be compiled where there is no draft
        x = _load_logits(target + sequence * target_batch + line * target_row, ids, n_vocab, n_load)
    elif line < n_slots:
        x = _load_logits(target + sequence * target_batch + line * target_row, ids, n_vocab, n_load)
    else:
        x = _load_logits(draft + sequence * draft_batch + (line - n_slots) * draft_row, ids, n_vocab, n_load_draft)
    maximum = tl.max(x, 0)
    z = _scaled(x, maximum, tl.where(line < n_slots, temperature, 1.0))  # draft rows are processed already
    at = (sequence * n_lines + line) * n_blocks + block
    tl.store(maxima + at, maximum)
    tl.store(sums + at, tl.where(maximum > -float("inf"), tl.sum(tl.exp(z), 0), 0.0))
    tl.store(best + at, tl.min(tl.where(x == maximum, ids, 2147483647), 0))


@jit
def _row_laws(
    maxima, sums, cuts, masses, lines, used, n_blocks, temperature, BLOCKS: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """Maximum, mass and cut of several lines, from the statistics of their blocks."""
    blocks = tl.arange(0, BLOCKS)[None, :]
    at = lines[:, None] * n_blocks + blocks
    mask = used[:, None] & (blocks < n_blocks)
    block_max = tl.load(maxima + at, mask=mask, other=-float("inf"))
    maximum = tl.max(block_max, 1)
    if CUT:
        return maximum, tl.load(masses + lines, mask=used, other=0.0), tl.load(cuts + lines, mask=used, other=0.0)
    block_sum = tl.load(sums + at, mask=mask, other=0.0)
    mass = tl.sum(block_sum * tl.exp(_scaled(block_max, maximum[:, None], temperature)), 1)
    return maximum, mass, maximum * 0.0 - float("inf")


# ----------------------------------------------------------------------------------------------------------------------
# The cut of top-k, top-p and min-p, exact, ties kept, without a sort
#
#     key       order-preserving bits of the scaled logit; found three bits at a time, from the top: 8 pivots per reading
#     top-k     the smallest key with fewer than k tokens above it
#     top-p     the smallest key with less than top_p of the survivors' mass above it


@jit
def _key(z):
    """31 bits, for z <= 0: the best token stands at 0. Both zeros have one key."""
    return (z.to(tl.int32, bitcast=True) & 0x7FFFFFFF) ^ 0x7FFFFFFF


@jit
def _descend(
    row, line_maxima, maximum, cut, limit, counting, n_vocab, n_load, temperature,
    BLOCK: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """The smallest scaled logit with less than limit above it: of the tokens (counting), or of the mass, at or above cut."""
    key, shift = 0, 28
    while shift >= 0:
        low = (1 << shift) - 1
        pivots = key + tl.minimum(tl.arange(0, 8) << shift, 0x7FFFFFFF - low - key) + low
        above = tl.zeros([8, BLOCK], tl.float32)
        start = 0
        while start < n_vocab:
            block_max = _scaled(tl.load(line_maxima + start // STATS), maximum, temperature)
            if _key(block_max) > key + low:  # else nothing here is above the lowest pivot
                z = _scaled(_load_logits(row, start + tl.arange(0, BLOCK), n_vocab, n_load), maximum, temperature)
                weight = tl.where(z >= cut, tl.where(counting, 1.0, tl.exp(z)), 0.0)
                above += tl.where(_key(z)[None, :] > pivots[:, None], weight[None, :], 0.0)
            start += BLOCK
        key += tl.sum((tl.sum(above, 1) >= limit).to(tl.int32), 0) << shift
        shift = tl.where(shift == 1, 0, shift - 3)  # 28 .. 1, then the last bit
    key = tl.maximum(key, 0x7FFFFF)  # that of -inf
    return (key ^ -1).to(tl.float32, bitcast=True)


@jit
def _mass(
    row, line_maxima, maximum, cut, n_vocab, n_load, temperature, BLOCK: tl.constexpr, STATS: tl.constexpr
):  # fmt: skip
    mass = tl.zeros([BLOCK], tl.float32)
    start = 0
    while start < n_vocab:
        if _scaled(tl.load(line_maxima + start // STATS), maximum, temperature) >= cut:
            z = _scaled(_load_logits(row, start + tl.arange(0, BLOCK), n_vocab, n_load), maximum, temperature)
            mass += tl.where(z >= cut, tl.exp(z), 0.0)
        start += BLOCK
    return tl.sum(mass, 0)


@jit
def _threshold_kernel(
    target, n_drafted, lengths, limits, maxima, cuts, masses, target_batch, target_row, n_lines, n_vocab, n_load, n_blocks,
    temperature, top_k, top_p, min_cut, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    sequence, slot = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if _idle(sequence, slot, n_drafted, lengths, limits):
        return
    line = sequence * n_lines + slot
    row = target + sequence * target_batch + slot * target_row
    line_maxima = maxima + line * n_blocks
    blocks = tl.arange(0, BLOCKS)
    maximum = tl.max(tl.load(line_maxima + blocks, mask=blocks < n_blocks, other=-float("inf")), 0)
    cut, mass, stage = maximum * 0.0 - float("inf"), maximum * 0.0, 0
    while stage < 3:  # top-k, top-p, min-p: a loop, so that the code of a search is there once
        if stage == 2:
            cut = tl.maximum(cut, min_cut)
        if (stage == 2) | ((stage == 1) & (top_p < 1)):
            mass = _mass(row, line_maxima, maximum, cut, n_vocab, n_load, temperature, BLOCK, STATS)
        if ((stage == 0) & (top_k > 0)) | ((stage == 1) & (top_p < 1)):
            limit = tl.where(stage == 0, top_k, top_p * mass)
            cut = _descend(
                row, line_maxima, maximum, cut, limit, stage == 0, n_vocab, n_load, temperature, BLOCK, STATS
            )
        stage += 1
    tl.store(cuts + line, cut)
    tl.store(masses + line, mass)


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
    keep_law: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw the token at `index` of each row.

    logits (N, V) after penalty and bias; seeds, index, rounds (N,) int64 -> tokens (N,) int64, their log-probabilities
    (N,) under the law they were drawn from (at temperature 0: log_softmax of the logits), and, with keep_law, that law as
    processed logits (N, V); None otherwise and at temperature 0, where it is one-hot.
    """
    logits = full_precision(logits)
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, _log_prob(logits, tokens), None
    processed = process_logits_ref(logits, temperature, top_k, top_p, min_p)
    rounds = torch.zeros_like(index) if rounds is None else rounds
    tokens = race(processed.softmax(-1), seeds, index, stream, rounds)
    return tokens, _log_prob(processed, tokens), processed if keep_law else None


def _log_prob(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def sample_token(
    logits, seeds, index, temperature, top_k=0, top_p=1.0, min_p=0.0, stream=SAMPLE, rounds=None, keep_law=False,
    impl: str = "auto",
):  # fmt: skip
    """sample_token_ref; on the device it is accept_draft without drafts."""
    if not on_triton(impl, logits):
        return sample_token_ref(logits, seeds, index, temperature, top_k, top_p, min_p, stream, rounds, keep_law)
    law = None
    if keep_law and temperature > 0:
        law = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    noise, filters = (seeds, index, rounds), (temperature, top_k, top_p, min_p)
    tokens, _, log_probs = _judge(logits[:, None], None, None, None, *noise, *filters, stream=stream, law=law)
    return tokens[:, 0], log_probs[:, 0], law


# ----------------------------------------------------------------------------------------------------------------------
# accept_draft: verification of K drafted tokens
#
#     drafts           d1   d2   d3            target rows    t0   t1   t2   t3
#     judged by        t0   t1   t2            accepted: d1, d2; d3 rejected -> drawn anew from t2 (corrected)
#                                              all accepted                 -> drawn from t3 (bonus)
#     bytes: (K + 1) V logits of the target and K V of the drafter, read once; then the one row that is drawn from, and the
#     draft's where it fell; under the coupled rule all K + 1 rows race. Written: statistics of blocks, no row


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


def commit_ref(state: RowState, tokens: torch.Tensor, n_accepted: torch.Tensor) -> torch.Tensor:
    """Advance the live rows by n_accepted + 1 tokens of (B, K+1); returns tokens, -1 throughout in rows that are not live."""
    live = state.lengths < state.limits
    n_new = torch.where(live, n_accepted + 1, 0)
    history = torch.cat((state.last, tokens), 1)
    state.last.copy_(history.gather(1, n_new[:, None] + torch.arange(2, device=tokens.device)))
    state.lengths.add_(n_new)
    state.rounds.add_(live.long())
    return tokens.masked_fill(~live[:, None], -1)


# The race of one row, spread over programs of 1024 ids, and the decision before it, which every program takes for itself from
# the statistics of the rows: nothing waits for anything. The program that arrives last at the ticket holds all block winners.


@jit
def _pick(values, slots, slot):
    return tl.sum(tl.where(slots == slot, values, 0.0), 0)


@jit
def _rank(residual, prob, speed):
    """int64 that orders as the race does: tokens of the residual, below them those of the law, below them the dead.

    So one race serves both, and the law wins only where no block has a residual. Bits of positive floats order as integers.
    """
    law = (prob.to(tl.float64) * speed).to(tl.int64, bitcast=True)
    corrected = (residual.to(tl.float64) * speed).to(tl.int64, bitcast=True)
    lowest = -(2**63)
    return tl.where(residual > 0, corrected, tl.where(prob > 0, law + lowest, lowest))


@jit
def _winner(rank, ids):
    """The best rank and its token, the lowest id where ranks are equal."""
    best = tl.max(rank, 0)
    return best, tl.min(tl.where(rank == best, ids, 2147483647), 0)


@jit
def _decide(
    ranks, winners, winner_log_probs, race, n_races, token_out, log_prob_out, BLOCK: tl.constexpr, RACES: tl.constexpr
):
    """The winner of a row's blocks, written out and returned."""
    races = tl.arange(0, RACES)
    inside = races < n_races
    rank = tl.load(ranks + race + races, mask=inside, other=-(2**63))
    token = _winner(rank, tl.load(winners + race + races, mask=inside, other=2147483647))[1]
    tl.store(token_out, token.to(tl.int64))
    tl.store(log_prob_out, tl.load(winner_log_probs + race + token // BLOCK))
    return token.to(tl.int64)


@jit
def _commit(lengths, state_rounds, last, sequence, n, token, before):
    """commit_ref for a live row: n drafts and the token, of which `before` is the last draft."""
    if lengths is not None:
        tl.store(lengths + sequence, tl.load(lengths + sequence) + n + 1)
        tl.store(state_rounds + sequence, tl.load(state_rounds + sequence) + 1)
        if n == 0:
            before = tl.load(last + sequence * 2 + 1)
        tl.store(last + sequence * 2, before)
        tl.store(last + sequence * 2 + 1, token)


@jit
def _close_row(tokens, n_accepted, log_probs, sequence, n_slots, slots):
    """A row that has ended: no token."""
    outs = sequence * n_slots + slots
    tl.store(tokens + outs, slots.to(tl.int64) * 0 - 1, mask=slots < n_slots)
    tl.store(log_probs + outs, slots * 0.0, mask=slots < n_slots)
    tl.store(n_accepted + sequence, sequence * 0)


@jit
def _greedy_kernel(
    target, draft_tokens, n_drafted, lengths, limits, state_rounds, last, maxima, sums, best, tokens, n_accepted, log_probs,
    target_batch, target_row, n_slots, n_blocks, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Temperature 0: the best ids of the blocks decide, there is no race."""
    sequence = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    if _idle(sequence, sequence * 0, None, lengths, limits):
        _close_row(tokens, n_accepted, log_probs, sequence, n_slots, slots)
        return
    drafted, proposed = sequence * 0, slots.to(tl.int64) * 0
    if draft_tokens is not None:
        drafted = tl.load(n_drafted + sequence)
        proposed = tl.load(draft_tokens + sequence * (n_slots - 1) + slots, mask=slots < drafted, other=0)
    lines, used, blocks = sequence * n_slots + slots, slots <= drafted, tl.arange(0, BLOCKS)[None, :]
    maximum, mass, _ = _row_laws(maxima, sums, None, None, lines, used, n_blocks, 1.0, BLOCKS, False)
    at, mask = lines[:, None] * n_blocks + blocks, used[:, None] & (blocks < n_blocks)
    is_best = tl.load(maxima + at, mask=mask, other=0.0) == maximum[:, None]
    ids = tl.where(is_best & mask, tl.load(best + at, mask=mask, other=0), 2147483647)
    own = tl.min(ids, 1).to(tl.int64)
    n = tl.min(tl.where((own == proposed) & (slots < drafted), SLOTS, slots), 0).to(tl.int64)
    x = tl.load(target + sequence * target_batch + slots * target_row + own, mask=slots <= n, other=0.0).to(tl.float32)
    tl.store(tokens + lines, tl.where(slots <= n, own, -1), mask=slots < n_slots)
    tl.store(log_probs + lines, tl.where(slots <= n, x - maximum - tl.log(mass), 0.0), mask=slots < n_slots)
    tl.store(n_accepted + sequence, n)
    if lengths is not None:
        token, before = tl.sum(tl.where(slots == n, own, 0), 0), tl.sum(tl.where(slots == n - 1, own, 0), 0)
        _commit(lengths, state_rounds, last, sequence, n, token, before)


@jit
def _accept_kernel(
    target, draft, draft_tokens, n_drafted, seeds, index, rounds, lengths, limits, state_rounds, last,
    maxima, sums, cuts, masses, ranks, winners, winner_log_probs, ticket, tokens, n_accepted, log_probs, law,
    target_batch, target_row, draft_batch, draft_row, n_slots, n_lines, n_vocab, n_load, n_load_draft, n_blocks, n_races,
    temperature, STREAM: tl.constexpr, OWN: tl.constexpr, CUT: tl.constexpr,
    SLOTS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, RACES: tl.constexpr,
):  # fmt: skip
    """OWN: every slot races, with stream STREAM, and a draft is accepted while it is the slot's own token. Else rejection."""
    sequence, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    race_slot, n_racing = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    slots = tl.arange(0, SLOTS)
    outs = sequence * n_slots + slots
    if _idle(sequence, race_slot * 0, None, lengths, limits):
        if block + race_slot == 0:
            _close_row(tokens, n_accepted, log_probs, sequence, n_slots, slots)
        return

    # what each slot's law is, and what was drafted there
    drafted = race_slot * 0
    if draft_tokens is not None:
        drafted = tl.load(n_drafted + sequence)
        draft_tokens += sequence * (n_slots - 1)
    lines = sequence * n_lines + slots
    maximum, mass, cut = _row_laws(
        maxima, sums, cuts, masses, lines, slots <= drafted, n_blocks, temperature, BLOCKS, CUT
    )
    seed, first, round = tl.load(seeds + sequence), tl.load(index + sequence), race_slot * 0
    if rounds is not None:
        round = tl.load(rounds + sequence)
    target += sequence * target_batch

    # how many drafts are accepted
    n, fell, stream = race_slot, drafted < 0, STREAM
    if not OWN:
        offered = slots < drafted
        proposed = tl.load(draft_tokens + slots, mask=offered, other=0)
        x = tl.load(target + slots * target_row + proposed, mask=offered, other=0.0).to(tl.float32)
        z, target_prob = _law(x, maximum, mass, cut, temperature)
        draft_prob = slots * 0.0 + 1.0
        if draft is not None:
            draft += sequence * draft_batch
            draft_max, draft_mass, draft_cut = _row_laws(
                maxima, sums, None, None, lines + n_slots, offered, n_blocks, 1.0, BLOCKS, False
            )
            draft_x = tl.load(draft + slots * draft_row + proposed, mask=offered, other=0.0).to(tl.float32)
            draft_prob = _law(draft_x, draft_max, draft_mass, draft_cut, 1.0)[1]
        accepted = (_uniform(seed, first + slots, round) * draft_prob < target_prob) & offered
        n = tl.min(tl.where(accepted, SLOTS, slots), 0).to(tl.int64)
        fell = n < drafted
        # RESAMPLE, or SAMPLE: the bonus is a plain token
        stream, round = tl.where(fell, 3, 0), tl.where(fell, round, 0)
        if block == 0:  # all slots but the one that is drawn
            others = (slots < n_slots) & (slots != n)
            tl.store(tokens + outs, tl.where(slots < n, proposed, -1), mask=others)
            tl.store(log_probs + outs, tl.where(slots < n, z - tl.log(mass), 0.0), mask=others)
            tl.store(n_accepted + sequence, n)

    # one block of the race
    row_max, row_mass, row_cut = _pick(maximum, slots, n), _pick(mass, slots, n), _pick(cut, slots, n)
    race = (sequence * n_racing + race_slot) * n_races
    if n <= drafted:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        scaled, prob = _law(
            _load_logits(target + n * target_row, ids, n_vocab, n_load), row_max, row_mass, row_cut, temperature
        )
        if law is not None:
            kept = tl.where(scaled >= row_cut, scaled, -float("inf"))
            tl.store(law + sequence * n_vocab + ids, kept, mask=ids < n_vocab)
        speed = tl.zeros([BLOCK], tl.float64)
        if tl.max(prob, 0) > 0:  # else no token of this block can be drawn: no noise
            speed = _speed(seed, block * BLOCK, first + n, stream, round, BLOCK)
        residual = prob
        if not OWN:
            if draft is None:
                residual = tl.where((ids == tl.load(draft_tokens + n, mask=fell, other=-1)), 0.0, prob)
            elif fell:
                other = _load_logits(draft + n * draft_row, ids, n_vocab, n_load_draft)
                other = _law(other, _pick(draft_max, slots, n), _pick(draft_mass, slots, n), -float("inf"), 1.0)[1]
                residual = tl.where(prob > other, prob - other, 0.0)
        rank, winner = _winner(_rank(residual, prob, speed), ids)
        tl.store(ranks + race + block, rank)
        tl.store(winners + race + block, winner)
        x_won = tl.load(target + n * target_row + winner).to(tl.float32)
        tl.store(winner_log_probs + race + block, _scaled(x_won, row_max, temperature) - tl.log(row_mass))

    # the last to arrive has all winners before it
    tl.debug_barrier()
    if tl.atomic_add(ticket + sequence, 1, sem="acq_rel", scope="gpu") < tl.num_programs(1) * n_racing - 1:
        return
    token, before = race_slot * 0, race_slot * 0
    if OWN:
        n = race_slot * 0 - 1
        going = drafted >= 0
        while going:
            n, before = n + 1, token
            race, out = (sequence * n_racing + n) * n_races, sequence * n_slots + n
            token = _decide(
                ranks, winners, winner_log_probs, race, n_races, tokens + out, log_probs + out, BLOCK, RACES
            )
            going = n < drafted
            if draft_tokens is not None:
                going = going & (tl.load(draft_tokens + n, mask=going, other=-1) == token)
        behind = (slots > n) & (slots < n_slots)
        tl.store(tokens + outs, slots.to(tl.int64) * 0 - 1, mask=behind)
        tl.store(log_probs + outs, slots * 0.0, mask=behind)
        tl.store(n_accepted + sequence, n)
    else:
        out = sequence * n_slots + n
        token = _decide(ranks, winners, winner_log_probs, race, n_races, tokens + out, log_probs + out, BLOCK, RACES)
        before = tl.load(draft_tokens + n - 1, mask=n > 0, other=0)
    _commit(lengths, state_rounds, last, sequence, n, token, before)


def _judge(
    target, draft, draft_tokens, n_drafted, seeds, index, rounds, temperature, top_k, top_p, min_p,
    own=True, stream=SAMPLE, state: RowState | None = None, law=None,
):  # fmt: skip
    """Statistics, cuts where there are filters, then the decision and the race: two launches, three with filters.

    own: a draft is accepted while it is the target's own token; else rejection. law (B, V): where to keep slot 0's law.
    """
    n_rows, n_slots, n_vocab = target.shape
    device, greedy = target.device, temperature == 0
    draft = None if own or greedy else draft
    target, n_load = _readable(target)
    draft, n_load_draft = (None, 0) if draft is None else _readable(draft)
    strides = (*target.stride()[:2], *((0, 0) if draft is None else draft.stride()[:2]))
    n_lines = n_slots if draft is None else 2 * n_slots - 1
    n_blocks, n_races = triton.cdiv(n_vocab, STATS_BLOCK), triton.cdiv(n_vocab, RACE_BLOCK)
    blocks = max(16, triton.next_power_of_2(n_blocks))
    temperature = 1.0 if greedy else max(float(temperature), torch.finfo(torch.float32).tiny)
    top_k = top_k if top_k < n_vocab else 0
    top_p = max(float(top_p), torch.finfo(torch.float32).tiny)
    filtered = not greedy and (top_k > 0 or top_p < 1 or min_p > 0)
    lengths, limits, state_rounds, last = (None,) * 4 if state is None else state
    n_drafted, draft_tokens = (None, None) if n_slots == 1 else _dense(n_drafted, draft_tokens)
    seeds, index, rounds = _dense(seeds, index, rounds)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    maxima, sums = empty(n_rows, n_lines, n_blocks), empty(n_rows, n_lines, n_blocks)
    best, ticket = empty(n_rows, n_lines, n_blocks, dtype=torch.int32), empty(n_rows, dtype=torch.int32)
    tokens, n_accepted = empty(n_rows, n_slots, dtype=torch.int64), empty(n_rows, dtype=torch.int64)
    log_probs = empty(n_rows, n_slots)
    _stats_kernel[n_rows, n_lines, n_blocks](
        target, draft, n_drafted, lengths, limits, maxima, sums, best, ticket,
        *strides, n_slots, n_lines, n_vocab, n_load, n_load_draft, n_blocks, temperature, STATS_BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    cuts = masses = None
    if filtered:
        cuts, masses = empty(n_rows, n_lines), empty(n_rows, n_lines)
        _threshold_kernel[n_rows, n_slots](
            target, n_drafted, lengths, limits, maxima, cuts, masses, *strides[:2], n_lines, n_vocab, n_load, n_blocks,
            temperature, float(top_k), top_p, math.log(min_p) if min_p > 0 else -math.inf, RACE_BLOCK, blocks, STATS_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    n_slots_wide = max(16, triton.next_power_of_2(n_slots))
    if greedy:
        _greedy_kernel[(n_rows,)](
            target, draft_tokens, n_drafted, lengths, limits, state_rounds, last, maxima, sums, best,
            tokens, n_accepted, log_probs, *strides[:2], n_slots, n_blocks, n_slots_wide, blocks, enable_fp_fusion=False,
        )  # fmt: skip
        return tokens, n_accepted, log_probs
    n_racing = n_slots if own else 1  # slots of a sequence that race
    ranks = empty(n_rows, n_racing, n_races, dtype=torch.int64)
    winners, winner_log_probs = empty(n_rows, n_racing, n_races, dtype=torch.int32), empty(n_rows, n_racing, n_races)
    _accept_kernel[n_rows, n_races, n_racing](
        target, draft, draft_tokens, n_drafted, seeds, index, rounds, lengths, limits, state_rounds, last,
        maxima, sums, cuts, masses, ranks, winners, winner_log_probs, ticket, tokens, n_accepted, log_probs, law,
        *strides, n_slots, n_lines, n_vocab, n_load, n_load_draft, n_blocks, n_races,
        temperature, stream, own, filtered, n_slots_wide, blocks, RACE_BLOCK, triton.next_power_of_2(n_races),
        num_warps=4 if own else 8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, n_accepted, log_probs


def accept_draft(
    target_logits, draft_logits, draft_tokens, n_drafted, seeds, index, rounds, temperature,
    top_k=0, top_p=1.0, min_p=0.0, verify="rejection", state: RowState | None = None, impl: str = "auto",
):  # fmt: skip
    """accept_draft_ref, then, where state is given, its commit: live rows advance, others get tokens of -1, none accepted.

    Log-probabilities behind the last token are unspecified.
    """
    block = (target_logits, draft_logits, draft_tokens, n_drafted, seeds, index)
    law = (temperature, top_k, top_p, min_p)
    if on_triton(impl, target_logits):
        own = verify == "coupled" or target_logits.shape[1] == 1  # no draft: a plain token
        return _judge(*block, None if own else rounds, *law, own=own, state=state)
    tokens, n_accepted, log_probs = accept_draft_ref(*block, rounds, *law, verify)
    if state is not None:
        tokens = commit_ref(state, tokens, n_accepted)
        n_accepted = n_accepted.masked_fill(tokens[:, 0] < 0, 0)
    return tokens, n_accepted, log_probs


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
    probs = logits.softmax(-1)
    if kind == "max_prob":
        return probs.amax(-1)
    if kind == "margin":
        best = probs.topk(min(2, probs.shape[-1])).values
        return best[..., 0] - best[..., 1:].sum(-1)  # a vocabulary of one has no second
    if kind == "entropy":
        n_possible = (logits > -torch.inf).sum(-1).clamp(min=2)  # padding makes no head surer
        return 1 - torch.special.entr(probs).sum(-1) / n_possible.to(logits.dtype).log()
    raise ValueError(f"confidence is {kind!r}: choose {', '.join(CONFIDENCES)}")


def logit(confidence: torch.Tensor) -> torch.Tensor:
    """log(c / (1 - c)) of probabilities, kept finite."""
    tiny = torch.finfo(confidence.dtype).eps
    return torch.logit(confidence, tiny)


def platt(confidence: torch.Tensor, slope: float, bias: float) -> torch.Tensor:
    """Chance of agreeing from a raw confidence (Platt 1999): sigmoid(slope * logit(confidence) + bias)."""
    return torch.sigmoid(slope * logit(confidence) + bias)


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
    logits = linear_ref(x, weight, norm=norm, index=vocab)
    if vocab is None and n_used is not None:
        logits = logits[..., :n_used]
    logits = full_precision(logits)
    best = logits.argmax(-1)
    tokens = best if vocab is None else vocab[best]
    return tokens, _log_prob(logits, best), confidence(logits, kind)


@jit(do_not_specialize=["n_rows"])
def _exit_kernel(
    x, weight, scale, vocab, norm_weight, norm_bias, partial, n_rows, x_stride, eps,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What a block of BN logits has to say of each row, partial (5, n_rows, blocks): best, its id, second, mass, slope."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    live = row < n_rows
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    rows = tl.minimum(column, N_OUT - 1).to(tl.int64)
    if vocab is not None:
        rows = tl.load(vocab + rows)
    x += row.to(tl.int64)[:, None] * x_stride
    z = _products(x, live, weight, rows, norm_weight, norm_bias, eps, N_IN, BN, BK)
    if scale is not None:
        z *= tl.load(scale + rows)[None, :]
    z = z.to(x.dtype.element_ty).to(tl.float32)  # the logits that linear writes: both choose the same token
    z = tl.where((column < N_OUT)[None, :], z, -float("inf"))
    best = tl.max(z, 1)
    chosen = tl.min(tl.where(z == best[:, None], column[None, :], N_OUT - 1), 1)  # NaN: some id, and a mass of NaN
    second = tl.max(tl.where(column[None, :] == chosen[:, None], -float("inf"), z), 1)
    below = (z - tl.where(best == -float("inf"), 0.0, best)[:, None]) * 1.4426950408889634
    weight_of = tl.exp2(below)
    slope = tl.sum(weight_of * tl.maximum(below, -1e4), 1)  # 0, not NaN, where below is -inf
    n_blocks = tl.num_programs(1)
    partial += row * n_blocks + tl.program_id(1)
    step = n_rows * n_blocks
    tl.store(partial, best, mask=live)
    tl.store(partial + step, chosen.to(tl.float32), mask=live)  # exact below 2^24
    tl.store(partial + 2 * step, second, mask=live)
    tl.store(partial + 3 * step, tl.sum(weight_of, 1), mask=live)
    tl.store(partial + 4 * step, slope, mask=live)


@jit(do_not_specialize=["n_rows"])
def _exit_merge_kernel(
    partial, vocab, tokens, log_probs, confidences, n_rows, n_blocks,
    N_OUT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n_blocks
    partial += row * n_blocks + at
    step = n_rows * n_blocks
    bests = tl.load(partial, mask=inside, other=-float("inf"))
    ids = tl.load(partial + step, mask=inside, other=N_OUT - 1).to(tl.int32)
    seconds = tl.load(partial + 2 * step, mask=inside, other=-float("inf"))
    masses = tl.load(partial + 3 * step, mask=inside, other=0.0)
    slopes = tl.load(partial + 4 * step, mask=inside, other=0.0)
    best = tl.max(bests, 0)
    chosen = tl.min(tl.where(bests == best, ids, N_OUT - 1), 0)
    second = tl.max(tl.maximum(seconds, tl.where(ids == chosen, -float("inf"), bests)), 0)
    below = tl.where(bests == -float("inf"), -float("inf"), (bests - best) * 1.4426950408889634)
    share = tl.exp2(below)
    mass = tl.sum(masses * share, 0)
    if KIND == "max_prob":
        confidence_of = 1.0 / mass
    elif KIND == "margin":
        confidence_of = (1.0 - tl.exp2((second - best) * 1.4426950408889634)) / mass
    else:  # H = ln(mass) - ln(2) * slope / mass
        slope = tl.sum(share * (slopes + tl.maximum(below, -1e4) * masses), 0)
        entropy = tl.log(mass) - 0.6931471805599453 * slope / mass
        confidence_of = 1.0 - entropy / tl.log(tl.maximum(N_OUT, 2.0))
    token = chosen.to(tl.int64)
    if vocab is not None:
        token = tl.load(vocab + token)
    tl.store(tokens + row, token)
    tl.store(log_probs + row, -tl.log(mass))
    tl.store(confidences + row, confidence_of)


def exit_confidence(
    x: torch.Tensor,
    weight: Weight,
    norm: Norm | None = None,
    vocab: torch.Tensor | None = None,
    n_used: int | None = None,
    kind: str = "max_prob",
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    int4 = isinstance(weight, QuantizedWeight) and weight.bits == 4
    small = int4 or isinstance(weight, PackedWeight)
    if kind not in CONFIDENCES or small or not few_rows(impl, x, weight, *(norm or ())[:2]):
        return exit_confidence_ref(x, weight, norm, vocab, n_used, kind)
    rows, arguments = _operands(x, weight, norm)
    n_out = len(arguments["weight"]) if n_used is None else n_used
    n_out = n_out if vocab is None else len(vocab)
    (vocab,) = _dense(vocab)
    n_rows, n_blocks = len(rows), triton.cdiv(n_out, arguments["BN"])
    partial = torch.empty(5, n_rows, n_blocks, dtype=torch.float32, device=x.device)
    _exit_kernel[(triton.cdiv(n_rows, 16), n_blocks)](rows, vocab=vocab, partial=partial, N_OUT=n_out, **arguments)
    tokens = x.new_empty(n_rows, dtype=torch.int64)
    log_probs, confidences = x.new_empty(2, n_rows, dtype=torch.float32)
    _exit_merge_kernel[(n_rows,)](
        partial, vocab, tokens, log_probs, confidences, n_rows, n_blocks, n_out, kind,
        triton.next_power_of_2(n_blocks), num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return tokens, log_probs, confidences


# ----------------------------------------------------------------------------------------------------------------------
# linear: a product with the few rows of a decode or verify step
#
#     norm(x) (n, in)    weight (out, in)   read once per 16 rows: a step of few rows should cost what one row costs
#
#     one program      weight[16 or 32 rows, all of in] x 16 rows of x; each warp takes its own slice of in, so that
#                      nothing is converted or normalised twice, and the slices are added in a fixed order
#
#         in ->   |warp 0|warp 1|warp 2|warp 3|warp 0|warp 1|...
#
#     A row's bits depend on its own values and on the shape of weight, never on n up to MAX_LINEAR_ROWS: tiles always
#     hold 16 rows.
#     bytes: out * in * element size


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm where bias is None, over the last dimension."""

    weight: torch.Tensor  # (C,)
    bias: torch.Tensor | None
    eps: float
    twice: torch.Tensor | None = None  # (2 C,) the weight two times over: see normalise


class QuantizedWeight(NamedTuple):
    """Weight-only quantisation of a matrix (out, in): scale * n + offset, n an integer.

    Scale and offset of int4 may be of any floating dtype; `quantize` gives bfloat16. `pack` rounds them to the activations' dtype,
    since a CPU's product takes no other: float16 scales under bfloat16 activations move a weight by about 1/64 of a step.
    """

    data: torch.Tensor  # int8 (out, in); or int4, packed (out, in rounded up to 128, // 4) int16
    scale: torch.Tensor  # float32 (out,); or per group (out, groups)
    offset: torch.Tensor | None  # None: 0; or per group
    bits: int
    group: int  # in where there is one scale per row

    def to(self, device) -> QuantizedWeight:
        return self._replace(**{name: x.to(device) for name, x in self._asdict().items() if torch.is_tensor(x)})


@dataclass(frozen=True)
class PackedWeight:
    """A matrix (out, in) as one CPU's products want it, which other machines and `torch.save` do not know.

    On x86 its products give a row the same bits whatever rides along, in passes of up to 8 rows (tests/test_kernels.py).
    """

    data: (
        torch.Tensor
    )  # bits 16: oneDNN's blocks of bfloat16, opaque; 8: int8 (out, in); 4: uint8 (out, in // 2), ATen's blocks
    scales: (
        torch.Tensor | None
    )  # in the activations' dtype: 8: (out,); 4: scale and offset + 8 * scale (groups, out, 2)
    bits: int
    shape: tuple[int, int]

    def __deepcopy__(self, memo) -> PackedWeight:
        return self  # nothing changes it, and oneDNN's tensors cannot be copied

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the product has an operator for x; it has no gradients."""
        dtype = torch.bfloat16 if self.scales is None else self.scales.dtype
        return x.dtype == dtype and x.is_cpu and x.numel() > 0 and not (x.requires_grad and torch.is_grad_enabled())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, in) -> (n, out)."""
        n = x.shape[0]
        if self.bits == 16:
            alone = n == 1 and self.shape[1] > 1024  # oneDNN cuts a long row that is alone otherwise than one of two
            rows = x.expand(2, -1).contiguous() if alone else x
            return torch.ops.mkldnn._linear_pointwise.default(rows, self.data, None, "none", [], "")[:n]
        x = _aligned(x)
        if self.bits == 4:
            group = self.shape[1] // self.scales.shape[0]
            return torch.ops.aten._weight_int4pack_mm_for_cpu.default(x, self.data, group, self.scales)
        if n <= INT8_ROWS:
            return torch.ops.aten._weight_int8pack_mm.default(x, self.data, self.scales)
        return F.linear(x, self.data.to(x.dtype)).mul_(self.scales)


INT8_ROWS = 48  # the int8 product costs by the row: beyond, it is cheaper to widen the matrix once


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x as ATen's int8 and int4 products need it, or their aligned loads end the process."""
    return x if x.is_contiguous() and x.data_ptr() % 64 == 0 else x.clone(memory_format=torch.contiguous_format)


Weight = torch.Tensor | QuantizedWeight | PackedWeight  # of a product


def n_bytes(weight: Weight) -> int:
    """Memory that reading all of a weight touches."""
    if isinstance(weight, PackedWeight):
        weight = (weight.data, weight.scales)
    tensors = [weight] if isinstance(weight, torch.Tensor) else [x for x in weight if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


PACK = 128  # int4: nibble q of word j of a block holds input q * 32 + j, so that a plane of nibbles meets consecutive x


def quantize(weight: torch.Tensor, bits: int = 8, group: int = 128) -> QuantizedWeight:
    """Round a matrix (out, in) to int8 with a scale per row, or to int4 with scale and offset per group of 32 or 128 inputs.

    Scales have bfloat16's bits: with them an int4 weight of group 128 takes 4.25. Integers are chosen for the rounded scales.
    """
    weight = weight.detach().float()
    if bits == 8:
        # rounded to bfloat16, as the CPU's product reads it
        scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16().float()
        data = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        return QuantizedWeight(data, scale, None, 8, weight.shape[1])
    if bits != 4 or group not in (32, 128):
        raise ValueError(f"bits is {bits}, group {group}: choose 8 bits, or 4 bits with group 32 or 128")
    weight = F.pad(weight, (0, -weight.shape[1] % PACK), mode="replicate")  # what stands behind `in` meets no input
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.aminmax(dim=-1)
    scale, offset = ((high - low) / 15).bfloat16(), low.bfloat16()
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
    nibbles = ((groups - offset.float()[..., None]) / step[..., None]).round().clamp(0, 15)
    return QuantizedWeight(pack_int4(nibbles.flatten(1)), scale, offset, 4, group)


def pack_int4(nibbles: torch.Tensor) -> torch.Tensor:
    """Integers 0..15 (out, in), in a multiple of 128 -> (out, in // 4) int16."""
    planes = nibbles.to(torch.int32).unflatten(1, (-1, 4, PACK // 4))  # (out, blocks, q, j)
    words = planes[:, :, 0] | planes[:, :, 1] << 4 | planes[:, :, 2] << 8 | planes[:, :, 3] << 12
    return words.flatten(1).to(torch.int16)  # wraps


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """What pack_int4 packed, int32."""
    words = packed.int().unflatten(1, (-1, 1, PACK // 4))
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    return (words >> shifts[:, None] & 15).flatten(1)  # (out, blocks, q, j)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype, n_in: int) -> torch.Tensor:
    """The matrix (out, n_in) that a QuantizedWeight stands for, each value computed in float32 and rounded once."""
    if weight.bits == 8:
        return (weight.data.float() * weight.scale[:, None]).to(dtype)
    groups = _nibbles(weight.data).unflatten(1, (-1, weight.group)).float()
    full = groups * weight.scale.float()[..., None] + weight.offset.float()[..., None]
    return full.flatten(1)[:, :n_in].to(dtype)


def take_rows(weight: Weight, index: slice | torch.Tensor) -> torch.Tensor | QuantizedWeight:
    """Some rows of a matrix; of a packed one they are taken out of its whole."""
    if isinstance(weight, PackedWeight):
        weight = unpack(weight)
    if not isinstance(weight, QuantizedWeight):
        return weight[index]
    offset = None if weight.offset is None else weight.offset[index]
    return weight._replace(data=weight.data[index], scale=weight.scale[index], offset=offset)


def pack(weight: Weight, dtype: torch.dtype, n_in: int) -> Weight:
    """The matrix (out, n_in) as this CPU's products with few rows of activations in `dtype` want it, or itself.

    bfloat16: oneDNN's blocks, where the CPU has bfloat16 instructions. int8: the same integers. int4: ATen's blocks. Scales and
    offsets are rounded to `dtype`. What has no such operator (float64, odd shapes) stays as it is.
    """
    if not isinstance(weight, QuantizedWeight):
        able = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or dtype != torch.bfloat16 or not able:
            return weight
        weight = weight.detach().contiguous()
        return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, 1), None, 16, tuple(weight.shape))
    if weight.data.device.type != "cpu" or dtype == torch.float64:
        return weight
    n_out = len(weight.data)
    if weight.bits == 8:
        return (
            PackedWeight(_aligned(weight.data), weight.scale.to(dtype), 8, (n_out, n_in)) if n_in % 16 == 0 else weight
        )
    if n_in % 32 or n_out % 16:
        return weight
    group = weight.group if n_in % weight.group == 0 else 32
    scale, offset = (
        x.float().repeat_interleave(weight.group // group, 1)[:, : n_in // group] for x in weight[1:3]
    )  # (out, groups)
    scales = torch.stack((scale, offset + 8 * scale), -1).to(dtype).transpose(0, 1).contiguous()
    data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_nibbles(weight.data)[:, :n_in].contiguous(), 1)
    return PackedWeight(data, scales, 4, (n_out, n_in))


def unpack(weight: Weight) -> torch.Tensor | QuantizedWeight:
    """What was packed, in the layout of every other place; the scales of int4 stay rounded."""
    if not isinstance(weight, PackedWeight):
        return weight
    if weight.bits == 16:
        return weight.data.to_dense()
    if weight.bits == 8:
        return QuantizedWeight(weight.data, weight.scales.float(), None, 8, weight.shape[1])
    n_out, n_in = weight.shape
    group = n_in // len(weight.scales)
    ones = torch.tensor((1.0, 8.0)).expand(len(weight.scales), n_out, 2).contiguous()  # 1 * (n - 8) + 8
    nibbles = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(n_in), weight.data, group, ones).t()
    padding = -n_in % PACK
    scale, shift = F.pad(weight.scales.float().transpose(0, 1), (0, 0, 0, padding // group)).unbind(-1)
    return QuantizedWeight(pack_int4(F.pad(nibbles, (0, padding))), scale, shift - 8 * scale, 4, group)


def norm_ref(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.bias is None:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def normalise(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """norm_ref. On a CPU, PyTorch's LayerNorm is one kernel and its RMSNorm many: that of x is the LayerNorm of (x, -x)."""
    if norm.twice is None:
        return norm_ref(x, norm)
    both = torch.cat((x, -x), -1)
    return F.layer_norm(both, norm.twice.shape, norm.twice, None, norm.eps)[..., : x.shape[-1]]


ACTIVATIONS = (None, "gelu", "swiglu")


def linear_ref(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + activation(norm(x) @ weight.T + bias): x (..., in), weight (out, in) -> (..., out), in the dtype of x.

    activation "gelu" is the tanh form (GPT-2); "swiglu" takes the first half of out as the gate: silu(gate) * rest, (..., out // 2).
    index (out,) int64 takes these rows of a larger weight and bias.
    """
    if norm is not None:
        x = normalise(x, norm)
    if index is not None:
        weight, bias = take_rows(weight, index), None if bias is None else bias[index]
    y = _product(x, weight, bias)
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def _product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, PackedWeight):
        if weight.takes(x):
            y = weight.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            return y if bias is None else y + bias
        weight = unpack(weight)
        weight = weight if isinstance(weight, QuantizedWeight) else weight.to(x.dtype)
    if isinstance(weight, QuantizedWeight):
        weight = dequantize(weight, x.dtype, x.shape[-1])
    n_rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 0 < n_rows < 10:
        return F.linear(x, weight, bias)
    # MKL's product of few float32 rows takes up to twice the time of the same product turned round, and one column
    # takes longer than two (LOG.md)
    rows = x.reshape(n_rows, -1)
    rows = torch.cat((rows, rows)) if n_rows == 1 else rows
    y = (weight @ rows.t()).t()[:n_rows].contiguous().view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


@jit
def _moments(x, live, eps, N_IN: tl.constexpr, CENTRE: tl.constexpr):
    """Mean and 1 / deviation of 16 rows; x (16, 1) pointers. Chunks are merged as in Chan et al.: no cancellation."""
    BLOCK: tl.constexpr = 256 if CENTRE else 16384 // x.dtype.element_ty.primitive_bitwidth  # as registers allow
    at = tl.arange(0, BLOCK)
    mean = tl.zeros((16,), tl.float32)
    squares = tl.zeros((16,), tl.float32)  # of what is left when the mean is taken off
    for first in tl.range(0, N_IN, BLOCK, num_stages=3 if CENTRE else 2):
        inside = live[:, None] & (first + at < N_IN)[None, :]
        chunk = tl.load(x + first + at[None, :], mask=inside, other=0.0).to(tl.float32)
        if CENTRE:
            n = tl.sum((first + at < N_IN).to(tl.float32), 0)
            apart = tl.sum(chunk, 1) / n - mean
            chunk = tl.where(inside, chunk - (mean + apart)[:, None], 0.0)
            squares += apart * apart * (first * n / (first + n))
            mean += apart * (n / (first + n))
        squares += tl.sum(chunk * chunk, 1)
    return mean, 1.0 / tl.sqrt(squares / N_IN + eps)


@jit
def _products(
    x, live, weight, rows, norm_weight, norm_bias, eps, N_IN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """norm(x) @ weight[rows].T: x (16, 1) pointers, rows (BN,) int64 -> (16, BN) float32; int8 weights as they stand."""
    CENTRE: tl.constexpr = norm_bias is not None
    if norm_weight is not None:
        mean, scale = _moments(x, live, eps, N_IN, CENTRE)
    at = tl.arange(0, 4)[:, None] * BK + tl.arange(0, BK)[None, :]  # (4, BK): what each warp takes
    x = x[None, :, :] + at[:, None, :]
    weight = weight + rows[None, :, None] * N_IN + at[:, None, :]
    total = tl.zeros((4, 16, BN), tl.float32)
    for first in range(0, N_IN, 4 * BK):
        if N_IN % (4 * BK) == 0:
            inside = at >= 0
            chunk = tl.load(x + first, mask=live[None, :, None], other=0.0)
            w = tl.load(weight + first)
        else:
            inside = first + at < N_IN
            chunk = tl.load(x + first, mask=live[None, :, None] & inside[:, None, :], other=0.0)
            w = tl.load(weight + first, mask=inside[:, None, :], other=0)
        if norm_weight is not None:  # rounded before the product, as it would be if it were written
            dtype = chunk.dtype
            gain = tl.load(norm_weight + first + at, mask=inside, other=0.0).to(tl.float32)
            chunk = (chunk.to(tl.float32) - mean[None, :, None]) * scale[None, :, None] * gain[:, None, :]
            if CENTRE:
                chunk += tl.load(norm_bias + first + at, mask=inside, other=0.0).to(tl.float32)[:, None, :]
            chunk = chunk.to(dtype)
        total = tl.dot(chunk, tl.permute(w.to(chunk.dtype), (0, 2, 1)), total, input_precision="ieee")
    return tl.sum(total, 0)


@jit
def _products_int4(
    x, live, weight, scale, offset, rows, N_IN: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """x @ weight[rows].T for packed int4 with GROUP inputs per scale and offset; a warp takes every fourth block of 128.

    A nibble n or-ed into the mantissa of 16 is the float 16 + n: exact, for one shift and one logic operation. The sum of
    x over the group, which undoes the 16 and carries the offset, is one more product, with ones: tensor cores have time.
    """
    BLOCKS: tl.constexpr = (N_IN + 127) // 128
    DTYPE: tl.constexpr = x.dtype.element_ty
    SHIFT: tl.constexpr = 6 if DTYPE == tl.float16 else 3  # mantissa bits - 4
    SIXTEEN: tl.constexpr = 0x4C00 if DTYPE == tl.float16 else 0x4180  # of float16, of bfloat16
    LIFT: tl.constexpr = 0.0 if DTYPE == tl.float32 else 16.0
    block = tl.arange(0, 4)
    at = block[:, None] * 128 + tl.arange(0, 32)[None, :]  # (4, 32)
    x = x[None, :, :] + at[:, None, :]
    weight = weight + rows[None, :, None] * (BLOCKS * 32) + block[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    group = (rows[None, None, :] * BLOCKS + block[:, None, None]) * (128 // GROUP)
    ones = tl.full((4, 32, BN), 1.0, DTYPE)
    total = tl.zeros((4, 16, BN), tl.float32)
    for first in range(0, BLOCKS, 4):
        whole = (first + block < BLOCKS)[:, None, None]
        words = tl.load(weight + first * 32, mask=whole, other=0)
        part = tl.zeros((4, 16, BN), tl.float32)
        sums = tl.zeros((4, 16, BN), tl.float32)
        for q in tl.static_range(4):
            inside = first * 128 + q * 32 + at < N_IN
            chunk = tl.load(x + first * 128 + q * 32, mask=live[None, :, None] & inside[:, None, :], other=0.0)
            if DTYPE == tl.float32:
                w = (words >> (4 * q) & 15).to(tl.float32)
            else:
                w = words << (SHIFT - 4 * q) if SHIFT > 4 * q else words >> (4 * q - SHIFT)
                w = (w & (15 << SHIFT) | SIXTEEN).to(tl.int16).to(DTYPE, bitcast=True)
            part = tl.dot(chunk, tl.permute(w, (0, 2, 1)), part, input_precision="ieee")
            sums = tl.dot(chunk, ones, sums, input_precision="ieee")
            if (q + 1) * 32 % GROUP == 0:
                here = group + first * (128 // GROUP) + q * 32 // GROUP
                step = tl.load(scale + here, mask=whole, other=0.0).to(tl.float32)
                low = tl.load(offset + here, mask=whole, other=0.0).to(tl.float32)
                total += step * part + (low - LIFT * step) * sums
                part = tl.zeros((4, 16, BN), tl.float32)
                sums = tl.zeros((4, 16, BN), tl.float32)
    return tl.sum(total, 0)


@jit(do_not_specialize=["n_rows"])  # one binary for all numbers of rows
def _linear_kernel(
    x, weight, index, scale, offset, bias, norm_weight, norm_bias, residual, y, n_rows, x_stride, residual_stride, eps,
    N_IN: tl.constexpr, N_OUT: tl.constexpr, ACTIVATION: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 rows, blocks of BN outputs). GROUP: weights of an int4 scale."""
    _wait(PDL)
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    live = row < n_rows
    row = row.to(tl.int64)[:, None]
    # swiglu: gate and up rows alternate, so that a thread holds both of a pair; behind the end the last row is read again
    PAIR: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    HALF: tl.constexpr = N_OUT // PAIR
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    rows = (tl.minimum(column // PAIR, HALF - 1) + column % PAIR * HALF).to(tl.int64)
    if index is not None:
        rows = tl.load(index + rows)
    if offset is not None:
        z = _products_int4(x + row * x_stride, live, weight, scale, offset, rows, N_IN, GROUP, BN)
    else:
        z = _products(x + row * x_stride, live, weight, rows, norm_weight, norm_bias, eps, N_IN, BN, BK)
        if scale is not None:
            z *= tl.load(scale + rows)[None, :]
    _launch_next(PDL)
    if bias is not None:
        z += tl.load(bias + rows).to(tl.float32)[None, :]
    if ACTIVATION == "gelu":  # z * (1 + tanh(u)) / 2 is z * sigmoid(2 u)
        u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        z = z / (1.0 + tl.exp2(u * -2.8853900817779268))
    if ACTIVATION == "swiglu":
        gate, up = tl.split(tl.reshape(z, (16, BN // 2, 2)))
        z = gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up
    out = tl.program_id(1) * (BN // PAIR) + tl.arange(0, BN // PAIR)[None, :]
    keep = live[:, None] & (out < HALF)
    if residual is not None:
        z += tl.load(residual + row * residual_stride + out, mask=keep, other=0.0).to(tl.float32)
    tl.store(y + row * HALF + out, z.to(y.dtype.element_ty), mask=keep)


@jit
def _norm_kernel(x, weight, bias, y, x_stride, eps, N_IN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    z = tl.load(x + row * x_stride + at, mask=at < N_IN, other=0.0).to(tl.float32)
    if bias is not None:
        z = tl.where(at < N_IN, z - tl.sum(z, 0) / N_IN, 0.0)
    z *= 1.0 / tl.sqrt(tl.sum(z * z, 0) / N_IN + eps)
    z *= tl.load(weight + at, mask=at < N_IN, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + at, mask=at < N_IN, other=0.0).to(tl.float32)
    tl.store(y + row * N_IN + at, z.to(y.dtype.element_ty), mask=at < N_IN)


MAX_LINEAR_ROWS = 64  # beyond, the library's product: weights are no longer what limits it


def few_rows(impl: str, x: torch.Tensor, weight: Weight, *others: torch.Tensor | None) -> bool:
    """Whether the kernels below take a product of x and weight; training and long blocks have the reference."""
    data = weight if isinstance(weight, torch.Tensor) else weight.data
    fits = 0 < x.numel() <= MAX_LINEAR_ROWS * x.shape[-1]
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, data, *others))
    return on_triton(impl, x) and fits and not wants_grad


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., C) -> (n, C), the last dimension contiguous: a view wherever that is one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _operands(x: torch.Tensor, weight: Weight, norm: Norm | None):
    """Rows (n, in) and what else a product's launch needs. Tiles follow from dtypes and the weight's shape, never from n.

    By Little's law 24 KB of weights in flight per SM hide the memory's latency at 4 TB/s (not measured yet); shared memory stays below 64 KB, AMD's limit.
    """
    x = as_rows(x)
    n_rows, n_in = x.shape
    data, scale, offset = weight[:3] if isinstance(weight, QuantizedWeight) else (weight, None, None)
    if data.shape[1] != (n_in if offset is None else -(-n_in // PACK) * (PACK // 4)):
        raise ValueError(f"x has {n_in} inputs, the weight is {tuple(data.shape)} of {data.dtype}")
    norm = None if norm is None else Norm(*_dense(norm.weight, norm.bias), norm.eps)
    if offset is not None and norm is not None:  # inside, it would double the 4.1 operations per weight that int4 takes
        y, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), triton.next_power_of_2(n_in)
        _norm_kernel[(n_rows,)](
            x, norm.weight, norm.bias, y, x.stride(0), norm.eps, n_in, block, num_warps=8, enable_fp_fusion=True
        )
        x, norm = y, None
    gain, shift, eps = (None, None, 0.0) if norm is None else norm[:3]
    if x.dtype == torch.float32:
        block_n, block_k, stages = 16, 32, 2
    else:  # narrow matrices take small blocks, to reach all SMs
        block_n, block_k, stages = (32, 64, 3) if data.shape[0] >= 4096 else (16, 64, 4)
        stages += scale is not None and offset is None  # int8 has half the bytes per stage; int4's x takes the room
    arguments = {"weight": data.contiguous(), "scale": scale, "norm_weight": gain, "norm_bias": shift, "eps": eps}
    arguments |= {"n_rows": n_rows, "x_stride": x.stride(0), "N_IN": n_in, "BN": block_n, "BK": block_k}
    arguments |= {"num_warps": 8 if x.dtype == torch.float32 else 4, "num_stages": stages, "enable_fp_fusion": True}
    return x, arguments


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}: choose {', '.join(map(str, ACTIVATIONS))}")
    if isinstance(weight, PackedWeight) or not few_rows(impl, x, weight, bias, residual, *(norm or ())[:2]):
        return linear_ref(x, weight, bias, norm, activation, residual, index)
    rows, arguments = _operands(x, weight, norm)
    n_out = arguments["weight"].shape[0] if index is None else len(index)
    y = x.new_empty(*x.shape[:-1], n_out // 2 if activation == "swiglu" else n_out)
    residual, (index, bias) = None if residual is None else as_rows(residual.expand(y.shape)), _dense(index, bias)
    int4 = isinstance(weight, QuantizedWeight) and weight.bits == 4
    grid = (triton.cdiv(len(rows), 16), triton.cdiv(n_out, arguments["BN"]))  # neighbours share weights
    _linear_kernel[grid](
        rows, index=index, bias=bias, residual=residual, y=y, residual_stride=0 if residual is None else residual.stride(0),
        offset=weight.offset if int4 else None, GROUP=weight.group if int4 else 0, N_OUT=n_out, ACTIVATION=activation,
        **arguments, **_dependent(),
    )  # fmt: skip
    return y


# ----------------------------------------------------------------------------------------------------------------------
# decode_attention: rotary embedding, cache append and attention of T new rows
#
#     positions of a row   0 1 2 3 4 5 6 7 8           block_table[row]   page 4, page 1, ...
#     cache                [ . . . . . . ] n n n
#     token t = 0          x x x x x x x
#     token t = 1          x x x x x x x x
#     token t = 2          x x x x x x x x x
#
# New keys are written first; token t then sees positions 0 .. its own. Slots behind the length are never loaded: they may hold
# NaN, and a mask behind the load would make 0 * NaN of it.
#
#     chunks of CHUNK keys  |---- 0 ----|---- 1 ----|-- 2 -      one program per chunk and kv head: its queries are the T new
#                           (out, lse)  (out, lse)  (out, lse)   rows of the group's heads. Then one program per row and head
#                                `-----------+-----------`       merges the chunks that the row sees
#     bytes: K and V of the row's length once, 2 * S * G * D * element size, while T * H / G rows fit a tile of 16 (H = G)
#     or 32 (H > G); further tiles find them in the L2, and the append is a launch before. Partial outputs: 8 * (D + 1) per
#     query row and chunk (6% of K and V at T = 1, H = 4 G, D = 128, bfloat16)
#
# A token's bits depend on its position and what it sees, not on what else is in the batch: CHUNK is a constant, key tiles start at
# multiples of BLOCK_N, the tile's height does not depend on T, and tiles that a row does not see leave it as it is.
#
# int8 K and V: one scale per token and kv head, (n_pages, page_size, G) float32; x is about scale * n, n in -127 .. 127.
# Not claimed for gfx942, which needs twice the registers of bfloat16 there.


SLOT_BLOCK = 16  # of attention on a CPU: other lengths are added up in another order


class RowPlan(NamedTuple):
    """Where one row of a batch reads and writes, on the host: made once per pass, used by every layer."""

    row: int
    first: int  # index in T of the row's first real position
    n: int  # real positions in T
    start: int  # position of the first; the row's memory holds 0 .. start + n - 1
    slots: slice | torch.Tensor  # of those positions in the flattened pages: a slice when the pages are consecutive


def spans(positions: list[list[int]], capacity: int) -> list[tuple[int, int, int, int]]:
    """Of each row that has any: row, index of its first real position, how many, the first; raises ValueError."""
    found = []
    for row, at in enumerate(positions):
        first = next((t for t, p in enumerate(at) if p >= 0), len(at))
        n = sum(p >= 0 for p in at)
        if n == 0:
            continue
        start, end = at[first], at[first] + n
        if at[first : first + n] != list(range(start, end)):
            raise ValueError(f"positions of row {row} must rise by one, with -1 at the ends only, not {at}")
        if end > capacity:
            raise ValueError(f"position {end - 1} of row {row} is beyond the cache's capacity of {capacity}")
        found.append((row, first, n, start))
    return found


def plan_rows(positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> list[RowPlan]:
    """positions (B, T), -1 for padding at either end, else rising by one; block_table (B, max_pages) -> plans of the rows."""
    plans = []
    for row, first, n, start in spans(positions.tolist(), block_table.shape[1] * page_size):
        end = start + n
        used = block_table[row, : -(-end // page_size)].tolist()
        if used == list(range(used[0], used[0] + len(used))):
            slots = slice(used[0] * page_size, used[0] * page_size + end)
        else:
            at_token = torch.arange(end, device=positions.device)
            slots = block_table[row].long()[at_token // page_size] * page_size + at_token % page_size
        plans.append(RowPlan(row, first, n, start, slots))
    return plans


class Runs(NamedTuple):
    """plan_rows for bfloat16 on a CPU where rows lie in memory one behind the other: few calls instead of one per row."""

    target: slice | torch.Tensor  # slots of the new tokens in the flattened pages
    source: slice | torch.Tensor  # which of the B * T tokens they are: all but the padding
    calls: list[
        tuple
    ]  # (first row, last row + 1, its first slot, slots between rows, slots read, mask (rows, T, 1, 1, slots))


def plan_runs(positions: torch.Tensor, starts: list[int], capacity: int) -> Runs:
    """positions (B, T) as in plan_rows; starts: the slot where each row begins, whose `capacity` slots hold finite numbers.

    A run is rows at even distances. All its rows read whole blocks of SLOT_BLOCK slots, as many as its longest row holds:
    a mask hides what is no position of a row's past.
    """
    at = positions.tolist()
    real = spans(at, capacity)
    if len(at) == 1 and real:
        _, t, n, p = real[0]
        target, source = slice(starts[0] + p, starts[0] + p + n), slice(t, t + n)
    else:
        target = torch.tensor([starts[row] + p + i for row, _, n, p in real for i in range(n)], dtype=torch.int64)
        source = torch.tensor([row * len(at[0]) + t + i for row, t, n, _ in real for i in range(n)], dtype=torch.int64)
    calls, first = [], 0
    while first < len(at):
        step, end = capacity, first + 1
        while end < len(at) and starts[end] - starts[end - 1] == step:
            end += 1
        longest = max(max(row) for row in at[first:end]) + 1
        n_read = max(-(-longest // SLOT_BLOCK), 1) * SLOT_BLOCK
        ahead = torch.arange(n_read) > positions[first:end, :, None].clamp(min=0)
        mask = torch.zeros(ahead.shape, dtype=torch.bfloat16).masked_fill_(ahead, -torch.inf)[:, :, None, None]
        calls.append((first, end, starts[first], step, n_read, mask))
        first = end
    return Runs(target, source, calls)


def attend_runs(qkv: torch.Tensor, k_cache, v_cache, n_head: int, cos, sin, runs: Runs) -> torch.Tensor:
    """decode_attention_ref by runs. Every token is an own row of PyTorch's attention, and keys come in blocks of SLOT_BLOCK:
    a token's bits then depend on its own past only (tests/test_kernels.py)."""
    _, _, n_kv, head_dim = k_cache.shape
    n_new = qkv.shape[1]
    qk, v = qkv[:, :, : n_head + n_kv], qkv[:, :, n_head + n_kv :]
    qk = qk if cos is None else rotate_ref(qk, cos, sin)
    q, k = qk[:, :, :n_head], qk[:, :, n_head:]
    append_runs(k, v, k_cache, v_cache, runs)
    q = q.unflatten(2, (n_kv, -1))  # (B, T, G, R, D)
    width, parts = n_kv * head_dim, []
    for first, end, start, step, n_read, mask in runs.calls:
        shape, strides = (end - first, n_kv, n_read, head_dim), (step * width, head_dim, width, 1)
        memory = [x.as_strided(shape, strides, x.storage_offset() + start * width) for x in (k_cache, v_cache)]
        if end - first == 1:  # all tokens of the row at once
            memory = [x.expand(n_new, -1, -1, -1) for x in memory]
            parts.append(F.scaled_dot_product_attention(q[first], *memory, attn_mask=mask[0])[None])
        else:
            out = [F.scaled_dot_product_attention(q[first:end, t], *memory, attn_mask=mask[:, t]) for t in range(n_new)]
            parts.append(torch.stack(out, 1))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.flatten(2, 3)


def append_runs(k: torch.Tensor, v: torch.Tensor, k_cache, v_cache, runs: Runs) -> None:
    """append_kv_ref by runs."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.flatten(0, 1)[runs.target] = new.flatten(0, 1)[runs.source]


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
    if out and len(plans) == len(qkv) and all(plan.n == qkv.shape[1] for plan in plans):
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
        # 1.5 * 2^23: float32 has no bits left for fractions, so this rounds to nearest even
        x = x + 12582912.0 - 12582912.0
    tl.store(cache + at[:, None] * D + d, x.to(cache.dtype.element_ty), mask=real[:, None] & (d < D))


@jit(do_not_specialize=["n_new", "max_pages", "n_chunks"])
def _attention_kernel(
    qkv, k_cache, v_cache, k_scale, v_scale, block_table, positions, cos, sin, partial, partial_lse,
    n_new, max_pages, n_chunks, stride: tl.constexpr, SCALE: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, B * G, tiles of query rows)."""
    _wait(PDL)
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
    _launch_next(PDL)
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
    CHUNK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * T, H)."""
    _wait(PDL)
    _launch_next(PDL)
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
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B, G)."""
    _wait(PDL)
    _launch_next(PDL)
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
    """decode_attention_ref for up to MAX_ROWS new rows per sequence; outputs at padding are 0.

    Positions must be below the cache's capacity: the device does not check, and would write into another row's pages.
    """
    if isinstance(plans, Runs):
        return attend_runs(qkv, k_cache, v_cache, n_head, cos, sin, plans)
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
        num_warps=8 if block_d == 256 else 4, num_stages=2, enable_fp_fusion=True, **_dependent(),
    )  # fmt: skip
    _merge_kernel[n_rows * n_new, n_head](
        partial, partial_lse, positions, out, n_new, n_chunks, BLOCK_S=16, **shape, num_warps=4, enable_fp_fusion=True,
        **_dependent(),
    )  # fmt: skip
    return out


def append_kv(k, v, k_cache, v_cache, block_table, positions, scales=None, plans=None, impl: str = "auto") -> None:
    """append_kv_ref; up to MAX_ROWS new rows per sequence are one launch."""
    if isinstance(plans, Runs):
        return append_runs(k, v, k_cache, v_cache, plans)
    if k.shape[1] > MAX_ROWS or not on_triton(impl, k):
        return append_kv_ref(k, v, k_cache, v_cache, block_table, positions, scales, plans)
    _append(k, v, k_cache, v_cache, block_table.contiguous(), positions.contiguous(), None, None, scales)


def _append(k, v, k_cache, v_cache, block_table, positions, cos, sin, scales) -> None:
    n_rows, n_new, n_kv, head_dim = k.shape
    k, v = _flat_rows(k), _flat_rows(v)
    _append_kernel[n_rows, n_kv](
        k, v, k_cache, v_cache, *(scales or (None, None)), block_table, positions, cos, sin, n_new, block_table.shape[1],
        k_stride=k.stride(0), v_stride=v.stride(0), G=n_kv, D=head_dim, PAGE=k_cache.shape[1], BLOCK_T=MAX_ROWS,
        BLOCK_D=_block_d(head_dim), num_warps=4, enable_fp_fusion=True, **_dependent(),
    )  # fmt: skip


rotate = rotate_ref
causal_attention = causal_attention_ref
