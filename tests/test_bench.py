import itertools
import json

import pytest
import torch
from helpers import tiny_model, weaker

import bench
from checkpoint import Tokenizer, save_checkpoint
from decode import Generation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, r"[\s\S]")
    target = tiny_model(dtype=torch.float32, poisoned=False, vocab_size=256)
    save_checkpoint(folder / "target", target, tokenizer)
    save_checkpoint(folder / "drafter", weaker(target), tokenizer)
    save_checkpoint(folder / "stranger", target, Tokenizer({bytes([255 - i]): i for i in range(256)}, r"[\s\S]"))
    save_checkpoint(folder / "mute", target)
    (folder / "keys.json").write_text(json.dumps({"texts": ["a", {"user": "b"}], "more": ["c"], "text": "abc"}))
    (folder / "prompts.json").write_text(json.dumps(["def f(x):", "import"]))
    return folder


def call(folder, capsys, *more):
    flags = ["--model", folder / "target", "--draft", folder / "drafter", "--prompts", folder / "prompts.json"]
    flags += ["--max-new-tokens", 12, "--repeats", 2, *more]
    try:
        status = bench.main(list(map(str, flags)))
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


def test_every_mode_is_compared_with_plain_on_the_same_tokens(folder, capsys, tmp_path):
    """Lossless modes have plain's text, a threshold above 1 is plain, and the last line holds what the file holds."""
    flags = ["--draft-len", "1,3", "--exit-threshold", "0.05,1.5", "--out", tmp_path / "result.json"]
    status, out, _ = call(folder, capsys, *flags)
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert {"command", "machine", "torch", "commit", "date"} <= set(result)
    rows = {row["mode"]: row for row in result["rows"]}
    assert len(rows) == 1 + 2 * 3 + 2
    assert rows["plain"]["ratio_to_plain"] == 1.0 and rows["plain"]["tokens_per_target_pass"] == 1.0
    for name, row in rows.items():
        if name != "early exit 0.05":
            assert row["equal"] == 1.0 and row["texts_equal"] == 2, name
    assert rows["early exit 1.5"]["mean_layers"] == 4 and rows["early exit 1.5"]["agreement"] is None
    eager = rows["early exit 0.05"]
    assert eager["exited"] > 0.5 and eager["mean_layers"] < 4 and 0 <= eager["agreement"] < 1
    assert rows["speculative k=3"]["tokens_per_target_pass"] > rows["speculative k=1"]["tokens_per_target_pass"] > 1
    assert bench.table(result["rows"]) in out


def test_ratios_are_paired_and_interleaved(folder, capsys, monkeypatch):
    """A machine that is ten times slower in every other repetition leaves the ratios as they are."""
    n_modes, n_runs = 5, itertools.count()
    monkeypatch.setattr(bench, "token_seconds", lambda run: 10.0 if next(n_runs) // n_modes % 2 else 1.0)
    status, out, _ = call(folder, capsys, "--repeats", 3)
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert status == 0 and len(rows) == n_modes
    assert [ratio for row in rows for ratio in (row["ratio_to_plain"], *row["ratio_quartiles"])] == [1.0] * 3 * n_modes


def test_ctrl_c_gives_no_result(folder, capsys, monkeypatch, tmp_path):
    """What an interruption cut short is not counted as if it were whole."""
    calls = itertools.count()

    def interrupted(run):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(bench, "token_seconds", interrupted)
    status, out, _ = call(folder, capsys, "--out", tmp_path / "result.json")
    assert (status, out) == (130, "") and not (tmp_path / "result.json").exists()
    cut = Generation(finish_reason="interrupted")
    with pytest.raises(KeyboardInterrupt):
        bench.measure(bench.BenchConfig(), {"plain": bench.Mode(lambda ids, sampling: cut)}, [[1]])


@pytest.mark.parametrize(
    "more",
    [
        ["--prompts", "nosuch.json"],
        ["--model", "nosuch"],
        ["--draft", "nosuch"],
        ["--draft-len", "-1"],
        ["--draft-len", "x"],
        ["--exit-threshold", "nan"],
        ["--temperature", "-1"],
        ["--exit-layer", "99"],
        ["--repeats", "0"],
        ["--max-new-tokens", "0"],
        ["--threads", "-1"],
        ["--out", "/nosuch/result.json"],
        ["--device", "mps"],
        ["--draft", "stranger"],
        ["--prompts", "prompts.json:nosuch"],
        ["--prompts", "keys.json:nosuch"],
        ["--prompts", "keys.json:text"],
        ["--prompts", "keys.json"],
        ["--variants", "int3"],
        ["--peers", "transformers", "--temperature", "1"],
        ["--what", "quality", "--model", "mute"],
    ],
    ids=" ".join,
)
def test_errors_are_one_line_and_status_2(folder, capsys, more):
    more = [folder / part if (folder / part.partition(":")[0]).exists() else part for part in more]
    status, out, err = call(folder, capsys, *more)
    errors = [line for line in err.splitlines() if line.startswith("bench.py: ")]
    assert status == 2 and out == "" and len(errors) == 1 and "Traceback" not in err


def test_prompts_may_be_lists_of_a_file(folder):
    assert bench.read_prompts(f"{folder / 'keys.json'}:texts,more") == ["a", {"user": "b"}, "c"]
    with pytest.raises(ValueError, match="nosuch.json.*No such file"):
        bench.read_prompts("nosuch.json")


def test_a_peer_says_nothing_of_passes_and_layers(folder, capsys, monkeypatch):
    """What another library does inside is not known; its row stands behind ours, its speed is paired like theirs."""

    def peer(model, config):
        def decode(ids, sampling):
            out = bench.generate(model, [ids], sampling)[0]
            return bench.foreign(out.tokens, 0.0, 1.0, 3.0)

        return {"peer": bench.Mode(decode)}

    monkeypatch.setitem(bench.PEERS, "transformers", peer)
    status, out, _ = call(
        folder, capsys, "--peers", "transformers", "--variants", "float32,int8", "--only", "plain,peer"
    )
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert status == 0 and [row["mode"] for row in rows] == ["float32 plain", "int8 plain", "peer"]
    assert rows[2]["tokens_per_target_pass"] is rows[2]["mean_layers"] is rows[2]["alpha"] is None
    assert rows[2]["equal"] == 1.0 and rows[2]["tokens_per_second"] == 6.0
