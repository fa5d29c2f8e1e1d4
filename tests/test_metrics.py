"""What is counted adds up, what is written can be read, and nothing of it stops or changes decoding."""

import dataclasses
import itertools
import json
import os
import random
import resource
import signal
import warnings
from collections import Counter

import pytest
from helpers import all_modes, check_counters, check_laws, exiting, run, speculating, tiny_model, weaker
from kill_switch import Work, asked, check, exposed, parted, serve, summed
from torch.utils._python_dispatch import TorchDispatchMode

import metrics
import sample
from checkpoint import load_checkpoint
from decode import DecodeStats, Generation, SamplingParams, generate
from metrics import MetricsFile, aggregate, served_by
from speculative import ExitDrafter, ModelDrafter, NGramDrafter

MODEL = tiny_model()
PROMPTS = [[1, 2, 3, 1, 2], [7], [4, 5, 6, 7, 8, 9, 4, 5]]


def of_mode(mode: str) -> str:
    return {"plain": "plain", "early": "early_exit", "propagate": "early_exit"}.get(mode, "speculative")


# ------------------------------------------------------------------------------------------- sums over many requests


def test_the_identities_of_one_request_hold_for_many():
    batches, sampling = [], SamplingParams(max_new_tokens=14, temperature=0.8, seed=3, stop_tokens=(8,))
    for decode in all_modes(MODEL).values():
        batches.append([out.stats for out in run(decode, PROMPTS, sampling)])
    rows = [stats for batch in batches for stats in batch]
    total = aggregate(batches)
    assert total["requests"] == len(rows) == 30
    for name in (
        "tokens",
        "rounds",
        "target_passes",
        "accepted",
        "drafted",
        "corrected",
        "bonus",
        "plain",
        "exited",
        "audited",
    ):
        assert total[name] == sum(getattr(stats, name) for stats in rows) > 0, name
    for kind in ("accepted", "drafted"):
        histogram, by_position = total[f"{kind}_histogram"], total[f"{kind}_by_position"]
        assert sum(histogram) == total["rounds"]
        assert sum(i * n for i, n in enumerate(histogram)) == sum(by_position) == total[kind]
        for i, n in enumerate(histogram):
            assert n == sum(sum(getattr(stats, f"{kind}_histogram")[i : i + 1]) for stats in rows)
    assert total["tokens"] == sum(total[source] for source in ("accepted", "corrected", "bonus", "plain", "exited"))
    assert sum(total["exit_histogram"].values()) == total["exited"] and set(total["exit_histogram"]) == {1, 2, 3}
    assert total["mean_accepted_length"] == total["tokens"] / total["rounds"]
    assert total["mean_layers"] == sum(stats.layer_passes for stats in rows) / total["tokens"]
    assert sum(total["share_by_drafted"].values()) == pytest.approx(1)
    assert total["share_by_drafted"][0] == total["drafted_histogram"][0] / total["rounds"]
    assert total["memory_peak_bytes"] > 10 * 2**20
    json.dumps(total)
    assert aggregate([])["requests"] == 0 and aggregate([])["tokens_per_second"] is None


def timed(seconds, first, gaps, **phases) -> DecodeStats:
    names = {f"{phase}_seconds": x for phase, x in phases.items()}
    return DecodeStats(
        plain=1 + len(gaps), first_token_seconds=first, token_seconds=[first, *gaps], seconds=seconds, **names
    )


def test_times_of_a_batch_count_once_and_phases_add_up_to_all_of_it():
    """Two rows of one call and a call of one row: 10 + 4 seconds, not 18."""
    batch = [
        timed(4.0, 2.0, [1.0, 1.0], prefill=1.0, draft=0.5, verify=2.0),
        timed(10.0, 2.0, [1.0, 1.0, 6.0], prefill=1.0, draft=2.0, verify=5.0),
    ]
    alone = [timed(4.0, 1.0, [3.0], prefill=0.5, draft=0.0, verify=3.5)]
    total = aggregate([batch, alone])
    parts = [total[f"{phase}_seconds"] for phase in metrics.PHASES]
    assert parts == [1.5, 2.0, 8.5, 2.0] and sum(parts) == 14.0
    assert total["tokens_per_second"] == 9 / (14.0 - 1.5)
    assert total["first_token_seconds"] == {"p50": 2.0, "p95": 2.0, "p99": 2.0}
    assert total["between_tokens_seconds"] == {"p50": 1.0, "p95": 6.0, "p99": 6.0}  # without the first tokens
    assert metrics.percentiles([*range(200, 0, -1)]) == {"p50": 100, "p95": 190, "p99": 198}
    assert metrics.per_output_token(batch[1]) == 8 / 3


