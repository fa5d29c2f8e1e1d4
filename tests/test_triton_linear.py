"""The products of a decode step and the exit head's confidence, as interpreted kernels, against float64 and by counting."""

import math

import pytest
import torch
from helpers import tiny_model
from interpreter import shuffled, watch

import kernels
from kernels import CONFIDENCES, Norm, QuantizedWeight

DTYPES = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}  # error that is allowed in any case
KINDS = {"float": None, "int8": (8, 128), "int4 128": (4, 128), "int4 32": (4, 32)}
CALLS = {  # what the layers of the two architectures ask for
    "plain": {},
    "residual": {"residual": True},
    "bias, residual": {"bias": True, "residual": True},
    "LayerNorm, bias, gelu": {"norm": "layer", "bias": True, "activation": "gelu"},
    "RMSNorm, swiglu": {"norm": "rms", "activation": "swiglu"},
    "RMSNorm": {"norm": "rms"},
}
SIZES = [(1, 64, 48), (2, 80, 100), (5, 960, 96), (16, 1600, 34), (17, 24, 258), (40, 129, 66), (64, 64, 16)]


def rand(*shape, dtype, scale=1.0, shift=0.0):
    return (torch.randn(*shape, dtype=torch.float64) * scale + shift).to(dtype)


def operands(n, n_in, n_out, dtype, kind="float", norm=None, bias=False, activation=None, residual=False):
    """x, weight and the other arguments of linear."""
    torch.manual_seed(n * n_in + n_out)
    weight = rand(n_out, n_in, dtype=dtype, scale=n_in**-0.5, shift=0.02)
    if KINDS[kind]:
        weight = kernels.quantize(weight, *KINDS[kind])
    shift = rand(n_in, dtype=dtype) if norm == "layer" else None
    n_result = n_out // 2 if activation == "swiglu" else n_out
    return (
        rand(n, n_in, dtype=dtype, scale=2, shift=0.5),
        weight,
        rand(n_out, dtype=dtype) if bias else None,
        Norm(rand(n_in, dtype=dtype, scale=0.2, shift=1), shift, 1e-5) if norm else None,
        activation,
        rand(n, n_result, dtype=dtype) if residual else None,
    )


def in_float64(x, weight, *rest):
    """The same arguments in float64, with the values that a quantised weight stands for."""
    if isinstance(weight, QuantizedWeight):
        weight = kernels.dequantize(weight, torch.float64, x.shape[-1])

    def widen(value):
        if isinstance(value, Norm):
            return Norm(value.weight.double(), None if value.bias is None else value.bias.double(), value.eps)
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(widen(value) for value in (x, weight, *rest))


def error(got, expected) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


# ----------------------------------------------------------------------------------------------------------------------
# linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_linear_is_within_the_error_budget(call, kind, dtype):
    """At most twice the reference's own error against float64."""
    first = (list(CALLS).index(call) + 2 * list(KINDS).index(kind)) % len(SIZES)
    for n, n_in, n_out in (SIZES * 2)[first : first + 2]:
        arguments = operands(n, n_in, n_out, dtype, kind, **CALLS[call])
        expected = kernels.linear_ref(*in_float64(*arguments))
        got = kernels.linear(*arguments, impl="triton")
        assert got.shape == expected.shape and got.dtype == dtype
        limit = max(DTYPES[dtype], 2 * error(kernels.linear_ref(*arguments), expected))
        assert error(got, expected) <= limit, (n, n_in, n_out)


