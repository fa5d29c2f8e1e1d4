"""Text to token ids and back: byte-level BPE through tiktoken, from whichever files a checkpoint brings.

    tokenizer.tiktoken + config.json     our own format
    tokenizer.json                       Hugging Face; or its older vocab.json + merges.txt
    metadata of a GGUF file              checkpoint.py reads the file
    chat template                        chat_template.jinja, tokenizer_config.json or GGUF: apply_chat renders it

tiktoken knows no merges: it joins the two neighbours whose joined bytes have the lowest id. That is the original's BPE
exactly where ids rise in the order of the merges and every token comes out of its own bytes (see `unreachable`), given
the same split into words, which is looked up by what the file declares. A tokenizer for which this does not hold
(SentencePiece's, with spaces as letters) is refused as Inexpressible: the weights are of use without it, as token ids.
"""

import base64
import datetime
import json
import unicodedata
from pathlib import Path

import tiktoken

# The splits into words. smollm isolates each digit, then splits as GPT-2: a run of spaces before a digit stays whole.
SPLITS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "smollm": r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
GGUF_SPLITS = {"gpt-2": "gpt2", "smollm": "smollm", "llama-bpe": "llama3", "qwen2": "qwen2"}  # tokenizer.ggml.pre
CLASS_SPLITS = {"GPT2Tokenizer": "gpt2", "Qwen2Tokenizer": "qwen2"}  # tokenizer_class, beside vocab.json and merges.txt


class Inexpressible(ValueError):
    """The files are sound, but tiktoken cannot do what they ask for."""


