"""The instruments on kernels whose faults are known: each fault is seen, and a sound kernel is not accused."""

import os

import numpy as np
import pytest
import torch
from interpreter import InterpreterBuilder, interpreted, repair_bfloat16, shuffled, tl, to_bits, watch


@interpreted
def copy_kernel(x_ptr, out_ptr, n, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STRIDE + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@interpreted
def far_kernel(x_ptr, out_ptr, row, stride, WIDE: tl.constexpr):
    row = tl.load(row)
    at = row.to(tl.int64) * stride if WIDE else row * stride
    tl.store(out_ptr + tl.arange(0, 4), tl.load(x_ptr + at + tl.arange(0, 4)))


@interpreted
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x + y, mask=at < n)
    tl.store(out_ptr + n + at, x * y, mask=at < n)
    tl.store(out_ptr + 2 * n + at, x / y, mask=at < n)
    tl.store(out_ptr + 3 * n + at, x - y, mask=at < n)
    tl.store(out_ptr + 4 * n + at, tl.where(x < y, x, y), mask=at < n)
    tl.store(out_ptr + 5 * n + at, tl.exp(x.to(tl.float32)).to(tl.bfloat16), mask=at < n)
    tl.store(out_ptr + 6 * n + at, tl.abs(-x), mask=at < n)
    tl.store(out_ptr + 7 * n + at, y * 0.1, mask=at < n)


@interpreted
def cast_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


@interpreted
def dot_kernel(x_ptr, w_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(w_ptr + at)))


@interpreted
def reduce_kernel(x_ptr, out_ptr, index_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.arange(0, ROWS)
    x = tl.load(x_ptr + rows[:, None] * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + rows, tl.sum(x, 1))
    tl.store(out_ptr + ROWS + rows, tl.max(x, 1))
    tl.store(out_ptr + 2 * ROWS + rows, tl.min(x, 1))
    tl.store(index_ptr + rows, tl.argmax(x, 1))


@interpreted
def one_cell_kernel(out_ptr, ticket_ptr, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(ticket_ptr, 1)
    else:
        tl.store(out_ptr, tl.program_id(0))


@interpreted
def neighbour_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at + BLOCK) + 1)


@interpreted
def philox_kernel(out_ptr, seed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    words = tl.philox(seed, at, at * 0 + 1, at * 0 + 2, at * 0 + 3)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * BLOCK + at, words[i].to(tl.int64) & 0xFFFFFFFF)


# ----------------------------------------------------------------------------------------------------------------------
# bfloat16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on infinities, and on integers that wrap


def float32_values(n: int) -> torch.Tensor:
    """Every magnitude, half of the values halfway between two bfloat16; NaN, infinities, both zeros, subnormals."""
    bits = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    bits[: n // 2] = bits[: n // 2] & ~0xFFFF | 0x8000
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3.4e38]).view(torch.int32)
    return torch.cat((special, bits.to(torch.int32))).view(torch.float32)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor):
    """Bit for bit; NaN equals NaN whatever its payload."""
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    same = (got.view(bits) == expected.view(bits)) | (got.isnan() & expected.isnan())
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ"


