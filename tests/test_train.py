import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import train_exit_heads
from checkpoint import Tokenizer, load_checkpoint, load_heads, save_checkpoint
from decode import SamplingParams, generate
from kernels import QuantizedWeight
from speculative import HeadDrafter, speculative_generate
from train_exit_heads import (
    TrainConfig,
    answers,
    base_losses,
    draft_losses,
    evaluate,
    kept_layers,
    main,
    rate,
    read_corpus,
    sequence,
    split_documents,
    train_tokenizer,
    unpacked,
)

SCRIPT = Path(train_exit_heads.__file__)
TINY = [
    "--vocab-size",
    "300",
    "--n-layer",
    "3",
    "--n-embd",
    "32",
    "--n-head",
    "2",
    "--n-kv-head",
    "1",
    "--n-hidden",
    "48",
]
TINY += ["--block-size", "32", "--exit-layers", "1,2", "--warmup", "4", "--eval-every", "100"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of a few files of text, of which one or two are held out."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(60):
        lines = [f"def f{rng.randrange(30)}(x):\n    return x + {rng.randrange(100)}\n" for _ in range(30)]
        (folder / f"file{i}.py").write_text("\n".join(lines))
    return folder


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [{k: v for k, v in record.items() if k.startswith(("step", "loss", "kl"))} for record in log(folder)]


def run(*arguments, processes=1, interrupt_after=None):
    """The script in a process of its own -> (exit status, stderr); interrupt_after: lines in the log before Ctrl-C."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(SCRIPT), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    if interrupt_after is not None:
        file = Path(arguments[arguments.index("--out") + 1]) / "log.jsonl"
        while process.poll() is None and not (file.exists() and file.read_text().count("\n") >= interrupt_after):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    return process.wait(120), process.stderr.read()


# ---------------------------------------------------------------------------------------------------------------- runs


def test_ctrl_c_leaves_a_checkpoint_from_which_resuming_gives_the_same_losses_and_weights(text, tmp_path):
    flags = [*TINY, "--data", text, "--steps", 60, "--batch-size", 4, "--layer-dropout", "0.5"]
    assert main([*map(str, flags), "--out", str(tmp_path / "whole")]) == 0
    status, stderr = run(*flags, "--out", tmp_path / "cut", interrupt_after=5)
    assert status == 130
    assert "Traceback" not in stderr
    done = torch.load(tmp_path / "cut" / "train.pt", weights_only=True)["step"]
    assert 5 <= done == len(log(tmp_path / "cut")) < 60
    load_checkpoint(tmp_path / "cut")
    with (tmp_path / "cut" / "log.jsonl").open("a") as file:  # a crash behind the checkpoint leaves such lines
        file.write(json.dumps({"step": done}) + "\n")
    assert main([*map(str, flags), "--out", str(tmp_path / "cut"), "--resume"]) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, other = (load_checkpoint(tmp_path / name)[0].state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_two_processes_equal_one_with_the_doubled_batch(text, tmp_path):
    flags = [*TINY, "--data", text, "--steps", 12, "--layer-dropout", "0", "--precision", "float32"]
    assert main([*map(str, flags), "--batch-size", "8", "--out", str(tmp_path / "one")]) == 0
    status, stderr = run(*flags, "--batch-size", 4, "--out", tmp_path / "two", processes=2)
    assert status == 0, stderr[-2000:]
    for one, two in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, abs=1e-4)


def test_two_processes_train_with_layers_left_out(text, tmp_path):
    flags = [*TINY, "--data", text, "--steps", 6, "--batch-size", 2, "--layer-dropout", "0.9"]
    dropped = [kept_layers(TrainConfig(n_layer=3, layer_dropout=0.9), step) for step in range(6)]
    assert any(len(kept) < 3 for kept in dropped)
    status, stderr = run(*flags, "--out", tmp_path, processes=2)
    assert status == 0, stderr[-2000:]
    assert all(math.isfinite(record["loss"]) for record in log(tmp_path))


@pytest.fixture(scope="module")
def target(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    assert (
        main([*TINY, "--data", str(text), "--steps", "60", "--batch-size", "8", "--lr", "0.01", "--out", str(folder)])
        == 0
    )
    return folder


def test_the_loss_falls_and_every_exit_learns(target):
    first, last = log(target)[0], log(target)[-1]
    assert all(last[name] < first[name] - 1 for name in ("loss", "loss_1", "loss_2"))
    assert set(last["held_out"]["exits"]) == {"1", "2"}
    assert last["held_out"]["bits_per_byte"] < 6


def test_the_drafter_comes_nearer_to_its_target(text, target, tmp_path):
    flags = ["--stage", "draft", "--data", text, "--model", target, "--n-layer", 1, "--n-embd", 16, "--n-head", 1]
    flags += ["--n-hidden", 32, "--block-size", 32, "--samples", 16, "--batch-size", 8, "--warmup", 4, "--lr", "0.01"]
    flags += ["--steps", 40, "--out", tmp_path]
    before = load_checkpoint(target)[0].state_dict()
    assert main([*map(str, flags)]) == 0
    records = log(tmp_path)
    assert sum(r["kl"] for r in records[-5:]) < 0.7 * sum(r["kl"] for r in records[:5])
    assert all(torch.equal(t, before[n]) for n, t in load_checkpoint(target)[0].state_dict().items())
    assert load_checkpoint(tmp_path)[1].ranks == load_checkpoint(target)[1].ranks
    (texts, best, log_probs), corpus = torch.load(tmp_path / "lessons.pt", weights_only=True)
    assert texts.shape == (16, 16)
    assert best.shape == log_probs.shape == (16, 16, 8)
    assert torch.iinfo(best.dtype).max > 200_000  # vocabularies of real models
    assert len(corpus) == 3


HEADS = [
    "--block-size",
    32,
    "--batch-size",
    4,
    "--warmup",
    1,
    "--eval-every",
    100,
    "--tokens",
    2000,
    "--head-vocab",
    200,
]


def test_exit_heads_begin_as_the_final_head_and_learn_beside_a_frozen_target(text, target, tmp_path):
    """Both stages read one recording; nothing but heads is written, and they fit the target in any dtype."""
    flags = ["--stage", "exits", "--data", text, "--model", target, "--exit-layers", "1,2", *HEADS]
    flags += ["--recording", tmp_path / "recording", "--out", tmp_path / "heads"]
    assert main([*map(str, flags), "--steps", "1", "--lr", "0"]) == 0
    model, _ = load_checkpoint(target)
    meta = load_heads(model, tmp_path / "heads")
    x, vocab = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)), model.exit_vocab
    assert len(vocab) == 200 and set(meta["figures"]["2"]) >= {"sampled", "foreign"}
    for layer, adapter in itertools.product((1, 2), ("exit", "draft")):
        logits = model.logits(x, layer, adapter)
        assert torch.allclose(logits[:, vocab], model.logits(x)[:, vocab], atol=0.02)
    made = (tmp_path / "recording" / "recording.pt").stat().st_mtime_ns
    assert main([*map(str, flags), "--steps", "60", "--lr", "0.01"]) == 0
    assert (tmp_path / "recording" / "recording.pt").stat().st_mtime_ns == made
    rows = [json.loads(line) for line in (tmp_path / "heads" / "log.jsonl").read_text().splitlines()]
    assert all(rows[-1][f"{name}_{layer}"] < rows[0][f"{name}_{layer}"] for name in ("kl", "loss") for layer in (1, 2))
    model = load_checkpoint(target, dtype="bfloat16")[0]
    load_heads(model, tmp_path / "heads")
    assert all(
        head.adapters[name].weight.abs().max() > 0 for head in model.exits.values() for name in ("exit", "draft")
    )
    assert len(model.config.exit_platt["max_prob"]) == 2

    flags[1], flags[-1] = "drafter", tmp_path / "drafter"
    assert main([*map(str, flags), "--steps", "60", "--lr", "0.01"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "drafter" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["kl_0"] < rows[0]["kl_0"] and rows[-1]["kl_2"] < rows[0]["kl_2"]
    model, sampling = load_checkpoint(target, dtype="float64")[0], SamplingParams(20, temperature=0)
    drafter = HeadDrafter(model, tmp_path / "drafter", quantize="int8")
    weights = {  # what it becomes by itself: on a CPU, int8 pays in bfloat16
        (dtype, asked): HeadDrafter(load_checkpoint(target, dtype=dtype)[0], tmp_path / "drafter", asked).head.fuse.weight
        for dtype in ("float32", "bfloat16") for asked in (None, "none")
    }  # fmt: skip
    assert [key for key, weight in weights.items() if isinstance(weight, QuantizedWeight)] == [("bfloat16", None)]
    outs = speculative_generate(model, drafter, [[5, 6, 7]], sampling)
    assert outs[0].tokens == generate(model, [[5, 6, 7]], sampling)[0].tokens and outs[0].stats.drafted > 0
    flags[-3] = tmp_path / "elsewhere"
    assert main([*map(str, flags), "--model", "stdlib", "--recording", str(tmp_path / "recording")]) == 2


def test_a_run_that_diverges_stops_and_says_so(text, tmp_path, capsys):
    assert main([*TINY, "--data", str(text), "--steps", "40", "--lr", "1e30", "--out", str(tmp_path)]) == 2
    assert "not finite" in capsys.readouterr().err
    assert not (tmp_path / "train.pt").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--data", "/no/such/place"],
        ["--stage", "draft", "--model", "nosuch"],
        ["--steps", "0"],
        ["--decay", "2"],
        ["--vocab-size", "256"],
        ["--exit-layers", "1,x"],
        ["--exit-layers", "2,1"],
        ["--stage", "nosuch"],
        ["--device", "abacus"],
        ["--resume"],
        ["--block-size", "100000"],
        ["--stage", "exits", "--exit-layers", "4,99"],
        ["--stage", "exits", "--tokens", "0"],
        ["--stage", "exits", "--cache-gb", "0"],
        ["--stage", "exits", "--head-vocab", "-1"],
        ["--stage", "drafter", "--unroll", "0"],
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_status_2(flags, text, tmp_path, capsys):
    given = [*TINY, "--data", str(text), "--steps", "2", "--out", str(tmp_path), *flags]
    try:
        status = main(given)
    except SystemExit as stopped:
        status = stopped.code
    err = capsys.readouterr().err
    assert status == 2
    assert err.startswith("train_exit_heads.py: "), err
    assert err.count("\n") == 1, err


# ------------------------------------------------------------------------------------------------------- text and tokens


def test_the_tokenizer_holds_all_bytes_and_loses_no_text(text):
    tokenizer, rng = train_tokenizer(read_corpus(str(text))[0], 300), random.Random(0)
    assert tokenizer.n_vocab == 300
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (299, (299,))
    assert [tokenizer.decode_bytes([i]) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert len(tokenizer.encode("    return x")) < 6
    for _ in range(200):  # every character, odd spaces and line ends included, is in some piece
        string = "".join(
            chr(rng.choice((rng.randrange(33), rng.randrange(256), rng.randrange(0xD800)))) for _ in range(30)
        )
        assert tokenizer.decode(tokenizer.encode(string)) == string


def test_a_file_is_held_out_by_its_name_alone(text):
    documents, text_hash = read_corpus(str(text))
    training, held_out = split_documents(documents)
    assert sorted(training + held_out) == documents
    assert held_out
    fewer = split_documents([d for d in documents if d != training[0]])
    assert fewer[1] == held_out
    changed = split_documents([(name, b"x") for name, _ in documents])
    assert [name for name, _ in changed[1]] == [name for name, _ in held_out]
    (text / "file0.py").write_text((text / "file0.py").read_text() + "#")
    assert read_corpus(str(text))[1] != text_hash


def test_one_file_of_text_is_split_at_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (training,), (held_out,) = split_documents(read_corpus(str(tmp_path / "a.txt"))[0])
    assert training[1] + held_out[1] == bytes(range(100))
    assert len(held_out[1]) == 10


def test_an_epoch_reads_every_window_once_and_the_next_one_otherwise():
    stream, length, n_windows = torch.arange(1003), 10, 99
    epochs = [[sequence(stream, epoch * n_windows + i, length, 0) for i in range(n_windows)] for epoch in range(3)]
    for windows in epochs:
        assert all(torch.equal(window, torch.arange(window[0], window[0] + length + 1)) for window in windows)
        read = Counter(int(token) for window in windows for token in window[:-1])
        assert max(read.values()) == 1
        assert len(read) == n_windows * length
    starts = [[int(window[0]) for window in windows] for windows in epochs]
    assert len({tuple(s) for s in starts}) == 3
    assert len({min(s) for s in starts}) > 1  # offsets
    assert sequence(stream, 5, length, 0).tolist() != sequence(stream, 5, length, 1).tolist()


# ----------------------------------------------------------------------------------------------------- losses and figures


def test_deeper_layers_are_left_out_more_often():
    config = TrainConfig(n_layer=6, layer_dropout=0.4)
    kept = Counter(layer for step in range(4000) for layer in kept_layers(config, step))
    shares = [1 - kept[layer] / 4000 for layer in range(6)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert abs(shares[-1] - 0.4) < 0.04  # five standard deviations
    assert kept_layers(TrainConfig(n_layer=6, layer_dropout=0), 1) == set(range(6))


def test_the_rate_rises_stays_and_falls_to_nothing():
    config = TrainConfig(steps=1000, warmup=50, decay=0.4)
    rates = [rate(config, step) for step in range(1001)]
    assert rates[0] == 1 / 50
    assert set(rates[49:601]) == {1.0}
    assert rates[600:] == sorted(rates[600:], reverse=True)
    assert rates[-1] == 0
    assert rates[800] == pytest.approx(0.5)


def test_copying_the_final_head_pulls_the_exits_alone(target):
    model, _ = load_checkpoint(target)
    parts = base_losses(model, torch.arange(40).view(2, 20), {0, 1, 2})
    assert len(parts) == 5
    sum(parts[3:]).backward()
    for unmoved in (model.final_norm.weight, model.blocks[2].up.weight):
        assert unmoved.grad is None or unmoved.grad.abs().max() == 0
    assert model.blocks[1].up.weight.grad.abs().max() > 0
    assert model.exits["1"].norm.weight.grad.abs().max() > 0


@torch.no_grad()
def test_the_answers_kept_of_the_target_measure_the_same_distance(target):
    config, model = TrainConfig(precision="float32"), load_checkpoint(target)[0]
    rows = torch.randint(0, 299, (5, 20), generator=torch.Generator().manual_seed(0))
    kl, _, agreement = draft_losses(model, *unpacked(answers(config, model, rows), "cpu"))
    assert kl.abs() < 1e-3
    assert agreement == 1
    other = load_checkpoint(target)[0]
    for parameter in other.parameters():
        parameter.data.mul_(1.2)
    teacher, guess = model(rows).log_softmax(-1), other(rows).log_softmax(-1)
    whole = (teacher.exp() * (teacher - guess)).sum(-1).mean()
    with_all, cross_entropy, _ = draft_losses(other, *unpacked(answers(config, model, rows, 300), "cpu"))
    with_some, _, _ = draft_losses(other, *unpacked(answers(config, model, rows), "cpu"))
    assert with_all == pytest.approx(whole.item(), abs=2e-3)
    assert 0 < with_some < whole + 1e-3  # putting tokens together can only hide a difference
    assert cross_entropy == pytest.approx(-guess.gather(-1, teacher.argmax(-1)[..., None]).mean().item(), abs=1e-4)


def test_bits_per_byte_of_a_uniform_model_are_those_of_its_vocabulary(target):
    model, tokenizer = load_checkpoint(target)
    for parameter in model.parameters():
        parameter.data.zero_()
    stream = torch.tensor(tokenizer.encode("def f(x):\n    return x\n" * 30))
    stream = stream[: 16 * ((len(stream) - 1) // 16) + 1]  # windows of 32 that overlap by 16 end where the text ends
    figures = evaluate(TrainConfig(precision="float32"), model, tokenizer, stream)
    n_bytes = len(tokenizer.decode_bytes(stream[1:].tolist()))
    assert (figures["tokens"], figures["bytes"]) == (len(stream) - 1, n_bytes)
    assert figures["bits_per_byte"] == pytest.approx((len(stream) - 1) * math.log2(300) / n_bytes, rel=1e-4)
    assert figures["exits"]["1"] == pytest.approx({"cross_entropy": math.log(300), "agreement": 1, "kl": 0}, abs=1e-4)


def test_a_drafter_may_be_asked_for_more_context_than_its_target_has(text, target, tmp_path):
    """The default --block-size is 512, this target's is 32: the texts end where the target does."""
    flags = ["--stage", "draft", "--data", text, "--model", target, "--n-layer", 1, "--n-embd", 16, "--n-head", 1]
    flags += ["--n-hidden", 16, "--samples", 4, "--batch-size", 2, "--steps", 1, "--eval-every", 1, "--out", tmp_path]
    assert main([*map(str, flags)]) == 0
    assert math.isfinite(log(tmp_path)[0]["held_out"]["kl"])


def test_a_truncated_run_is_one_line_and_keeps_its_file(text, tmp_path, capsys):
    flags = [*TINY, "--data", str(text), "--steps", "1", "--batch-size", "2", "--out", str(tmp_path)]
    assert main(flags) == 0
    half = (tmp_path / "train.pt").read_bytes()[:3000]
    (tmp_path / "train.pt").write_bytes(half)
    capsys.readouterr()
    assert main([*flags, "--resume"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train_exit_heads.py: ")]
    assert len(errors) == 1 and "truncated" in errors[0] and (tmp_path / "train.pt").read_bytes() == half


def test_empty_files_are_in_the_hash_and_in_no_split(text, tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    documents, digest = read_corpus(str(tmp_path))
    (tmp_path / "b.py").write_text("")
    with_empty, other = read_corpus(str(tmp_path))
    assert with_empty == documents and other != digest


def test_a_pair_of_strangers_gets_no_report(text, target, tmp_path, capsys):
    """A drafter of the same shape whose ids mean other tokens: one line, and no figures."""
    model, tokenizer = load_checkpoint(target)
    ranks = {piece: rank ^ 1 if rank < 256 else rank for piece, rank in tokenizer.ranks.items()}
    stranger = Tokenizer(ranks, tokenizer.pattern, tokenizer.special, tokenizer.bos_id, tokenizer.eos_ids)
    save_checkpoint(tmp_path / "stranger", model, stranger)
    flags = ["--stage", "report", "--data", text, "--model", target, "--draft", tmp_path / "stranger"]
    assert main([*map(str, flags), "--out", str(tmp_path / "report.json")]) == 2
    assert "not a pair" in capsys.readouterr().err and not (tmp_path / "report.json").exists()