class Tokenizer:
    """Byte-level BPE through tiktoken: any text encodes, and any sequence of known ids decodes to exact bytes.

    ranks: {bytes: id}; pattern: the split regex; special: {text: id}. A byte without a token (some vocabularies leave
    out control characters) becomes unk_id, or nothing where that is None; the original would join its neighbours, we do
    not. normalizer: "NFC" or None, for all of the text. chat_template: jinja or None. The ranks are passed in, because
    tiktoken's own loader caches a file by its path and would serve an old tokenizer after a retraining.
    """

    SAVED = ("pattern", "special", "bos_id", "eos_ids", "chat_template", "normalizer", "unk_id")

    def __init__(
        self, ranks, pattern, special=None, bos_id=None, eos_ids=(), chat_template=None, normalizer=None, unk_id=None
    ):
        self.ranks, self.pattern, self.special = dict(ranks), pattern, dict(special or {})
        self.bos_id, self.eos_ids, self.unk_id = bos_id, tuple(eos_ids), unk_id
        self.chat_template, self.normalizer = chat_template, normalizer
        self.n_vocab = max((*self.ranks.values(), *self.special.values())) + 1
        missing = [bytes([byte]) for byte in range(256) if bytes([byte]) not in self.ranks]
        stand_ins = {byte: self.n_vocab + i for i, byte in enumerate(missing)}  # tiktoken cannot do without
        self.encoding = tiktoken.Encoding(
            "nanospec", pat_str=pattern, mergeable_ranks=self.ranks | stand_ins, special_tokens=self.special
        )
        self._bytes = {rank: piece for piece, rank in self.ranks.items()}
        self._bytes.update({rank: text.encode() for text, rank in self.special.items()})
        self._lossy = bool(missing)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of the text. special=True reads special tokens written in it; none is ever added."""
        text = text.encode("utf-8", errors="replace").decode()  # lone surrogates, which tiktoken would refuse
        if self.normalizer is not None:
            text = unicodedata.normalize(self.normalizer, text)
        ids = self.encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=())
        if self._lossy:
            ids = [i if i < self.n_vocab else self.unk_id for i in ids if i < self.n_vocab or self.unk_id is not None]
        return ids

    def decode_bytes(self, ids) -> bytes:
        try:
            return b"".join([self._bytes[int(i)] for i in ids])
        except KeyError as error:
            raise ValueError(f"token id {error.args[0]} is not in the tokenizer (0 to {self.n_vocab - 1})") from None

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({str(error).splitlines()[0]})") from None
    if type(content) is not dict:
        raise ValueError(f"{file}: not a JSON object")
    return content


# ------------------------------------------------------------------------------------------------------ our own format


def save_tokenizer(tokenizer: Tokenizer, write) -> dict:
    """What stands of it in config.json; write(text) takes the lines of tokenizer.tiktoken."""
    write("".join(f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in tokenizer.ranks.items()))
    return {name: getattr(tokenizer, name) for name in Tokenizer.SAVED}


def no_tokenizer(place: Path):
    raise Inexpressible(f"{place}: there is no tokenizer beside the weights: text cannot be read, only token ids")


def our_tokenizer(folder: Path, about: dict | None, n_vocab_used: int) -> Tokenizer:
    """about: the "tokenizer" field of config.json; the tokens themselves stand in tokenizer.tiktoken."""
    if about is None:
        return no_tokenizer(folder)
    file, ranks = folder / "tokenizer.tiktoken", {}
    about = about if isinstance(about, dict) else {}
    fields = {name: about.get(name) for name in Tokenizer.SAVED} | {"eos_ids": about.get("eos_ids", [])}
    special, ids = fields["special"], [fields["bos_id"], fields["unk_id"]]

    def known(i) -> bool:
        return type(i) is int and i >= 0

    for name, sound in (
        ("pattern", isinstance(fields["pattern"], str)),
        ("special", isinstance(special, dict) and all(type(i) is int for i in special.values())),
        ("bos_id", fields["bos_id"] is None or known(fields["bos_id"])),
        ("eos_ids", isinstance(fields["eos_ids"], list) and all(map(known, fields["eos_ids"]))),
        ("chat_template", isinstance(fields["chat_template"], str | None)),
        ("normalizer", fields["normalizer"] in (None, "NFC")),
        ("unk_id", fields["unk_id"] is None or known(fields["unk_id"])),
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
    all_ids = sorted([*ranks.values(), *special.values()])
    if all_ids != list(range(len(all_ids))) or not all_ids:
        raise ValueError(f"{file}: incomplete; ids must run from 0 without a gap")
    if len(all_ids) != n_vocab_used:
        raise ValueError(f"{file}: {len(all_ids)} tokens, but the model uses {n_vocab_used}")
    if max(*(i or 0 for i in ids), *fields["eos_ids"], 0) >= n_vocab_used:
        raise ValueError(f"{folder / 'config.json'}: field tokenizer.bos_id, unk_id or eos_ids names no token")
    try:
        return Tokenizer(ranks, **fields)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: field tokenizer.pattern is no pattern ({error})") from None


# -------------------------------------------------------------------------------------------- byte-level BPE of others


def byte_letters() -> dict[int, int | None]:
    """For str.translate: the letters in which these files write bytes -> Latin-1; any other letter -> none of Latin-1.

    Printable Latin-1 stands for itself, the other bytes for the letters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: 0xFFFF for byte in others} | {256 + i: byte for i, byte in enumerate(others)}


def unreachable(ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]]) -> bytes | None:
    """The first token that BPE does not make of its own bytes, or None; merges in order, ids rising along them.

    Where every token is reachable, tiktoken's rule equals BPE's. Both choose alike until neighbours (a, b) join into a
    token: as long as nothing crosses its ends, the token's own bytes go the same way alone, and there they end
    in one of its merges: so (a, b) is one.

    A token = left + right is reachable unless something crosses the seam. Times are ids, since they only rise: while
    left forms, its last part grows along a chain, each link alive until the id of the next; right's first part too. A
    link of each, both alive at the id of their join, would be joined. Of two joins with one id the leftmost is made.
    """
    last, first = ({bytes([byte]): () for byte in range(256)} for _ in range(2))  # token: ((part, gone), ...) inside it
    for left, right in merges:
        token = left + right
        if token in last:  # some files list all the splits of a token
            continue
        time = ranks[token]
        crossed = any(
            (join := ranks.get(a + b, time)) < gone_a and join <= gone_b and join != time
            for a, gone_a in ((left, time), *last.get(left, ()))
            for b, gone_b in ((right, time), *first.get(right, ()))
        )
        if not crossed:
            last[token] = ((right, time), *last.get(right, ()))
            first[token] = ((left, time), *first.get(left, ()))
    return min((left + right for left, right in merges if left + right not in last), key=ranks.get, default=None)


