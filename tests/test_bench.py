"""bench.py and measure.py: what is measured is paired, counted and judged rightly, and what cannot be is one line."""

import functools
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import cpu_step
import pytest
import torch
from helpers import tiny_model

import bench
import kernels
import measure
import peers
import quality
import synthetic
from checkpoint import Tokenizer, load_checkpoint
from decode import Generation, Sampler, SamplingParams, generate
from early_exit import early_exit_generate
from model import DraftHead
from speculative import ChainDrafter, ExitDrafter, HeadDrafter, ModelDrafter, NGramDrafter, speculative_generate

ROOT = Path(bench.__file__).parent
ONE = ["--batch", "1", "--temperature", "0"]


def call(model_folder, capsys, *more, command=()):
    flags = ["--model", model_folder / "target", "--draft", model_folder / "drafter"]
    flags += ["--prompts", model_folder / "prompts.json", "--repeats", 2, "--max-new-tokens", 12]
    try:
        status = bench.main(list(map(str, [*command, *flags, *more])))
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


def result_of(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_every_mode_is_compared_with_plain_on_the_same_tokens(model_folder, capsys, tmp_path):
    """Lossless modes have plain's text, a threshold above 1 is plain, and the last line holds what the file holds."""
    flags = [*ONE, "--draft-len", "1,3,auto", "--exit-threshold", "0.05,1.5", "--out", tmp_path / "result.json"]
    status, out, _ = call(model_folder, capsys, *flags, "--report", tmp_path / "page")
    result = result_of(out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert {"command", "machine", "torch", "commit", "date", "ceilings", "flags"} <= set(result)
    rows = {row["mode"]: row for row in result["rows"]}
    assert len(rows) == 1 + 3 * 3 + 1 + 2
    assert rows["plain"]["ratio_to_plain"] == 1.0 and rows["plain"]["tokens_per_target_pass"] == 1.0
    for name, row in rows.items():
        if name != "early exit 0.05":
            assert row["equal"] == 1.0 and row["texts_equal"] == 2 and row["kl"] == 0.0, name
            assert name == "plain" or row["gate"]["verdict"] in ("passed", "unsure"), name
    assert rows["early exit 1.5"]["mean_layers"] == 4 and rows["early exit 1.5"]["agreement"] is None
    eager = rows["early exit 0.05"]
    assert eager["exited"] > 0.5 and eager["mean_layers"] < 4 and 0 <= eager["agreement"] < 1 and eager["kl"] > 0
    assert eager["gate"]["verdict"] == "failed" and status == 1  # whatever its speed
    assert f"early exit 0.05 (batch 1, temperature 0): disagreement failed: {eager['gate']['why']}" in out
    assert rows["speculative k=3"]["tokens_per_target_pass"] > rows["speculative k=1"]["tokens_per_target_pass"] > 1
    assert bench.table(result["rows"]) in out
    page = (tmp_path / "page" / "report.html").read_text()
    assert "speculative k=3" in page and result["commit"] in page


def test_a_lossless_mode_that_changes_the_text_fails_whatever_its_speed(model_folder, capsys, monkeypatch):
    honest = bench.speculative_generate

    def broken(*how):
        outs = honest(*how)
        outs[0].tokens[5] ^= 1
        return outs

    monkeypatch.setattr(bench, "speculative_generate", broken)
    monkeypatch.setattr(measure, "near_tie", lambda model, ids, drawn: (1.0, 1e-3))
    status, out, _ = call(model_folder, capsys, *ONE, "--only", "speculative k=4")
    row = result_of(out)["rows"][1]
    assert status == 1 and row["gate"]["verdict"] == "failed" and "identity FAILED" in out
    assert "parts at token 6" in row["gate"]["why"]
    monkeypatch.setattr(measure, "near_tie", lambda model, ids, drawn: (1e-9, 1e-3))
    assert call(model_folder, capsys, *ONE, "--only", "speculative k=4")[0] == 0  # a near-tie


def test_every_timed_text_is_held_to_plains_too(model_folder, capsys, monkeypatch):
    """What goes wrong from the second call on, or beside other modes alone, was fast and wrong."""
    honest, n_calls = bench.speculative_generate, itertools.count()

    def leaking(*how):
        outs = honest(*how)
        outs[0].tokens[5] ^= next(n_calls) == 2
        return outs

    monkeypatch.setattr(bench, "speculative_generate", leaking)
    monkeypatch.setattr(measure, "near_tie", lambda model, ids, drawn: (1.0, 1e-3))
    status, out, _ = call(model_folder, capsys, *ONE, "--only", "speculative k=4")
    assert status == 1 and result_of(out)["rows"][1]["gate"]["why"].startswith("1 of 6 texts")


def test_a_coupled_text_is_judged_by_its_own_race(model_folder, capsys, monkeypatch):
    """Above temperature 0: of every row of a batch, with the row's seed, and of every timed text."""
    honest, race_gap, asked = bench.speculative_generate, quality.race_gap, []

    def broken(*how):
        outs = honest(*how)
        for out in outs:
            out.tokens[5] ^= 1
        return outs

    def watched(model, sampling, seed, ids, drawn):
        asked.append(seed)
        apart, bound = race_gap(model, sampling, seed, ids, (drawn[0], drawn[0]))
        assert apart <= bound  # plain's own token wins there
        return race_gap(model, sampling, seed, ids, drawn)

    monkeypatch.setattr(bench, "speculative_generate", broken)
    monkeypatch.setattr(quality, "race_gap", watched)
    flags = ["--temperature", 1, "--batch", "1,2", "--seed", 7, "--only", "speculative k=4", "--verify", "coupled"]
    status, out, _ = call(model_folder, capsys, *flags)
    rows = [row for row in result_of(out)["rows"] if row["mode"] != "plain"]
    assert status == 1 and [row["gate"]["verdict"] for row in rows] == ["failed"] * 2
    assert all("parts at token 6" in row["gate"]["why"] for row in rows) and asked == [7, 8, 7, 7, 8, 8] + [7, 8] * 3
    monkeypatch.setattr(quality, "race_gap", lambda *how: (1e-9, 1e-3))
    assert call(model_folder, capsys, *flags)[0] == 0


def test_a_prompt_that_comes_again_is_no_other_sequence():
    """Two greedy texts, ten times each, are two sequences: too few for a bootstrap to promise anything."""
    config, mode = bench.BenchConfig(), measure.Mode(None, measure.Variant("", None, None, None), promise="exits")
    texts = [measure.Text([i % 2], None, *runs(rounds=10, plain=10), i) for i in range(20)]
    assert measure.gate(config, mode, [], texts, 0.0)["verdict"] == "unsure"
    assert measure.gate(config, mode, [], texts, 1.0)["verdict"] == "passed"  # each with a seed of its own


def test_each_promise_has_its_gate(model_folder, capsys):
    """Coupled is held to the text, rejection to the law, exits to their audit; batches keep the noise of each prompt."""
    flags = ["--batch", "1,2", "--only", "speculative k=4,early"]
    for verify, kind in (("coupled", "identity"), ("rejection", "distribution")):
        status, out, _ = call(model_folder, capsys, *flags, "--verify", verify, "--temperature", 1, "--max-disagreement", 1,
                              "--max-nats", "inf")  # fmt: skip
        rows = {(row["batch"], row["mode"]): row for row in result_of(out)["rows"]}
        for batch in (1, 2):
            assert rows[batch, "speculative k=4"]["gate"]["kind"] == kind
            assert rows[batch, "early exit 0.9"]["gate"]["kind"] == "disagreement"
            assert verify != "coupled" or rows[batch, "speculative k=4"]["equal"] == 1.0
        assert status == 0
        assert (
            rows[1, "speculative k=4"]["alpha"] == rows[2, "speculative k=4"]["alpha"]
        )  # the same noise, alone or not


@pytest.mark.parametrize("value, verdict", [(0.5, "passed"), (0.04, "failed")])
def test_a_law_that_fails_is_asked_again_with_other_seeds(model_folder, capsys, monkeypatch, value, verdict):
    """Once in a thousand a right one fails; what fails for a reason is doubtful again."""
    seen, honest = [], bench.speculative_generate

    def watched(model, drafter, prompts, sampling, *how):
        seen.append(list(sampling.row_seeds(len(prompts))))
        return honest(model, drafter, prompts, sampling, *how)

    def judged(model, sampling, runs):
        first = seen[-1][0] < measure.OTHER_SEEDS
        assert [len(tokens) for _, tokens in runs] == [12, 12]
        return {"kind": "distribution", "verdict": "failed" if first else "passed", "value": 0.0005 if first else value,
                "bound": 0.001, "why": "first" if first else "second"}  # fmt: skip

    monkeypatch.setattr(bench, "speculative_generate", watched)
    monkeypatch.setattr(measure.quality, "distribution_gate", judged)
    only = ["--batch", 1, "--temperature", 1, "--only", "speculative k=4", "--repeats", 1]
    status, out, _ = call(model_folder, capsys, *only)
    gate = result_of(out)["rows"][1]["gate"]
    assert (gate["verdict"], gate["value"], status) == (verdict, value, int(verdict == "failed"))
    assert gate["why"] == "first; with other seeds second"
    assert seen[-2:] == [[x[0] + measure.OTHER_SEEDS] for x in seen[:4:2]]  # two prompts, each run twice before


def test_ratios_are_paired_and_interleaved(model_folder, capsys, monkeypatch):
    """A machine that is ten times slower in every other repetition leaves the ratios as they are."""
    n_modes, n_runs = 9, itertools.count()
    monkeypatch.setattr(measure, "token_seconds", lambda runs: 10.0 if next(n_runs) // n_modes % 2 else 1.0)
    _, out, _ = call(model_folder, capsys, *ONE, "--repeats", 3)
    rows = result_of(out)["rows"]
    assert len(rows) == n_modes
    assert [ratio for row in rows for ratio in (row["ratio_to_plain"], *row["ratio_quartiles"])] == [1.0] * 3 * n_modes


def runs(**stats):
    out = Generation()
    for name, value in stats.items():
        setattr(out.stats, name, value)
    out.tokens = [0] * out.stats.tokens
    out.stats.seconds = out.stats.draft_seconds + out.stats.verify_seconds
    return [out]


def test_the_cost_model_by_hand():
    """Of three drafts at alpha 0.5 a round has 1.875 tokens; it takes 1.5 plain tokens' time."""
    variant = measure.Variant("", tiny_model(), None, None)
    plain = runs(rounds=10, plain=10, verify_seconds=10.0, layer_passes=40, drafted_histogram=[10])
    mode = measure.Mode(None, variant)
    drafted = {"accepted_histogram": [5, 3, 2], "corrected": 7, "drafted_histogram": [0, 0, 0, 10], "rounds": 10}
    batch = runs(draft_seconds=5.0, verify_seconds=10.0, bonus=3, **drafted)
    ratio, terms = measure.predicted(mode, batch, plain)
    assert ratio == pytest.approx(1.875 / 1.5)
    assert terms == {"acceptance": pytest.approx(17 / 18.75), "loop": 1.0}
    batch[0].stats.seconds += 5.0  # a third more than its passes
    assert measure.predicted(mode, batch, plain)[1]["loop"] == pytest.approx(1 / (1 + 5 / 15))
    assert measure.predicted(mode, plain, plain)[0] == 1.0
    assert measure.predicted(measure.Mode(None), plain, plain) is None


def test_early_exit_is_predicted_from_its_calls_at_what_each_takes_alone(monkeypatch):
    """Two rows, three steps of plain; of two tokens a row one leaves alone at layer 1, and the other later, with it in front."""
    variant, other = (measure.Variant("", tiny_model(), None, None) for _ in range(2))
    took = {("layers", 2, 1, 4): 6.0, ("head", 2, False): 1.0, ("draw", 2): 0.5, ("layers", 2, 1, 1): 2.0,
            ("asked", 2): 0.25, ("head", 2, True): 0.75, ("draw", 1): 0.25, ("layers", 1, 2, 3): 3.0}  # fmt: skip
    asked = []

    def alone(calls, temperature):
        asked.append((calls, temperature))
        return {(model, call): took[call] * (1 if model is variant.model else 10) for model, call in calls}

    monkeypatch.setattr(measure, "seconds_of", alone)
    plain = Counter({("layers", 2, 1, 4): 3, ("head", 2, False): 3, ("draw", 2): 3})
    own = Counter(
        {("layers", 2, 1, 1): 2, ("asked", 2): 2, ("head", 2, True): 1, ("draw", 1): 2, ("layers", 1, 2, 3): 1}
    )
    mode = measure.Mode(None, other, promise="exits")
    seen = measure.Seen(own, inside=100.0, between=25.0), measure.Seen(plain, inside=30.0, between=3.0)
    groups = [measure.Measured([], x, [], []) for x in seen]
    [(ratio, terms)] = measure.by_calls(mode, measure.Mode(None, variant), groups[:1], groups[1:], 0.7)
    alone = 3 * (6.0 + 1.0 + 0.5), 10 * (2 * 2.0 + 2 * 0.25 + 0.75 + 2 * 0.25 + 3.0)
    assert ratio == pytest.approx(alone[0] / alone[1]) and asked[0][1] == 0.7
    assert terms == pytest.approx({"calls in place": 30 / alone[0] / (100 / alone[1]), "between calls": 1.1 / 1.25})
    assert ratio * terms["calls in place"] * terms["between calls"] == pytest.approx(33 / 125)
    left = runs(rounds=4, exited=2, plain=2, verify_seconds=5.0)
    stepped = runs(rounds=6, plain=6, verify_seconds=5.0)
    guess, left_out = measure.predicted(mode, left, stepped, (ratio, terms))
    assert guess == pytest.approx(4 / 6 * ratio) and left_out == {"loop": 1.0} | terms
    assert measure.predicted(mode, left, stepped, None) is None
    unseen = [group._replace(seen=None) for group in groups]
    for a, b in ((unseen[0], groups[1]), (groups[0], unseen[1])):
        assert measure.by_calls(mode, measure.Mode(None, variant), [a], [b], 0.7) == [None]


def test_times_are_of_the_timed_runs_and_quartiles_of_few_lie_around_their_median():
    """The run before them is cold, or audited: an hour in it changes no figure."""
    variant, group = measure.Variant("", tiny_model(), None, None), measure.Group(0, [[1, 2, 3]], [None])
    modes = {"plain": measure.Mode(None, variant), "drafts k=1": measure.Mode(None, variant, draft_len=1)}
    counts = {"rounds": 10, "drafted_histogram": [10], "target_passes": 10, "layer_passes": 40, "plain": 10}

    def made(draft, hours, seconds):
        timed = [runs(draft_seconds=draft, verify_seconds=10.0, **counts) for _ in seconds]
        return measure.Measured(runs(draft_seconds=3600.0 * hours, verify_seconds=10.0, **counts), None, seconds, timed)

    for hours in (0, 1):
        done = [{"plain": made(0.0, 0, [8.0] * 4), "drafts k=1": made(5.0, hours, [1.0, 8.0, 4.0, 2.0])}]
        roof = measure.Ceilings(1.0, 1.0)
        row = measure.summary(bench.BenchConfig(), "drafts k=1", modes, done, [group], 0.0, roof, None)
        assert row["predicted_ratio"] == pytest.approx(10 / 15) and row["time_shares"]["draft"] == pytest.approx(1 / 3)
        assert [part["seconds"] for part in row["timeline"]] == pytest.approx([0.5, 1.0])
        assert (row["ratio_to_plain"], row["ratio_quartiles"]) == (3.0, [1.75, 5.0])
        assert row["first_token_seconds"] is None and "NaN" not in json.dumps(row)


def test_the_work_of_a_run_by_hand():
    """Bytes that plain decoding reads are its weights once a token, and its cache; drafts add what they read."""
    model, small = (
        tiny_model(dtype=torch.float32, poisoned=False),
        tiny_model(dtype=torch.float32, n_layer=1, exit_layers=()),
    )
    prompts, sampling = [[1, 2, 3], [4, 5, 6]], SamplingParams(10, 0.0)
    variant, blocks = (
        measure.Variant("", model, None, None),
        sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2),
    )
    head = model.output.weight.numel()
    cache = sum(
        2 * 2 * 4 * 4 * 4 * (13 - 5) for _ in range(10)
    )  # keys, values; 2 heads of 4, float32, 4 layers, mean length
    plain = measure.work_of(measure.Mode(None, variant), prompts[:1], generate(model, prompts[:1], sampling))
    assert plain.read == 10 * 4 * (blocks + head) + cache and plain.flops == 10 * (
        2 * (blocks + head) + 4 * 4 * 4 * 4 * (3 + 5)
    )  # scores and values: 4 heads of 4, 4 layers, mean length
    assert plain.held == model.weight_bytes() + 13 * 2 * 2 * 4 * 4 * 4
    both = measure.work_of(measure.Mode(None, variant), prompts, generate(model, prompts, sampling))
    assert both.read == plain.read + cache and both.flops == 2 * plain.flops  # the weights are read for both at once
    drafter = ModelDrafter(small)
    batch = speculative_generate(model, drafter, prompts[:1], sampling, 3)
    drafted = measure.work_of(measure.Mode(None, variant, drafter=drafter), prompts[:1], batch)
    stats = batch[0].stats
    own = 2 * (sum(p.numel() for p in small.blocks.parameters() if p.dim() == 2) + head) + 4 * 4 * 4 * 8
    assert drafted.flops == pytest.approx((stats.rounds + stats.drafted) * plain.flops / 10 + stats.drafted * own)
    assert drafted.read - stats.rounds / 10 * plain.read == pytest.approx(stats.drafted * small.weight_bytes())
    [short] = generate(model, [[1] * 60], SamplingParams(10, 0.0))  # ends with the context
    assert measure.work_of(measure.Mode(None, variant), [[1] * 60], [short]).held == model.weight_bytes() + 64 * 256
    drafter = ExitDrafter(model, 1)  # reads its layer, and then the outputs of the exit
    batch = speculative_generate(model, drafter, prompts[:1], sampling, 3)
    drafted, stats = measure.work_of(measure.Mode(None, variant, drafter=drafter), prompts[:1], batch), batch[0].stats
    weights = stats.layer_passes * blocks + (stats.rounds * 4 + stats.drafted * 4) * head
    assert drafted.read == pytest.approx(weights + stats.layer_passes * 64 * 8) and drafted.held == plain.held
    own = 2 * (head + 16 * 16)  # the exit's outputs and its adapter; its layers are the verification's
    assert drafted.flops == pytest.approx((stats.rounds + stats.drafted) * plain.flops / 10 + stats.drafted * own)
    both = measure.draft_operations(ChainDrafter(NGramDrafter(), ModelDrafter(small), drafter), 8.0)
    assert both == own + measure.draft_operations(ModelDrafter(small), 8.0)


def test_a_draft_heads_operations_are_its_block_its_inputs_and_its_outputs():
    model = tiny_model(dtype=torch.float32, poisoned=False)
    head = DraftHead(model.config, range(10))
    matrices = sum(p.numel() for p in head.parameters() if p.dim() == 2)
    expected = 2 * (matrices + 10 * 16) + 4 * 4 * 4 * 8  # 4 heads of 4, one layer, behind 8 tokens
    assert measure.draft_operations(HeadDrafter(model, head), 8.0) == expected
    packed = model.to(torch.bfloat16).pack()
    assert measure.draft_operations(HeadDrafter(packed, head.to(torch.bfloat16)), 8.0) == expected


def test_ctrl_c_keeps_what_is_complete(model_folder, capsys, monkeypatch, tmp_path):
    """The first of two prompts is done, the second is not: a result of the first, marked, and status 130."""
    calls, honest = itertools.count(), measure.token_seconds

    def interrupted(found):
        if next(calls) == 2 * 2 + 1:
            raise KeyboardInterrupt
        return honest(found)

    monkeypatch.setattr(measure, "token_seconds", interrupted)
    flags = [*ONE, "--only", "n-gram k=4", "--out", tmp_path / "result.json"]
    status, out, _ = call(model_folder, capsys, *flags)
    result = json.loads((tmp_path / "result.json").read_text())
    assert status == 130 and result["interrupted"] and result == result_of(out)
    assert [(row["mode"], row["texts"]) for row in result["rows"]] == [("plain", 1), ("n-gram k=4", 1)]
    calls = itertools.count(5)
    (tmp_path / "result.json").unlink()
    status, out, _ = call(model_folder, capsys, *flags)
    assert (status, out) == (130, "") and not (tmp_path / "result.json").exists()  # nothing was complete


def interrupt(monkeypatch, name: str, at: int = 2) -> None:
    """Ctrl-C in a call of a function of bench.py, counted from 0."""
    calls, honest = itertools.count(), getattr(bench, name)

    def interrupted(*what):
        if next(calls) == at:
            raise KeyboardInterrupt
        return honest(*what)

    monkeypatch.setattr(bench, name, interrupted)


@pytest.mark.parametrize("command", [[], ["stack"]], ids=["speed", "stack"])
def test_ctrl_c_while_quality_is_judged_keeps_the_rows_before(model_folder, capsys, monkeypatch, command):
    interrupt(monkeypatch, "summary")
    status, out, _ = call(model_folder, capsys, *ONE, command=command)
    result = result_of(out)
    assert status == 130 and result["interrupted"] and len(result.get("rows") or result["stack"]) == 2


def test_ctrl_c_keeps_the_variants_whose_quality_is_known(model_folder, capsys, monkeypatch, tmp_path):
    interrupt(monkeypatch, "compare_on_text")
    flags = ["--variants", "float32,int8,int4", "--out", tmp_path / "result.json"]
    status, out, _ = call(model_folder, capsys, *flags, command=["quality"])
    result = result_of(out)
    assert status == 130 and result["interrupted"] and result == json.loads((tmp_path / "result.json").read_text())
    assert [row["variant"] for row in result["rows"]] == ["float32", "int8"] and "perplexity" in out.splitlines()[0]
    interrupt(monkeypatch, "compare_on_text", at=0)
    assert call(model_folder, capsys, *flags, command=["quality"])[:2] == (130, "")  # nothing was complete


def test_the_machine_is_what_runs(monkeypatch):
    """A GPU that is there and not used is not named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    assert bench.environment()["machine"] == "GPU None" and bench.environment("cuda:1")["machine"] == "GPU cuda:1"
    assert "GPU" not in bench.environment("cpu")["machine"]
    monkeypatch.setattr(bench, "predict", lambda config: {})
    monkeypatch.setattr(bench, "predict_lines", lambda *how: "")
    asked = []
    monkeypatch.setattr(bench, "environment", lambda device: asked.append(device) or {})
    assert bench.main(["predict"]) == 0 and asked == ["cpu"]
    monkeypatch.setattr(bench.canary, "run", lambda *how: 0)
    assert bench.main(["canary", "--device", "cpu"]) == 0 and asked == ["cpu", "cpu"]


@pytest.mark.parametrize(
    "command, more, word",
    [
        (["peers"], ["--only", "nonsense"], "no mode of plain, "),
        (["peers"], ["--only", "plain,nonsense"], "no mode of plain, "),
        ([], ["--only", "plain,floor", "--peers", "floor"], "no mode of plain, "),
        (["sweep"], ["--only", "nonsense"], "no mode of plain, "),
        (["stack"], ["--only", "nonsense"], "leave it out"),
        (["stack"], ["--peers", "floor"], "leave it out"),
        (["quality"], ["--only", "nonsense"], "leave it out"),
        (["quality"], ["--variants", "nonsense"], "choose auto"),
        (["peers"], ["--peers", "nonsense"], "choose transformers"),
    ],
    ids=str,
)
def test_a_name_that_chooses_nothing_is_refused_in_one_line(model_folder, capsys, command, more, word):
    status, out, err = call(model_folder, capsys, *more, command=command)
    assert status == 2 and out == "" and word in err and err.count("\n") == 1 and "Traceback" not in err


def test_a_peer_that_dies_takes_nothing_along(model_folder, capsys, monkeypatch):
    """Its process ends in the middle of the second prompt: the first is kept, and one line says why it ended there."""
    peer, calls, honest = FakePeer(), itertools.count(), FakePeer.decode

    def dying(prompts, sampling):
        if next(calls) == 4:  # one to try, two runs of each prompt
            raise OSError("floor 1.0: its process ended")
        return honest(peer, prompts, sampling)

    monkeypatch.setattr(peer, "decode", dying)
    monkeypatch.setattr(peers, "start", lambda names, **how: ({"floor 1.0": peer}, []))
    status, out, err = call(model_folder, capsys, *ONE, "--peers", "floor", "--only", "plain", "--repeats", 1)
    assert status == 130 and [row["texts"] for row in result_of(out)["rows"]] == [1, 1] and peer.closed
    assert "bench.py: floor 1.0: its process ended" in err and "Traceback" not in err


def test_a_real_interrupt_ends_a_run_within_a_token(model_folder, capsys):
    """What Ctrl-C cut short is not counted as if it were whole."""
    threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT)).start()
    began = time.perf_counter()
    status, _, err = call(model_folder, capsys, *ONE, "--repeats", 10**6)
    assert status == 130 and "Traceback" not in err and time.perf_counter() - began < 20


@pytest.mark.parametrize(
    "more",
    [
        ["--prompts", "nosuch.json"],
        ["--model", "nosuch"],
        ["--model", "random:nosuch"],
        ["--model", "random:gpt2"],
        ["--draft", "nosuch"],
        ["--draft-len", "-1"],
        ["--draft-len", "x"],
        ["--draft-len", ""],
        ["--batch", "0"],
        ["--batch", ""],
        ["--exit-threshold", "nan"],
        ["--temperature", "-1"],
        ["--temperature", "0,-1"],
        ["--exit-layer", "99"],
        ["--repeats", "0"],
        ["--max-new-tokens", "0"],
        ["--max-disagreement", "2"],
        ["--threads", "-1"],
        ["--out", "/nosuch/result.json"],
        ["--report", __file__],
        ["--device", "mps"],
        ["--draft", "stranger"],
        ["--prompts", "prompts.json:nosuch"],
        ["--prompts", "keys.json:nosuch"],
        ["--prompts", "keys.json:text"],
        ["--prompts", "keys.json"],
        ["--variants", "int3"],
        ["--peers", "nosuch"],
        ["--synthetic-acceptance", "0.5"],
        ["--synthetic-acceptance", "1.5", "--temperature", "0"],
        ["--only", "nosuch"],
        ["--model", "random:gpt2:1", "--prompts", "", "--draft", "none", "--max-prompts", "1", "--exit-layer", "1"],
        [
            "--model",
            "random:gpt2:1",
            "--prompts",
            "",
            "--draft",
            "none",
            "--max-prompts",
            "1",
            "--exit-threshold",
            "0.5",
        ],
        ["--model", "mute"],
    ],
    ids=" ".join,
)
def test_errors_are_one_line_and_status_2(model_folder, capsys, more):
    more = [model_folder / part if (model_folder / (part.partition(":")[0] or "-")).exists() else part for part in more]
    status, out, err = call(model_folder, capsys, *more)
    errors = [line for line in err.splitlines() if line.startswith("bench.py: ")]
    assert status == 2 and out == "" and len(errors) == 1 and "Traceback" not in err


class FakePeer:
    """Another engine that says token 1, a second for the first and then one every half."""

    def __init__(self, rows=1):
        self.rows, self.closed = rows, False

    def decode(self, prompts, sampling):
        if len(prompts) > self.rows:
            raise ValueError("fake: one prompt at a time")
        n = sampling.max_new_tokens
        return [peers.generation([1] * n, [1.0] + [0.5] * (n - 1)) for _ in prompts]

    def close(self):
        self.closed = True


def test_a_peer_stands_beside_the_modes_and_its_absence_is_one_line(model_folder, capsys, monkeypatch):
    """What another engine does not tell is no figure; it is compared at temperature 0, in batches that it can decode."""
    peer, asked = FakePeer(), []
    said = {"floor 1.0": peer}, ["transformers: pip install it"]
    monkeypatch.setattr(peers, "start", lambda names, **how: asked.append(how["draft"]) or said)
    flags = ["--peers", "transformers,floor", "--only", "plain", "--batch", "1,2", "--temperature", "0,1"]
    status, out, err = call(model_folder, capsys, *flags)
    rows = {(row["batch"], row["temperature"], row["mode"]): row for row in result_of(out)["rows"]}
    assert status == 0 and [key for key in rows if key[2] == "floor 1.0"] == [(1, 0.0, "floor 1.0")]
    row = rows[1, 0.0, "floor 1.0"]
    assert row["tokens_per_second"] == pytest.approx(2.0) and row["equal"] < 1
    assert row["tokens_per_target_pass"] is None and row["gate"] is None and row["predicted_ratio"] is None
    assert "transformers: pip install it" in err and "fake: one prompt at a time: left out" in err and peer.closed
    call(model_folder, capsys, *ONE, *flags[:4], "--draft", "none")
    assert asked == [str(model_folder / "drafter"), None]  # it drafts with what ours draft with


def test_variants_are_compared_with_the_first_and_keep_their_own_text(model_folder, capsys):
    """Ratios are to the first variant's plain run, the same text is the variant's own."""
    status, out, _ = call(model_folder, capsys, *ONE, "--variants", "float32,int8", "--only", "plain,speculative k=4")
    rows = {row["mode"]: row for row in result_of(out)["rows"]}
    expected = [f"{variant} {mode}" for variant in ("float32", "int8") for mode in ("plain", "speculative k=4")]
    assert status == 0 and list(rows) == expected
    assert rows["float32 plain"]["ratio_to_plain"] == 1.0 != rows["int8 plain"]["ratio_to_plain"]
    assert all(rows[name]["equal"] == 1.0 for name in expected[:3])
    assert rows["int8 plain"]["peak_bytes"] < rows["float32 plain"]["peak_bytes"]
    assert rows["float32 plain"]["kl"] == 0.0 < rows["int8 plain"]["kl"] < 0.2  # faster, but not the same law
    assert rows["int8 speculative k=4"]["kl"] is None
    _, out, _ = call(model_folder, capsys, *ONE, "--variants", "float32,int8", "--only", "int8 speculative k=4")
    again = {
        row["mode"]: row for row in result_of(out)["rows"]
    }  # held to int8's text, though nobody asked for its speed
    assert list(again) == ["float32 plain", "int8 plain", "int8 speculative k=4"]
    assert again["int8 speculative k=4"]["gate"] == rows["int8 speculative k=4"]["gate"]


def test_quality_of_a_variant_is_perplexity_and_agreement_with_the_first(model_folder, capsys):
    status, out, _ = call(model_folder, capsys, "--variants", "float32,int8,int4", command=["quality"])
    first, *others = result_of(out)["rows"]
    assert status == 0 and (first["agreement"], first["perplexity_ratio"], first["kl"]) == (1.0, 1.0, 0.0)
    assert others[0]["agreement"] > 0.8 and 0 < others[0]["kl"] < others[1]["kl"]
    assert "perplexity" in out.splitlines()[0] and len(out.splitlines()) == 5
    status, _, err = call(model_folder, capsys, "--model", model_folder / "mute", command=["quality"])
    assert status == 2 and "no tokenizer" in err
    assert bench.main(["quality", "--model", "random:gpt2:1"]) == 2
    assert capsys.readouterr().err.startswith("bench.py: --model random:gpt2:1")


def test_answers_are_graded_and_compared_with_plains(model_folder, capsys, tmp_path, monkeypatch):
    item = {"group": "factual", "check": {"any": ["yes"]}}
    (tmp_path / "q.json").write_text(json.dumps([item | {"user": word} for word in ("ab", "cd")]))
    monkeypatch.setattr(quality, "spelled", lambda tokenizer, item: tokenizer.encode(item["user"]))
    seen = []
    monkeypatch.setattr(quality, "grade", lambda item, text: seen.append((item["user"], text)) or item["user"] == "ab")
    status, out, _ = call(model_folder, capsys, *ONE, "--prompts", tmp_path / "q.json", "--only", "n-gram k=4")
    rows = result_of(out)["rows"]
    assert status == 0 and "1/2" in out
    assert rows[1]["pass_rate"]["passed"] == 1 and rows[1]["pass_rate"]["difference"] == 0
    assert [user for user, _ in seen[:2]] == ["ab", "cd"] and all(len(text.encode()) >= 1 for _, text in seen)
    (tmp_path / "q.json").write_text(json.dumps([{"user": "ab", "group": "factual", "check": {"nosuch": 1}}]))
    monkeypatch.undo()
    status, _, err = call(model_folder, capsys, "--prompts", tmp_path / "q.json")
    assert status == 2 and "nosuch" in err and err.count("\n") == 1


def test_a_sweep_has_a_cell_for_each_number_of_drafts_and_temperature(model_folder, capsys):
    flags = ["--draft-len", "1,3", "--temperature", "0,1", "--max-disagreement", "1"]
    status, out, _ = call(model_folder, capsys, *flags, command=["sweep"])
    rows = result_of(out)["sweep"]
    found = {(row["drafter"], row["draft_len"], row["temperature"]) for row in rows}
    drafters = ("speculative", "n-gram", "exit 1 drafts")
    assert status == 0 and found == set(itertools.product(drafters, (1, 3), (0.0, 1.0))) and len(rows) == 12
    cell = next(r for r in rows if (r["drafter"], r["draft_len"], r["temperature"]) == ("speculative", 3, 1.0))
    assert f"{cell['ratio_to_plain']:.2f}x ({cell['predicted_ratio']:.2f}, {cell['alpha']:.2f})" in out


def test_no_cell_of_a_sweep_stands_in_the_place_of_another():
    """Batches have tables of their own, 10 drafts come behind 2, and what was not measured leaves its place empty."""
    cells = [(1, 2, 0.0), (1, 10, 0.0), (1, 10, 1.0), (1, 2, 0.5), (4, 2, 1.0)]
    rows = [{"drafter": "head", "batch": b, "draft_len": k, "temperature": t, "ratio_to_plain": b + k + t,
             "predicted_ratio": 1.0, "alpha": None} for b, k, t in cells]  # fmt: skip
    lines = [line.split() for line in bench.sweep_table(rows).replace(" (1.00, 0.00)", "").splitlines()]
    assert lines[0][:3] == ["head,", "batch", "1:"] and lines[5][:3] == ["head,", "batch", "4:"]
    assert lines[2:4] == [["2", "3.00x", "3.50x", "-"], ["10", "11.00x", "-", "12.00x"]]
    assert lines[7] == ["2", "-", "-", "7.00x"]


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_the_baseline_of_the_stack_says_what_the_engine_says(arch):
    """Written apart from the model, from its weights: the same greedy text, so its speed is that of the same work."""
    more = {"n_kv_head": 4, "gain": 4.0} if arch == "gpt2" else {}
    model, sampling = tiny_model(arch, poisoned=False, **more), SamplingParams(30, 0.0)
    for prompt in ([1, 2, 3], [7]):
        [out], [plain] = bench.eager(model, [prompt], sampling), generate(model, [prompt], sampling)
        assert out.tokens == plain.tokens and len(set(out.tokens)) > 3
        assert 0 <= out.stats.prefill_seconds < out.stats.first_token_seconds < out.stats.seconds


def test_the_stack_adds_one_thing_a_row_and_holds_it_to_its_text(model_folder, capsys, monkeypatch):
    status, out, _ = call(model_folder, capsys, "--max-disagreement", 1, "--max-nats", 9, command=["stack"])
    rows = result_of(out)["stack"]
    names = [row["mode"] for row in rows]
    assert status == 0 and names[0].startswith("float32, eager") and names[-1] == "instead: int8, early exit 0.9"
    assert names[1:-1] == ["+ this engine", "+ bfloat16", "+ int8", "+ speculation", "+ early-exit drafts"]
    assert rows[0]["total"] == 1.0 and rows[1]["gate"]["verdict"] == rows[4]["gate"]["verdict"] == "passed"
    assert math.prod(row["factor"] for row in rows[:-1]) == pytest.approx(rows[-2]["total"])
    assert all(row["why"] in out for row in rows)
    assert rows[-1]["factor"] == pytest.approx(rows[-1]["total"] / rows[3]["total"])  # it stands on int8, not on drafts
    assert rows[1]["kl"] == 0.0 < rows[3]["kl"]  # what quantisation bought its speed with
    honest = bench.eager

    def wrong(*how):
        [run] = honest(*how)
        run.tokens[3] ^= 1
        return [run]

    monkeypatch.setattr(bench, "eager", wrong)
    monkeypatch.setattr(measure, "near_tie", lambda model, ids, drawn: (1.0, 1e-3))
    assert call(model_folder, capsys, command=["stack"])[0] == 1
    assert call(model_folder, capsys, "--temperature", 1, command=["stack"])[0] == 2
    status, _, err = call(model_folder, capsys, "--max-new-tokens", 64, command=["stack"])
    assert status == 2 and "a context of 64" in err  # the loop by hand knows no end of it


def test_the_calculator_has_the_figures_that_people_quote(capsys):
    assert bench.main(["predict"]) == 0
    found = result_of(capsys.readouterr().out)["predict"]
    assert found["tokens_per_round"] == pytest.approx(3.3616) and found["cost_for_2.5x"] == pytest.approx(0.08616)
    assert found["mean_layers"] == pytest.approx(20.4) and found["early_exit_speedup"] == pytest.approx(
        1.5686, abs=1e-4
    )
    assert bench.main(["predict", "--acceptance", "0.8", "--draft-len", "4", "--cost", "0.08616"]) == 0
    assert result_of(capsys.readouterr().out)["predict"]["speedup"] == pytest.approx(2.5)
    assert bench.main(["predict", "--acceptance", "0.3", "--cost", "0.6"]) == 0
    out = capsys.readouterr().out
    assert result_of(out)["predict"]["best_draft_len"] == 0 and "no draft is cheap enough" in out
    assert bench.main(["predict", "--draft-len", "0"]) == 0 and "at most" not in capsys.readouterr().out
    for wrong in (
        ["--acceptance", "2"],
        ["--exits", "8:0.5"],
        ["--exits", "x"],
        ["--exits", "8:nan"],
        ["--exits", "8:-1,16:2"],
        ["--exits", "99:1"],
        ["--draft-len", "-1"],
    ):
        with pytest.raises(SystemExit) as stopped:
            bench.main(["predict", *wrong])
        assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_synthetic_drafter_is_right_as_often_as_asked_and_changes_nothing():
    model = tiny_model(poisoned=False)
    prompts, sampling = [[1, 2, 3], [5]], SamplingParams(50, 1.0, seed=4)
    for acceptance, alpha in ((0.0, 0.0), (1.0, 1.0), (0.7, 0.7)):
        drafter = synthetic.SyntheticDrafter(model, [acceptance], NGramDrafter())
        drafter.tell(prompts, sampling)
        outs = speculative_generate(model, drafter, prompts, sampling, 4, "coupled")
        assert [out.tokens for out in outs] == [out.tokens for out in generate(model, prompts, sampling)]
        judged = sum(out.stats.accepted + out.stats.corrected for out in outs)
        assert sum(out.stats.accepted for out in outs) / judged == pytest.approx(alpha, abs=0.15 * (0 < alpha < 1))
        longer = SamplingParams(40, 0.5, seed=4)  # another text of the same prompts
        drafter.tell(prompts, longer)
        outs = speculative_generate(model, drafter, prompts, longer, 4, "coupled")
        assert acceptance < 1 or all(out.stats.alpha == 1.0 and out.stats.drafted > 25 for out in outs)


def test_a_synthetic_drafter_turns_half_way():
    model, prompts, sampling = tiny_model(poisoned=False), [[1, 2, 3], [5]], SamplingParams(40, 0.0)
    drafter = synthetic.SyntheticDrafter(model, [1.0, 0.0])
    drafter.tell(prompts, sampling)
    for out in speculative_generate(model, drafter, prompts, sampling, 3):
        assert out.sources[:20].count("draft") == 15 and "draft" not in out.sources[20:]
    with pytest.raises(ValueError, match="is 1.5"):
        synthetic.SyntheticDrafter(model, [0.5, 1.5])


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m"])
def test_random_weights_decode_at_any_shape(name, quantize):
    model = synthetic.random_model(f"{name}:1", "cpu", "float32", quantize)
    assert model.config.n_layer == 1 and model.config.n_embd == synthetic.SHAPES[name].n_embd
    [out] = generate(model, [[1, 2, 3]], SamplingParams(3, 1.0))
    assert max(out.tokens) < model.config.n_vocab_used and all(map(math.isfinite, out.logprobs))


def test_random_weights_are_measured_like_others(capsys):
    flags = ["--model", "random:gpt2:1", "--synthetic-acceptance", "0.6", "--max-new-tokens", "12", "--repeats", "1"]
    assert (
        bench.main([*flags, "--temperature", "0", "--max-prompts", "2", "--only", "synthetic k=4", "--batch", "1"]) == 0
    )
    row = result_of(capsys.readouterr().out)["rows"][1]
    assert row["mode"] == "synthetic k=4" and row["gate"]["verdict"] == "passed" and row["texts"] == 2


def test_prompts_come_from_keys_of_a_file_and_messages_take_the_template(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"a": ["x", "y"], "b": [{"user": "z"}], "c": [1]}))
    assert quality.read_prompts(f"{file}:a,b") == ["x", "y", {"user": "z"}]
    for source in (f"{file}:c", f"{file}:d", str(file), f"{file}x"):
        with pytest.raises(ValueError, match="--prompts"):
            quality.read_prompts(source)
    with pytest.raises(ValueError, match="nosuch.json.*No such file"):
        quality.read_prompts("nosuch.json")
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, r"[\s\S]", chat_template="<{{ messages[0].content }}>")
    assert bytes(quality.spelled(tokenizer, {"user": "z"})) == b"<z>" and bytes(quality.spelled(tokenizer, "z")) == b"z"


def test_kernels_are_counted_without_a_gpu_and_timed_with_one(monkeypatch):
    """What the interpreter counts is the least there is: each weight and each key is loaded once."""
    counted = subprocess.run([sys.executable, ROOT / "tests" / "counts.py"], capture_output=True, text=True, check=True)
    lines = [line.split() for line in counted.stdout.splitlines() if line.startswith(("product", "attention"))]
    assert len(lines) == 12 and all("1.00" in line for line in lines)
    asked = []
    monkeypatch.setattr(
        bench.subprocess, "run", lambda argv, **how: asked.append(argv) or SimpleNamespace(returncode=3)
    )
    for there, scripts in ((False, ["cpu_step.py", "counts.py", "aot.py"]), (True, ["gpu_check.py"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        asked.clear()
        assert bench.main(["kernels"]) == 3 and [argv[1].name for argv in asked] == scripts
    assert bench.main(["gpu-check", "--only", "law"]) == 3 and asked[-1][2:] == ["--only", "law"]


@torch.inference_mode()
def test_the_parts_of_a_step_are_timed_beside_one_read_of_its_weights(model_folder, tmp_path, capsys):
    """Each part does what the step does of it, on inputs of its shapes; memory of the size of the weights is read."""
    model, seen = load_checkpoint(model_folder / "target")[0], []
    parts = cpu_step.parts_of(model, context=5, n_rows=2)
    assert list(parts) == list(cpu_step.PARTS)
    matrices = [p for name, p in model.named_parameters() if name.startswith(("blocks", "output")) and p.dim() == 2]
    assert int(parts["read"]()) == sum(p.nbytes for p in matrices) // 8  # a sum of ones
    for name in ("linear", "decode_attention"):
        real = getattr(kernels, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, name, lambda *x, real=real, **how: seen.append(real(*x, **how)) or seen[-1])
            shapes = {}
            for part in ("whole", {"linear": "products", "decode_attention": "attention"}[name]):
                parts[part](), shapes.setdefault(part, Counter(tuple(x.shape) for x in seen)), seen.clear()
        whole, alone = shapes.values()
        assert whole.total() == alone.total() > 0 and (name == "linear" or whole == alone)
    flags = ["--model", model_folder / "target", "--repeats", 2, "--context", 5, "--out", tmp_path / "step.json"]
    assert cpu_step.main([*map(str, flags)]) == 0
    [row] = json.loads((tmp_path / "step.json").read_text())["steps"]
    assert row["whole_ms"] > row["products_ms"] > 0 and "float32" in capsys.readouterr().out
    assert cpu_step.main(["--model", "nosuch"]) == 2 and "nosuch" in capsys.readouterr().err


def test_the_calls_of_a_run_are_counted_without_its_prompts():
    """Five tokens run the layers five times, whatever the prompt's length and however many rows share a pass."""
    model, sampling = tiny_model(), SamplingParams(5, 0.0)
    mode = measure.Mode(lambda *how: generate(model, *how), measure.Variant("", model, None, None))
    for prompts in ([[1, 2, 3]], [[7]], [[1, 2, 3, 4], [5]], [[1] * 61, [2]]):  # the last row goes on alone
        calls, inside, between = measure.calls_of(mode, prompts, sampling)
        assert calls.total() == 3 * 5 and 0 < inside and 0 <= between
        assert sum(n for call, n in calls.items() if call[0] == "layers") == 5
    assert calls["layers", 2, 1, 4] == 3 and calls["draw", 1] == 2
    prompts, sampling = [[1, 2], [3, 4], [5, 6]], SamplingParams(30, 1.0, seed=3)
    for thresholds in ((0.4, 0.5, 0.6), (0.0, 2.0, 2.0), (2.0, 2.0, 2.0)):
        mode = mode._replace(decode=functools.partial(early_exit_generate, model, threshold=thresholds))
        calls, outs = measure.calls_of(mode, prompts, sampling).calls, mode.decode(prompts, sampling)
        sums = {what: sum(n * call[1] for call, n in calls.items() if call[0] == what) for what in ("asked", "draw")}
        assert sums["draw"] == 90 and sums["asked"] >= sum(out.stats.exited for out in outs)
        draws, heads = (sum(n for call, n in calls.items() if call[0] == what) for what in ("draw", "head"))
        assert draws == heads  # those that leave at one depth are drawn from one head
        passes = sum(n * call[1] * call[3] for call, n in calls.items() if call[0] == "layers")
        assert passes == sum(out.stats.layer_passes for out in outs)
    assert not {"run_layers", "logits", "exit_confidence"} & set(vars(model)) and Sampler.sample.__module__ == "decode"


def test_a_call_that_is_timed_alone_is_the_call_that_was_seen():
    model = tiny_model(poisoned=False)
    wanted = [
        ("layers", 2, 3, 2),
        ("layers", 1, 1, 4),
        ("head", 3, True),
        ("head", 2, False),
        ("asked", 2),
        ("draw", 3),
    ]
    taken = measure.seconds_of({(model, call) for call in wanted}, 0.8, 2)
    assert set(taken) == {(model, call) for call in wanted} and min(taken.values()) > 0
    for call in wanted:

        def decode(prompts, sampling, call=call):
            with torch.inference_mode():
                act = measure.prepared(model, call, 0.8)
                if call[0] == "draw":
                    assert len(act()[0]) == call[1]
                act()
            return [Generation()]

        mode = measure.Mode(decode, measure.Variant("", model, None, None))
        calls = measure.calls_of(mode, [[0]], SamplingParams(1)).calls
        assert calls[call] >= 1, (call, calls)


def test_early_exit_that_the_device_runs_unseen_has_no_prediction(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(measure, "runs_alone", lambda *how: True)
    _, out, _ = call(model_folder, capsys, *ONE, "--only", "early")
    assert result_of(out)["rows"][1]["predicted_ratio"] is None and "early exit 0.9" in out
