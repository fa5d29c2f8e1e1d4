import dataclasses
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
import torch
from helpers import tiny_model, weaker
from prometheus_client.parser import text_string_to_metric_families

import sample
from checkpoint import Tokenizer, load_checkpoint, parse_flags, save_checkpoint
from decode import SamplingParams, generate
from model import GPT

SCRIPT = Path(sample.__file__)
END = 256
MODES = ("plain", "speculative", "early-exit")


def byte_tokenizer(shift=0, bos_id=END, eos_ids=(END,)) -> Tokenizer:
    """One token a byte, so that almost every character and stop string is cut into pieces."""
    ranks = {bytes([(i + shift) % 256]): i for i in range(256)}
    return Tokenizer(ranks, r"[\s\S]", {"<|end|>": END}, bos_id, eos_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints by kind: a target, its drafter, and what cannot work beside them."""
    folder, shape = tmp_path_factory.mktemp("models"), {"vocab_size": 264, "n_vocab_used": 257, "block_size": 160}
    target = tiny_model(dtype=torch.float32, poisoned=False, **shape)
    save_checkpoint(folder / "target", target, byte_tokenizer())
    save_checkpoint(folder / "drafter", weaker(target), byte_tokenizer())
    save_checkpoint(
        folder / "short",
        tiny_model(dtype=torch.float32, poisoned=False, **shape | {"block_size": 40}),
        byte_tokenizer(),
    )
    endless = tiny_model(dtype=torch.float32, poisoned=False, **shape | {"block_size": 8192})
    save_checkpoint(folder / "endless", endless, byte_tokenizer(eos_ids=()))
    save_checkpoint(folder / "stranger", weaker(target), byte_tokenizer(shift=1))
    save_checkpoint(folder / "mute", target)
    save_checkpoint(folder / "startless", target, byte_tokenizer(bos_id=None))
    save_checkpoint(
        folder / "exitless", tiny_model(poisoned=False, exit_layers=(), exit_adapters=(), **shape), byte_tokenizer()
    )
    (folder / "empty.txt").write_bytes(b"")
    (folder / "binary.txt").write_bytes(b"abc\xff\xfe\x00")
    (folder / "long.txt").write_bytes(b"a" * 1_000_000)
    return folder


@pytest.fixture(autouse=True)
def fewer_repeats(monkeypatch):
    monkeypatch.setattr(sample, "REPEATS", 2)


def flags(folder, *more) -> list[str]:
    return ["--model", str(folder / "target"), "--draft", str(folder / "drafter"), "--exit-threshold", "0.05",
            "--prompt", "def f(", "--max-new-tokens", "40", "--threads", "0", *map(str, more)]  # fmt: skip


def call(capsys, *arguments) -> tuple[int, str, str]:
    try:
        status = sample.main(list(map(str, arguments)))
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


def records(capsys, *arguments) -> list[dict]:
    status, out, err = call(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def start(*arguments, **options) -> subprocess.Popen:
    """The real command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **options.pop("env", {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment} | options
    return subprocess.Popen([sys.executable, SCRIPT, *map(str, arguments)], **options)


# ------------------------------------------------------------------------------------------------------ TextStream


def test_text_stream_equals_the_text_and_holds_back_no_more_than_it_must():
    rng, n_stopped = random.Random(0), 0
    alphabet = ["é".encode(), "€".encode(), "🙂".encode(), b"a", b"b", b"ab", b"\xff", b"\xe2\x82", b"\xf0\x9f", b"\n"]
    for _ in range(3000):
        stops = [rng.choice(["ab", "aba", "bb€", "€é", "aaaa", "b\n"]) for _ in range(rng.randrange(3))]
        data = b"".join(rng.choices(alphabet, k=rng.randrange(1, 12)))
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(6)))
        tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)]) if a < b]
        stream, read, pieces = sample.TextStream(stops), b"", []
        for token in tokens:  # as the engine does: decoding ends behind the token that completes a stop string
            read += token
            text = read.decode(errors="replace")
            pieces.append(stream.push(token))
            found = [text.find(s) for s in stops if s in text]
            if found:
                break
            behind = len(text) - len("".join(pieces))
            assert behind < max([4, *(len(s) + 3 for s in stops)])
        n_stopped += bool(found)
        pieces.append(stream.push(b"", final=True))
        assert "".join(pieces) == (text[: min(found)] if found else text), (stops, tokens)
        assert stream.push(b"more") == ""
    assert 300 < n_stopped < 2700


