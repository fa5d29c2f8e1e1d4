import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model, weaker

import bench
import sample
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


def call(folder, capsys, *more, canary=False):
    flags = ["--model", folder / "target", "--draft", folder / "drafter", "--prompts", folder / "prompts.json"]
    flags = ["canary", *flags, "--threads", 0] if canary else [*flags, "--repeats", 2]
    try:
        status = bench.main(list(map(str, [*flags, "--max-new-tokens", 12, *more])))
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


def test_every_mode_is_compared_with_plain_on_the_same_tokens(folder, capsys, tmp_path):
    """Lossless modes have plain's text, a threshold above 1 is plain, and the last line holds what the file holds."""
    flags = ["--draft-len", "1,3,auto", "--exit-threshold", "0.05,1.5", "--out", tmp_path / "result.json"]
    status, out, _ = call(folder, capsys, *flags)
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert {"command", "machine", "torch", "commit", "date"} <= set(result)
    rows = {row["mode"]: row for row in result["rows"]}
    assert len(rows) == 1 + 3 * 3 + 1 + 2
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
    n_modes, n_runs = 9, itertools.count()
    monkeypatch.setattr(bench, "token_seconds", lambda run: 10.0 if next(n_runs) // n_modes % 2 else 1.0)
    status, out, _ = call(folder, capsys, "--repeats", 3)
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert status == 0 and len(rows) == n_modes
    assert [ratio for row in rows for ratio in (row["ratio_to_plain"], *row["ratio_quartiles"])] == [1.0] * 3 * n_modes


def test_the_cost_model_by_hand():
    """Of three drafts at alpha 0.5 a round has 1.875 tokens; it takes 1.5 plain tokens' time. Early exit counts layers."""

    def runs(**stats):
        out = Generation()
        for name, value in stats.items():
            setattr(out.stats, name, value)
        return [out]

    plain = runs(rounds=10, plain=10, verify_seconds=10.0, layer_passes=40)
    drafted = {"accepted_histogram": [5, 3, 2], "corrected": 7, "drafted_histogram": [0, 0, 0, 10], "rounds": 10}
    assert bench.predicted(runs(draft_seconds=5.0, verify_seconds=10.0, **drafted), plain) == pytest.approx(1.875 / 1.5)
    assert bench.predicted(plain, plain) is not None
    assert bench.predicted(runs(rounds=10, exited=5, plain=5, layer_passes=20), plain) == 2.0
    assert bench.predicted(runs(plain=10), plain) is None


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


def test_a_peer_stands_beside_the_modes_and_its_absence_is_one_line(folder, capsys, monkeypatch):
    """What another library does not tell is no figure; its text is compared with the first mode's."""

    def decode(ids, sampling):
        return bench.foreign([1] * sampling.max_new_tokens, 10.0, 11.0, 13.0)

    monkeypatch.setitem(bench.PEERS, "transformers", lambda model, config: {"stranger 1.0": bench.Mode(decode)})
    status, out, _ = call(folder, capsys, "--peers", "transformers", "--only", "plain,stranger")
    rows = {row["mode"]: row for row in json.loads(out.splitlines()[-1])["rows"]}
    assert status == 0 and list(rows) == ["plain", "stranger 1.0"]
    assert rows["stranger 1.0"]["tokens_per_second"] == pytest.approx(12 / 2)
    assert rows["stranger 1.0"]["tokens_per_target_pass"] is None and rows["stranger 1.0"]["equal"] < 1
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    status, _, err = call(folder, capsys, "--peers", "llama.cpp")
    assert status == 2 and err.count("\n") == 1 and "pip install llama-cpp-python" in err
    status, _, err = call(folder, capsys, "--only", "plain,nosuch")
    assert status == 2 and "'nosuch'" in err and "n-gram k=4" in err
    status, _, err = call(folder, capsys, "--peers", "vllm")
    assert status == 2 and "vllm" in err and "transformers, llama.cpp, floor" in err


def test_variants_are_compared_with_the_first_and_keep_their_own_text(folder, capsys):
    """Ratios are to the first variant's plain run, the same text is the variant's own."""
    status, out, _ = call(folder, capsys, "--variants", "float32,int8", "--only", "plain,speculative k=4")
    rows = {row["mode"]: row for row in json.loads(out.splitlines()[-1])["rows"]}
    expected = [f"{variant} {mode}" for variant in ("float32", "int8") for mode in ("plain", "speculative k=4")]
    assert status == 0 and list(rows) == expected
    assert rows["float32 plain"]["ratio_to_plain"] == 1.0 != rows["int8 plain"]["ratio_to_plain"]
    assert all(rows[name]["equal"] == 1.0 for name in expected[:3])


def test_quality_of_a_variant_is_perplexity_and_agreement_with_the_first(folder, capsys):
    status, out, _ = call(folder, capsys, "--what", "quality", "--variants", "float32,int8,int4")
    first, *others = json.loads(out.splitlines()[-1])["rows"]
    assert status == 0 and (first["agreement"], first["perplexity_ratio"], first["kl"]) == (1.0, 1.0, 0.0)
    assert others[0]["agreement"] > 0.8 and 0 < others[0]["kl"] < others[1]["kl"]
    assert "perplexity" in out.splitlines()[0] and len(out.splitlines()) == 5


def canary(folder, capsys, *more):
    return call(folder, capsys, *more, canary=True)


@pytest.mark.parametrize("draft", ["drafter", "exit", "ngram"])
@pytest.mark.parametrize("more", [[], ["--temperature", 0.8, "--n", 5]], ids=["greedy", "coupled"])
def test_a_canary_of_lossless_modes_finds_plains_text(folder, capsys, draft, more):
    draft = folder / draft if draft == "drafter" else draft
    more = [*more, "--repetition-penalty", 0.5] if draft == "ngram" else more  # a text that repeats itself
    status, out, err = canary(folder, capsys, "--draft", draft, "--dtype", "float64", *more)
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and "within the bound" in out.splitlines()[-2] and "Traceback" not in err
    assert (result["above"], result["disagreement"], result["parted"]) == (False, 0.0, [])
    n = 5 if "--n" in more else 2  # greedily, no prompt twice
    assert result["requests"] == result["same_text"] == n and result["plain"]["tokens"] == 12 * n
    assert (
        0 < result["optimised_tokens"] == 12 * n - result["optimised"]["plain"] and result["optimised"]["drafted"] > 0
    )


@pytest.mark.parametrize("at", [0, 5])
def test_a_canary_of_a_wrong_text_ends_with_1_and_says_where(folder, capsys, monkeypatch, at):
    """A decoder that goes wrong at one place of one request: all behind it counts, up to a bound that allows it."""
    decode = bench.Session.decode

    def broken(self, mode, *how, **more):
        [out] = decode(self, mode, *how, **more)
        if mode == "speculative" and self.sampling.seed == 1:
            out.tokens[at] ^= 1
        return [out]

    monkeypatch.setattr(bench.Session, "decode", broken)
    for dtype in ("float32", "float64"):
        status, out, _ = canary(folder, capsys, "--dtype", dtype)
        result = json.loads(out.splitlines()[-1])
        assert status == 1 and "ABOVE the bound" in out and f"the earliest at token {at + 1}, 0 at near-ties" in out
        assert result["disagreement"] == (12 - at) / 12 / 2 and result["same_text"] == 1
        assert (result["parted"][0]["request"], result["parted"][0]["token"]) == (1, at)
    assert canary(folder, capsys, "--bound", 0.6)[0] == 0
    monkeypatch.setattr(bench.Session, "gap", lambda self, tokens: (1e-7, 1e-5))
    status, out, _ = canary(folder, capsys, "--dtype", "float32")
    assert status == 0 and "1 at near-ties" in out and json.loads(out.splitlines()[-1])["same_text"] == 1
    assert canary(folder, capsys, "--dtype", "float64")[0] == 1  # where nothing is excused


def test_a_canary_of_early_exit_counts_the_audit_against_the_bound(folder, capsys):
    asked = ["--mode", "early-exit", "--exit-threshold", 0.05, "--json"]
    status, out, _ = canary(folder, capsys, *asked, "--bound", 0)
    result = json.loads(out)
    optimised = result["optimised"]
    assert status == 1 and optimised["audited"] == optimised["exited"] == result["optimised_tokens"] > 12
    assert result["disagreement"] == pytest.approx(optimised["audit_disagreed"] / optimised["tokens"])  # equal lengths
    assert 0 < result["disagreement"] < 1 and result["parted"]
    assert canary(folder, capsys, *asked, "--bound", result["disagreement"] + 1e-9)[0] == 0
    assert canary(folder, capsys, *asked, "--bound", result["disagreement"] * 0.9)[0] == 1


def test_a_canary_without_a_bound_alarms_where_the_certificate_is_improbable(folder, capsys, monkeypatch):
    """A risk far below what is seen is: one that is a little below it is not, on so few requests."""
    asked = ["--mode", "early-exit", "--json", "--temperature", 1, "--n", 12]
    certificate = SimpleNamespace(thresholds=[0.05] * 3, loss="disagreement", clip=1.0, delta=0.05, risk=1e-4)
    for module in (bench, sample):
        monkeypatch.setattr(module, "certified", lambda *how: certificate)
    status, out, err = canary(folder, capsys, *asked)
    assert not err, err
    seen = json.loads(out)["disagreement"]
    assert status == 1 and json.loads(out)["bound"] == 1e-4 and seen > 0.1
    certificate.risk = 0.95 * seen
    assert canary(folder, capsys, *asked)[0] == 0
    certificate.clip, certificate.risk = 0.02, 0.01
    assert json.loads(canary(folder, capsys, *asked)[1])["disagreement"] <= 0.02
    certificate.loss = "nll"
    assert canary(folder, capsys, *asked)[0] == 2


@pytest.mark.parametrize(
    "more, word",
    [
        (["--mode", "early-exit"], "no calibrated ones"),
        (["--mode", "early-exit", "--exit-threshold", "0.5"], "--bound"),
        (["--bound", "2"], "--bound"),
        (["--bound", "nan"], "--bound"),
        (["--n", "0"], "--n"),
        (["--mode", "compare"], "mode"),
        (["--prompt", "abc"], "--prompts"),
        (["--prompts", "nosuch.json"], "nosuch.json"),
        (["--model", "nosuch"], "nosuch"),
        (["--draft", "none"], "none"),
        (["--mode", "auto", "--draft", "none"], "nothing to compare"),
        (["--mode", "early-exit", "--bound", "0", "--exit-threshold", "1.5"], "nothing to compare"),
        (["--mode", "early-exit", "--bound", "0", "--kv-fill", "propagate"], "audited"),
        (["--verify", "rejection", "--temperature", "1"], "coupled"),
        (["--temperature", "-1"], "temperature"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_canary_that_cannot_compare_ends_with_2(folder, capsys, more, word):
    status, _, err = canary(folder, capsys, *more)
    errors = [line for line in err.splitlines() if line.startswith("bench.py")]
    assert status == 2 and len(errors) == 1 and word in errors[0] and "Traceback" not in err


def test_a_canary_under_the_kill_switch_or_with_a_bug_is_no_verdict(folder, capsys, monkeypatch):
    monkeypatch.setenv("NANOSPEC_PLAIN", "1")
    status, _, err = canary(folder, capsys)
    assert status == 2 and "kill switch" in err
    monkeypatch.delenv("NANOSPEC_PLAIN")
    monkeypatch.setattr(bench.Session, "decode", lambda *_, **__: 1 / 0)
    status, _, err = canary(folder, capsys)
    assert status == 2 and "ZeroDivisionError" in err


def test_prompts_come_from_keys_of_a_file_and_messages_take_the_template(folder, tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"a": ["x", "y"], "b": [{"user": "z"}], "c": [1]}))
    assert bench.read_prompts(f"{file}:a,b") == ["x", "y", {"user": "z"}]
    for source in (f"{file}:c", f"{file}:d", str(file), f"{file}x"):
        with pytest.raises(ValueError, match="--prompts"):
            bench.read_prompts(source)
    with pytest.raises(ValueError, match="nosuch.json.*No such file"):
        bench.read_prompts("nosuch.json")
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, r"[\s\S]", chat_template="<{{ messages[0].content }}>")
    assert bytes(bench.spelled(tokenizer, {"user": "z"})) == b"<z>" and bytes(bench.spelled(tokenizer, "z")) == b"z"