def test_reasons_are_added_whatever_the_controller_calls_them():
    parts = [DecodeStats(), DecodeStats(), DecodeStats()]
    parts[0].reasons, parts[2].reasons = {"auto": 3, "probe": 1}, {"auto": 2, "kill switch": 2}
    assert aggregate([parts])["share_by_reason"] == {"auto": 5 / 8, "probe": 1 / 8, "kill switch": 2 / 8}
    assert parts[0].reasons == {"auto": 3, "probe": 1}  # what is added up is left alone


# -------------------------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def decoded():
    """(optimization, prompts, generations) of every mode."""
    sampling = SamplingParams(max_new_tokens=14, temperature=0.8, seed=3, stop_tokens=(8,))
    return [(of_mode(mode), PROMPTS, run(decode, PROMPTS, sampling)) for mode, decode in all_modes(MODEL).items()]


def test_prometheus_reads_the_text_and_its_sums_are_the_generations(decoded, tmp_path):
    for optimization, prompts, outs in decoded:
        MetricsFile(tmp_path / "m.prom").add(asked(prompts, optimization), outs)  # a process each
    samples = exposed(tmp_path / "m.prom")
    for optimization in ("plain", "speculative", "early_exit"):
        outs = [out for kind, _, part in decoded if kind == optimization for out in part]
        stats, only = metrics.add_up(out.stats for out in outs), {"optimization": optimization}

        def n(name, only=only, **labels):
            return summed(samples, name, **only, **labels)

        assert n("nanospec_requests_total") == len(outs)
        assert n("nanospec_requests_total", finish_reason="stop") == sum(out.finish_reason == "stop" for out in outs)
        n_tokens = sum(len(out.tokens) for out in outs)
        assert n("nanospec_output_tokens_total") == n("nanospec_source_tokens_total") == n_tokens
        assert n("nanospec_output_tokens_total", served_by="plain") == n("nanospec_source_tokens_total", source="plain")
        for source in ("draft", "corrected", "bonus", "plain", "exit"):
            assert n("nanospec_source_tokens_total", source=source) == sum(out.sources.count(source) for out in outs)
        assert n("nanospec_input_tokens_total") == sum(map(len, PROMPTS)) * len(outs) / len(PROMPTS)
        assert n("nanospec_drafted_per_round_count") == n("nanospec_accepted_per_round_count") == stats.rounds
        assert n("nanospec_drafted_per_round_sum") == stats.drafted
        assert n("nanospec_accepted_per_round_sum") == stats.accepted
        for i, rounds in enumerate(stats.accepted_histogram):
            below = n("nanospec_accepted_per_round_bucket", le=f"{i - 1}.0") if i else 0
            assert n("nanospec_accepted_per_round_bucket", le=f"{i}.0") - below == rounds
        assert n("nanospec_exit_tokens_total") == n("nanospec_source_tokens_total", source="exit") == stats.exited
        assert n("nanospec_exit_tokens_total", layers="2") == stats.exit_histogram.get(2, 0)
        assert n("nanospec_audited_tokens_total") == stats.audited
        assert n("nanospec_audited_tokens_total", verdict="disagreed") == stats.audit_disagreed
        assert n("nanospec_layer_passes_total") == stats.layer_passes
        assert n("nanospec_time_between_tokens_seconds_count") == n_tokens - len(outs)
        assert n("gen_ai_server_request_duration_seconds_sum") == pytest.approx(stats.seconds)
        assert n("gen_ai_server_time_to_first_token_seconds_count") == len(outs)
        batches = [[out.stats for out in part] for kind, _, part in decoded if kind == optimization]
        for phase in metrics.PHASES:
            expected = sum(metrics.phase_seconds(batch)[phase] for batch in batches)
            assert n("nanospec_seconds_total", phase=phase) == pytest.approx(expected)
    assert samples["nanospec_memory_peak_bytes"][()] > 10 * 2**20