@pytest.mark.parametrize("n_in", [1600, 200])
def test_a_large_mean_does_not_cancel_the_deviation(n_in):
    x, weight, _, norm, *_ = operands(3, n_in, 32, torch.float32, norm="layer")
    x += 1000
    expected = kernels.linear_ref(*in_float64(x, weight, None, norm))
    limit = 2 * error(kernels.linear_ref(x, weight, norm=norm), expected)
    assert error(kernels.linear(x, weight, norm=norm, impl="triton"), expected) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_rides_along(kind, dtype):
    arguments = operands(40, 320, 40, dtype, kind, norm="layer", bias=True, activation="gelu", residual=True)
    x, weight, bias, norm, activation, residual = arguments
    together = kernels.linear(*arguments, impl="triton")
    for rows in (slice(0, 1), slice(7, 8), slice(39, 40), slice(3, 8), slice(20, 36)):
        alone = kernels.linear(x[rows], weight, bias, norm, activation, residual[rows], impl="triton")
        assert torch.equal(bits(alone), bits(together[rows]))
    with shuffled(3):
        assert torch.equal(bits(kernels.linear(*arguments, impl="triton")), bits(together))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_of_rows_are_one_launch(kind, dtype):
    """Tile, stages and strides do not know n: rounding to 16 bits would hide a tile that does from the test above."""
    seen = set()
    for n in (1, 5, 16, 17, 64):
        arguments = operands(n, 64, 16, dtype, kind, norm="rms")
        with watch() as memory:
            kernels.linear(*arguments, impl="triton")
            kernels.exit_confidence(arguments[0], arguments[1], arguments[3], impl="triton")
        for launch in memory.launches:
            if launch.kernel in ("_linear_kernel", "_exit_kernel"):
                assert launch.grid[0] == math.ceil(n / 16)
                scalars = tuple(x for x in launch.scalars if x[0] != "n_rows")
                seen.add((launch.kernel, launch.grid[1:], scalars))
    assert len(seen) == (1 if "int4" in kind else 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["RMSNorm, swiglu", "bias, residual"])
def test_weights_are_read_once_and_nothing_else_is_touched(call, kind):
    """x and residual are strided views between NaN; rows of a last, partial block are read again, results written once."""
    for n, n_out in ((1, 96), (5, 96), (16, 40)):
        arguments = operands(n, 320, n_out, torch.bfloat16, kind, **CALLS[call])
        x, weight, bias, norm, activation, residual = arguments
        expected = kernels.linear(*arguments, impl="triton")
        poisoned = x.new_full((n, 3, 352), torch.nan)
        poisoned[:, 1, 16:336] = x
        views = {"x": poisoned[:, 1, 16:336]}
        if residual is not None:
            poisoned = residual.new_full((n, 2, n_out + 8), torch.nan)
            poisoned[:, 1, 8:] = residual
            residual = views["residual"] = poisoned[:, 1, 8:]
        data = weight.data if isinstance(weight, QuantizedWeight) else weight
        if kind == "float":
            around = torch.full((n_out + 4, 320), torch.nan, dtype=x.dtype)
            around[2:-2] = weight
            data = weight = around[2:-2]
        with watch(**views, data=data) as memory:
            got = kernels.linear(views["x"], weight, bias, norm, activation, residual, impl="triton")
        assert torch.equal(got, expected)
        assert memory.violations == [] and memory.conflicts == []
        size = data.numel() * data.element_size()
        blocks = math.ceil(n_out / 16)
        assert memory.unique_loaded["data"] == size
        assert memory.loaded["data"] == size * blocks * 16 // n_out
        normed = norm is not None and "int4" in kind  # by a launch of its own
        assert [launch.kernel for launch in memory.launches] == ["_norm_kernel"] * normed + ["_linear_kernel"]
        if not normed:  # a pass over x for its moments, one for the product, out of the cache
            assert memory.loaded["x"] == blocks * (1 + (norm is not None)) * n * 320 * 2
            assert memory.stored["y"] == got.numel() * 2
        assert memory.unique_loaded["x"] == n * 320 * 2 * (1 + normed)


