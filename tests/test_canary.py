"""The canary: what decodes wrongly is found, and nothing else."""

import json
from types import SimpleNamespace

import pytest

import bench
import canary as canary_module
import sample


def canary(model_folder, capsys, *more):
    flags = ["canary", "--model", model_folder / "target", "--draft", model_folder / "drafter"]
    flags += ["--prompts", model_folder / "prompts.json", "--threads", 0, "--max-new-tokens", 12]
    try:
        status = bench.main(list(map(str, [*flags, *more])))
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize("draft", ["drafter", "exit", "ngram"])
@pytest.mark.parametrize("more", [[], ["--temperature", 0.8, "--n", 5]], ids=["greedy", "coupled"])
def test_a_canary_of_lossless_modes_finds_plains_text(model_folder, capsys, draft, more):
    draft = model_folder / draft if draft == "drafter" else draft
    more = [*more, "--repetition-penalty", 0.5] if draft == "ngram" else more  # a text that repeats itself
    status, out, err = canary(model_folder, capsys, "--draft", draft, "--dtype", "float64", *more)
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and "within the bound" in out.splitlines()[-2] and "Traceback" not in err
    assert (result["above"], result["disagreement"], result["parted"]) == (False, 0.0, [])
    n = 5 if "--n" in more else 2  # greedily, no prompt twice
    assert result["requests"] == result["same_text"] == n and result["plain"]["tokens"] == 12 * n
    assert (
        0 < result["optimised_tokens"] == 12 * n - result["optimised"]["plain"] and result["optimised"]["drafted"] > 0
    )


@pytest.mark.parametrize("at", [0, 5])
def test_a_canary_of_a_wrong_text_ends_with_1_and_says_where(model_folder, capsys, monkeypatch, at):
    """A decoder that goes wrong at one place of one request: all behind it counts, up to a bound that allows it."""
    decode = canary_module.Session.decode

    def broken(self, mode, *how, **more):
        [out] = decode(self, mode, *how, **more)
        if mode == "speculative" and self.sampling.seed == 1:
            out.tokens[at] ^= 1
        return [out]

    monkeypatch.setattr(canary_module.Session, "decode", broken)
    for dtype in ("float32", "float64"):
        status, out, _ = canary(model_folder, capsys, "--dtype", dtype)
        result = json.loads(out.splitlines()[-1])
        assert status == 1 and "ABOVE the bound" in out and f"the earliest at token {at + 1}, 0 at near-ties" in out
        assert result["disagreement"] == (12 - at) / 12 / 2 and result["same_text"] == 1
        assert (result["parted"][0]["request"], result["parted"][0]["token"]) == (1, at)
    assert canary(model_folder, capsys, "--bound", 0.6)[0] == 0
    monkeypatch.setattr(canary_module.Session, "gap", lambda self, tokens, drawn: (1e-7, 1e-5))
    status, out, _ = canary(model_folder, capsys, "--dtype", "float32")
    assert status == 0 and "1 at near-ties" in out and json.loads(out.splitlines()[-1])["same_text"] == 1
    assert canary(model_folder, capsys, "--dtype", "float64")[0] == 1  # where nothing is excused


def test_a_canary_of_sampled_texts_excuses_near_ties_of_the_race_alone(model_folder, capsys, monkeypatch):
    decode = canary_module.Session.decode

    def broken(self, mode, *how, **more):
        [out] = decode(self, mode, *how, **more)
        if mode == "speculative":
            out.tokens[4] ^= 1
        return [out]

    monkeypatch.setattr(canary_module.Session, "decode", broken)
    race_gap, seeds = canary_module.quality.race_gap, []

    def watched(model, sampling, seed, ids, drawn):
        seeds.append(seed)
        apart, bound = race_gap(model, sampling, seed, ids, (drawn[0], drawn[0]))
        assert apart <= bound  # plain's own token wins there
        return race_gap(model, sampling, seed, ids, drawn)

    monkeypatch.setattr(canary_module.quality, "race_gap", watched)
    sampled = ["--temperature", 0.8, "--n", 3, "--seed", 5]
    status, out, _ = canary(model_folder, capsys, *sampled)
    result = json.loads(out.splitlines()[-1])
    assert status == 1 and seeds == [5, 6, 7] and not any(part["near_tie"] for part in result["parted"])
    status, out, _ = canary(model_folder, capsys, *sampled, "--top-k", 2)
    assert status == 1 and '"gap": null' in out and "Infinity" not in out  # a token that the filter cuts
    monkeypatch.setattr(canary_module.quality, "race_gap", lambda *how: (1e-9, 1e-5))
    status, out, _ = canary(model_folder, capsys, *sampled)
    assert status == 0 and "3 at near-ties" in out
    assert canary(model_folder, capsys, *sampled, "--dtype", "float64")[0] == 1