def test_text_stream_waits_for_the_rest_of_a_character():
    stream = sample.TextStream()
    assert [stream.push(bytes([b])) for b in "a€b".encode()] == ["a", "", "", "€", "b"]
    stream = sample.TextStream(["stop"])
    assert [stream.push(piece) for piece in (b"x s", b"to", b"ne st", b"op!")] == ["x ", "", "stone ", ""]


@pytest.mark.parametrize("mode", MODES)
def test_streamed_text_equals_the_text_with_stop_strings_across_tokens(folder, capsys, mode):
    for seed in range(20):
        asked = flags(folder, "--mode", mode, "--temperature", 1, "--max-new-tokens", 120, "--seed", seed)
        row = records(capsys, *asked)[0]
        if row["finish_reason"] == "length":
            break
    whole = row["text"]
    stop = next(
        whole[i : i + 3] for i in range(9, len(whole)) if "�" not in whole[i : i + 3] and whole[i : i + 3].isascii()
    )
    many = ["--stop", "never there", "--stop", stop, "--stop", stop[:2] + "\x01"]
    for stops in ([], ["--stop", whole[-1] + "never there"], ["--stop", stop], many):
        expected = records(capsys, *asked, *stops)[0]
        status, out, err = call(capsys, *asked, *stops)
        assert (status, err) == (0, "")
        assert out.partition("\n")[2].startswith(
            f"def f({expected['text']}\n\n{mode}: {len(expected['tokens'])} tokens"
        )
        if stop in stops:
            assert expected["finish_reason"] == "stop" and stop not in expected["text"]
            assert expected["text"] == whole[: whole.index(stop)]


def test_a_chat_shows_the_message_and_the_answer_without_the_template(folder, capsys, tmp_path):
    """The model reads the template around the message; the mark that ends its answer is not shown."""
    model, _ = load_checkpoint(folder / "target")
    template = "[{{ messages[0].content }}]{% if add_generation_prompt %}:{% endif %}"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    save_checkpoint(tmp_path / "chat", model, tokenizer)
    asked = [
        "--model",
        tmp_path / "chat",
        "--mode",
        "plain",
        "--chat",
        "--prompt",
        "hello",
        "--temperature",
        2,
        "--threads",
        0,
    ]
    found = [records(capsys, *asked, "--seed", seed)[0] for seed in range(30)]
    assert all(bytes(row["prompt"]) == b"[hello]:" for row in found)
    seed = next(i for i, row in enumerate(found) if row["finish_reason"] == "stop")
    assert found[seed]["text"].endswith("<|end|>")
    out = call(capsys, *asked, "--seed", seed)[1].partition("\n")[2]
    assert out.startswith(f"hello\n\n{found[seed]['text'].removesuffix('<|end|>')}\n\nplain: ")


# ---------------------------------------------------------------------------------------------------------- modes


