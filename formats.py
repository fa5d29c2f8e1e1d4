"""What checkpoint files say: the shape of the model, its tokenizer, and where each tensor lies. No weight is read here.

    our own folder      config.json + model.safetensors
    Hugging Face        the same names, or shards with an index; GPT-2, Llama, Mistral, Qwen2 in transformers' words
    GGUF                llama, qwen2, gpt2; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K
    nanoGPT             ckpt.pt

describe(path) gives a Source; locate() lays its tensors beside ours and refuses what is missing, left over, misshapen.
What a file asks for and we would compute wrongly (another activation, a sliding window) is refused by name.
"""

import dataclasses
import functools
import json
import math
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

import kernels
from kernels import QuantizedWeight
from model import GPTConfig
from tokenizer import Tokenizer, gguf_tokenizer, hugging_face_tokenizer, no_tokenizer, our_tokenizer, read_json


class Stored(NamedTuple):
    """A tensor in a file, not read yet."""

    shape: tuple[int, ...]
    kind: str  # as the file calls it: "BF16", "Q4_1"
    read: Callable[[int, int], torch.Tensor]  # rows first .. last-1, float; a view of the file where it can be one
    packed: Callable[[int, int], QuantizedWeight] | None = None  # the same as int4, where the file's blocks are that
    scattered: bool = False  # a row of it lies all over the file's tensor

    def unfolded(self) -> "Stored":
        """To be read in many pieces: a scattered one is mapped once for all of them."""
        return held(self.read(0, self.shape[0])) if self.scattered else self


class Source(NamedTuple):
    """What a checkpoint says, before a weight is read."""

    file: Path  # that messages speak of
    config: GPTConfig
    tensors: dict[str, Stored]
    names: dict[str, str] | None  # a table of NAMES; None: our own
    tokenizer: Callable[[], Tokenizer]  # reads it; raises Inexpressible where there is none for tiktoken


def describe(path: Path) -> Source:
    """What a folder or file says of its model; ValueError for what is broken or not supported."""
    if path.suffix == ".pt":
        return read_nanogpt(path)
    if path.is_file():
        try:
            return read_gguf(path)
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{path}: metadata of a wrong kind ({type(error).__name__} {error})") from None
    file = path / "config.json"
    described = read_json(file)
    if described.get("format") in ("nanospec-heads", "nanospec-draft-head"):
        raise ValueError(f"{path}: heads for a model, and no model: give them as sample.py --exits or --draft")
    if described.get("format") != "nanospec":
        config = hugging_face_config(file, described)
        table = NAMES["gpt2" if config.arch == "gpt2" else "llama"]
        tensors = open_safetensors(path)
        if config.arch == "gpt2":  # Conv1D keeps (in, out) matrices
            conv1d = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
            tensors = {name: transposed(x) if conv1d.search(name) else x for name, x in tensors.items()}
        read = functools.partial(hugging_face_tokenizer, path, config.vocab_size)
        return Source(path / "model.safetensors", config, tensors, table, read)
    shape, about = described.get("model"), described.get("tokenizer")
    if type(shape) is not dict:
        raise ValueError(f"{file}: field model is missing")
    config = make_config(file, shape)
    read = functools.partial(our_tokenizer, path, about, config.n_vocab_used)
    return Source(path / "model.safetensors", config, open_safetensors(path), None, read)


def locate(file: Path, model: nn.Module, names: dict | None, tensors: dict[str, Stored]) -> dict[str, list[Stored]]:
    """{our name: its parts, one below the other}, or a ValueError: nothing is read before all is there and fits."""
    prefixes = ("", "transformer.", "model.")  # whether the body was saved alone or inside a model with a head
    found, known = {}, set()
    for ours, wanted in model.state_dict().items():
        theirs = [ours] if names is None else foreign_names(names, ours)
        there = [next((prefix + name for prefix in prefixes if prefix + name in tensors), None) for name in theirs]
        if None in there:
            raise ValueError(f"{file}: tensor {theirs[there.index(None)]} is missing")
        parts = [tensors[name] for name in there]
        readable = all(part.kind in READABLE and len(part.shape) == wanted.ndim for part in parts)
        fits = all(part.shape[1:] == wanted.shape[1:] for part in parts)
        if not readable or not fits or sum(part.shape[0] for part in parts) != len(wanted):
            stored = " + ".join(f"{part.kind} {part.shape}" for part in parts)
            raise ValueError(
                f"{file}: tensor {' + '.join(there)} is {stored}, but the config needs {tuple(wanted.shape)}"
            )
        found[ours] = parts
        known.update(there)
    for name in sorted(set(tensors) - known):
        if names is None or not HARMLESS.search(name):
            raise ValueError(f"{file}: tensor {name} is none that the config speaks of")
    return found