def test_offsets_beyond_two_to_the_31st():
    """524,300 rows of 4,096 int8 weights, of which three are read; the others are never mapped."""
    n_out, n_in = 524_300, 4096
    data = torch.empty(n_out, n_in, dtype=torch.int8)
    index = torch.tensor([n_out - 1, 7, n_out - 6])
    torch.manual_seed(0)
    data[index] = torch.randint(-127, 128, (3, n_in), dtype=torch.int8)
    weight = QuantizedWeight(data, torch.full((n_out,), 0.01), None, 8, n_in)
    x = torch.randn(2, n_in)
    with watch(data=data) as memory:
        got = kernels.linear(x, weight, index=index, impl="triton")
        best, _, _ = kernels.exit_confidence(x, weight, vocab=index.sort().values, impl="triton")
    expected = x.double() @ data[index].double().t() * 0.01
    assert memory.violations == [] and error(got, expected) < 1e-6
    assert torch.equal(best, index[expected.argmax(-1)])


def test_chosen_rows_are_those_of_the_whole_product():
    x, weight, bias, norm, *_ = operands(5, 160, 100, torch.bfloat16, bias=True, norm="rms")
    index = torch.tensor([0, 3, 4, 50, 99])
    whole = kernels.linear(x, weight, bias, norm, impl="triton")
    assert torch.equal(kernels.linear(x, weight, bias, norm, index=index, impl="triton"), whole[:, index])


def spread(x):
    """The same values with a gap behind each."""
    return torch.stack((x, torch.full_like(x, 3)), -1)[..., 0]