def test_compare_streams_all_modes_and_ends_with_a_table(folder, capsys):
    asked = flags(folder, "--prompt", "import os\ndef f(")
    status, out, err = call(capsys, *asked)
    by_mode = {record["mode"]: record for record in records(capsys, *asked)}
    assert out.partition("\n")[2].startswith("--- plain\nimport os\ndef f(") and out.count("import os\n") == 1
    assert (status, err, "\x1b" in out) == (0, "", False)
    for mode in MODES:
        assert f"--- {mode}\n" in out and f"\ndef f({by_mode[mode]['text']}\n\n" in out
    table = {
        line.split()[0]: line.split() for line in out.splitlines() if re.match(r"(plain|speculative|early-exit) ", line)
    }
    assert list(table) == list(MODES)
    for mode, (_, speed, ratio, per_pass, layers, same, *_) in table.items():
        stats = by_mode[mode]["stats"]
        assert float(speed) > 0 and float(ratio.removesuffix("x")) > 0
        assert per_pass == f"{stats['mean_accepted_length']:.2f}" and layers == f"{stats['mean_layers']:.1f}"
        plain, tokens = by_mode["plain"]["tokens"], by_mode[mode]["tokens"]
        n_same = next((i for i in range(40) if plain[i : i + 1] != tokens[i : i + 1]), 40)
        assert same == ("yes" if plain == tokens else f"{100 * n_same // 40}%")
    assert table["speculative"][5] == "yes" and table["early-exit"][5] != "yes"
    assert float(table["speculative"][3]) > 1 and float(table["early-exit"][4]) < 4
    assert "Medians of 2 interleaved runs" in out and "up to near-ties in float32: no difference." in out
    assert re.search(
        r"^Fastest: (plain|(speculative|early-exit), [\d.]+ times plain; same text: .*)\.$", out, re.MULTILINE
    )


def test_the_table_compares_runs_that_stand_side_by_side(folder, capsys, monkeypatch):
    session, order = sample.Session(parse_flags(sample.Config, flags(folder))), []
    runs = {mode: session.decode(mode) for mode in MODES}
    rates = {"plain": [10.0, 20.0, 400.0], "speculative": [30.0, 40.0, 300.0], "early-exit": [5.0, 40.0, 400.0]}
    capsys.readouterr()
    sample.print_table(session, runs, rates)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines[1:4]] == [
        ["plain", "20.0", "1.00x"],
        ["speculative", "40.0", "2.00x"],
        ["early-exit", "40.0", "1.00x"],
    ]
    assert lines[-1][:5] == ["Fastest:", "speculative,", "2.00", "times", "plain;"]

    def decode(self, mode, *show):
        order.append(mode)
        for out in runs[mode]:
            out.stats.seconds = len(order) * (1 if mode == "speculative" else 2)
        return runs[mode]

    monkeypatch.setattr(sample.Session, "decode", decode)
    lines = [line.split() for line in call(capsys, *flags(folder))[1].splitlines()]
    assert (
        order == [*MODES] * 3
    )  # the streamed runs, then two silent rounds: 40 tokens in 8, 5, 12 and 14, 8, 18 seconds
    assert ["plain", f"{(40 / 8 + 40 / 14) / 2:.1f}", "1.00x"] in [line[:3] for line in lines]
    assert ["speculative", f"{(40 / 5 + 40 / 8) / 2:.1f}", f"{(8 / 5 + 14 / 8) / 2:.2f}x"] in [
        line[:3] for line in lines
    ]


def test_threshold_above_one_and_coupled_sampling_keep_the_text(folder, capsys):
    more = ["--temperature", 1, "--verify", "coupled", "--exit-threshold", 1.5, "--dtype", "float64"]
    plain, *others = records(capsys, *flags(folder, *more))
    assert [other["tokens"] for other in others] == [plain["tokens"]] * 2
    assert "plain's text, exactly in float64: no difference." in call(capsys, *flags(folder, *more))[1]
    assert "--verify coupled would give" in call(capsys, *flags(folder, "--temperature", 1))[1]


def test_a_difference_is_reported_with_position_and_gap(folder, capsys):
    session = sample.Session(parse_flags(sample.Config, flags(folder, "--repetition-penalty", 1.3)))
    plain, other = session.decode("plain"), session.decode("plain")
    other[0].tokens[7] += 1
    text = sample.promise(session, plain, other)
    tokens = session.prompt + plain[0].tokens[:7]
    logits = session.model(torch.tensor([tokens]))[0, -1].detach().numpy()
    for i in set(tokens):
        logits[i] = logits[i] / 1.3 if logits[i] > 0 else logits[i] * 1.3
    apart = max(logits) - min(
        logits[[plain[0].tokens[7], other[0].tokens[7]]]
    )  # not from the second best, which nobody drew
    assert "sample 1 differs at token 8" in text and f"are {apart:.2g} apart (no near-tie" in text
    session.gap = lambda tokens, drawn: (1e-7, 1e-5)
    assert "(a near-tie; the bound is 1e-05)" in sample.promise(session, plain, other)


