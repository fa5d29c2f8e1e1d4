"""Reading and writing weights and tokenizers; and the one parser of flags, which the three commands share.

    from checkpoint import load_checkpoint, save_checkpoint
    model, tokenizer = load_checkpoint("stdlib")                # bundled, beside this file
    model, tokenizer = load_checkpoint("path/to/folder")        # our format, or Hugging Face's (GPT-2, Llama)
    model, tokenizer = load_checkpoint("path/to/ckpt.pt")       # nanoGPT's, read with weights_only=True

Our format is a folder: config.json ("model": the shape; "tokenizer": split pattern and special tokens; "meta": whatever
the training recorded), model.safetensors, tokenizer.tiktoken (a line per token: base64 of its bytes, its id).
Whatever is wrong with a file is one ValueError that names the file and the field.
"""

import argparse
import base64
import dataclasses
import hashlib
import json
import os
import pickle
import typing
import warnings
import zipfile
from contextlib import ExitStack
from pathlib import Path

import tiktoken
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from model import GPT, DraftHead, ExitHead, GPTConfig

BUNDLED = Path(__file__).resolve().parent / "checkpoints"
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class Tokenizer:
    """Byte-level BPE through tiktoken: any text encodes, and any sequence of known ids decodes to exact bytes.

    ranks: {bytes: id}; pattern: the split regex; special: {text: id}. The ranks are passed in, because tiktoken's own
    loader caches a file by its path and would serve an old tokenizer after a retraining.
    """

    def __init__(self, ranks, pattern, special=None, bos_id=None, eos_ids=()):
        self.ranks, self.pattern, self.special = dict(ranks), pattern, dict(special or {})
        self.bos_id, self.eos_ids = bos_id, tuple(eos_ids)
        self.encoding = tiktoken.Encoding(
            "nanospec", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens=self.special
        )
        self.n_vocab = self.encoding.max_token_value + 1
        self._bytes = {rank: piece for piece, rank in self.ranks.items()}
        self._bytes.update({rank: text.encode() for text, rank in self.special.items()})

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of the text. special=True reads special tokens written in it; none is ever added."""
        text = text.encode("utf-8", errors="replace").decode()  # lone surrogates, which tiktoken would refuse
        return self.encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=())

    def decode_bytes(self, ids) -> bytes:
        try:
            return b"".join([self._bytes[int(i)] for i in ids])
        except KeyError as error:
            raise ValueError(f"token id {error.args[0]} is not in the tokenizer (0 to {self.n_vocab - 1})") from None

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


# ------------------------------------------------------------------------------------------------------ writing


def write_atomically(path: str | Path, write) -> None:
    """write(a temporary path), then one rename: whoever opens `path` finds the old file or the new, never a half."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path: str | Path, model: GPT, tokenizer: Tokenizer | None = None, meta: dict | None = None) -> None:
    """Write model, tokenizer and meta (anything json can hold) as a folder in our format, in the model's dtype."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    described = {"format": "nanospec", "model": dataclasses.asdict(model.config), "tokenizer": None, "meta": meta or {}}
    if tokenizer is not None:
        fields = ("pattern", "special", "bos_id", "eos_ids")
        described["tokenizer"] = {name: getattr(tokenizer, name) for name in fields}
        lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in tokenizer.ranks.items()]
        write_atomically(folder / "tokenizer.tiktoken", lambda p: p.write_text("".join(lines)))
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", lambda p: save_file(state, p))
    write_atomically(folder / "config.json", lambda p: p.write_text(json.dumps(described, indent=1) + "\n"))


# -------------------------------------------------------------------------------- exit heads for someone else's model
#
# A folder of two files: config.json ("format": "nanospec-heads", the fields below, the target's fingerprint) and
# heads.safetensors. The backbone stays where it is: heads of a few megabytes need not carry it along.

HEAD_FIELDS = ("exit_layers", "exit_vocab", "exit_adapters", "exit_platt")


def sample_of(weight: torch.Tensor) -> torch.Tensor:
    """The first 256 numbers of four rows of a weight (rows, ...), float32."""
    rows = [i * len(weight) // 4 for i in range(4)]
    return weight[rows].flatten(1)[:, :256].float() if weight.ndim > 1 else weight[:256].float()


def fingerprint(samples: dict[str, torch.Tensor]) -> str:
    """Of the backbone (name: sample_of its weight as the file states it), whatever dtype or quantisation it is loaded in."""
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(f"{name} {tuple(samples[name].shape)}".encode())
        digest.update(samples[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def fingerprint_of(model: GPT) -> str:
    """The file's where the model was loaded, else that of its weights as they are."""
    if model.fingerprint is not None:
        return model.fingerprint
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("exits.")}
    return fingerprint({name: sample_of(tensor.detach().cpu()) for name, tensor in state.items()})