def test_vectors_may_have_gaps():
    x, weight, bias, norm, activation, residual = operands(
        3, 40, 24, torch.float32, "float", "layer", True, "gelu", True
    )
    index = torch.arange(23, -1, -1)
    gaps = Norm(spread(norm.weight), spread(norm.bias), norm.eps)
    dense = (x, weight, bias, norm, activation, residual, index)
    wide = (spread(x), spread(weight), spread(bias), gaps, activation, spread(residual), spread(index))
    assert torch.equal(kernels.linear(*wide, impl="triton"), kernels.linear(*dense, impl="triton"))
    some = torch.tensor([1, 5, 7, 20])
    ours, theirs = (
        kernels.exit_confidence(x, weight, n, ids, impl="triton") for n, ids in ((gaps, spread(some)), (norm, some))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("kind", CONFIDENCES)
def test_an_exit_that_knows_one_token_is_sure(kind):
    x, weight, *_ = operands(3, 40, 24, torch.float32)
    for impl in ("torch", "triton"):
        tokens, log_probs, confidence = kernels.exit_confidence(
            x, weight, vocab=torch.tensor([7]), kind=kind, impl=impl
        )
        assert (tokens.tolist(), log_probs.tolist(), confidence.tolist()) == ([7] * 3, [0.0] * 3, [1.0] * 3)


def test_training_goes_through_the_reference():
    arguments = operands(3, 64, 48, torch.float32, norm="layer", bias=True)
    x, weight, *rest = arguments
    expected = kernels.linear_ref(*arguments)
    with watch() as memory:
        weight.requires_grad_()
        got = kernels.linear(x, weight, *rest, impl="triton")
        got.sum().backward()
        assert torch.equal(got, expected) and weight.grad.abs().sum() > 0 and memory.launches == []
        with torch.no_grad():
            kernels.linear(x, weight, *rest, impl="triton")
        assert len(memory.launches) == 1


def test_long_blocks_go_through_the_library():
    x, weight, *_ = operands(kernels.MAX_LINEAR_ROWS + 1, 32, 16, torch.float32)
    with watch() as memory:
        assert torch.equal(kernels.linear(x, weight, impl="triton"), kernels.linear_ref(x, weight))
        assert kernels.linear(x[:0], weight, impl="triton").shape == (0, 16)
    assert memory.launches == []


def test_shapes_are_kept_and_unknown_activations_refused():
    x, weight, *_ = operands(6, 32, 16, torch.float32)
    got = kernels.linear(x.view(2, 3, 32).transpose(0, 1), weight, impl="triton")
    assert torch.allclose(got, kernels.linear_ref(x, weight).view(2, 3, 16).transpose(0, 1), atol=1e-6)
    with pytest.raises(ValueError, match="activation is 'relu': choose None, gelu, swiglu"):
        kernels.linear(x, weight, activation="relu", impl="triton")
    with pytest.raises(ValueError, match="x has 31 inputs, the weight is \\(16, 32\\)"):
        kernels.linear(x[:, :31], weight, impl="triton")
    row = torch.randn(16)  # a residual is broadcast, as in the reference
    got = kernels.linear(x, weight, residual=row, impl="triton")
    assert torch.allclose(got, kernels.linear_ref(x, weight) + row, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Quantised weights


def test_packed_nibbles_come_back():
    torch.manual_seed(0)
    nibbles = torch.randint(0, 16, (3, 384))
    scale, offset = torch.ones(3, 3), torch.zeros(3, 3)
    weight = QuantizedWeight(kernels.pack_int4(nibbles), scale, offset, 4, 128)
    assert torch.equal(kernels.dequantize(weight, torch.float32, 384), nibbles.float())
    assert weight.data.numel() * 2 == nibbles.numel() / 2


@pytest.mark.parametrize("n_in", [64, 128, 200])
def test_quantised_weights_are_within_half_a_step(n_in):
    torch.manual_seed(0)
    weight = (
        torch.randn(5, n_in) * torch.tensor([1e-3, 1.0, 0.0, 40.0, 1.0])[:, None]
        + torch.tensor([0, 3, 1, 0, 0.0])[:, None]
    )
    eight = kernels.quantize(weight, 8)
    assert ((kernels.dequantize(eight, torch.float64, n_in) - weight).abs() <= eight.scale[:, None] * 0.5001).all()
    for group in (32, 128):
        four = kernels.quantize(weight, 4, group)
        assert four.data.shape == (5, math.ceil(n_in / 128) * 32)
        step, low = (x.float().repeat_interleave(group, 1)[:, :n_in] for x in (four.scale, four.offset))
        limit = step * 0.5001 + (15 * step + low.abs()) * 2**-8  # scale and offset are bfloat16
        assert ((kernels.dequantize(four, torch.float64, n_in) - weight).abs() <= limit).all()
    with pytest.raises(ValueError, match="bits is 4, group 64: choose"):
        kernels.quantize(weight, 4, 64)


# ----------------------------------------------------------------------------------------------------------------------
# exit_confidence


def head(n, n_in, n_vocab, dtype=torch.float32, norm="rms"):
    x, weight, _, norm, *_ = operands(n, n_in, n_vocab, dtype, norm=norm)
    return x, weight * 3, norm


@pytest.mark.parametrize("kind", CONFIDENCES)
@pytest.mark.parametrize("n, n_in, n_vocab", [(1, 64, 300), (5, 160, 100), (17, 96, 65), (40, 24, 33)])
def test_exit_confidence_is_that_of_the_logits(n, n_in, n_vocab, kind):
    x, weight, norm = head(n, n_in, n_vocab, norm="layer" if n_vocab % 2 else "rms")
    vocab = torch.arange(0, n_vocab, 3)
    for chosen, n_used in ((None, None), (None, n_vocab - 13), (vocab, None)):
        arguments = (x, weight, norm, chosen, n_used, kind)
        tokens, log_probs, confidence = kernels.exit_confidence_ref(*in_float64(*arguments))
        got = kernels.exit_confidence(*arguments, impl="triton")
        assert torch.equal(got[0], tokens) and got[0].dtype == torch.int64
        assert (got[1] - log_probs).abs().max() < 1e-5 and (got[2] - confidence).abs().max() < 1e-5
        alone = kernels.exit_confidence(x[-1:], *arguments[1:], impl="triton")
        assert all(torch.equal(together[-1:], single) for together, single in zip(got, alone))
    with shuffled(1):
        again = kernels.exit_confidence(*arguments, impl="triton")
    assert all(torch.equal(one, other) for one, other in zip(got, again))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exit_tokens_are_those_of_the_kernels_own_logits(dtype):
    """Ties after the logits are rounded included: many in bfloat16."""
    x, weight, norm = head(40, 64, 120, dtype)
    weight[60:] = weight[:60]
    weight[60:, 0] += 2**-6  # nearly the same
    tokens, log_probs, _ = kernels.exit_confidence(x, weight, norm, impl="triton")
    logits = kernels.linear(x, weight, norm=norm, impl="triton").float()
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(log_probs, logits.log_softmax(-1).amax(-1), atol=1e-5)
    if dtype == torch.bfloat16:
        assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).any()


def test_exit_confidence_of_quantised_weights():
    x, weight, norm = head(5, 160, 100)
    for four in (False, True):  # int4 by the reference
        arguments = (x, kernels.quantize(weight, 4 if four else 8), norm)
        expected, got = kernels.exit_confidence_ref(*arguments), kernels.exit_confidence(*arguments, impl="triton")
        assert torch.equal(got[0], expected[0]) and torch.allclose(got[2], expected[2], atol=1e-5)


def test_ties_go_to_the_lowest_id_and_have_no_margin():
    x, weight, norm = head(3, 64, 100)
    for first, second in ((5, 7), (5, 90), (31, 32)):  # in one block, in two
        weight[:] = weight * 0.01
        weight[first] = weight[second] = 0.1 * norm.weight
        x[:] = x.abs()
        tokens, _, margin = kernels.exit_confidence(x, weight, norm, kind="margin", impl="triton")
        assert tokens.tolist() == [first] * 3 and margin.tolist() == [0.0] * 3
        weight[first] = weight[second] = 0


def test_exit_heads_with_nan_are_never_sure():
    x, weight, norm = head(3, 64, 100)
    x[1, 5] = torch.nan
    tokens, log_probs, confidence = kernels.exit_confidence(x, weight, norm, impl="triton")
    assert log_probs.isfinite().tolist() == [True, False, True]
    assert 0 <= tokens[1] < 100 and not confidence[1] >= 0


@pytest.mark.parametrize("reduced", [False, True])
def test_exit_confidence_writes_no_logits(reduced):
    x, weight, norm = head(5, 96, 300)
    vocab = torch.arange(0, 300, 6) if reduced else None
    with watch(weight=weight) as memory:
        kernels.exit_confidence(x, weight, norm, vocab, impl="triton")
    n_rows = 300 if vocab is None else len(vocab)
    blocks = math.ceil(n_rows / 16)
    assert memory.violations == [] and memory.conflicts == [] and len(memory.launches) == 2
    assert memory.stored == {"partial": 5 * blocks * 5 * 4, "tokens": 40, "log_probs": 20, "confidences": 20}
    assert memory.unique_loaded["weight"] == n_rows * 96 * 4
    assert memory.loaded["weight"] == blocks * 16 * 96 * 4


# ----------------------------------------------------------------------------------------------------------------------
# In the model


@pytest.mark.parametrize("changes", [{}, {"exit_adapters": ()}, {"exit_vocab": (0, 3, 7, 19)}, {"n_vocab_used": 21}])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_exits_by_kernels_are_those_of_the_reference(arch, changes):
    model = tiny_model(arch, dtype=torch.float32, **changes).requires_grad_(False)
    x = torch.randn(5, model.config.n_embd)
    for exit_layer in (1, 3):
        for kind in CONFIDENCES:
            model.impl = "torch"
            expected, logits = model.exit_confidence(x, exit_layer, kind), model.logits(x, exit_layer)
            model.impl = "triton"
            got = model.exit_confidence(x, exit_layer, kind)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[0], logits.argmax(-1))
            assert torch.allclose(got[1], expected[1], atol=1e-5) and torch.allclose(got[2], expected[2], atol=1e-5)
            assert torch.allclose(got[2], kernels.confidence(logits, kind), atol=1e-5)
        assert torch.allclose(model.logits(x, exit_layer), logits, atol=1e-5)
    with pytest.raises(ValueError, match="exit_layer is 4"):
        model.exit_confidence(x, 4)