def test_drafters_and_exits_by_flag(folder, capsys):
    modes = {}
    for draft in ("none", "ngram", "exit"):
        modes[draft] = records(capsys, *flags(folder, "--draft", draft, "--repetition-penalty", 0.5))
    assert [record["mode"] for record in modes["none"]] == ["plain", "early-exit"]
    for draft in ("ngram", "exit"):
        plain, speculative, _ = modes[draft]
        assert speculative["draft"] == draft and speculative["stats"]["drafted"] > 0
        assert speculative["tokens"] == plain["tokens"]
    deep = records(capsys, *flags(folder, "--mode", "early-exit", "--exit-layer", "2,3"))[0]
    assert set(deep["layers_run"]) <= {2, 3, 4} and 2 in deep["layers_run"]
    assert {r["mode"] for r in records(capsys, "--model", folder / "exitless", "--prompt", "a")} == {
        "plain",
        "speculative",
    }


def test_auto_says_whether_drafting_paid(folder, capsys, monkeypatch):
    asked = flags(folder, "--mode", "auto", "--temperature", 0)
    assert "\nauto: plain, because --draft is none\n" in call(capsys, *asked, "--draft", "none")[1]
    lengths, step = [], sample.speculative_step
    monkeypatch.setattr(sample, "speculative_step", lambda *how: lengths.append(how[3]) or step(*how))
    for draft in ("ngram", "ngram,exit"):
        *_, last, expected = call(capsys, *asked, "--draft", draft)[1].splitlines()
        if draft == "ngram":  # of which no cost model knows how often it finds something
            last = expected
        else:
            form = r"cost model: (no gain from drafts|[\d.]+ times plain from exits?( \d)? with \d drafts a round), before anything was measured"
            assert re.fullmatch(form, expected), expected
        line = rf"auto: {draft} drafted in (\d+) of (\d+) rounds, as \d+ of \d+ drafts were accepted; rounds by reason: (.+)"
        n_drafting, n_rounds, whys = re.fullmatch(line, last).groups()
        counts = [int(why.rsplit(" ", 1)[1]) for why in whys.split(", ")]
        assert sum(counts) == int(n_rounds) >= int(n_drafting) and "measure" in whys
    stats = records(capsys, *asked)[0]["stats"]
    assert sum(stats["reasons"].values()) == stats["rounds"]
    records(capsys, *flags(folder, "--mode", "speculative", "--draft-len", 3))
    assert lengths == ["auto"] * 3 + [3]


def test_control_file_makes_decoding_plain(folder, capsys, tmp_path):
    (tmp_path / "control").write_text("plain\n")
    asked = flags(folder, "--mode", "speculative", "--temperature", 0, "--control", tmp_path / "control")
    assert set(records(capsys, *asked)[0]["sources"]) == {"plain"}
    (tmp_path / "control").write_text("")
    assert "draft" in records(capsys, *asked)[0]["sources"]
    (tmp_path / "control").write_text("k=1")
    assert len(records(capsys, *asked)[0]["stats"]["drafted_histogram"]) == 2
    (tmp_path / "control").write_text("faster!")
    status, _, err = call(capsys, *flags(folder, "--control", tmp_path / "control"))
    assert status == 0 and err.count("\n") == 1 and "'faster!' is none of plain, k=N and auto" in err


# ---------------------------------------------------------------------------------------------------- seeds, json