def test_a_line_holds_the_figures_by_their_known_names_and_no_text(decoded, tmp_path):
    for optimization, prompts, outs in decoded:
        MetricsFile(tmp_path / "log").add(asked(prompts, optimization), outs)
    lines = (tmp_path / "log").read_text().splitlines()
    outs = [(optimization, out) for optimization, _, part in decoded for out in part]
    for line, (optimization, out) in zip(lines, outs, strict=True):
        row = json.loads(line)
        assert row["gen_ai.usage.output_tokens"] == len(out.tokens) == sum(row["optimization_tokens"].values())
        assert row["gen_ai.response.finish_reasons"] == [out.finish_reason]
        assert row["gen_ai.server.time_to_first_token"] == out.stats.first_token_seconds
        assert row["optimization"] == optimization and set(row["optimization_tokens"]) <= {"plain", optimization}
        assert row["stats"]["accepted_histogram"] == out.stats.accepted_histogram
        assert not set(row) & {"prompt", "tokens", "text", "logprobs"}
        assert row["gen_ai.server.request.duration"] == pytest.approx(
            sum(row["stats"][f"{p}_seconds"] for p in metrics.PHASES)
        )


def test_labels_survive_whatever_a_model_is_called(decoded, tmp_path):
    names = ['a "quoted" one', "back\\slash\\n", "new\nline", "sp ace } {", "x\u2028y\x0cz", "\udcff.bin", "", "1.0 2"]
    for name, _ in itertools.product(names, range(2)):
        MetricsFile(tmp_path / "m.prom").add(asked(PROMPTS, "plain", name), decoded[0][2])
    counts = exposed(tmp_path / "m.prom")["nanospec_requests_total"]
    found = {dict(labels)["gen_ai_request_model"] for labels in counts}
    assert found == {name.replace("\udcff", "?") for name in names} and sum(counts.values()) == 3 * 2 * len(names)


