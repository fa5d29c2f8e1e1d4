import json

import pytest
import torch
from helpers import tiny_model, weaker

import bench
from checkpoint import Tokenizer, save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, r"[\s\S]")
    target = tiny_model(dtype=torch.float32, poisoned=False, vocab_size=256)
    save_checkpoint(folder / "target", target, tokenizer)
    save_checkpoint(folder / "drafter", weaker(target), tokenizer)
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
    """A machine that slows down as it goes leaves the ratios as they are."""
    clock = iter(range(1, 10**6))
    monkeypatch.setattr(bench, "token_seconds", lambda run: float(next(clock)))
    status, out, _ = call(folder, capsys, "--repeats", 40)
    ratios = [row["ratio_to_plain"] for row in json.loads(out.splitlines()[-1])["rows"]]
    assert status == 0 and ratios[0] == 1.0 and all(0.9 < ratio < 1.1 for ratio in ratios)


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
    ],
    ids=" ".join,
)
def test_errors_are_one_line_and_status_2(folder, capsys, more):
    status, out, err = call(folder, capsys, *more)
    errors = [line for line in err.splitlines() if line.startswith("bench.py: ")]
    assert status == 2 and out == "" and len(errors) == 1 and "Traceback" not in err