def test_json_holds_what_reproduces_it(folder, capsys):
    asked = flags(folder, "--mode", "plain", "--num-samples", 3, "--seed", 5, "--stop", "zz", "--temperature", 0.9)
    asked += ["--top-k", "50", "--top-p", "0.95", "--min-p", "0.01", "--repetition-penalty", "1.1"]
    rows = records(capsys, *asked)
    model, tokenizer = load_checkpoint(folder / "target")
    sampling = SamplingParams(**rows[0]["sampling"])
    assert sampling == SamplingParams(40, 0.9, 50, 0.95, 0.01, 1.1, {}, 5, [END], ["zz"])
    expected = generate(model, [rows[0]["prompt"]] * 3, sampling, tokenizer)
    for i, (row, out) in enumerate(zip(rows, expected, strict=True)):
        for field in dataclasses.fields(out):
            if field.name != "stats":
                assert row[field.name] == getattr(out, field.name)
        assert (row["sample"], row["seed"], row["mode"], row["dtype"]) == (i, 5 + i, "plain", "float32")
        assert row["stats"]["tokens"] == len(row["tokens"]) and row["versions"]["torch"] == torch.__version__
        assert row["flags"]["top_k"] == 50


def test_seeds_decide_and_nothing_else(folder, capsys):
    asked = flags(folder, "--mode", "plain", "--max-new-tokens", 12)
    batch = records(capsys, *asked, "--num-samples", 20)
    assert len({record["text"] for record in batch}) > 10
    assert records(capsys, *asked, "--seed", 0)[0]["tokens"] == batch[0]["tokens"]
    assert records(capsys, *asked, "--seed", 7)[0]["tokens"] == batch[7]["tokens"]
    out = [call(capsys, *asked, "--num-samples", 3)[1].partition("\n")[2] for _ in range(2)]  # free memory may differ
    assert out[0].partition("plain:")[0] == out[1].partition("plain:")[0]
    for i in range(3):
        assert f"--- plain, sample {i + 1} of 3, seed {i}\ndef f({batch[i]['text']}\n\n" in out[0]


def test_the_end_token_ends_a_sample(folder, capsys):
    rows = records(capsys, *flags(folder, "--mode", "plain", "--num-samples", 100, "--temperature", 100))
    assert any(row["finish_reason"] == "stop" for row in rows) and any(row["finish_reason"] == "length" for row in rows)
    for row in rows:
        assert END not in row["tokens"][:-1] and (row["tokens"][-1] == END) == (row["finish_reason"] == "stop")


@pytest.mark.parametrize("mode", ["compare", "plain", "speculative", "early-exit", "auto"])
def test_metrics_of_every_mode_go_to_both_kinds_of_file(folder, capsys, tmp_path, mode):
    asked = flags(folder, "--mode", mode, "--num-samples", 2, "--temperature", 0.5)
    rows = records(capsys, *asked, "--metrics", tmp_path / "log")
    assert call(capsys, *asked, "--metrics", tmp_path / "m.prom")[::2] == (0, "")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    samples = [s for f in text_string_to_metric_families((tmp_path / "m.prom").read_text()) for s in f.samples]
    words = {"plain": "plain", "speculative": "speculative", "auto": "speculative", "early-exit": "early_exit"}
    for line, row in zip(lines, rows, strict=True):
        assert line["optimization"] == words[row["mode"]] and line["gen_ai.request.model"] == str(folder / "target")
        assert line["gen_ai.usage.input_tokens"] == len(row["prompt"])
        assert line["gen_ai.usage.output_tokens"] == len(row["tokens"])
        assert line["optimization_tokens"]["plain"] == row["sources"].count("plain")
        assert (line["gen_ai.request.seed"], line["gen_ai.request.temperature"]) == (row["seed"], 0.5)
        assert line["gen_ai.response.finish_reasons"] == [row["finish_reason"]] and "def f(" not in json.dumps(line)
    counted = {s.labels["optimization"]: s.value for s in samples if s.name == "nanospec_input_tokens_total"}
    n_input = [(line["optimization"], line["gen_ai.usage.input_tokens"]) for line in lines]
    assert counted == {kind: sum(n for other, n in n_input if other == kind) for kind, _ in n_input}


