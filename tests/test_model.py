"""The model: the cache changes nothing, the parts add up to the whole, exits and padding are what they say."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import all_modes, cached, tiny_model, true_states

import decode
import kernels
from decode import SamplingParams, generate, read_tokens
from model import GPT, GPTConfig, KVCache, rotary_tables

SHAPES = {
    "gpt2": {"arch": "gpt2", "n_kv_head": 4},
    "gpt2-gqa-tied": {"arch": "gpt2", "tie_weights": True, "qkv_bias": False},
    "llama": {"arch": "llama"},
    "llama-mqa-bias": {"arch": "llama", "n_kv_head": 1, "head_dim": 6, "qkv_bias": True},
}


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_cached_forward_equals_uncached_whatever_the_chunks(shape):
    """Chunks 7+1+5+7; ragged rows with padding at either end, or none in a chunk; shuffled pages full of NaN."""
    model = tiny_model(**SHAPES[shape])
    chunks = [  # (width, left padding and tokens of each of four rows)
        (7, [(0, 7), (0, 4), (1, 6), (0, 0)]),
        (1, [(0, 1), (0, 0), (0, 1), (0, 1)]),
        (5, [(0, 5), (0, 5), (2, 3), (1, 2)]),
        (7, [(0, 7), (0, 2), (1, 5), (3, 4)]),
    ]
    totals = [sum(parts[row][1] for _, parts in chunks) for row in range(4)]
    torch.manual_seed(1)
    tokens = torch.randint(24, (4, 20))
    full = model(tokens)
    cache = model.new_cache(4, 20)
    done = [0] * 4
    for width, parts in chunks:
        ids, positions = torch.zeros(4, width, dtype=torch.int64), torch.full((4, width), -1)
        for row, (left, n) in enumerate(parts):
            ids[row, left : left + n] = tokens[row, done[row] : done[row] + n]
            positions[row, left : left + n] = torch.arange(done[row], done[row] + n)
        x = model.embed(ids, positions)
        for first, last in ((0, 1), (1, 3), (3, 4)):
            x = model.run_layers(x, cache, positions, first, last)
        logits = model.logits(x)
        for row, (left, n) in enumerate(parts):
            expected = full[row, done[row] : done[row] + n]
            assert torch.allclose(logits[row, left : left + n], expected, rtol=0, atol=1e-11), (shape, row, done[row])
            done[row] += n
    assert done == totals
    held = ~cache.k[..., 0, 0].isnan()
    assert held.sum().item() == sum(totals) * model.config.n_layer  # nothing else was written
    for row in range(4):
        _, k, v = true_states(model, tokens[row, : totals[row]].tolist())
        for got, expected in zip(cached(cache, row, totals[row]), (k, v)):
            assert torch.allclose(got, expected, rtol=0, atol=1e-11)


@torch.no_grad()
def test_a_later_token_overwrites_a_rejected_one_and_rows_share_their_pages():
    model = tiny_model()
    cache = model.new_cache(3, 12)

    def read(view, ids, start):
        return read_tokens(model, view, ids, [start] * len(ids))

    read(cache, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 0)
    read(cache, [[20, 21, 22], [20, 21, 22], [20, 21, 22]], 3)  # thrown away
    for index in ([2, 0], torch.tensor([2, 0])):
        view = cache.rows(index)
        x = read(view, [[10, 11], [12, 13]], 3)
        assert view.k.data_ptr() == cache.k.data_ptr()
        for i, ids in enumerate(([7, 8, 9, 10, 11], [1, 2, 3, 12, 13])):
            assert torch.allclose(model.logits(x[i]), model(torch.tensor([ids]))[0, -1], rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_prefill_in_chunks_equals_one_pass(arch, monkeypatch):
    """Also longer than the 16 rows below which attention takes its own path."""
    model = tiny_model(arch)
    torch.manual_seed(2)
    prompts = [torch.randint(24, (n,)).tolist() for n in (37, 1, 12, 20)]
    results = []
    for chunk in (512, 5, 1):
        monkeypatch.setattr(decode, "PREFILL_CHUNK", chunk)
        cache = model.new_cache(4, 40)
        x = read_tokens(model, cache, prompts, [0] * 4)
        out = generate(model, prompts, SamplingParams(max_new_tokens=4, temperature=0))
        results.append((x, [cached(cache, row, len(p))[0] for row, p in enumerate(prompts)], out))
    for row, prompt in enumerate(prompts):
        truth = model(torch.tensor([prompt]))[0, -1]
        for x, keys, out in results:
            assert torch.allclose(model.logits(x[row]), truth, rtol=0, atol=1e-11)
            assert torch.allclose(keys[row], results[0][1][row], rtol=0, atol=1e-11)
            assert out[row].tokens == results[0][2][row].tokens


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_fill_kv_writes_what_each_layer_would_write_for_that_input(arch):
    model = tiny_model(arch)
    positions = torch.tensor([[3, 4, -1], [0, 1, 2]])
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    cache, other = model.new_cache(2, 8), model.new_cache(2, 8)
    for past in (cache, other):  # something to attend to
        past.k[:], past.v[:] = 0.5, 0.5
    cache.k[:], cache.v[:] = torch.nan, torch.nan
    model.fill_kv(x, cache, positions, 2)
    for layer in range(model.config.n_layer):
        model.run_layers(x, other, positions, layer, layer + 1)
        if layer < 2:
            assert cache.k[layer].isnan().all() and cache.v[layer].isnan().all()
        else:
            written = ~cache.k[layer].isnan()
            assert written[..., 0, 0].sum() == 5
            assert torch.allclose(cache.k[layer][written], other.k[layer][written], rtol=0, atol=1e-13)
            assert torch.allclose(cache.v[layer][written], other.v[layer][written], rtol=0, atol=1e-13)


@torch.no_grad()
def test_padded_vocabulary_is_minus_infinity_everywhere():
    for changes in ({"tie_weights": True}, {}, {"exit_vocab": (0, 3, 7, 19)}):
        model = tiny_model(vocab_size=24, n_vocab_used=20, **changes)
        x = torch.randn(2, 3, 16, dtype=torch.float64)
        for logits in (model.logits(x), model(torch.ones(2, 3, dtype=torch.int64)), model.logits(x, 2)):
            assert logits.shape == (2, 3, 24) and (logits[..., 20:] == -torch.inf).all()
            assert torch.isfinite(logits[..., [0, 3, 7, 19]]).all()


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_exit_heads_start_as_the_final_head(arch):
    """Step 0 of training is the logit lens, for both adapters and without; a bug of the exit path shows at once."""
    for adapters in ((), ("exit", "draft")):
        config = GPTConfig(arch, 24, 64, 4, 4, 16, n_hidden=24, exit_layers=(1, 3), exit_adapters=adapters)
        torch.manual_seed(0)
        model = GPT(config).double()
        model.final_norm.weight.uniform_(0.5, 2)  # so that a second norm would show
        for head in model.exits.values():
            head.norm.load_state_dict(model.final_norm.state_dict())
        x = torch.randn(2, 3, 16, dtype=torch.float64)
        expected = F.linear(model.final_norm(x), model.token_embedding.weight)
        assert torch.equal(model.logits(x), expected)
        for exit_layer in (1, 3):
            for adapter in ("exit", "draft"):
                assert torch.allclose(model.logits(x, exit_layer, adapter), expected)
    head = model.exits["3"]
    head.adapters["draft"].weight.normal_(0, 0.3)
    assert torch.allclose(model.logits(x, 3, "exit"), model.logits(x))  # the other adapter is its own
    assert not torch.allclose(model.logits(x, 3, "draft"), model.logits(x), atol=0.1)
    # the adapter adds in units of the row's own size: scale does not matter
    assert torch.allclose(model.logits(x * 100, 3, "draft"), model.logits(x, 3, "draft"), atol=1e-3)
    with pytest.raises(ValueError, match=r"exit_layer is 2: this model has exits \(1, 3\)"):
        model.logits(x, 2)


@torch.no_grad()
def test_exit_vocab_restricts_the_exit_heads_only():
    known = (1, 4, 5, 20)
    model, whole = tiny_model(exit_vocab=known), tiny_model()
    whole.load_state_dict(model.state_dict())
    x = torch.randn(5, 16, dtype=torch.float64)
    assert torch.equal(model.logits(x), whole.logits(x))
    for exit_layer in model.config.exit_layers:
        got, full = model.logits(x, exit_layer), whole.logits(x, exit_layer)
        assert torch.allclose(got[:, known], full[:, known], atol=1e-12)
        others = [i for i in range(24) if i not in known]
        assert (got[:, others] == -torch.inf).all() and torch.isfinite(full).all()


@torch.no_grad()
def test_rotary_tables_follow_their_definitions():
    shape = {
        "arch": "llama",
        "vocab_size": 8,
        "block_size": 128,
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 16,
        "n_hidden": 8,
        "rope_theta": 500.0,
    }
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    kinds = {"plain": None, "linear": {"type": "linear", "factor": 4.0}, "llama3": llama3}
    n_stretched, n_kept, n_between = 0, 0, 0
    for name, scaling in kinds.items():
        cos, sin = rotary_tables(GPTConfig(**shape, rope_scaling=scaling))
        for j in range(8):
            frequency = 500.0 ** (-2 * j / 16)
            if name == "linear":
                frequency /= 4
            if name == "llama3":  # as in Hugging Face's modeling_rope_utils, by wavelength
                wavelength = 2 * math.pi / frequency
                if wavelength > 64 / 1.0:
                    frequency /= 8
                    n_stretched += 1
                elif wavelength >= 64 / 4.0:
                    smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
                    frequency = (1 - smooth) * frequency / 8 + smooth * frequency
                    n_between += 1
                else:
                    n_kept += 1
            for at in (0, 1, 63, 127):
                assert abs(cos[at, j] - math.cos(at * frequency)) < 1e-6 and cos[at, j + 8] == cos[at, j]
                assert abs(sin[at, j + 8] - math.sin(at * frequency)) < 1e-6 and sin[at, j] == -sin[at, j + 8]
    assert n_stretched and n_kept and n_between
    with pytest.raises(ValueError, match="rope_type must be default, linear or llama3"):
        GPT(GPTConfig(**shape, rope_scaling={"rope_type": "yarn", "factor": 2}))


@torch.no_grad()
def test_embedding_adds_the_row_of_the_position():
    """And none for llama. Padding is in range, whatever it holds."""
    tokens, positions = torch.tensor([[3, 5, 0]]), torch.tensor([[0, 63, -1]])
    for arch in ("gpt2", "llama"):
        model = tiny_model(arch)
        x = model.embed(tokens, positions)
        for t, (token, at) in enumerate(((3, 0), (5, 63))):
            place = model.position_embedding.weight[at] if arch == "gpt2" else 0
            assert torch.equal(x[0, t], model.token_embedding.weight[token] + place)


@torch.no_grad()
def test_rotary_attention_sees_distances_only():
    """The same tokens 9 positions later give the same output: no absolute position leaks into a llama."""
    model = tiny_model("llama")
    outputs = []
    for start in (0, 9):
        positions = torch.arange(5)[None] + start
        x = model.embed(torch.tensor([[3, 1, 4, 1, 5]]), positions)
        outputs.append(model.run_layers(x, None, positions, 0, 4))
    assert torch.allclose(outputs[0], outputs[1], rtol=0, atol=1e-5)  # the tables are float32


def test_untied_output_is_its_own_and_tied_is_the_embedding():
    tied, untied = tiny_model(tie_weights=True), tiny_model()
    assert tied.output is None and "output.weight" not in tied.state_dict()
    with torch.no_grad():
        x = torch.randn(3, 16, dtype=torch.float64)
        assert torch.equal(tied.logits(x), F.linear(tied.final_norm(x), tied.token_embedding.weight))
        assert torch.equal(untied.logits(x), F.linear(untied.final_norm(x), untied.output.weight))
        for model, weight in ((tied, tied.token_embedding.weight), (untied, untied.output.weight)):
            z = model.exits["2"](x, "exit")
            assert torch.equal(model.logits(x, 2), F.linear(z, weight))  # the exits share the output matrix


def test_every_parameter_receives_a_gradient():
    """Training reaches all of it, exits and both adapters included; padded rows do not poison it."""
    for arch in ("gpt2", "llama"):
        model = tiny_model(arch, n_vocab_used=20, exit_vocab=(0, 2, 5, 9))
        ids = torch.tensor([[1, 2, 5, 9, 0, 2]])
        positions = torch.arange(6)[None]
        x, loss = model.embed(ids, positions), 0.0
        for layer in range(4):
            x = model.run_layers(x, None, positions, layer, layer + 1)
            for adapter in ("exit", "draft") if layer < 3 else (None,):
                logits = model.logits(x) if adapter is None else model.logits(x, layer + 1, adapter)
                loss = loss + F.cross_entropy(logits[0], torch.tensor([2, 5, 9, 0, 2, 2]))
        loss.backward()
        for name, weight in model.named_parameters():
            assert torch.isfinite(weight.grad).all() and weight.grad.abs().max() > 0, name


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_the_model_runs_in_every_dtype(arch):
    base = tiny_model(arch, dtype=torch.float32, gain=1.0)
    ids = torch.randint(24, (2, 20), generator=torch.Generator().manual_seed(0))
    exact = tiny_model(arch, gain=1.0)
    exact.load_state_dict(base.state_dict())
    truth = exact(ids)
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(arch, dtype=torch.float32, gain=1.0, poisoned=False).to(dtype)
        logits = model(ids)
        assert logits.dtype == model.dtype == model.new_cache(1, 4).k.dtype == dtype
        assert (logits.double() - truth).abs().max() < 20 * torch.finfo(dtype).eps * truth.abs().max()
        out = generate(model, [[1, 2, 3], [4]], SamplingParams(max_new_tokens=8))
        assert [len(o.tokens) for o in out] == [8, 8] and all(math.isfinite(lp) for o in out for lp in o.logprobs)


GOOD = {"arch": "gpt2", "vocab_size": 8, "block_size": 8, "n_layer": 3, "n_head": 2, "n_embd": 8}


@pytest.mark.parametrize(
    "name, value, changes",
    [
        ("arch", "bert", {}),
        ("vocab_size", 0, {}),
        ("vocab_size", 8.0, {}),
        ("block_size", -1, {}),
        ("n_layer", 0, {}),
        ("n_head", "2", {}),
        ("n_embd", 7, {}),
        ("n_kv_head", 3, {}),
        ("n_kv_head", 0, {}),
        ("head_dim", 3, {"arch": "llama", "n_hidden": 8}),
        ("head_dim", 0, {}),
        ("n_hidden", None, {"arch": "llama"}),
        ("n_hidden", 0, {}),
        ("n_vocab_used", 9, {}),
        ("n_vocab_used", 0, {}),
        ("exit_layers", (0, 1), {}),
        ("exit_layers", (1, 3), {}),
        ("exit_layers", (2, 1), {}),
        ("exit_layers", (1, 1), {}),
        ("exit_vocab", (), {}),
        ("exit_vocab", (3, 2), {}),
        ("exit_vocab", (0, 8), {}),
        ("exit_vocab", (0, 7), {"n_vocab_used": 6}),
        ("exit_adapters", ("exit", "drafts"), {}),
    ],
)
def test_a_bad_config_is_refused_in_one_line(name, value, changes):
    with pytest.raises(ValueError) as error:
        GPTConfig(**GOOD | changes | {name: value})
    message = str(error.value)
    assert message.startswith(f"{name} is {value!r}: ") and "\n" not in message


def test_wrong_uses_are_refused_in_one_line():
    model = GPT(GPTConfig(**GOOD))
    with pytest.raises(ValueError, match="9 tokens are more than block_size 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype is torch.int32"):
        KVCache(model.config, 1, 8, dtype=torch.int32)
    cache = KVCache(model.config, 2, 8, page_size=4)
    assert cache.capacity == 8 and cache.k.shape == (3, 4, 4, 2, 4) and cache.block_table.tolist() == [[0, 1], [2, 3]]


def quantised(model: GPT, bits: int, group=32) -> tuple[GPT, GPT]:
    """The model with quantised matrices, and one whose dense matrices are those values."""
    small, dense = copy.deepcopy(model), copy.deepcopy(model)
    for name, weight in model.state_dict().items():
        if weight.dim() == 2 and "position" not in name:
            new = kernels.quantize(weight, 8 if "token" in name else bits, group)
            small.set_weight(name, new)
            dense.set_weight(name, kernels.dequantize(new, torch.float64, weight.shape[1]))
    return small, dense


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_model_built_on_meta_is_what_its_weights_make_it(arch):
    model = tiny_model(arch, poisoned=False, exit_vocab=(0, 3, 7))
    with torch.device("meta"):
        built = GPT(model.config)
    state = model.state_dict()
    assert all(weight.is_meta for weight in built.state_dict().values()) and built.state_dict().keys() == state.keys()
    for name, weight in state.items():
        built.set_weight(name, weight)
        assert built.state_dict()[name].data_ptr() == weight.data_ptr()  # taken over, not copied
    assert not any(tensor.is_meta for tensor in (*built.parameters(), *built.buffers()))
    tokens = torch.randint(24, (2, 9), generator=torch.Generator().manual_seed(0))
    assert (built.device.type, built.dtype) == ("cpu", torch.float64)
    for exit_layer in (None, 2):
        x = [m.run_layers(m.embed(tokens, tokens), None, tokens, 0, 3) for m in (model, built)]
        assert torch.allclose(*(m.logits(y, exit_layer) for m, y in zip((model, built), x)), rtol=0, atol=1e-6)
    built.double()  # the rotary tables too, which float32 weights would have left alone
    assert torch.equal(built(tokens), model(tokens))


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_model_is_the_one_with_those_values(arch, bits):
    """In float64 to the last bit or two: every product, the embedding, exits, skipped layers' keys; then moved and recast."""
    small, dense = quantised(tiny_model(arch, tie_weights=bits == 8, exit_vocab=(0, 3, 7, 19)), bits)
    prompts = [[1, 2, 3, 4, 5], [7, 8]]
    for decode_ in ("plain", "exit", "early", "propagate"):
        outs = [all_modes(m)[decode_](prompts, SamplingParams(12, seed=3)) for m in (small, dense)]
        assert [out.tokens for out in outs[0]] == [out.tokens for out in outs[1]], decode_
    tokens = torch.arange(10)[None]
    assert torch.allclose(small(tokens), dense(tokens), rtol=0, atol=1e-11)
    scale = small.blocks[0].up.weight.scale
    small.to(torch.float32)
    assert small.dtype == small(tokens).dtype == torch.float32 and torch.equal(small.blocks[0].up.weight.scale, scale)
    assert torch.allclose(small(tokens).double(), dense(tokens), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="is quantised"):
        small.state_dict()


