"""decode_attention and append_kv in Triton's interpreter, and int8 caches; each test is named after what it proves."""

import math
from typing import NamedTuple

import pytest
import torch
from helpers import tiny_model, weaker
from interpreter import shuffled, watch

import kernels
from decode import SamplingParams, generate
from model import GPT, GPTConfig, KVCache
from speculative import ExitDrafter, ModelDrafter, speculative_generate

CHUNK = kernels.CHUNK
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = dict(zip(DTYPES, (1e-6, 6e-4, 4e-3)))  # norm-wise, against float64
ROUNDING = dict(zip(DTYPES, (2**-24, 2**-11, 2**-8)))
WILD = 2**30  # a page that does not exist stands in a table's unused entries: nothing may follow it


class Case(NamedTuple):
    """Arguments of one call. The caches hold the past of each row; every other slot is NaN (int8: 77 with NaN scales)."""

    qkv: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    n_head: int
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    scales: tuple | None

    def run(self, impl="triton"):
        return kernels.decode_attention(*self, impl=impl)

    def memory(self) -> tuple:
        """What a call may change."""
        return (self.k, self.v, *(self.scales or ()))

    def fresh(self):
        """The same call on copies of the caches."""
        k, v, *scales = (x.clone() for x in self.memory())
        return self._replace(k=k, v=v, scales=tuple(scales) or None)

    def part(self, rows=slice(None), tokens=slice(None)):
        """Some rows and some of their new tokens, on the same caches."""
        cos, sin = (x if x is None else x[rows, tokens] for x in (self.cos, self.sin))
        changes = {"qkv": self.qkv[rows, tokens], "table": self.table[rows], "positions": self.positions[rows, tokens]}
        return self._replace(**changes, cos=cos, sin=sin)