def test_self_speculation_is_combined_and_auto_without_a_drafter_is_plain(folder, capsys, tmp_path):
    for more, word in ((["--draft", "exit"], "combined"), (["--draft", "ngram"], "speculative")):
        records(capsys, *flags(folder, "--mode", "speculative", "--metrics", tmp_path / "log", *more))
        assert json.loads((tmp_path / "log").read_text().splitlines()[-1])["optimization"] == word
    records(capsys, *flags(folder, "--mode", "auto", "--draft", "none", "--metrics", tmp_path / "log"))
    assert json.loads((tmp_path / "log").read_text().splitlines()[-1])["optimization"] == "plain"


@pytest.mark.parametrize("name", ["/dev/full", "nosuch/log", "nosuch/m.prom", ".", "notes.prom"])
def test_metrics_that_cannot_be_written_are_one_warning_and_the_same_text(folder, capsys, monkeypatch, tmp_path, name):
    if not os.path.exists("/dev/full") and name.startswith("/dev"):
        pytest.skip("needs a device that is always full")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.prom").write_text("mine\n")
    out = call(capsys, *flags(folder))[1]
    status, again, err = call(capsys, *flags(folder, "--metrics", name))
    assert status == 0 and err.startswith(f"sample.py: --metrics {name}: ") and err.count("\n") == 1
    assert name != "/dev/full" or os.strerror(errno.ENOSPC) in err
    texts = [shown.partition("\nmode ")[0].partition("\n")[2] for shown in (again, out)]  # memory may differ
    assert texts[0] == texts[1] and (tmp_path / "notes.prom").read_text() == "mine\n"


def test_metrics_cost_no_pass_of_the_model(folder, capsys, monkeypatch, tmp_path):
    passes, run_layers = [], GPT.run_layers
    monkeypatch.setattr(GPT, "run_layers", lambda self, x, *how: passes.append(x.shape) or run_layers(self, x, *how))
    seen = []
    for more in ([], ["--metrics", tmp_path / "log"], ["--metrics", tmp_path / "m.prom"]):
        passes.clear()
        records(capsys, *flags(folder, *more))
        seen.append(list(passes))
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) > 40


# -------------------------------------------------------------------------------------------------------- prompts


def test_prompts_from_anywhere(folder, capsys, tmp_path):
    (tmp_path / "prompt").write_text("déf\n")
    for prompt, ids in (
        ("", [END]),
        ("a", [97]),
        (f"@{tmp_path / 'prompt'}", [*"déf\n".encode()]),
        ("<|end|>b", [END, 98]),
    ):
        row = records(capsys, *flags(folder, "--mode", "plain", "--prompt", prompt))[0]
        assert row["prompt"] == ids and (len(row["tokens"]) == 40 or row["tokens"][-1] == END)
    row = records(capsys, *flags(folder, "--mode", "speculative", "--prompt", "a" * 157, "--temperature", 0))[0]
    assert (len(row["tokens"]), row["finish_reason"]) == (3, "context")
    row = records(capsys, *flags(folder, "--mode", "plain", "--prompt", "a" * 160))[0]
    assert (row["tokens"], row["finish_reason"]) == ([], "context")
    for n in ("0", "1", "2"):
        assert {len(row["tokens"]) for row in records(capsys, *flags(folder, "--max-new-tokens", n))} == {int(n)}
        assert call(capsys, *flags(folder, "--max-new-tokens", n))[0] == 0


def test_a_drafter_with_a_short_context_is_one_warning_and_the_same_text(folder, capsys):
    status, out, err = call(capsys, *flags(folder, "--draft", folder / "short", "--max-new-tokens", 60))
    assert status == 0 and err.startswith("sample.py: ") and err.count("\n") == 1 and "40" in err
    assert re.search(r"^speculative .*  yes$", out, re.MULTILINE)


# --------------------------------------------------------------------------------------------------------- errors