# ------------------------------------------------------------------------------------------------------------- configs


def make_config(file: Path, fields: dict) -> GPTConfig:
    """GPTConfig from fields whose names are its own; what is wrong is said with the file's name."""
    for field in dataclasses.fields(GPTConfig):
        if field.default is dataclasses.MISSING and fields.get(field.name) is None:
            raise ValueError(f"{file}: field {field.name} is missing")
    try:
        return GPTConfig(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


SHAPE = "vocab_size block_size n_layer n_head n_embd n_hidden norm_eps n_kv_head head_dim"
SHAPE_OF = {  # transformers' names for the same
    "gpt2": "vocab_size n_positions n_layer n_head n_embd n_inner layer_norm_epsilon",
    "llama": "vocab_size max_position_embeddings num_hidden_layers num_attention_heads hidden_size intermediate_size"
    " rms_norm_eps num_key_value_heads head_dim",
}
KINDS = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "llama"}  # model_type: arch
COMPUTED = {  # variants: field, what we compute (first: what its absence means)
    "": {
        "quantization_config": (None,),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": (None, {}),
        "partial_rotary_factor": (1.0, None),
        "rope_interleaved": (False,),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "embedding_multiplier": (1.0, None),
        "residual_multiplier": (1.0, None),
        "attention_multiplier": (None, 1.0),
        "logits_scaling": (1.0, None),
    },
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,)},
    "mistral": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"hidden_act": ("silu",), "use_sliding_window": (False,), "use_mrope": (False,)},
}


def hugging_face_config(file: Path, described: dict) -> GPTConfig:
    """Shape of a model from transformers' config.json; a variant that we would compute wrongly is refused."""
    kind = described.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"{file}: model_type is {kind!r}: only {', '.join(KINDS)} can be read")
    for name, allowed in (COMPUTED[""] | COMPUTED[kind]).items():
        if described.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{file}: {name} is {described[name]!r}: only {allowed[0]!r} can be computed")
    fields = {"arch": KINDS[kind], "tie_weights": described.get("tie_word_embeddings", kind == "gpt2")}
    for number, (ours, theirs) in enumerate(zip(SHAPE.split(), SHAPE_OF[KINDS[kind]].split())):
        if described.get(theirs) is not None:
            fields[ours] = described[theirs]
        elif number < (5 if kind == "gpt2" else 6):  # the rest has defaults
            raise ValueError(f"{file}: field {theirs} is missing")
    if kind != "gpt2":
        fields.setdefault("norm_eps", 1e-6)  # transformers' default
    window, layers = described.get("sliding_window"), described.get("layer_types") or []
    if kind == "mistral" and window is not None and not window >= fields["block_size"]:
        raise ValueError(
            f"{file}: sliding_window is {window!r}, below max_position_embeddings: only full attention can be"
        )
    if set(layers) - {"full_attention"}:
        raise ValueError(
            f"{file}: layer_types holds {min(set(layers) - {'full_attention'})!r}: only full_attention can be"
        )
    if kind != "gpt2":
        fields |= rotary_fields(file, described)
        fields["qkv_bias"] = kind == "qwen2"
    return make_config(file, fields)


def rotary_fields(file: Path, described: dict) -> dict:
    """rope_theta and rope_scaling: one field rope_parameters in newer files, two in older ones."""
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{file}: rope_parameters is {rope!r}: only one set for all layers can be computed")
    theta = rope.get("rope_theta", described.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    numbers = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in numbers:
        raise ValueError(f"{file}: the model's rope_type is {kind!r}: only {', '.join(numbers)} can be computed")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{file}: partial_rotary_factor is {rope['partial_rotary_factor']!r}: only 1 can be computed")
    for name in numbers[kind]:
        if not isinstance(rope.get(name), int | float) or rope[name] <= 0:
            raise ValueError(f"{file}: rope_type {kind} needs a number above 0 for {name}, not {rope.get(name)!r}")
    scaling = {"rope_type": kind} | {name: rope[name] for name in numbers[kind]} if numbers[kind] else None
    return {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta})