def test_a_canary_of_early_exit_counts_the_audit_against_the_bound(model_folder, capsys):
    asked = ["--mode", "early-exit", "--exit-threshold", 0.05, "--json"]
    status, out, _ = canary(model_folder, capsys, *asked, "--bound", 0)
    result = json.loads(out)
    optimised = result["optimised"]
    assert status == 1 and optimised["audited"] == optimised["exited"] == result["optimised_tokens"] > 12
    assert result["disagreement"] == pytest.approx(optimised["audit_disagreed"] / optimised["tokens"])  # equal lengths
    assert 0 < result["disagreement"] < 1 and result["parted"]
    assert canary(model_folder, capsys, *asked, "--bound", result["disagreement"] + 1e-9)[0] == 0
    assert canary(model_folder, capsys, *asked, "--bound", result["disagreement"] * 0.9)[0] == 1


def test_a_canary_without_a_bound_alarms_where_the_certificate_is_improbable(model_folder, capsys, monkeypatch):
    """A risk far below what is seen is: one that is a little below it is not, on so few requests."""
    asked = ["--mode", "early-exit", "--json", "--temperature", 1, "--n", 12]
    certificate = SimpleNamespace(thresholds=[0.05] * 3, loss="disagreement", clip=1.0, delta=0.05, risk=1e-4)
    for module in (canary_module, sample):
        monkeypatch.setattr(module, "certified", lambda *how: certificate)
    status, out, err = canary(model_folder, capsys, *asked)
    assert not err, err
    seen = json.loads(out)["disagreement"]
    assert status == 1 and json.loads(out)["bound"] == 1e-4 and seen > 0.1 and json.loads(out)["at_most"] > seen
    certificate.risk = 0.95 * seen
    assert canary(model_folder, capsys, *asked)[0] == 0
    certificate.risk = 0.02
    status, out, _ = canary(model_folder, capsys, "--mode", "early-exit", "--temperature", 1, "--n", 1)
    assert status == 0 and "would not be noticed: see --n" in out  # one request proves nothing
    certificate.clip, certificate.risk = 0.02, 0.01
    assert json.loads(canary(model_folder, capsys, *asked)[1])["disagreement"] <= 0.02
    certificate.loss = "nll"
    assert canary(model_folder, capsys, *asked)[0] == 2


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
def test_a_canary_that_cannot_compare_ends_with_2(model_folder, capsys, more, word):
    status, _, err = canary(model_folder, capsys, *more)
    errors = [line for line in err.splitlines() if line.startswith("bench.py")]
    assert status == 2 and len(errors) == 1 and word in errors[0] and "Traceback" not in err


def test_a_canary_under_the_kill_switch_or_with_a_bug_is_no_verdict(model_folder, capsys, monkeypatch):
    monkeypatch.setenv("NANOSPEC_PLAIN", "1")
    status, _, err = canary(model_folder, capsys)
    assert status == 2 and "kill switch" in err
    monkeypatch.delenv("NANOSPEC_PLAIN")
    monkeypatch.setattr(canary_module.Session, "decode", lambda *_, **__: 1 / 0)
    status, _, err = canary(model_folder, capsys)
    assert status == 2 and "ZeroDivisionError" in err