ERRORS = {
    "--temperature=-1": "temperature", "--temperature nan": "temperature", "--temperature hot": "temperature",
    "--top-p 2": "top_p", "--top-k -1": "top_k", "--min-p 1.5": "min_p", "--repetition-penalty 0": "repetition_penalty",
    "--max-new-tokens -1": "max_new_tokens", "--seed x": "seed", "--stop=": "stop_strings", "--stop": "stop",
    "--draft-len -1": "draft-len", "--draft-len many": "draft-len", "--draft none --mode speculative": "drafter",
    "--draft nosuch": "nosuch", "--draft stranger": "stranger", "--draft mute": "mute", "--draft exit --model exitless": "exit heads",
    "--exit-layer 99": "99", "--exit-layer x": "exit-layer", "--exit-threshold -1": "threshold", "--exit-threshold nan": "nan",
    "--mode early-exit --model exitless": "exit heads", "--mode fast": "mode", "--verify never": "verify",
    "--kv-fill guess": "kv-fill", "--confidence none": "confidence", "--num-samples 0": "num-samples", "--threads -1": "threads",
    "--model nosuch": "nosuch", "--model .": "config.json", "--model mute": "tokenizer", "--model startless --prompt=": "start token",
    "--prompt @nosuch": "nosuch", "--prompt @.": "directory", "--prompt @empty.txt": "empty", "--prompt @binary.txt": "UTF-8",
    "--prompt @long.txt": "1000000 tokens", "--prompt @/dev/zero": "16 MiB", "--dtype float8": "float8", "--device tpu": "tpu", "--quantize int3": "int3",
    "--chat": "template", "--exits nosuch": "nosuch", "--draft-quantize int2": "int2", "--draft ngram --draft-quantize int8": "no weights", "--exits drafter": "nanospec-heads",
    "--model smollm2-exits": "heads for a model", "--draft smollm2-exits": "heads for a model", "--impl triton": "TRITON_INTERPRET", "--nosuch": "nosuch", "stray": "stray",
}  # fmt: skip


@pytest.mark.parametrize("arguments", ERRORS)
def test_errors_are_one_line_and_status_2(folder, capsys, monkeypatch, arguments):
    monkeypatch.chdir(folder)
    status, out, err = call(capsys, *flags(folder), *arguments.split())
    assert status == 2 and re.fullmatch(r"(--- MiB of memory: .*\n)?", out)
    assert err.startswith("sample.py: ") and err.count("\n") == 1 and ERRORS[arguments] in err