def save_heads(path: str | Path, model: GPT, meta: dict | None = None) -> None:
    """Write the exit heads of a model, in their dtype, and whose they are; meta: anything json can hold."""
    described = {name: getattr(model.config, name) for name in HEAD_FIELDS}
    _write_heads(path, "nanospec-heads", model, model.exits, described, meta)


def load_heads(model: GPT, path: str | Path) -> dict:
    """Give a loaded model the exit heads of a folder, in place of its own; returns their meta.

    ValueError where they were trained for other weights, and for files that are broken.
    """
    described = _read_heads(path, "nanospec-heads", "exits", model)
    shape = dataclasses.asdict(model.config) | {name: described.get(name) for name in HEAD_FIELDS}
    shape |= {name: shape[name] or () for name in ("exit_layers", "exit_adapters")}
    config = make_config(Path(path) / "config.json", shape)
    heads = nn.ModuleDict({str(layer): ExitHead(config) for layer in config.exit_layers})
    _load_into(heads, path, model)
    model.set_exits(config.exit_layers, config.exit_vocab, config.exit_adapters)
    model.config, model.exits = config, heads
    return described.get("meta", {})


def save_draft_head(path: str | Path, head: DraftHead, model: GPT, meta: dict | None = None) -> None:
    """Write a drafter's block, trained for `model`: the same two files as exit heads."""
    _write_heads(path, "nanospec-draft-head", model, head, {"vocab": head.config.exit_vocab}, meta)


def load_draft_head(model: GPT, path: str | Path) -> DraftHead:
    """The block that a folder holds, in the model's dtype; ValueError as in load_heads."""
    described, file = _read_heads(path, "nanospec-draft-head", "drafter", model), Path(path) / "config.json"
    shape = dataclasses.asdict(model.config) | {"exit_layers": (), "exit_vocab": described.get("vocab")}
    config = make_config(file, shape)
    if config.exit_vocab is None:
        raise ValueError(f"{file}: field vocab is missing")
    head = DraftHead(config, config.exit_vocab)
    _load_into(head, path, model)
    return head


def _write_heads(path, kind: str, model: GPT, heads: nn.Module, described: dict, meta: dict | None) -> None:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    described = {"format": kind, **described, "target": fingerprint_of(model), "meta": meta or {}}
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    write_atomically(folder / "heads.safetensors", lambda p: save_file(state, p))
    write_atomically(folder / "config.json", lambda p: p.write_text(json.dumps(described) + "\n"))


def _read_heads(path, kind: str, stage: str, model: GPT) -> dict:
    """config.json of heads of that kind, trained for this model."""
    file = Path(path) / "config.json"
    described = read_json(file)
    if described.get("format") != kind:
        raise ValueError(f"{file}: format is {described.get('format')!r}, not {kind}")
    if described.get("target") != fingerprint_of(model):
        raise ValueError(f"{path}: trained for another model; train one with train_exit_heads.py --stage {stage}")
    return described


def _load_into(heads: nn.Module, path, model: GPT) -> None:
    with ExitStack() as files:
        tensors = open_safetensors(Path(path), files, "heads")
        heads.load_state_dict(assemble(Path(path) / "heads.safetensors", heads, None, tensors))
    heads.to(model.device, model.dtype).eval()


# ------------------------------------------------------------------------------------------------------ reading


