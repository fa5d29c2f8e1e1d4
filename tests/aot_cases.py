"""Representative calls of the launchers, which aot.py compiles for each target, and what their kernels have to show.

A case is its name, its call and the needs of its kernels. Only shapes, dtypes and strides count: the tensors are empty, and
memory that is never touched costs nothing. Shapes are those of Llama-3-8B and GPT-2 XL.
"""

import re

import torch
from aot import NVIDIA, Case, Need, events

from kernels import (
    Norm,
    QuantizedWeight,
    RowState,
    accept_draft,
    decode_attention,
    exit_confidence,
    linear,
    penalise,
    sample_token,
)

DEPENDENT = {"_linear_kernel", "_attention_kernel", "_merge_kernel", "_append_kernel"}
BF16, F16, F32, I8, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32
V = 128256


def t(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def w8(n_out: int, n_in: int) -> QuantizedWeight:
    return QuantizedWeight(t(n_out, n_in, dtype=I8), t(n_out, dtype=F32), None, 8, n_in)


def w4(n_out: int, n_in: int) -> QuantizedWeight:
    return QuantizedWeight(t(n_out, n_in // 4, dtype=torch.int16), t(n_out, n_in // 128), t(n_out, n_in // 128), 4, 128)


def rms(width: int) -> Norm:
    return Norm(t(width), None, 1e-5)


def layer(width: int) -> Norm:
    return Norm(t(width), t(width), 1e-5)


def attention(rows=4, new=6, head=32, kv=8, dim=128, dtype=BF16, cache=None, rotary=True, page=16, n_pages=512):
    memory = [t(n_pages * rows, page, kv, dim, dtype=cache or dtype) for _ in "kv"]
    turn = [t(rows, new, 1, dim, dtype=dtype) if rotary else None for _ in "cs"]
    scales = tuple(t(n_pages * rows, page, kv, dtype=F32) for _ in "kv") if cache else None
    table, positions = torch.zeros(rows, n_pages, dtype=I32), ints(rows, new)
    qkv = t(rows, new, head + 2 * kv, dim, dtype=dtype)
    decode_attention(qkv, *memory, table, positions, head, *turn, scales=scales, impl="triton")


def sound(launches) -> list[str]:
    """Orders in the code that no interpreter shows: fences, and what dependent launch rests on."""
    complaints = []
    for launch in launches:
        ptx, kernel = launch.ptx, launch.kernel
        if not re.search(r"^\.target sm_", ptx, re.MULTILINE):
            continue
        if kernel == "_attention_kernel":
            # a barrier follows the last store of the append at once, in its own branch; the loop then loads the cache by
            # cp.async, and nothing before it does
            order = events(ptx, S=r"st\.global", B=r"\bbar\.sync", C=r"cp\.async\.c[ag]", J=r"\bbra\b|^\$L__BB\w+:")
            if "C" in order:
                before = order.split("C")[0]
                fenced = "S" in before and before[before.rindex("S") + 1 :].startswith("B")
                complaints += [] if fenced else ["no barrier between the append and the first load of the cache"]
        if kernel == "_accept_kernel":
            order = events(ptx, S=r"st\.global", B=r"\bbar\.sync", T=r"atom\S*\.gpu\.acq_rel")
            fenced = order.count("T") == 1 and order.split("T")[0].endswith("B")
            complaints += [] if fenced else ["the ticket may overtake the winner that it announces"]
        if kernel in DEPENDENT and not re.search(r"^\.target sm_8", ptx, re.MULTILINE):
            order = events(
                ptx, W=r"griddepcontrol\.wait", N=r"griddepcontrol\.launch", M=r"(ld|st)\.global|cp\.async\.c[ag]"
            )
            ready = order.startswith("W") and order.count("N") == 1
            complaints += [] if ready else [f"{kernel} touches memory before it waits for the kernel before it"]
    return complaints


def logits(*shape: int, vocab: int = V, dtype: torch.dtype = F32) -> torch.Tensor:
    """Rows as a head leaves them, padded to whole vectors behind the vocabulary."""
    return t(*shape, -(-vocab // 64) * 64, dtype=dtype)[..., :vocab]


def sample(temperature: float = 0.8, **more) -> None:
    sample_token(logits(4), ints(4), ints(4), temperature, impl="triton", **more)


def accept(drafted=5, temperature=0.8, draft=True, vocab=V, dtype=F32, **more):
    """As in a round on the device, which commits."""
    target, laws = logits(2, drafted + 1, vocab=vocab, dtype=dtype), logits(2, drafted, vocab=vocab) if draft else None
    more |= {"state": RowState(ints(2), ints(2), ints(2), ints(2, 2)), "impl": "triton"}
    accept_draft(target, laws, ints(2, drafted), *(ints(2) for _ in range(4)), temperature, **more)


def product(weight, rows: int = 6, call=linear, **more) -> None:
    data = getattr(weight, "data", weight)
    n_in = data.shape[1] * (4 if data.dtype == torch.int16 else 1)
    call(t(rows, n_in), weight, impl="triton", **more)


def confidence(weight, **more) -> None:
    product(weight, call=exit_confidence, norm=rms(4096), **more)


def linear_needs(ops: float, weights: int = 0, registers: int = 144) -> dict:
    return {"_linear_kernel": Need(registers, 40, True, True, ops, weights)}


def attention_needs(registers: int, code_kb: int = 40, tensor_cores: bool = True) -> dict:
    needs = {"_attention_kernel": Need(registers, code_kb, wide_loads=True, tensor_cores=tensor_cores)}
    return needs | {"_merge_kernel": Need(registers=128, wide_loads=True)}


ATTENTION = attention_needs(224)  # 144 on NVIDIA, the rest is gfx942's
ATTENTION_INT8 = {"targets": NVIDIA, **attention_needs(190, code_kb=52)}
ROWS = {"_stats_kernel": Need(registers=112, wide_loads=True)}
EXIT = {"_exit_kernel": Need(registers=176, code_kb=40, wide_loads=True, tensor_cores=True)}
SEEN = {"seen": t(2, V, dtype=torch.bool), "ahead": ints(2, 5), "penalty": 1.1, "bias": None}
CASES = {
    "linear bf16, RMSNorm": Case(lambda: product(t(6144, 4096), norm=rms(4096)), **linear_needs(4.5)),
    "linear bf16, residual": Case(lambda: product(t(4096, 14336), residual=t(6, 4096)), **linear_needs(2.3)),
    "linear bf16, SwiGLU": Case(lambda: product(t(28672, 4096), activation="swiglu"), **linear_needs(2.3)),
    "linear bf16, head": Case(lambda: product(t(V, 4096), rows=1), **linear_needs(2.3)),
    "linear bf16, LayerNorm, GELU": Case(
        lambda: product(t(6400, 1600), bias=t(6400), norm=layer(1600), activation="gelu"), **linear_needs(5.5)
    ),
    "linear int8, RMSNorm": Case(lambda: product(w8(6144, 4096), norm=rms(4096)), **linear_needs(6.5)),
    "linear int8, residual": Case(lambda: product(w8(4096, 14336), residual=t(6, 4096)), **linear_needs(4.5)),
    "linear int4, RMSNorm": Case(
        lambda: product(w4(6144, 4096), norm=rms(4096)), **linear_needs(5.7, weights=32 * 512)
    ),
    "attention bf16, grouped, rotary": Case(attention, **ATTENTION),
    "attention bf16, one row": Case(lambda: attention(new=1), **ATTENTION),
    "attention f16, 16 rows": Case(lambda: attention(new=16, dtype=F16), **ATTENTION),
    "attention bf16, GPT-2": Case(lambda: attention(head=25, kv=25, dim=64, rotary=False), **ATTENTION),
    "attention bf16, SmolLM2": Case(lambda: attention(head=9, kv=3, dim=64), **ATTENTION),
    "attention bf16, two tiles of rows": Case(lambda: attention(new=9), **ATTENTION, _append_kernel=Need(64)),
    "attention f32": Case(lambda: attention(dtype=F32), targets=NVIDIA, **attention_needs(210, 44, tensor_cores=False)),
    "attention int8": Case(lambda: attention(cache=I8), **ATTENTION_INT8),
    "attention int8, GPT-2": Case(lambda: attention(head=25, kv=25, dim=64, cache=I8, rotary=False), **ATTENTION_INT8),
    "sample": Case(sample, **ROWS),
    "sample, law kept, filtered": Case(lambda: sample(top_k=50, top_p=0.9, stream=1, keep_law=True), **ROWS),
    "sample, greedy": Case(lambda: sample(temperature=0), **ROWS),
    "accept": Case(accept, **ROWS),
    "accept, coupled": Case(lambda: accept(verify="coupled"), **ROWS),
    "accept bf16, filtered": Case(lambda: accept(dtype=BF16, top_k=50, top_p=0.9, min_p=0.05), **ROWS),
    "accept bf16, greedy": Case(lambda: accept(dtype=BF16, temperature=0, draft=False), **ROWS),
    "accept, one-hot drafts, GPT-2": Case(lambda: accept(vocab=50257, draft=False), **ROWS),
    "penalise": Case(lambda: penalise(logits(2, 6), **SEEN, impl="triton")),
    "penalise, no drafts": Case(lambda: penalise(logits(2, 1), **SEEN | {"ahead": None}, impl="triton")),
    "exit bf16": Case(lambda: confidence(t(V, 4096)), **EXIT),
    "exit int8, reduced vocabulary": Case(lambda: confidence(w8(V, 4096), vocab=ints(32768)), **EXIT),
}
for case in CASES.values():
    case.check = sound