def test_bfloat16_casts_are_those_of_torch():
    wide = float32_values(10_000)
    assert_same_bits(torch.from_numpy(to_bits(wide.numpy()).view(np.int16)).view(torch.bfloat16), wide.bfloat16())
    integers = torch.arange(-128, 128, dtype=torch.int8)
    for source, dtype in ((wide, torch.bfloat16), (wide.bfloat16(), torch.float32), (integers, torch.bfloat16)):
        out = torch.empty(len(source), dtype=dtype)
        cast_kernel[(-(-len(source) // 1024),)](source, out, len(source), BLOCK=1024)
        assert_same_bits(out, source.to(dtype))
    halves = torch.linspace(-1e5, 1e5, 4000).half()
    for source in (halves, halves.bfloat16()):
        out = torch.empty(4000, dtype=torch.bfloat16 if source.dtype == torch.float16 else torch.float16)
        cast_kernel[(4,)](source, out, 4000, BLOCK=1024)
        assert_same_bits(out, source.to(out.dtype))


def test_bfloat16_arithmetic_is_that_of_torch():
    x = float32_values(10_000).bfloat16()
    y = x.roll(4321)
    n = len(x)
    out = torch.empty(8, n, dtype=torch.bfloat16)
    arithmetic_kernel[(-(-n // 1024),)](x, y, out, n, BLOCK=1024)
    for got, expected in zip(out, (x + y, x * y, x / y, x - y, torch.where(x < y, x, y))):
        assert_same_bits(got, expected)
    assert torch.allclose(out[5].float(), x.exp().float(), rtol=2**-8, atol=0, equal_nan=True)
    assert_same_bits(out[6], x.abs())
    assert_same_bits(out[7], y * torch.tensor(0.1).bfloat16())


def test_bfloat16_dot_and_reductions_are_exact_on_integers():
    """Small integers: every partial sum is exact, so any order gives these bits."""
    chance = torch.Generator().manual_seed(1)
    x, w = torch.randint(-8, 9, (2, 32, 32), generator=chance).bfloat16()
    out = torch.empty(32, 32)
    dot_kernel[(1,)](x, w, out, BLOCK=32)
    assert torch.equal(out, x.float() @ w.float())
    out, index = torch.empty(3, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.int32)
    reduce_kernel[(1,)](x, out, index, ROWS=32, BLOCK=32)
    assert torch.equal(out, torch.stack((x.float().sum(1).bfloat16(), x.amax(1), x.amin(1))))
    first_best = [row.index(max(row)) for row in x.tolist()]
    assert index.tolist() == first_best


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_of_a_dot_has_the_same_bits_wherever_it_stands(dtype):
    chance = torch.Generator().manual_seed(2)
    x, w = torch.randn(2, 32, 32, generator=chance).to(dtype)
    order = torch.randperm(32, generator=chance)
    out, turned = torch.empty(2, 32, 32)
    dot_kernel[(1,)](x, w, out, BLOCK=32)
    dot_kernel[(1,)](x[order].contiguous(), w, turned, BLOCK=32)
    assert torch.equal(turned, out[order])
    assert torch.allclose(out, x.float() @ w.float(), rtol=1e-5, atol=1e-5)


def test_a_second_repair_changes_nothing():
    before = InterpreterBuilder.cast_impl
    repair_bfloat16()
    assert InterpreterBuilder.cast_impl is before


# ----------------------------------------------------------------------------------------------------------------------
# The kernels stay interpreted when the variable has gone


def test_interpreter_works_without_the_variable():
    """Nested functions of tl as well: Philox gives Random123's known answer for this counter and key."""
    assert "TRITON_INTERPRET" not in os.environ
    import kernels

    out = torch.empty(4, 8, dtype=torch.int64)
    philox_kernel[(1,)](out, (7 << 32) + 5, BLOCK=8)
    assert out.T.tolist() == [list(kernels.philox(at, 1, 2, 3, 5, 7)) for at in range(8)]
    assert not kernels.on_triton("auto", torch.zeros(1)) and kernels.on_triton("triton", torch.zeros(1))


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def test_bytes_are_counted_per_name():
    x, out = torch.arange(100.0), torch.empty(100)
    with watch(x=x, result=out) as memory:
        copy_kernel[(4,)](x, out, 100, STRIDE=32, BLOCK=32)
        copy_kernel[(2,)](x, out, 50, STRIDE=32, BLOCK=32)
    assert memory.loaded == {"x": 600} and memory.stored == {"result": 600} and memory.unique_loaded == {"x": 400}
    assert not memory.violations and not memory.conflicts and torch.equal(x, out)


def test_a_view_has_its_own_name_inside_its_storage():
    pages = torch.arange(64.0).view(2, 32)
    with watch(k=pages[0], v=pages[1]) as memory:
        copy_kernel[(1,)](pages[0], pages[1], 32, STRIDE=32, BLOCK=32)
    assert memory.loaded == {"k": 128} and memory.stored == {"v": 128}


def test_launch_arguments_are_registered_while_their_launch_runs():
    x, out = torch.arange(32.0), torch.empty(32)
    with watch() as memory:
        copy_kernel[(1,)](x, out, 32, STRIDE=32, BLOCK=32)
    assert memory.loaded == {"x_ptr": 128} and memory.stored == {"out_ptr": 128} and not memory.violations


def test_an_access_outside_is_recorded_and_not_carried_out():
    whole = torch.zeros(64)
    x, out = torch.arange(32.0), torch.from_numpy(whole.numpy()[:32])  # a storage that ends within another's memory
    with watch(x=x, out=out) as memory:
        copy_kernel[(2,)](x, out, 64, STRIDE=32, BLOCK=32)
    assert [(v.kernel, v.program, v.kind, v.n_lanes, v.near) for v in memory.violations] == [
        ("copy_kernel", (1, 0, 0), "load", 32, "x + 128"),
        ("copy_kernel", (1, 0, 0), "store", 32, "out + 128"),
    ]
    assert torch.equal(whole[:32], x) and not whole[32:].any()


@pytest.mark.parametrize("wide", [True, False])
def test_an_int32_offset_beyond_2_31_is_stopped_before_it_reads(wide):
    """The pages of an empty tensor of 2 GB are mapped only when they are touched."""
    row, stride = torch.tensor([2**19 + 1], dtype=torch.int32), 2**12
    x, out = torch.empty(2**31 + 2**13, dtype=torch.int8), torch.zeros(4, dtype=torch.int8)
    x[2**31 + 2**12 : 2**31 + 2**12 + 4] = torch.tensor([1, 2, 3, 4])
    with watch(x=x) as memory:
        far_kernel[(1,)](x, out, row, stride, WIDE=wide)
    if wide:
        assert not memory.violations and out.tolist() == [1, 2, 3, 4]
    else:
        assert [(v.kind, v.n_lanes) for v in memory.violations] == [("load", 4)] and out.tolist() == [0] * 4


# ----------------------------------------------------------------------------------------------------------------------
# Programs


def test_programs_that_share_a_cell_conflict_unless_they_use_atomics():
    out, ticket = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with watch(out=out, ticket=ticket) as memory:
        one_cell_kernel[(3,)](out, ticket, ATOMIC=True)
        for _ in range(2):  # one program a launch: launches follow each other
            one_cell_kernel[(1,)](out, ticket, ATOMIC=False)
    assert not memory.conflicts and ticket.item() == 3 and memory.loaded["ticket"] == 12
    with watch(out=out) as memory:
        one_cell_kernel[(3,)](out, ticket, ATOMIC=False)
    assert [(c.kind, c.name, c.offset, c.programs) for c in memory.conflicts] == [
        ("WW", "out", 0, ((0, 0, 0), (1, 0, 0))),
        ("WW", "out", 0, ((1, 0, 0), (2, 0, 0))),
    ]


def test_reading_what_another_program_writes_conflicts_in_either_order():
    kinds = set()
    for seed in range(8):
        x = torch.zeros(64)
        with watch(x=x) as memory, shuffled(seed):
            neighbour_kernel[(3,)](x, BLOCK=16)
        assert {c.name for c in memory.conflicts} == {"x"} and len(memory.conflicts) == 2
        kinds |= {c.kind for c in memory.conflicts}
    assert kinds == {"RAW", "WAR"}


def test_overlapping_blocks_conflict_and_parts_of_a_word_do_not():
    x, out = torch.arange(64, dtype=torch.int8), torch.empty(64, dtype=torch.int8)
    with watch(out=out) as memory:
        copy_kernel[(8,)](x, out, 64, STRIDE=8, BLOCK=8)
        assert not memory.conflicts
        copy_kernel[(8,)](x, out, 64, STRIDE=4, BLOCK=8)
    assert len(memory.conflicts) == 7 and memory.conflicts[0].offset == 4


def test_shuffled_programs_all_run_once_in_an_order_of_the_seed():
    def order(seed):
        out, ticket = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with shuffled(seed), watch(out=out) as memory:
            one_cell_kernel[(6,)](out, ticket, ATOMIC=False)
        return [c.programs[0][0] for c in memory.conflicts] + [out.item()]

    orders = [order(seed) for seed in (0, 0, 1, 2)]
    assert orders[0] == orders[1] and len({tuple(x) for x in orders}) == 3
    assert all(sorted(x) == list(range(6)) for x in orders)


# ----------------------------------------------------------------------------------------------------------------------
# The trace of launches


def test_the_trace_is_equal_for_equal_rounds_and_sees_a_changed_pointer_or_scalar():
    x = torch.arange(64.0)

    def round_(source, n=32):
        workspace = torch.empty(64)
        copy_kernel[(1,)](source, workspace, n, STRIDE=32, BLOCK=32, num_warps=2)
        copy_kernel[(1,)](workspace, torch.empty(64), n, STRIDE=32, BLOCK=32, num_warps=2)
        trace = list(memory.launches)
        memory.launches.clear()
        return trace

    with watch(x=x) as memory:
        first = round_(x)
        keep = [torch.empty(64) for _ in range(5)]  # the allocator now gives other addresses
        assert round_(x) == first and len(keep) == 5
        assert round_(x[16:]) != first and round_(x, 31) != first
    assert first[0].kernel == "copy_kernel" and first[0].grid == (1,)
    assert first[0].pointers == (("x_ptr", "x+0"), ("out_ptr", "#1+0"))
    assert first[1].pointers[0] == ("x_ptr", "#1+0")
    assert first[0].scalars == (("n", 32), ("STRIDE", 32), ("BLOCK", 32), ("num_warps", 2))