def make_case(rows, group=1, n_kv=1, head_dim=64, page=16, dtype=torch.float32, int8=False, rotary=True) -> Case:
    """rows: (padding, tokens held, new tokens, padding) of each sequence; pages in a shuffled order, two of them nobody's."""
    chance = torch.Generator().manual_seed(len(rows))
    positions = torch.tensor(
        [[-1] * left + list(range(held, held + n)) + [-1] * right for left, held, n, right in rows]
    )
    max_pages = int(positions.max()) // page + 2
    n_pages = len(rows) * max_pages + 2
    table = torch.randperm(n_pages, generator=chance)[:-2].view(len(rows), max_pages).int()
    for row, (_, held, n, _) in enumerate(rows):
        table[row, -(-(held + n) // page) :] = WILD
    qkv = torch.randn(*positions.shape, (group + 2) * n_kv, head_dim, generator=chance).to(dtype)
    cos = sin = None
    if rotary:
        frequency = 1000.0 ** -(torch.arange(head_dim // 2, dtype=torch.float64) * 2 / head_dim)
        angle = positions.clamp(min=0)[..., None, None] * frequency  # (B, T, 1, D/2)
        cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
        sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    k = torch.full((n_pages, page, n_kv, head_dim), 77 if int8 else math.nan, dtype=torch.int8 if int8 else dtype)
    scales = tuple(torch.full(k.shape[:3], math.nan) for _ in "kv") if int8 else None
    case = Case(qkv, k, k.clone(), table, positions, group * n_kv, cos, sin, scales)
    held = torch.tensor([[held] for _, held, _, _ in rows])
    past = torch.arange(int(held.max())).expand(len(rows), -1)
    old = torch.randn(2, *past.shape, n_kv, head_dim, generator=chance).to(dtype)
    kernels.append_kv_ref(*old, case.k, case.v, table, past.masked_fill(past >= held, -1), scales)
    return case


def expected(case: Case) -> torch.Tensor:
    """float64 attention over caches that hold the new tokens already, 0 at padding."""
    q, cos, sin = (None if x is None else x.double() for x in (case.qkv[:, :, : case.n_head], case.cos, case.sin))
    q = q if cos is None else kernels.rotate_ref(q, cos, sin)
    out = torch.zeros_like(q)
    for row, first, n, start, slots in kernels.plan_rows(case.positions, case.table, case.k.shape[1]):
        k, v = (x.flatten(0, 1)[slots].double() for x in (case.k, case.v))
        if case.scales is not None:
            k, v = (x * scale.flatten(0, 1)[slots][..., None] for x, scale in zip((k, v), case.scales))
        out[row, first : first + n] = kernels.attend_ref(q[row, first : first + n], k, v, start)
    return out


def error(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.double() - true).norm() / true.norm())


def same(a, b) -> bool:
    """Bit for bit, NaN included."""
    as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return all(torch.equal(*(z.contiguous().view(as_bits[z.element_size()]) for z in pair)) for pair in zip(a, b))


def named(case: Case) -> dict:
    """Tensors for watch()."""
    scales = dict(zip(("k_scale", "v_scale"), case.scales or ()))
    return {"qkv": case.qkv, "table": case.table, "k": case.k, "v": case.v} | scales


def ragged(width: int, lengths) -> list:
    """Rows of `width` new tokens up to each length, rows padded at both ends, an empty one."""
    rows = [(0, length - width, width, 0) for length in lengths] + [(width, 0, 0, 0)]
    return rows + [(1, CHUNK - 2, width - 2, 1), (0, 3, 1, width - 1)] * (width > 2)


SHAPES = {  # new tokens, group, kv heads, head size, page size, rotary, lengths
    "one": (1, 1, 3, 64, 16, False, (1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)),
    "sixteen": (16, 1, 1, 80, 64, False, (16, CHUNK, CHUNK + 15, 2 * CHUNK + 5)),
    "three heads a group": (5, 3, 2, 16, 16, True, (5, CHUNK, CHUNK + 1, 2 * CHUNK + 3)),
    "a full tile": (8, 4, 1, 128, 16, True, (8, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 3)),
    "two tiles": (7, 8, 1, 80, 64, True, (7, CHUNK, CHUNK + 3)),
}


@pytest.mark.parametrize(
    "shape, dtype, int8",
    [(shape, dtype, False) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    + [(shape, torch.float16, False) for shape in ("one", "a full tile")]
    + [(shape, torch.bfloat16, True) for shape in SHAPES]
    + [(shape, dtype, True) for shape in ("one", "three heads a group") for dtype in (torch.float32, torch.float16)],
    ids=str,
)
def test_output_and_caches_equal_the_reference_and_nothing_else_is_touched(shape, int8, dtype):
    width, group, n_kv, head_dim, page, rotary, lengths = SHAPES[shape]
    case = make_case(ragged(width, lengths), group, n_kv, head_dim, page, dtype, int8, rotary)
    reference = case.fresh()
    reference.run("torch")
    with watch(**named(case)) as memory:
        out = case.run()
    assert not memory.violations and not memory.conflicts
    assert out.dtype == dtype and (out[case.positions < 0] == 0).all()
    assert error(out, expected(case)) < LIMITS[dtype]
    if not rotary:
        assert same(case.memory(), reference.memory())  # the untouched slots too
    for got, true, scale, true_scale in zip(
        case.memory(), reference.memory(), case.scales or (None, None), reference.scales or (None, None)
    ):
        written = ~(true if scale is None else true_scale).isnan()
        if scale is None:
            assert torch.equal(~got.isnan(), written)
            assert error(got[written], true[written].double()) < 2 * ROUNDING[dtype]
        else:  # the reference's rotation rounds twice, which is up to half a step of int8 each time in bfloat16
            assert torch.equal(~scale.isnan(), written) and (got[~written] == 77).all()
            assert torch.allclose(scale[written], true_scale[written], rtol=2 * ROUNDING[dtype], atol=0)
            assert (got.int() - true.int())[written].abs().max() <= 2


def test_a_batch_without_rows_is_no_error():
    case = make_case([(0, 3, 2, 0)]).part(rows=slice(0, 0))
    for impl in ("torch", "triton"):
        assert case.run(impl).shape == (0, 2, 1, 64)


def test_every_element_of_the_output_is_written(monkeypatch):
    """Workspaces and outputs come filled with NaN: what a kernel leaves out would show."""
    case = make_case(ragged(5, (5, CHUNK + 1, 3 * CHUNK)), group=3, n_kv=2, head_dim=80)
    new_empty = torch.Tensor.new_empty

    def full_of_nan(*args, **options):
        x = new_empty(*args, **options)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    assert error(case.run(), expected(case)) < LIMITS[torch.float32]


@pytest.mark.parametrize("group", [1, 4, 8])  # 8: five tokens fill two tiles, their keys come in a launch of their own
@pytest.mark.parametrize("kind", [*DTYPES, torch.int8], ids=str)
def test_a_row_has_the_same_bits_whatever_rides_along(kind, group):
    """Five tokens at once, one by one, alone or in a batch, in a small or a large cache: the block crosses a chunk's edge."""
    int8 = kind == torch.int8
    rows = [(0, CHUNK - 2, 5, 0), (0, 0, 5, 0)]
    block = make_case(rows, group, dtype=torch.bfloat16 if int8 else kind, int8=int8)
    single, alone, large = block.fresh(), block.fresh(), block.fresh()
    out = block.run()
    one_by_one = [single.part(tokens=slice(t, t + 1)).run() for t in range(5)]
    assert same([out], [torch.cat(one_by_one, 1)]) and same(block.memory(), single.memory())
    assert same([out], [torch.cat([alone.part(slice(i, i + 1)).run() for i in range(2)])])
    assert same(block.memory(), alone.memory())
    table = torch.cat((block.table, torch.full((2, 40), WILD, dtype=torch.int32)), 1)
    assert same([out], [large._replace(table=table).run()])


@pytest.mark.parametrize("int8", [False, True], ids=["own", "int8"])
def test_the_order_of_programs_changes_no_bit(int8):
    case = make_case(ragged(5, (CHUNK + 2,)), 8, 2, head_dim=16, dtype=torch.float16, int8=int8)
    first = case.fresh()
    out = first.run()
    for seed in range(2):
        other = case.fresh()
        with shuffled(seed):
            assert same([out], [other.run()])
        assert same(first.memory(), other.memory())


@pytest.mark.parametrize("width, group, n_tiles", [(1, 1, 1), (16, 1, 1), (8, 4, 1), (5, 8, 2)])
@pytest.mark.parametrize("int8", [False, True], ids=["own", "int8"])
def test_keys_and_values_are_loaded_once_per_tile_of_rows(width, group, n_tiles, int8):
    lengths = (width, CHUNK + 20)
    case = make_case([(0, n - width, width, 0) for n in lengths], group, 2, 64, dtype=torch.float16, int8=int8)
    with watch(**named(case)) as memory:
        case.run()
    floor = sum(lengths) * 2 * 64 * case.k.element_size()
    scale_floor = sum(lengths) * 2 * 4
    for name in "kv":
        assert memory.unique_loaded[name] == floor and memory.loaded[name] == n_tiles * floor
        assert memory.stored[name] == floor // sum(lengths) * width * 2
        if int8:
            assert memory.loaded[f"{name}_scale"] == n_tiles * scale_floor
    kinds = [launch.kernel for launch in memory.launches]
    assert kinds == ["_append_kernel"] * (n_tiles > 1) + ["_attention_kernel", "_merge_kernel"]


def test_launches_do_not_depend_on_positions():
    case = make_case([(0, 2 * CHUNK, 3, 0), (0, 7, 3, 0)], head_dim=16)
    traces = []
    for shift in (0, 1, 5):
        with watch(**named(case)) as memory:
            case._replace(positions=case.positions - shift).run()
        traces.append(memory.launches)
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("int8", [False, True], ids=["own", "int8"])
def test_pages_beyond_2_31_elements_are_read_and_written(int8):
    """The cache is larger than memory, but only the pages that are used exist."""
    near = make_case([(0, CHUNK - 1, 3, 0), (0, 5, 3, 0)], n_kv=2, head_dim=128, dtype=torch.float16, int8=int8)
    out = near.fresh()
    first_page = 2**31 // near.k[0].numel()
    n_near = len(near.k)
    k, v = (torch.empty(first_page + n_near, *near.k.shape[1:], dtype=near.k.dtype) for _ in "kv")
    scales = near.scales and tuple(torch.empty(k.shape[:3]) for _ in "kv")
    far = near._replace(k=k, v=v, scales=scales, table=near.table.where(near.table == WILD, near.table + first_page))
    for pages, held in zip(far.memory(), near.memory()):
        pages[first_page:] = held
    with watch(**named(far)) as memory:
        got = far.run()
    assert not memory.violations
    assert same([got], [out.run()]) and same([x[first_page:] for x in far.memory()], out.memory())
    new = torch.randn(2, 2, 3, 2, 128).half()
    with watch(**named(far)) as memory:
        kernels.append_kv(*new, far.k, far.v, far.table, far.positions, far.scales, impl="triton")
    assert not memory.violations
    kernels.append_kv_ref(*new, out.k, out.v, out.table, out.positions, out.scales)
    assert same([x[first_page:] for x in far.memory()], out.memory())


@pytest.mark.parametrize("kind", [*DTYPES, torch.int8], ids=str)
def test_append_writes_what_the_reference_writes(kind):
    int8 = kind == torch.int8
    case = make_case(ragged(6, (6, CHUNK + 1)), n_kv=3, head_dim=80, dtype=torch.bfloat16 if int8 else kind, int8=int8)
    reference = case.fresh()
    new = torch.randn(*case.positions.shape, 6, 80).to(case.qkv.dtype)
    new[0, 0] = 0  # nothing to scale by
    k, v = new.chunk(2, 2)  # views, as in the model
    kernels.append_kv_ref(k, v, *reference[1:5], reference.scales)
    with watch(**named(case)) as memory:
        kernels.append_kv(k, v, *case[1:5], case.scales, impl="triton")
    assert not memory.violations and not memory.conflicts and len(memory.launches) == 1
    assert same(case.memory(), reference.memory())


# ----------------------------------------------------------------------------------------------------------------------
# int8 keys and values, the reference too


def test_int8_is_off_by_at_most_half_a_step_and_never_nan():
    x = torch.randn(50, 64) * torch.logspace(-40, 30, 50)[:, None]
    x[7] = 0
    n, scale = kernels.quantise_kv_ref(x)
    assert n.dtype == torch.int8 and n.min() == -127 and n.max() == 127 and (n[7] == 0).all() and scale[7] == 0
    normal = scale > 1e-37
    off = (x.double() - n.double() * scale[:, None].double()).abs()
    assert (off[normal] <= 0.5001 * scale[normal, None].double()).all() and off.isfinite().all()
    ties = torch.tensor([[127.0, 0.5, 1.5, -2.5]])  # scale 1: to the even neighbour
    assert kernels.quantise_kv_ref(ties)[0].tolist() == [[127, 0, 2, -2]]


def test_a_cache_of_another_float_is_refused():
    model = tiny_model(dtype=torch.float32)
    del model.new_cache
    for model.cache_dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match="cache_dtype is torch"):
            generate(model, [[1, 2]], SamplingParams(1))
    for model.cache_dtype in (None, torch.float32, torch.int8):
        assert len(generate(model, [[1, 2]], SamplingParams(1))[0].tokens) == 1


def test_an_int8_cache_has_scales_and_its_views_share_them():
    config = GPTConfig("llama", 11, 64, 3, 4, 32, n_kv_head=2, n_hidden=8)
    model = GPT(config)
    assert model.new_cache(2, 20).scales(1) is None
    model.cache_dtype = torch.int8
    cache = model.new_cache(2, 20)
    assert cache.k.dtype == cache.v.dtype == torch.int8 and cache.k.shape == (3, 4, 16, 2, 8)
    for mine, theirs in zip(cache.scales(1), cache.rows([1]).scales(1)):
        assert mine.shape == (4, 16, 2) and mine.dtype == torch.float32 and mine.data_ptr() == theirs.data_ptr()
    for dtype in (torch.uint8, torch.int16, torch.float8_e5m2):
        with pytest.raises(ValueError, match=f"dtype is {dtype}: a cache holds .* or int8$"):
            KVCache(config, 1, 8, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_greedy_speculation_equals_plain_decoding_with_int8_caches(arch, dtype):
    model = tiny_model(arch, dtype=dtype, poisoned=False)
    weak = weaker(model)
    prompts, sampling = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], SamplingParams(max_new_tokens=30, temperature=0)
    own = [out.logprobs for out in generate(model, prompts, sampling)]
    model.cache_dtype = weak.cache_dtype = torch.int8
    outs = generate(model, prompts, sampling)
    plain = [out.tokens for out in outs]
    off = [abs(a - b) for out, logprobs in zip(outs, own) for a, b in zip(out.logprobs, logprobs)]
    assert max(off) > 1e-4  # it rounds
    for drafter in (ModelDrafter(weak), ExitDrafter(model, 2)):
        for verify in ("rejection", "coupled"):
            outs = speculative_generate(model, drafter, prompts, sampling, 4, verify)
            assert [out.tokens for out in outs] == plain
            assert sum(out.stats.accepted for out in outs) > 0