def test_errors_name_both_numbers_and_both_models(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert "160" in call(capsys, *flags(folder, "--prompt", "@long.txt"))[2]
    assert "target" in call(capsys, *flags(folder, "--draft", "stranger"))[2]
    assert "bundled" in call(capsys, "--model", "nosuch")[2]


def test_bugs_are_not_dressed_as_errors(folder, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(sample, "run_loop", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        sample.main(flags(folder))


def test_help_names_every_flag_with_its_trade(capsys):
    status, out, err = call(capsys, "--help")
    assert (status, err) == (0, "") and "python sample.py " in out
    for field in dataclasses.fields(sample.Config):
        assert f"--{field.name.replace('_', '-')}" in out
        assert " ".join(field.metadata["help"].split())[:20] in " ".join(out.split())


# ----------------------------------------------------------------------------------------- terminals and processes


def on_terminal(arguments) -> str:
    """What the command writes to a terminal."""
    master, slave = os.openpty()
    mode = termios.tcgetattr(slave)
    mode[1] &= ~termios.OPOST  # newlines as they are
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    written, stdout = [], sys.stdout

    def read():
        try:
            while data := os.read(master, 4096):
                written.append(data)
        except OSError:  # how Linux says that the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(slave, "w", encoding="utf-8") as sys.stdout:
            assert sample.main(list(map(str, arguments))) == 0
    finally:
        sys.stdout = stdout
        reader.join()
        os.close(master)
    return b"".join(written).decode()


def test_colour_is_for_terminals_and_shows_the_source(folder, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    asked = flags(folder, "--temperature", 1, "--max-new-tokens", 100)
    for mode in MODES:
        out = on_terminal([*asked, "--mode", mode])
        row = records(capsys, *asked, "--mode", mode)[0]
        shown = row["text"].translate(sample.PICTURES)
        plain_text = re.sub(r"\x1b\[\d*m", "", out)
        assert plain_text.partition("\n")[2].startswith(f"def f({shown}\n\n") and not set(plain_text) & {
            chr(i) for i in sample.PICTURES
        }
        assert set(row["text"]) & {chr(i) for i in sample.PICTURES}
        assert all(f"\x1b[{colour}m{source}\x1b[0m" in out for source, colour in sample.COLOURS.items())  # the legend
        out = out.partition("\x1b[32mdraft")[0]
        used = {source for source, colour in sample.COLOURS.items() if f"\x1b[{colour}m" in out}
        assert used <= set(row["sources"]) - {"plain"} and bool(used) == (mode != "plain")
        letters = [
            (source, chr(t)) for source, t in zip(row["sources"], row["tokens"]) if 97 <= t < 123 and source != "plain"
        ]
        for source, letter in letters:  # behind half a character a token brings that along
            assert re.search(rf"\x1b\[{sample.COLOURS[source]}m�?{letter}\x1b\[0m", out)
        assert "\x1b" not in call(capsys, *asked, "--mode", mode)[1].replace(row["text"], "")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_terminal([*asked, "--mode", "speculative"])


def test_the_command_as_a_stranger_runs_it(folder):
    process = start("--model", folder / "target", "--draft", folder / "drafter")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    text = out.decode()
    assert sample.DEFAULT_PROMPT in text and "\nFastest: " in text and "\x1b[" not in text


def test_ctrl_c_prints_what_there_is_and_ends_with_130(folder, tmp_path):
    process = start(
        *flags(folder, "--model", folder / "endless", "--metrics", tmp_path / "log"), "--max-new-tokens", "8000"
    )
    read = b""
    while len(read.partition(b"--- plain\n")[2]) < 30:
        read += process.stdout.read1(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    [row] = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    n = row["gen_ai.usage.output_tokens"]
    assert row["gen_ai.response.finish_reasons"] == ["interrupted"] and 0 < n < 8000
    model, tokenizer = load_checkpoint(folder / "endless")
    [whole] = generate(model, [[*b"def f("]], SamplingParams(n, temperature=0), tokenizer)
    assert (read + out).decode().partition("\n")[2].startswith(f"--- plain\ndef f({whole.text}\n\nplain: {n} tokens")


def test_ctrl_c_before_the_first_token_is_silent(folder, tmp_path):
    os.mkfifo(tmp_path / "prompt")
    process = start(*flags(folder, "--prompt", f"@{tmp_path / 'prompt'}"))
    with open(tmp_path / "prompt", "w"):  # waits until the other side reads, which is after the imports
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_ctrl_c_during_imports_is_silent(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n")
    process = start(env={"PYTHONPATH": str(tmp_path)})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_on_the_way_to_a_token_imports_sympy(folder, temperature):
    """Some functions of PyTorch do: a third of a second each."""
    code = "import sys, sample; sys.exit(sample.main(sys.argv[1:]) or 'sympy' in sys.modules)"
    command = [sys.executable, "-c", code, *flags(folder, "--prompt", "ab", "--temperature", temperature)]
    assert (
        subprocess.run([*map(str, command)], cwd=Path(SCRIPT).parent, capture_output=True, check=False).returncode == 0
    )


def test_a_closed_pipe_is_a_silent_end(folder):
    process = start(*flags(folder, "--prompt", "-"), stdin=subprocess.PIPE)
    process.stdin.write(b"def g(")
    process.stdin.close()
    assert process.stdout.readline().startswith(b"--- MiB of memory")
    assert process.stdout.readline() == b"--- plain\n" and process.stdout.read(6) == b"def g("
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(folder):
    with open("/dev/full", "w") as full:
        process = start(*flags(folder, "--json"), stdout=full)
    err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2 and err.startswith("sample.py: ") and err.count("\n") == 1