def from_merges(file: Path, vocab: dict, merges: list, special: dict, split: str, **fields) -> Tokenizer:
    """vocab {token: id}, merges [(token, token)] in byte_letters; special {text: id}, which may stand in vocab as well.

    fields: what else a Tokenizer takes. Inexpressible where tiktoken would give other ids than the original.
    """
    letters = byte_letters()
    if not all(len(pair) == 2 for pair in merges):
        raise ValueError(f"{file}: merges are no list of pairs")

    def as_bytes(token: str) -> bytes:
        return token.translate(letters).encode("latin-1")

    try:
        ranks = {as_bytes(token): i for token, i in vocab.items() if token not in special}
        merges = [(as_bytes(left), as_bytes(right)) for left, right in merges]
    except UnicodeEncodeError as error:
        raise Inexpressible(f"{file}: token {error.object!r} is not in the letters of byte-level BPE") from None
    before, made = -1, set()
    for left, right in merges:
        parts = [ranks.get(part) for part in (left, right, left + right)]
        if None in parts:
            raise ValueError(f"{file}: merge {left!r} + {right!r} is of or makes an unknown token")
        earlier = [i for i, part in zip(parts, (left, right)) if len(part) > 1]
        if parts[2] < before or any(i >= parts[2] for i in earlier):
            raise Inexpressible(
                f"{file}: ids do not rise in the order of the merges, which tiktoken needs ({left + right!r})"
            )
        before = parts[2]
        made.add(left + right)
    loose = [piece for piece in ranks if len(piece) > 1 and piece not in made]
    stuck = loose[0] if loose else unreachable(ranks, merges)
    if stuck is not None:
        raise Inexpressible(f"{file}: token {stuck!r} is made by no merges, but tiktoken would make it")
    used = {*ranks.values(), *special.values()}
    special = special | {f"<|unused {i}|>": i for i in range(max(used)) if i not in used}  # every id decodes
    return Tokenizer(ranks, SPLITS[split], special, **fields)


def declared_split(file: Path, declared) -> str:
    """Name in SPLITS of a tokenizer.json's pre_tokenizer."""
    steps = declared.get("pretokenizers", [declared]) if isinstance(declared, dict) else []
    found = []
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and not step.get("add_prefix_space", True):
            found.append(step.get("use_regex", True))
        elif kind == "Digits" and step.get("individual_digits"):
            found.append("digits")
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(step["pattern"].get("Regex"))
        else:
            found.append(None)
    known = {(True,): "gpt2", ("digits", True): "smollm"}
    known |= {(SPLITS[name], False): name for name in ("llama3", "qwen2")}
    if tuple(found) not in known:
        kinds = " + ".join(str(step.get("type")) for step in steps) or "none (SentencePiece?)"
        raise Inexpressible(f"{file}: pre_tokenizer {kinds} is none of those of {', '.join(SPLITS)}")
    return known[tuple(found)]