def said(act) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", ["m.prom", "log"])
def test_a_disk_that_fills_up_is_one_warning_and_what_was_written_stays(decoded, tmp_path, name):
    optimization, prompts, outs = decoded[1]
    file = MetricsFile(tmp_path / name)
    file.add(asked(prompts, optimization), outs)
    before = (tmp_path / name).read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100 if name == "log" else 100, limits[1]))
    try:
        lines = said(lambda: file.add(asked(prompts, optimization), outs))
        assert not said(lambda: [file.add(asked(prompts, optimization), outs) for _ in range(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(lines) == 1 and lines[0].startswith(f"--metrics {tmp_path / name}: ") and "decoding goes on" in lines[0]
    assert (tmp_path / name).read_text().startswith(before) and os.listdir(tmp_path) == [name]
    assert not said(lambda: file.add(asked(prompts, optimization), outs))  # there is room again
    if name == "log":
        assert (
            sum(is_json(line) for line in (tmp_path / name).read_text().splitlines()) == 6
        )  # a torn line spoils no other
    else:
        assert summed(exposed(tmp_path / name), "nanospec_requests_total") == 6


def is_json(line: str) -> bool:
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


FOREIGN = {
    "notes": b"my notes\n",
    "binary": b"\xff\xfe\x00",
    "another exporter": b"# HELP up Is it?\n# TYPE up gauge\nup 1\n",
    "cut off": b"# nanospec metrics, format 1\nnanospec_requests_total{optimization=",
    "a line too much": b"# nanospec metrics, format 1\nup 1\n",
    "no number": b'# nanospec metrics, format 1\nnanospec_requests_total{a="b"} x\n',
    "later format": b"# nanospec metrics, format 2\n",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_prom_file_that_is_not_ours_is_one_warning_and_left_alone(decoded, tmp_path, kind):
    (tmp_path / "m.prom").write_bytes(FOREIGN[kind])
    optimization, prompts, outs = decoded[0]

    def use():
        file = MetricsFile(tmp_path / "m.prom")
        file.add(asked(prompts, optimization), outs)
        file.add(asked(prompts, optimization), outs)

    assert len(said(use)) == 1 and (tmp_path / "m.prom").read_bytes() == FOREIGN[kind]


@pytest.mark.parametrize(
    "name", ["missing/m.prom", "missing/log", "file/log", "file/m.prom", "folder", "folder.prom", "/dev/full"]
)
def test_a_place_where_nothing_can_be_written_is_one_warning(decoded, tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.prom").mkdir()
    optimization, prompts, outs = decoded[0]

    def use():
        file = MetricsFile(tmp_path / name)
        file.add(asked(prompts, optimization), outs)
        file.add(asked(prompts, optimization), outs)

    lines = said(use)
    assert len(lines) == 1 and "\n" not in lines[0]
    if name == "missing/m.prom":  # the folder comes later
        file = MetricsFile.__new__(MetricsFile)
        file.path, file.warned = tmp_path / name, True
        (tmp_path / "missing").mkdir()
        file.add(asked(prompts, optimization), outs)
        assert summed(exposed(tmp_path / name), "nanospec_requests_total") == 3


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    try:
        MetricsFile(tmp_path / "pipe")
        assert signal.alarm(0) > 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------------- many requests, and the switch thrown


def bundled():
    model, _ = load_checkpoint("stdlib", "cpu", "float64")
    drafter, _ = load_checkpoint("stdlib-draft", "cpu", "float64")
    return model, drafter


def by_turns(model, small) -> list[tuple[str, object, float]]:
    """optimization, how it is decoded, temperature; float64, so that coupled and greedy texts are plain's exactly."""
    low, high = model.config.exit_layers[0], model.config.exit_layers[1]
    return [
        ("plain", lambda *args, **options: generate(model, *args, **options), 0.8),
        ("speculative", speculating(model, ModelDrafter(small), 4), 0),
        ("early_exit", exiting(model, threshold=0.3, audit=True), 0),
        ("speculative", speculating(model, ModelDrafter(small), 3, "coupled"), 0.8),
        ("combined", speculating(model, ExitDrafter(model, (low, high), threshold=0.4), 3, "coupled"), 0.8),
        ("early_exit", exiting(model, threshold=0.3, max_parked=3), 0.8),
        ("speculative", speculating(model, NGramDrafter(), 4), 0),
        ("speculative", speculating(model, ModelDrafter(small), "auto", "coupled"), 0.8),
    ]


@pytest.mark.parametrize("which, rows", [("tiny", 1), ("bundled", 8)])
def test_two_hundred_mixed_requests_with_the_switch_thrown_in_the_middle(which, rows, tmp_path):
    """Nothing is lost, no text changes that must not, and the figures add up: 200 requests in batches of `rows`."""
    model, small = (MODEL, weaker(MODEL)) if which == "tiny" else bundled()
    rng, n_vocab, ways = random.Random(0), model.config.n_vocab_used, by_turns(model, small)
    work = []
    for i in range(200 // rows):
        optimization, decode, temperature = ways[i % len(ways)]
        phrase = [rng.randrange(n_vocab) for _ in range(3)]
        prompts = [phrase * 2 + [rng.randrange(n_vocab) for _ in range(rng.randrange(1, 4))] for _ in range(rows)]
        sampling = SamplingParams(rng.randrange(5, 9), temperature, seed=i * rows, stop_tokens=(8,))
        work.append(Work(which, model, optimization, decode, prompts, sampling))
    served = serve(work, tmp_path)
    assert not parted(served) and check(served, tmp_path)["requests"] == 200
    for request, seed in zip(served, itertools.count()):
        check_counters(request.out)
        if which == "tiny" and request.work.optimization == "early_exit":
            # each token is that of the head which emitted it, with the request's own noise
            check_laws(model, work[request.batch].prompts[request.row], request.out, request.work.sampling, seed)


def test_a_plain_request_is_served_by_plain_alone():
    out = Generation(tokens=[1, 2, 3], sources=["plain", "plain", "plain"])
    assert served_by("plain", out) == {"plain": 3}
    assert served_by("speculative", out) == {"plain": 3, "speculative": 0}
    out = dataclasses.replace(out, sources=["plain", "draft", "corrected"])
    assert served_by("combined", out) == {"plain": 1, "combined": 2}


@pytest.mark.parametrize("mode", ["plain", "speculative", "early-exit"])
def test_metrics_cost_no_operation(mode, tmp_path, capsys):
    """On or off, decoding does the same operations, so it launches, waits and allocates alike."""

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    flags = ["--mode", mode, "--max-new-tokens", "12", "--threads", "1", "--temperature", "0"]
    found = []
    for more in ([], ["--metrics", str(tmp_path / "m.jsonl")], ["--metrics", str(tmp_path / "m.prom")]):
        with Counting() as counting:
            assert sample.main([*flags, *more]) == 0
        found.append(counting.seen)
    assert found[0] == found[1] == found[2] and sum(found[0].values()) > 1000
    assert (tmp_path / "m.jsonl").stat().st_size and (tmp_path / "m.prom").stat().st_size
