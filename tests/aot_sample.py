"""Kernels with known figures, sound and faulty, on which test_aot.py tries the instruments of aot.py."""

import re

import torch
import triton
import triton.language as tl
from aot import Case, Need, events

jit = triton.jit


@jit
def _scale_kernel(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * stride + tl.arange(0, BLOCK)
    seen = tl.arange(0, BLOCK) < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=seen) * 2, mask=seen)


@jit
def _dot_kernel(x_ptr, w_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns, at = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + rows[:, None] * K + start + at)
        w = tl.load(w_ptr + columns[:, None].to(tl.int64) * K + start + at)
        total = tl.dot(x, w.T, total)
    tl.store(out_ptr + rows[:, None] * N * tl.num_programs(0) + columns, total)


@jit
def _ticket_kernel(x_ptr, ticket_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at)
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(ticket_ptr, 0)


def scale(n: int) -> None:
    """A row of float32; rows of n stand n apart: 16-byte loads need n to be a multiple of 4, and a known one."""
    x = torch.zeros(4, n)
    _scale_kernel[(4,)](x, torch.empty_like(x), n, x.stride(0), BLOCK=triton.next_power_of_2(n))


def dot(m: int = 16, n: int = 32, block: int = 128, num_warps: int = 4, num_stages: int = 3, grid: int = 4) -> None:
    x = torch.empty(m, 1024, dtype=torch.bfloat16)
    w, out = x.new_empty(n * grid, 1024), torch.empty(m, n * grid)
    _dot_kernel[(grid,)](x, w, out, 1024, M=m, N=n, BLOCK=block, num_warps=num_warps, num_stages=num_stages)


def ticket() -> None:
    _ticket_kernel[(4,)](torch.empty(128, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), BLOCK=128)


def ticket_order(launches) -> list[str]:
    """The partial is stored, then come a barrier (3.9: another), one thread's ticket, and a barrier before the rest."""
    found = events(launches[0].ptx, S=r"st\.global", B=r"bar\.sync", T=r"atom\.global\S*acq_rel")
    return [] if re.fullmatch("SB+TBS", found) else [f"order {found}"]


CASES = {
    "scale": Case(lambda: scale(4096), _scale_kernel=Need(registers=64, wide_loads=True)),
    "dot": Case(dot, _dot_kernel=Need(registers=128, wide_loads=True, tensor_cores=True)),
    "ticket": Case(ticket, check=ticket_order, targets=("sm_90", "sm_120")),
    # faulty
    "unaligned": Case(lambda: scale(4098), _scale_kernel=Need(wide_loads=True)),
    "spilling": Case(lambda: dot(m=128, n=256, block=32, num_stages=1), targets=("sm_90",)),
    "greedy": Case(dot, _dot_kernel=Need(registers=24, code_kb=1)),
    "large": Case(lambda: dot(m=64, n=128, block=128, num_stages=4), targets=("sm_90", "sm_120", "gfx942")),
    "no tensor cores": Case(lambda: scale(1024), _scale_kernel=Need(tensor_cores=True)),
    "another kernel": Case(lambda: scale(1024), _dot_kernel=Need()),
    "wrong order": Case(ticket, check=lambda launches: ["complaint"], targets=("sm_90",)),
    "wide grid": Case(lambda: _scale_kernel[(1, 70_000)](torch.empty(4), torch.empty(4), 4, 4, BLOCK=4)),
    "raises": Case(lambda: scale(-1)),
}
