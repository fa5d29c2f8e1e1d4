"""Representative calls of the launchers, which aot.py compiles for each target, and what their kernels have to show.

A case is its name, its call and the needs of its kernels. Only shapes, dtypes and strides count: the tensors are empty, and
memory that is never touched costs nothing. Shapes are those of Llama-3-8B and GPT-2 XL.
"""

import torch
from aot import Case, Need

from kernels import Norm, QuantizedWeight, accept_draft, decode_attention, linear, penalise, sample_token

NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
BF16, F16, F32, I8, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32
V = 128256


def t(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def w8(n_out: int, n_in: int) -> QuantizedWeight:
    return QuantizedWeight(t(n_out, n_in, dtype=I8), t(n_out, dtype=F32), None, 8, n_in)


def w4(n_out: int, n_in: int) -> QuantizedWeight:
    return QuantizedWeight(t(n_out, n_in // 4, dtype=torch.int16), t(n_out, n_in // 128), t(n_out, n_in // 128), 4, 128)


def product(weight, rows: int = 6, dtype=BF16, **more):
    n_in = weight.group if isinstance(weight, QuantizedWeight) and weight.bits == 8 else more.pop("n_in", None)
    linear(t(rows, n_in or weight.shape[1], dtype=dtype), weight, impl="triton", **more)


def attention(rows=4, new=6, head=32, kv=8, dim=128, dtype=BF16, cache=None, rotary=True, page=16, n_pages=512):
    memory = [t(n_pages * rows, page, kv, dim, dtype=cache or dtype) for _ in "kv"]
    turn = [t(rows, new, 1, dim, dtype=dtype) if rotary else None for _ in "cs"]
    scales = tuple(t(n_pages * rows, page, kv, dtype=F32) for _ in "kv") if cache else None
    table, positions = torch.zeros(rows, n_pages, dtype=I32), torch.zeros(rows, new, dtype=torch.int64)
    qkv = t(rows, new, head + 2 * kv, dim, dtype=dtype)
    decode_attention(qkv, *memory, table, positions, head, *turn, scales=scales, impl="triton")


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def accept(drafted=5, temperature=0.8, vocab=V, dtype=F32, draft=True, **more):
    target = t(2, drafted + 1, vocab, dtype=dtype)
    laws = t(2, drafted, vocab, dtype=F32) if draft else None
    rest = ints(2, drafted), ints(2), ints(2), ints(2), ints(2)
    accept_draft(target, laws, *rest, temperature, impl="triton", **more)


LINEAR = {"_linear_kernel": Need(registers=168, wide_loads=True, tensor_cores=True)}
ATTENTION = {"_attention_kernel": Need(registers=168, wide_loads=True, tensor_cores=True)}
ATTENTION |= {"_merge_kernel": Need(registers=128, wide_loads=True)}
ROWS = {"_stats_kernel": Need(registers=112, wide_loads=True)}
CASES = {
    "linear bf16, RMSNorm": Case(lambda: product(t(6144, 4096), norm=Norm(t(4096), None, 1e-5)), **LINEAR),
    "linear bf16, residual": Case(lambda: product(t(4096, 14336), residual=t(6, 4096)), **LINEAR),
    "linear bf16, SwiGLU": Case(lambda: product(t(28672, 4096), activation="swiglu"), **LINEAR),
    "linear bf16, head": Case(lambda: product(t(V, 4096), rows=1), **LINEAR),
    "linear bf16, LayerNorm, GELU": Case(
        lambda: product(t(6400, 1600), bias=t(6400), norm=Norm(t(1600), t(1600), 1e-5), activation="gelu"), **LINEAR
    ),
    "linear int8, RMSNorm": Case(lambda: product(w8(6144, 4096), norm=Norm(t(4096), None, 1e-5)), **LINEAR),
    "linear int8, residual": Case(lambda: product(w8(4096, 14336), residual=t(6, 4096)), **LINEAR),
    "linear int4, RMSNorm": Case(lambda: product(w4(6144, 4096), n_in=4096, norm=Norm(t(4096), None, 1e-5)), **LINEAR),
    "attention bf16, grouped, rotary": Case(attention, **ATTENTION),
    "attention bf16, one row": Case(lambda: attention(new=1), **ATTENTION),
    "attention f16, 16 rows": Case(lambda: attention(new=16, dtype=F16), **ATTENTION),
    "attention bf16, GPT-2": Case(lambda: attention(head=25, kv=25, dim=64, rotary=False), **ATTENTION),
    "attention int8": Case(lambda: attention(cache=I8), targets=NVIDIA, **ATTENTION),
    "sample f32": Case(lambda: sample_token(t(4, V, dtype=F32), ints(4), ints(4), 0.8, impl="triton"), **ROWS),
    "accept f32": Case(accept, **ROWS),
    "accept bf16, top-p": Case(lambda: accept(dtype=BF16, top_k=50, top_p=0.9, min_p=0.05), **ROWS),
    "accept bf16, greedy": Case(lambda: accept(dtype=BF16, temperature=0, draft=False), **ROWS),
    "accept f32, GPT-2": Case(lambda: accept(vocab=50257), **ROWS),
    "penalise": Case(
        lambda: penalise(t(2, 6, V, dtype=F32), t(2, V, dtype=torch.bool), None, 1.1, None, impl="triton")
    ),
}