def hugging_face_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """From tokenizer.json, or vocab.json and merges.txt; ends and template from the files beside them.

    Inexpressible where there are none of these, or of a kind that tiktoken cannot express.
    """
    file, settings = folder / "tokenizer.json", optional_json(folder / "tokenizer_config.json")
    try:
        if file.exists():
            described = read_json(file)
            vocab, merges, special, split, fields = from_tokenizer_json(file, described)
        elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
            file = folder / "vocab.json"
            vocab, fields = read_json(file), {}
            lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
            merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
            kind = settings.get("tokenizer_class", "GPT2Tokenizer").removesuffix("Fast")
            if kind not in CLASS_SPLITS or settings.get("add_prefix_space"):
                raise Inexpressible(
                    f"{file}: tokenizer_class {kind} does not say how text is split; tokenizer.json would"
                )
            split = CLASS_SPLITS[kind]
            special = {token: vocab[token] for token in ("<|endoftext|>",) if token in vocab}
            special |= optional_json(folder / "added_tokens.json")
            added = settings.get("added_tokens_decoder", {})
            special |= {token["content"]: int(i) for i, token in added.items()}
            fields["normalizer"] = "NFC" if split == "qwen2" else None
        elif any(folder.glob("*.model")):
            raise Inexpressible(f"{folder}: its tokenizer is SentencePiece's, which tiktoken cannot express")
        else:
            no_tokenizer(folder)
        special = {text: i for text, i in special.items() if i < vocab_size}  # the model has no row for the others
        return from_merges(
            file, vocab, merges, special, split, **fields, **ends_and_template(folder, settings, special)
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a tokenizer ({type(error).__name__} {str(error).splitlines()[0]})") from None


def from_tokenizer_json(file: Path, described: dict):
    """(vocab, merges, special, split, fields) of a tokenizer.json."""
    model, normalizer = described["model"], described.get("normalizer")
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise Inexpressible(f"{file}: a {model.get('type')} with spaces as letters (SentencePiece), not byte-level BPE")
    if normalizer not in (None, {"type": "NFC"}):
        raise Inexpressible(
            f"{file}: normalizer {normalizer.get('type')} changes the text in a way that is not supported"
        )
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise Inexpressible(f"{file}: {name} is {model[name]!r}, which tiktoken cannot express")
    for token in described.get("added_tokens", []):
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise Inexpressible(f"{file}: added token {token['content']!r} takes in the spaces around it")
    special = {token["content"]: token["id"] for token in described.get("added_tokens", [])}
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    unk = model.get("unk_token")
    fields = {"normalizer": normalizer and "NFC", "unk_id": None if unk is None else (special | model["vocab"])[unk]}
    return model["vocab"], merges, special, declared_split(file, described.get("pre_tokenizer")), fields


def optional_json(file: Path) -> dict:
    return read_json(file) if file.exists() else {}


def ends_and_template(folder: Path, settings: dict, special: dict) -> dict:
    """bos_id, eos_ids and chat_template: a chat model has several ends, and each file knows some of them."""
    ids = {}
    for name in ("bos", "eos"):
        token = settings.get(f"{name}_token")
        found = [special.get(token["content"] if isinstance(token, dict) else token)]
        for file in ("generation_config.json", "config.json"):
            value = optional_json(folder / file).get(f"{name}_token_id")
            found += value if isinstance(value, list) else [value]
        ids[name] = list(dict.fromkeys(i for i in found if isinstance(i, int)))
    template, file = settings.get("chat_template"), folder / "chat_template.jinja"
    if file.exists():
        template = file.read_text(encoding="utf-8")
    elif isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return {"bos_id": next(iter(ids["bos"]), None), "eos_ids": ids["eos"], "chat_template": template}


def gguf_tokenizer(file: Path, fields: dict) -> Tokenizer:
    """From the metadata of a GGUF file, {name: value}."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind is None:
        raise Inexpressible(f"{file}: there is no tokenizer in the file (tokenizer.ggml.model)")
    if kind != "gpt2":
        raise Inexpressible(f"{file}: tokenizer.ggml.model is {kind!r} (SentencePiece), which tiktoken cannot express")
    if pre not in GGUF_SPLITS:
        raise Inexpressible(f"{file}: tokenizer.ggml.pre is {pre!r}: only {', '.join(GGUF_SPLITS)} can be split")
    lists = [fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges")]
    if not all(isinstance(x, list) for x in lists) or len(lists[0]) != len(lists[1]):
        raise ValueError(f"{file}: fields tokenizer.ggml.tokens, token_type and merges are missing, or do not fit")
    tokens, types, merges = lists
    # 1: normal, 5: unused, the padding of the vocabulary; the others (control, user defined) are special
    special = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind not in (1, 5)}
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == 1}
    merges = [pair.split(" ") for pair in merges]
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return from_merges(
        file, vocab, merges, special, GGUF_SPLITS[pre], bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_ids=list(dict.fromkeys(i for i in ends if i is not None)),
        chat_template=fields.get("tokenizer.chat_template"), normalizer="NFC" if GGUF_SPLITS[pre] == "qwen2" else None,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- chat


def apply_chat(tokenizer: Tokenizer, messages: list[dict], add_generation_prompt: bool = True) -> str:
    """The conversation [{"role": ..., "content": ...}] as the model's own template writes it; encode with special=True.

    The template comes with the weights, so it runs in jinja2's sandbox, where it can change nothing outside.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: leave --chat out, or choose a model that was tuned to chat")
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need the package jinja2: pip install jinja2") from None

    def raise_exception(message):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    text_of = {i: text for text, i in tokenizer.special.items()}
    ends = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
            **{name: text_of.get(i, "") for name, i in ends.items()},
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - a template may fail in any way that Python can
        raise ValueError(
            f"the model's chat template fails: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from None