def load_checkpoint(name_or_path, device="auto", dtype="auto", quantize=None) -> tuple[GPT, Tokenizer | None]:
    """A model, and its tokenizer where the checkpoint has one, by the name of a bundled model or by path.

    device "auto": cuda where there is one. dtype "auto": bfloat16 on cuda, float32 on a CPU, whatever the file holds.
    """
    if quantize is not None:
        raise ValueError(f"quantize is {quantize!r}: quantisation comes later; leave it out")
    device, dtype = pick_device(device), pick_dtype(dtype, pick_device(device))
    path = find_checkpoint(name_or_path)
    with ExitStack() as files:
        if path.is_file():
            config, tensors = read_nanogpt(path)
            sources, tokenizer = foreign_names(config, conv1d=False), None
        else:
            described = read_json(path / "config.json")
            if described.get("format") == "nanospec":
                config, tokenizer = our_config(path, described)
                sources = None
            else:
                config, tokenizer = hugging_face_config(path / "config.json", described), None
                sources = foreign_names(config, conv1d=True)
            tensors = open_safetensors(path, files)
        try:
            model = GPT(config).to(dtype)  # before the weights come: float64 ones are not to pass through float32
        except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
            kind, text = type(error).__name__, str(error).splitlines()[0]
            raise ValueError(f"{path}: cannot build the model of its config: {kind} {text}") from None
        state = assemble(path / "model.safetensors" if path.is_dir() else path, model, sources, tensors)
        model.load_state_dict(state)
        backbone = {name: sample_of(weight) for name, weight in state.items() if not name.startswith("exits.")}
        model.fingerprint = fingerprint(backbone)
    return model.to(device=device).eval(), tokenizer


def check_pair(name: str, tokenizer: Tokenizer | None, draft_name: str, draft_tokenizer: Tokenizer | None) -> None:
    """ValueError where the drafter's ids mean other tokens than the target's, also when there are equally many."""
    if any(getattr(tokenizer, x, None) != getattr(draft_tokenizer, x, None) for x in ("ranks", "special", "pattern")):
        raise ValueError(f"{name} and {draft_name} have different tokenizers: not a pair")


def pick_device(device) -> torch.device:
    name = str(device)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}: choose auto, cpu or cuda")
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices here")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current device, wherever its tensors are
    return device


def pick_dtype(dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES and dtype not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}: choose auto, {', '.join(DTYPES)}")
    return DTYPES.get(dtype, dtype)


def find_checkpoint(name_or_path) -> Path:
    """The folder or file meant: a bundled name first ("./stdlib" means a folder of yours), then a path."""
    name, path = str(name_or_path), Path(name_or_path)
    if path.name == name and (BUNDLED / name / "config.json").exists():
        return BUNDLED / name
    if not name or not path.exists():
        bundled = ", ".join(sorted(folder.parent.name for folder in BUNDLED.glob("*/config.json"))) or "none"
        raise ValueError(
            f"model {name!r}: no such folder (bundled: {bundled}); download a hub model yourself and give the path of"
            " the folder that holds its config.json and model.safetensors"
        )
    if path.is_file() and path.suffix != ".pt":
        raise ValueError(f"{path}: give a folder with config.json and model.safetensors, or nanoGPT's ckpt.pt")
    return path


def read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not JSON ({str(error).splitlines()[0]})") from None
    if type(content) is not dict:
        raise ValueError(f"{file}: not a JSON object")
    return content