def test_weights_that_do_not_fit_are_refused():
    model = tiny_model()
    eight, four = (kernels.quantize(torch.randn(24, 16), bits) for bits in (8, 4))
    for name, weight, words in (
        ("blocks.9.qkv.weight", torch.zeros(2, 2), "is no weight"),
        ("blocks.0.qkv.scale", torch.zeros(2, 2), "is no weight"),
        ("cos", torch.zeros(64, 4), "is no weight"),
        ("blocks.0.qkv.weight", torch.zeros(2, 2), "this model has"),
        ("blocks.0.qkv.weight", eight, "this model has"),
        ("blocks.0.qkv.weight", four, "this model has"),
        ("token_embedding.weight", torch.zeros(24, 16, dtype=torch.int64), "this model has"),
        ("token_embedding.weight", four, "choose int8"),
        ("final_norm.weight", eight, "choose int8"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            model.set_weight(name, weight)
        assert name in str(error.value) and "\n" not in str(error.value)
    model.set_weight("token_embedding.weight", eight)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4", "int8 float32", "int4 float32"])
def test_a_packed_model_says_what_it_said(kind):
    """Logits, exits, skipped layers' keys and state; .to() undoes it, and a copy shares it."""
    bits, dtype = {"int8": 8, "int4": 4}.get(kind[:4], 16), torch.float32 if "float32" in kind else torch.bfloat16
    wide = {"n_embd": 64, "n_hidden": 96, "vocab_size": 48}
    model = tiny_model(poisoned=False, exit_vocab=tuple(range(0, 48, 3)), tie_weights=True, **wide)
    dense = copy.deepcopy(model)
    if bits < 16:
        model, dense = quantised(model, bits)
    model.to(dtype)
    before = None if bits < 16 else {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens = torch.randint(48, (3, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(3, 12)

    def say(m):
        x = m.run_layers(m.embed(tokens, positions), None, positions, 0, 3)
        cache = m.new_cache(3, 12)
        m.fill_kv(x, cache, positions, 3)
        tokens_, _, sure = m.exit_confidence(x.flatten(0, 1), 2)
        return [
            m(tokens),
            m.logits(x, 2),
            m.logits(x, 2, "draft"),
            cache.k[3, :, :12],
            cache.v[3, :, :12],
            tokens_,
            sure,
        ]

    truth, loose = say(dense), say(model)
    assert model.pack() is model
    packed = say(model)
    # another rounding, not another value: half as far again from the truth as before
    for got, was, true in zip(packed, loose, truth):
        finite = true.isfinite()
        errors = [(y.double() - true)[finite].square().mean().sqrt().item() for y in (got, was)]
        assert torch.equal(got.isfinite(), finite) and errors[0] <= 1.5 * errors[1] + 1e-6, errors
    assert all(torch.equal(*pair) for pair in zip(say(copy.deepcopy(model)), packed))
    if bits == 16:
        assert {
            name: torch.equal(weight, before[name]) for name, weight in model.state_dict().items()
        } == dict.fromkeys(before, True)
        model.to(dtype)
        assert all(torch.equal(*pair) for pair in zip(say(model), loose))
    if dtype == torch.float32:  # else norms and scales were rounded
        assert all(torch.allclose(*pair, rtol=0, atol=1e-4, equal_nan=True) for pair in zip(say(model.double()), truth))


@torch.no_grad()
def test_new_exits_of_a_packed_model_know_their_own_tokens():
    torch.manual_seed(0)
    config = GPTConfig("llama", 256, 16, 3, 4, 64, n_hidden=96, exit_layers=(1,), exit_vocab=tuple(range(64)))
    for model in (GPT(config).bfloat16().pack(), GPT(replace(config, exit_vocab=None)).bfloat16().pack()):
        x = torch.randn(2, 64).bfloat16()
        model.set_exits((2,), tuple(range(128, 192)))
        assert torch.allclose(model.logits(x, 2)[:, 128:192], model.logits(x)[:, 128:192], atol=1e-2)
        assert (model.exit_confidence(x, 2)[0] >= 128).all()
        model.set_exits((2,))
        assert torch.allclose(model.logits(x, 2), model.logits(x), atol=1e-2)