# --------------------------------------------------------------------------------------------------------------- files

LLAMA = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attn_out": "self_attn.o_proj"}
LLAMA |= {"qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "up": "mlp.gate_proj mlp.up_proj"}
LLAMA |= {"down": "mlp.down_proj"}
GPT2 = {"attn_norm": "ln_1", "qkv": "attn.c_attn", "attn_out": "attn.c_proj", "mlp_norm": "ln_2"}
GPT2 |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
GGUF = {"attn_norm": "attn_norm", "qkv": "attn_q attn_k attn_v", "attn_out": "attn_output", "mlp_norm": "ffn_norm"}
GGUF |= {"up": "ffn_gate ffn_up", "down": "ffn_down"}
GGUF_TOP = {"token_embedding": "token_embd", "position_embedding": "position_embd", "final_norm": "output_norm"}
GGUF_TOP |= {"output": "output", "blocks": "blk"}
NAMES = {  # our module: theirs, several where ours joins them; "blocks" is the list of layers
    "llama": {
        "token_embedding": "embed_tokens",
        "final_norm": "norm",
        "output": "lm_head",
        "blocks": "layers",
        **LLAMA,
    },
    "gpt2": {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f", "output": "lm_head"}
    | {"blocks": "h", **GPT2},
    "gguf-llama": GGUF_TOP | GGUF,
    "gguf-gpt2": GGUF_TOP | GGUF | {"qkv": "attn_qkv", "up": "ffn_up"},
}
# tensors of theirs that we have no use for: masks, tables that we make ourselves, an output that is the embedding
HARMLESS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq|lm_head\.weight|rope_freqs\.weight)$")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READABLE = {*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}


def foreign_names(table: dict[str, str], ours: str) -> list[str]:
    """ "blocks.3.up.weight" -> ["layers.3.mlp.gate_proj.weight", "layers.3.mlp.up_proj.weight"]."""
    *path, module, kind = ours.split(".")
    where = f"{table['blocks']}.{path[1]}." if path else ""
    return [f"{where}{name}.{kind}" for name in table[module].split()]


def mapped(file: Path, first: int, n_bytes: int) -> torch.Tensor:
    """Bytes of a file as a tensor, for as long as that lives: pages of a longer mapping would count as our memory."""
    return torch.from_numpy(np.memmap(file, np.uint8, "c", first, (n_bytes,)))  # "c": never written back


def floats(file: Path, kind: str, shape: tuple[int, ...], start: int) -> Stored:
    """A tensor of ordinary numbers that begins at byte `start` of the file."""
    dtype = FLOATS[kind]
    row = math.prod(shape[1:]) * dtype.itemsize

    def read(first: int, last: int) -> torch.Tensor:
        return mapped(file, start + first * row, (last - first) * row).view(dtype).view(-1, *shape[1:])

    return Stored(shape, kind, read)


def held(tensor: torch.Tensor) -> Stored:
    """A tensor that is in memory already."""
    kind = {dtype: kind for kind, dtype in FLOATS.items()}.get(tensor.dtype, str(tensor.dtype))
    return Stored(tuple(tensor.shape), kind, lambda first, last: tensor[first:last])


def transposed(stored: Stored) -> Stored:
    if len(stored.shape) != 2:
        return stored

    def read(first: int, last: int) -> torch.Tensor:
        return stored.read(0, stored.shape[0]).t()[first:last]

    return Stored(stored.shape[::-1], stored.kind, read, scattered=True)


def open_safetensors(folder: Path, stem: str = "model") -> dict[str, Stored]:
    """The tensors of model.safetensors, or of the shards that its index lists."""
    index = folder / f"{stem}.safetensors.index.json"
    names = [f"{stem}.safetensors"]
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index}: field weight_map is missing")
        names = sorted(set(shards.values()))
    elif not (folder / names[0]).exists() and any(folder.glob("*.bin")):
        raise ValueError(
            f"{folder}: only pickled weights (.bin), which can run code; convert them to model.safetensors"
        )
    tensors = {}
    for file in (folder / name for name in names):
        if not file.is_file():
            raise ValueError(f"{file}: there is no such file")
        try:
            with safe_open(file, "pt"):  # it checks that the header is sound and the file as long as it says
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: truncated, or not safetensors ({str(error).splitlines()[0]})") from None
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, about in header.items():
            kind, shape, start = about["dtype"], tuple(about["shape"]), 8 + length + about["data_offsets"][0]
            tensors[name] = floats(file, kind, shape, start) if kind in FLOATS else Stored(shape, kind, None)
    return tensors