def make_config(file: Path, fields: dict) -> GPTConfig:
    """GPTConfig from fields whose names are its own; what is wrong is said with the file's name."""
    for field in dataclasses.fields(GPTConfig):
        if field.default is dataclasses.MISSING and fields.get(field.name) is None:
            raise ValueError(f"{file}: field {field.name} is missing")
    try:
        return GPTConfig(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


def our_config(folder: Path, described: dict) -> tuple[GPTConfig, Tokenizer | None]:
    file, shape, about = folder / "config.json", described.get("model"), described.get("tokenizer")
    if type(shape) is not dict:
        raise ValueError(f"{file}: field model is missing")
    config = make_config(file, shape)
    return config, None if about is None else read_tokenizer(folder, about, config.n_vocab_used)


def read_tokenizer(folder: Path, about: dict, n_vocab_used: int) -> Tokenizer:
    """about: the "tokenizer" field of config.json; the tokens themselves stand in tokenizer.tiktoken."""
    file, ranks = folder / "tokenizer.tiktoken", {}
    about = about if isinstance(about, dict) else {}
    bos_id, eos_ids, special = about.get("bos_id"), about.get("eos_ids", []), about.get("special")

    def known(i) -> bool:
        return type(i) is int and i >= 0

    for name, sound in (
        ("pattern", isinstance(about.get("pattern"), str)),
        ("special", isinstance(special, dict) and all(type(i) is int for i in special.values())),
        ("bos_id", bos_id is None or known(bos_id)),
        ("eos_ids", isinstance(eos_ids, list) and all(map(known, eos_ids))),
    ):
        if not sound:
            raise ValueError(f"{folder / 'config.json'}: field tokenizer.{name} is missing or wrong")
    try:
        for number, line in enumerate(file.read_text(encoding="ascii").splitlines(), 1):
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
    except FileNotFoundError:
        raise ValueError(f"{file}: there is no such file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not a list of tokens") from None
    except ValueError:
        raise ValueError(f"{file}: line {number} is not a token in base64 and its id") from None
    ids = sorted([*ranks.values(), *about["special"].values()])
    if ids != list(range(len(ids))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{file}: incomplete; ids must run from 0 without a gap and hold all 256 bytes")
    if len(ids) != n_vocab_used:
        raise ValueError(f"{file}: {len(ids)} tokens, but the model uses {n_vocab_used}")
    if max(bos_id or 0, *eos_ids, 0) >= n_vocab_used:
        raise ValueError(f"{folder / 'config.json'}: field tokenizer.bos_id or eos_ids names no token")
    try:
        return Tokenizer(ranks, about["pattern"], special, bos_id, eos_ids)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: field tokenizer.pattern is no pattern ({error})") from None


SHAPE = "vocab_size block_size n_layer n_head n_embd n_hidden norm_eps n_kv_head head_dim rope_theta rope_scaling"
SHAPE_OF = {  # transformers' names for the same
    "gpt2": "vocab_size n_positions n_layer n_head n_embd n_inner layer_norm_epsilon",
    "llama": "vocab_size max_position_embeddings num_hidden_layers num_attention_heads hidden_size intermediate_size"
    " rms_norm_eps num_key_value_heads head_dim rope_theta rope_scaling",
}
COMPUTED = {  # variants: field, what we compute (first: what its absence means)
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
}


def hugging_face_config(file: Path, described: dict) -> GPTConfig:
    """Shape of a GPT-2 or Llama from transformers' config.json; a variant that we would compute wrongly is refused."""
    kind = described.get("model_type")
    if kind not in SHAPE_OF:
        raise ValueError(f"{file}: model_type is {kind!r}: only {' and '.join(SHAPE_OF)} can be read")
    for name, allowed in COMPUTED[kind].items():
        if described.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{file}: {name} is {described[name]!r}: only {allowed[0]!r} can be computed")
    if isinstance(described.get("rope_parameters"), dict):  # newer files: one field for what used to be two
        rope = described["rope_parameters"]
        described = {**described, "rope_theta": rope.get("rope_theta"), "rope_scaling": rope}
    fields = {"arch": kind, "tie_weights": described.get("tie_word_embeddings", kind == "gpt2")}
    for number, (ours, theirs) in enumerate(zip(SHAPE.split(), SHAPE_OF[kind].split())):
        if described.get(theirs) is not None:
            fields[ours] = described[theirs]
        elif number < (5 if kind == "gpt2" else 6):  # the rest has defaults
            raise ValueError(f"{file}: field {theirs} is missing")
    return make_config(file, fields)


def read_nanogpt(file: Path) -> tuple[GPTConfig, dict]:
    """Shape and tensors of nanoGPT's ckpt.pt. weights_only: a pickle that wants to run code is refused, not run."""
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
        weights = [(name, tensor) for name, tensor in tensors.items() if name.endswith("weight")]
        tensors |= {name.removesuffix("weight") + "bias": torch.zeros(len(tensor)) for name, tensor in weights}
    return config, {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}


def foreign_names(config: GPTConfig, conv1d: bool) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Our name of a tensor -> (their names of its parts, one below the other; whether they store it transposed).

    Hugging Face's GPT-2 keeps the (in, out) matrices of a Conv1D; nanoGPT has the same names and ordinary matrices.
    """
    if config.arch == "gpt2":
        tops = {"token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight"}
        tops |= {f"final_norm.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")}
        parts = {"attn_norm": "ln_1", "qkv": "attn.c_attn", "attn_out": "attn.c_proj", "mlp_norm": "ln_2"}
        parts |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
        layers = {
            f"blocks.{i}.{ours}.{kind}": (
                (f"h.{i}.{theirs}.{kind}",),
                conv1d and kind == "weight" and "ln" not in theirs,
            )
            for i in range(config.n_layer)
            for ours, theirs in parts.items()
            for kind in ("weight", "bias")
        }
    else:
        tops = {"token_embedding.weight": "embed_tokens.weight", "final_norm.weight": "norm.weight"}
        parts = {"attn_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)}
        parts |= {"qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"), "attn_out": ("self_attn.o_proj",)}
        parts |= {"up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
        layers = {
            f"blocks.{i}.{ours}.weight": (tuple(f"layers.{i}.{name}.weight" for name in theirs), False)
            for i in range(config.n_layer)
            for ours, theirs in parts.items()
        }
    output = {} if config.tie_weights else {"output.weight": (("lm_head.weight",), False)}
    return {ours: ((theirs,), False) for ours, theirs in tops.items()} | layers | output


def open_safetensors(folder: Path, files: ExitStack, stem: str = "model") -> dict:
    """{name: function that reads that tensor} over model.safetensors, or over the shards that its index lists."""
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
        if not file.exists():
            raise ValueError(f"{file}: there is no such file")
        try:
            opened = files.enter_context(safe_open(file, "pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: truncated, or not safetensors ({str(error).splitlines()[0]})") from None
        tensors |= {name: lambda opened=opened, name=name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def assemble(file: Path, model: nn.Module, sources: dict | None, tensors: dict) -> dict[str, torch.Tensor]:
    """The complete state of the model, or a ValueError: nothing is loaded before every tensor is there and fits.

    sources: from foreign_names; None for our own format, where a tensor too many is an error as well.
    """
    state = model.state_dict()
    if sources is None:
        sources = {name: ((name,), False) for name in state}
        if set(tensors) - set(state):
            raise ValueError(f"{file}: tensor {min(set(tensors) - set(state))} is none that config.json speaks of")
    prefixes = ("", "transformer.", "model.")  # whether the body was saved alone or inside a model with a head
    for ours, wanted in state.items():
        names, transposed = sources[ours]
        found = [next((prefix + name for prefix in prefixes if prefix + name in tensors), None) for name in names]
        if None in found:
            raise ValueError(f"{file}: tensor {names[found.index(None)]} is missing")
        parts = [tensors[name]() for name in found]
        stored = " + ".join(f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}" for part in parts)
        if transposed and wanted.ndim == 2:
            parts = [part.t() if part.ndim == 2 else part for part in parts]
        fits = all(part.is_floating_point() and part.ndim == wanted.ndim for part in parts)
        if not fits or any(part.shape[1:] != wanted.shape[1:] for part in parts) or sum(map(len, parts)) != len(wanted):
            needed = tuple(reversed(wanted.shape)) if transposed else tuple(wanted.shape)
            raise ValueError(f"{file}: tensor {' + '.join(found)} is {stored}, but the config needs {needed}")
        state[ours] = torch.cat(parts)
    return state


# -------------------------------------------------------------------------------------------------------- flags


def listed(kind):
    """Parser of a comma-separated flag: "2,4" -> (2, 4)."""

    def parse(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(",") if part)

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def flag(default, text: str, choices=None, parse=None):
    """A field of a configuration dataclass that is also a flag; text is its one line of help."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "parse": parse})


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, without the usage block, which would push it out of sight."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse_flags(cls, argv=None, prog=None, description=None, epilog=None):
    """An instance of the dataclass cls from the command line: field draft_len is flag --draft-len."""
    parser = Parser(prog, description=description, epilog=epilog, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, text = "--" + field.name.replace("_", "-"), field.metadata["help"].replace("%", "%%")
        if types[field.name] is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction if field.default else "store_true",
                                default=field.default, help=text)  # fmt: skip
            continue
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        default, action = field.default, "store"
        if types[field.name] == tuple[str, ...]:  # a flag that may be given several times
            default, action = list(default), "append"
        parser.add_argument(name, type=field.metadata["parse"] or types[field.name], default=default, action=action,
                            choices=field.metadata["choices"], metavar=None if field.metadata["choices"] else "X",
                            help=text + (f" ({shown})" if shown not in (None, "") else ""))  # fmt: skip
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in vars(parser.parse_args(argv)).items()}
    try:
        return cls(**values)
    except ValueError as error:  # a value that the class itself refuses
        parser.error(str(error))