def read_nanogpt(file: Path) -> Source:
    """nanoGPT's ckpt.pt. weights_only: a pickle that wants to run code is refused, not run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they speak of versions of pickle
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{file}: not a checkpoint of tensors ({str(error).splitlines()[0][:100]})") from None
    sound = isinstance(content, dict) and all(isinstance(content.get(name), dict) for name in ("model", "model_args"))
    if not sound:
        raise ValueError(f"{file}: fields model and model_args are missing: not nanoGPT's ckpt.pt")
    shape = content["model_args"]
    for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
        if name not in shape:
            raise ValueError(f"{file}: field model_args.{name} is missing")
    fields = {name: shape[name] for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")}
    n_used = 50257 if shape["vocab_size"] == 50304 else None  # nanoGPT pads GPT-2's vocabulary up to a multiple of 64
    config = make_config(file, {"arch": "gpt2", "n_vocab_used": n_used, **fields})
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in content["model"].items()}  # torch.compile's
    if not shape.get("bias", True):  # no bias is a bias of zero, one for each row of the weight
        weights = [(name, tensor) for name, tensor in tensors.items() if re.search(r"(ln_\w+|c_\w+)\.weight$", name)]
        tensors |= {name.removesuffix("weight") + "bias": torch.zeros(len(tensor)) for name, tensor in weights}
    return Source(
        file,
        config,
        {name: held(x) for name, x in tensors.items()},
        NAMES["gpt2"],
        functools.partial(no_tokenizer, file),
    )


# ---------------------------------------------------------------------------------------------------------------- GGUF
#
#     "GGUF" | version | counts | metadata: name, type, value ... | tensors: name, shape, type, offset ... | pad | data
#
# Quantised rows are blocks of 32 or 256 numbers with their own scales. Q4_0, Q4_1 and Q4_K are our int4, groups of 32.
# Metadata are read here: the package's reader makes an array per string, which for SmolLM2's 98,000 takes 1.7 seconds.

GGUF_NUMBERS = dict(enumerate("BbHhIif?--Qqd"))  # type: struct's letter; 8 is a string, 9 an array
GGUF_SHAPE = {  # what stands behind "llama." : ours
    "context_length": "block_size",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_hidden",
    "attention.head_count_kv": "n_kv_head",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.freq_base": "rope_theta",
}
GGUF_CHECKED = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
}


class GgufBytes:
    """The file from its start on; whatever would read behind its end is an error."""

    def __init__(self, file: Path):
        self.file, self.opened, self.size, self.at = file, file.open("rb"), file.stat().st_size, 0

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > self.size - self.at:
            raise ValueError(f"{self.file}: truncated at byte {self.size}")
        self.at += n_bytes
        return self.opened.read(n_bytes)

    def number(self, letter: str):
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int):
        if kind == 8:
            return self.string()
        if kind == 9:
            kind, n = self.number("I"), self.number("Q")
            if kind == 8:
                return [self.string() for _ in range(n)]
            letter = self.letter(kind)
            return list(struct.unpack(f"<{n}{letter}", self.take(n * struct.calcsize(letter))))
        number = self.number(self.letter(kind))
        return float(str(np.float32(number))) if kind == 6 else number  # 1e-5 as it was meant, not as float32 keeps it

    def letter(self, kind: int) -> str:
        letter = GGUF_NUMBERS.get(kind, "-")
        if letter == "-":
            raise ValueError(f"{self.file}: metadata of type {kind}, which GGUF does not have")
        return letter


def read_gguf(file: Path) -> Source:
    """Shape, tokenizer and tensors of a GGUF file of architecture llama, qwen2 or gpt2."""
    try:
        import gguf
    except ImportError:
        raise ValueError(f"{file}: GGUF files need the package gguf: pip install gguf") from None
    if file.stat().st_size < 24:
        raise ValueError(f"{file}: truncated, or not GGUF")
    content = GgufBytes(file)
    if content.take(4) != b"GGUF":
        raise ValueError(f"{file}: not GGUF: it does not begin with these letters")
    version, n_tensors, n_fields = content.number("I"), content.number("Q"), content.number("Q")
    if version not in (2, 3):
        raise ValueError(f"{file}: GGUF version {version}: only 2 and 3, little-endian, can be read")
    fields = {content.string(): content.value(content.number("I")) for _ in range(n_fields)}
    listed = []
    for _ in range(n_tensors):
        name, n_dims = content.string(), content.number("I")
        shape = tuple(content.number("Q") for _ in range(n_dims))[::-1]
        listed.append((name, shape, content.number("I"), content.number("Q")))
    align = fields.get("general.alignment", 32)
    start = -(-content.at // align) * align
    shapes = {name: shape for name, shape, *_ in listed}
    config = gguf_config(file, fields, shapes)
    order = head_order(config) if fields["general.architecture"] == "llama" else {}
    tensors = {}
    for name, shape, kind, offset in listed:
        known = kind in iter(gguf.GGMLQuantizationType)
        kind = gguf.GGMLQuantizationType(kind) if known else kind
        if not known or kind.name not in READABLE:
            raise ValueError(
                f"{file}: tensor {name} is of type {getattr(kind, 'name', kind)}: choose {', '.join(READABLE)}"
            )
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % per_block:
            raise ValueError(f"{file}: tensor {name} is {kind.name} {shape}, not whole blocks of {per_block}")
        if start + offset + math.prod(shape) // per_block * block_bytes > content.size:
            raise ValueError(f"{file}: truncated in tensor {name}")
        if kind.name in FLOATS:
            stored = floats(file, kind.name, shape, start + offset)
        else:
            stored = blocks(file, kind, shape, start + offset, block_bytes * shape[-1] // per_block)
        tensors[name] = reordered(stored, order.get(name.removesuffix(".weight").rpartition(".")[2]))
    if "rope_freqs.weight" in tensors:
        config = dataclasses.replace(config, rope_scaling=llama3_scaling(file, config, tensors["rope_freqs.weight"]))
    table = NAMES["gguf-gpt2" if config.arch == "gpt2" else "gguf-llama"]
    return Source(file, config, tensors, table, functools.partial(gguf_tokenizer, file, fields))


def gguf_config(file: Path, fields: dict, shapes: dict) -> GPTConfig:
    """Shape from the metadata; a field of the architecture that is not known here may change what it computes."""
    arch, shape = fields.get("general.architecture"), {}
    if arch not in ("llama", "qwen2", "gpt2"):
        raise ValueError(f"{file}: general.architecture is {arch!r}: only llama, qwen2 and gpt2 can be read")
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{file}: tensor token_embd.weight is missing")
    for name, value in fields.items():
        if name.startswith(arch + "."):
            short = name.removeprefix(arch + ".")
            if short in GGUF_SHAPE:
                if type(value) not in (int, float):
                    raise ValueError(f"{file}: {name} is {value!r}: only one number for all layers can be computed")
                shape[GGUF_SHAPE[short]] = value
            elif short not in GGUF_CHECKED and value not in (0, False):
                raise ValueError(f"{file}: {name} is {value!r}: not supported")
    if fields.get("split.count", 1) > 1:
        raise ValueError(f"{file}: one of {fields['split.count']} parts: join them with llama.cpp's gguf-split --merge")
    for short, name in GGUF_SHAPE.items():
        if name in ("block_size", "n_layer", "n_head", "n_embd", "n_hidden") and name not in shape:
            raise ValueError(f"{file}: field {arch}.{short} is missing")
    shape |= {"arch": "gpt2" if arch == "gpt2" else "llama", "vocab_size": shapes["token_embd.weight"][0]}
    config = make_config(file, shape | {"tie_weights": "output.weight" not in shapes, "qkv_bias": arch != "llama"})
    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{file}: {arch}.rope.scaling.type is {scaling!r}: only none and linear can be computed")
    if scaling == "linear":
        factor = fields.get(f"{arch}.rope.scaling.factor", 1.0)
        config = dataclasses.replace(config, rope_scaling={"rope_type": "linear", "factor": factor})
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.get(f"{arch}.{name}", config.head_dim) != config.head_dim:
            raise ValueError(f"{file}: {arch}.{name} is {fields[f'{arch}.{name}']}: only the head size can be computed")
    return config


def llama3_scaling(file: Path, config: GPTConfig, stored: Stored) -> dict:
    """Llama 3's scaling from what the converter made of it: a divisor per frequency, the largest being the factor."""
    divisors = stored.read(0, stored.shape[0]).double()
    scaling = {"rope_type": "llama3", "factor": round(float(divisors.max()), 6), "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    turns = 8192 * config.rope_theta**-half / (2 * math.pi)
    keep = ((turns - 1.0) / 3.0).clamp(0, 1)
    expected = 1 / (keep + (1 - keep) / scaling["factor"])
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{file}: rope_freqs.weight is not Llama 3's scaling: not supported")
    return scaling


def head_order(config: GPTConfig) -> dict[str, torch.Tensor]:
    """Our rows of q and k in theirs: for llama the converter puts the two halves of a rotated pair side by side."""

    def order(n_heads: int) -> torch.Tensor:
        rows = torch.arange(n_heads * config.head_dim)
        return rows.view(n_heads, -1, 2).transpose(1, 2).flatten()  # (heads, pairs, 2) -> (heads, 2, pairs)

    return {"attn_q": order(config.n_head), "attn_k": order(config.n_kv_head)}


def reordered(stored: Stored, order: torch.Tensor | None) -> Stored:
    """Row i is row order[i] of what is stored; near rows stay near, so that a block is still a block."""
    if order is None or stored.shape[0] != len(order):
        return stored

    def of(read):
        def rows(first: int, last: int):
            wanted = order[first:last]
            low = int(wanted.min())
            there = read(low, int(wanted.max()) + 1)
            if isinstance(there, QuantizedWeight):
                data, scale, offset = (x[wanted - low] for x in there[:3])
                return QuantizedWeight(data, scale, offset, *there[3:])
            return there[wanted - low]

        return rows

    return stored._replace(read=of(stored.read), packed=stored.packed and of(stored.packed))


def blocks(file: Path, kind, shape: tuple[int, ...], start: int, row_bytes: int) -> Stored:
    """A quantised matrix that begins at byte `start`; kind: gguf's GGMLQuantizationType."""
    from gguf import quants

    def rows(first: int, last: int) -> np.ndarray:
        return mapped(file, start + first * row_bytes, (last - first) * row_bytes).view(last - first, row_bytes).numpy()

    def read(first: int, last: int) -> torch.Tensor:
        return torch.from_numpy(quants.dequantize(rows(first, last), kind))

    def packed(first: int, last: int) -> QuantizedWeight:
        per_row = rows(first, last).reshape(last - first, -1, header + n_nibbles)
        half = per_row[..., header:].reshape(last - first, -1, 1, min(n_nibbles, 32)) >> np.array([[0], [4]], np.uint8)
        nibbles = torch.from_numpy((half & 15).reshape(last - first, -1))
        scale, offset = per_row[..., :4].copy().view(np.float16).astype(np.float32).transpose(2, 0, 1)[:, :, :, None]
        if kind.name == "Q4_0":
            offset = scale * -8
        elif kind.name == "Q4_K":  # eight groups, their scales and offsets in 6 bits
            n, n_below = (
                x.reshape(*scale.shape[:2], 8) for x in quants.Q4_K.get_scale_min(per_row[..., 4:16].reshape(-1, 12))
            )
            scale, offset = scale * n, -offset * n_below
        pad = -shape[1] % kernels.PACK  # what stands behind the inputs meets none
        grouped = [torch.from_numpy(x.reshape(last - first, -1)) for x in (scale, offset)]
        scale, offset = (F.pad(x, (0, pad // 32)) for x in grouped)
        return QuantizedWeight(kernels.pack_int4(F.pad(nibbles, (0, pad))), scale, offset, 4, 32)

    header, n_nibbles = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q4_K": (16, 128)}.get(kind.name, (0, 0))
    return Stored(shape, kind.name, read, packed if n_nibbles and len(shape) == 2 else None)
