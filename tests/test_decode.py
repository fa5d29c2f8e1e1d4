"""The loop: what is refused, where decoding ends, what is reported, and that nothing leaks, grows or is computed twice."""

import contextlib
import copy
import dataclasses
import errno
import gc
import itertools
import math
import os
import time
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import Pieces, all_modes, check_counters, check_laws, counters, run, speculating, tiny_model

import kernels
from auto import DraftLength
from decode import Batch, Control, DecodeStats, SamplingParams, compare_on_text, generate, pick_threads
from early_exit import early_exit_generate
from model import GPT
from speculative import ExitDrafter, ModelDrafter, NGramDrafter, speculative_generate

MODEL = tiny_model()
MODES = all_modes(MODEL)
PROMPTS = [[1, 2, 3, 1, 2], [7], [4, 5, 6, 7, 8, 9, 4, 5]]
NAMES = [
    "zero",
    "a",
    " b",
    "cat",
    "dd",
    "é",
    "fog ",
    "g",
    "h-",
    "i",
    "jk",
    "l.",
    "m",
    "no",
    "p",
    "q",
    "rst",
    "u",
    "v",
    "w",
]
TOKENIZER = Pieces([*NAMES, "x", "yy", "z", "\n"])
every_mode = pytest.mark.parametrize("mode", MODES)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", True),
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 2),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.2),
        ("logit_bias", [1, 2]),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("seed", 1.5),
        ("seed", None),
        ("seed", [1, "2"]),
        ("stop_tokens", 3),
        ("stop_tokens", [-3]),
        ("stop_tokens", ["a"]),
        ("stop_strings", "abc"),
        ("stop_strings", [""]),
        ("stop_strings", [3]),
    ],
)
def test_a_bad_sampling_value_is_refused_in_one_line(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name} is {value!r}: it must be ") and "\n" not in message and len(message) < 120


def test_values_at_the_edge_are_accepted():
    SamplingParams(0, 0, 0, 1.0, 0.0, 1.0, {}, 0)
    SamplingParams(
        temperature=1e-300, top_p=1e-9, min_p=1, repetition_penalty=0.5, logit_bias={3: -math.inf}, seed=-(2**70)
    )
    SamplingParams(stop_tokens={1, 2}, stop_strings=("a",), seed=(1, 2**64, -5))


@pytest.mark.parametrize(
    "prompts, changes, message",
    [
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([[1] * 65], {}, r"prompts\[0\] has 65 tokens: the model's context holds 64"),
        ([[1], [2, 24]], {}, r"prompts\[1\] holds token 24: ids run from 0 to 23"),
        ([[1, -1]], {}, r"prompts\[0\] holds token -1"),
        ([[1], [2]], {"seed": [1, 2, 3]}, "seed has 3 values for 2 prompts"),
        ([[1]], {"logit_bias": {24: 1.0}}, "logit_bias names token 24: the vocabulary ends at 23"),
        ([[1]], {"stop_strings": ["a"]}, "stop_strings need a tokenizer"),
    ],
)
def test_a_bad_prompt_is_refused_in_one_line_by_every_mode(prompts, changes, message):
    for decode in MODES.values():
        with pytest.raises(ValueError, match=message) as error:
            decode(prompts, SamplingParams(max_new_tokens=3, **changes))
        assert "\n" not in str(error.value)


@every_mode
def test_logits_that_are_not_numbers_name_their_row(mode):
    model = tiny_model()
    model.token_embedding.weight.data[5] = torch.nan
    decode = all_modes(model)[mode]
    with pytest.raises(ValueError, match="row 1: the model's logits hold NaN"):
        decode([[1, 2, 3], [4, 5, 6], [7]], SamplingParams(max_new_tokens=4))
    only_nine = {i: -math.inf for i in range(24) if i != 9}
    out = run(MODES[mode], [[1, 2]], SamplingParams(max_new_tokens=6, logit_bias=only_nine))[0]
    assert out.tokens == [9] * 6 and out.logprobs == [0.0] * 6
    with pytest.raises(ValueError, match="row 0"):
        MODES[mode]([[1, 2]], SamplingParams(max_new_tokens=6, logit_bias=only_nine | {9: -math.inf}))


# ----------------------------------------------------------------------------------------------------------------------
# What comes out


@every_mode
def test_every_mode_reports_the_law_it_drew_from_and_each_row_is_its_own_batch(mode):
    """Logprobs against a full forward; tokens against argmax or the race; rows alone give the same, counters included."""
    lossy = mode in ("early", "propagate")
    for changes in (
        {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": {3: 1.5, 7: -2.0}},
        {
            "temperature": 0.8,
            "top_k": 9,
            "top_p": 0.95,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "logit_bias": {3: 1.5},
        },
        {"temperature": 1.0},
    ):
        sampling = SamplingParams(max_new_tokens=12, seed=3, **changes)
        outs = run(MODES[mode], PROMPTS, sampling)
        plain = generate(MODEL, PROMPTS, sampling)
        for row, (prompt, out) in enumerate(zip(PROMPTS, outs)):
            assert out.finish_reason == "length" and len(out.tokens) == 12 and out.text is None
            if mode != "propagate":
                noise = mode in ("plain", "auto", "coupled", "early")  # the others draw by the rejection rule
                check_laws(MODEL, prompt, out, sampling, 3 + row if noise else None)
            if not lossy and (sampling.temperature == 0 or mode in ("plain", "auto", "coupled")):
                assert out.tokens == plain[row].tokens
            alone = run(MODES[mode], [prompt], dataclasses.replace(sampling, seed=[3 + row]))[0]
            assert alone.tokens == out.tokens
            if mode != "auto":  # whose rounds go by the clock
                assert alone.sources == out.sources and counters(alone) == counters(out)
            assert max(abs(a - b) for a, b in zip(alone.logprobs, out.logprobs)) < 1e-9


def test_plain_decoding_runs_every_layer_for_every_token():
    out = run(MODES["plain"], PROMPTS, SamplingParams(max_new_tokens=9))[1]
    assert out.layers_run == [4] * 9 and out.sources == ["plain"] * 9 and out.stats.mean_layers == 4.0
    assert out.stats.accepted_histogram == [9] and out.stats.alpha is None and out.stats.acceptance_rate is None


@pytest.mark.parametrize("mode", ["plain", "model", "coupled", "early"])
def test_the_seed_decides_everything(mode):
    decode = MODES[mode]

    def tokens(prompts, seed):
        return [out.tokens for out in decode(prompts, SamplingParams(max_new_tokens=6, seed=seed))]

    twenty = tokens([[1, 2]] * 20, 0)
    assert twenty == tokens([[1, 2]] * 20, 0) and len({tuple(t) for t in twenty}) > 10
    assert twenty[3:5] == tokens([[1, 2]] * 2, 3) == tokens([[1, 2]] * 2, [3, 4])  # row i uses seed + i
    assert tokens([[1, 2]], 0) == [twenty[0]] != tokens([[1, 2]], 1)  # 0 is a seed, not "none"
    assert tokens([[1, 2]], 2**64 + 3) == [twenty[3]] and tokens([[1, 2]], -(2**70)) == [twenty[0]]  # 64 bits of it
    assert tokens([[1, 2]], 2**32) != [twenty[0]]  # all of the 64


# ----------------------------------------------------------------------------------------------------------------------
# Where it ends


def check_cut(full, out, n, reason, text=None):
    """out is full cut behind its first n tokens. What automatic lengths draft depends on the other rows, and no text on that."""
    assert out.tokens == full.tokens[:n] and out.finish_reason == reason
    if not out.stats.reasons.get("measure"):
        assert out.sources == full.sources[:n]
    assert out.layers_run == full.layers_run[:n]
    assert all(abs(a - b) < 1e-9 for a, b in zip(out.logprobs, full.logprobs))
    assert out.text == (TOKENIZER.decode(out.tokens) if text is None else text)


@every_mode
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stop_token_ends_the_row_there_also_inside_a_block(mode, temperature):
    sampling = SamplingParams(max_new_tokens=14, temperature=temperature, seed=1)
    full = run(MODES[mode], PROMPTS, sampling, tokenizer=TOKENIZER)
    for at in (0, 2, 3, 6, 13):
        stops = [out.tokens[at] for out in full]
        outs = run(MODES[mode], PROMPTS, dataclasses.replace(sampling, stop_tokens=stops), tokenizer=TOKENIZER)
        for row, out in enumerate(outs):
            first = next(i for i, t in enumerate(full[row].tokens) if t in stops)
            check_cut(full[row], out, first + 1, "stop")  # a stop on the last token of the budget is a stop
            if mode == "itself":  # what was drafted behind the stop was never judged
                assert out.stats.acceptance_rate in (None, 1.0) and out.stats.alpha in (None, 1.0)


@every_mode
def test_a_stop_string_ends_the_row_wherever_it_lies_in_the_tokens(mode):
    sampling = SamplingParams(max_new_tokens=14, temperature=1, seed=1)
    full = run(MODES[mode], PROMPTS, sampling, tokenizer=TOKENIZER)
    pieces = [[TOKENIZER.pieces[t] for t in out.tokens] for out in full]
    for row, prompt in enumerate(PROMPTS):
        for stops in (
            [pieces[row][2]],  # one token
            [pieces[row][4][-1] + pieces[row][5] + pieces[row][6][:1]],  # from inside a token, over one, into the next
            ["".join(pieces[row][3:9])],  # longer than any block but one
            ["never", pieces[row][7][:1]],
        ):
            once = dataclasses.replace(sampling, stop_strings=stops, seed=[1 + row])
            out = run(MODES[mode], [prompt], once, tokenizer=TOKENIZER)[0]
            n = next(n for n in range(15) if any(s in "".join(pieces[row][:n]) for s in stops))
            text = "".join(pieces[row][:n])
            text = text[: min(text.find(s) for s in stops if s in text)]
            check_cut(full[row], out, n, "stop", text)
    # what stands in the prompt is no match
    tail = TOKENIZER.decode(PROMPTS[0][-1:]) + pieces[0][0]
    if tail not in "".join(pieces[0]):
        out = run(MODES[mode], PROMPTS[:1], dataclasses.replace(sampling, stop_strings=[tail]), tokenizer=TOKENIZER)[0]
        check_cut(full[0], out, 14, "length")


@every_mode
def test_the_budget_is_kept_exactly(mode):
    """With a stop behind the budget, which must not be seen; also where the row is one of a batch that goes on."""
    for budget in (0, 1, 2, 3):
        sampling = SamplingParams(max_new_tokens=budget, temperature=0)
        for out in run(MODES[mode], PROMPTS, sampling, tokenizer=TOKENIZER):
            assert len(out.tokens) == budget and out.finish_reason == "length"
            assert len(out.stats.drafted_histogram) <= max(1, budget)  # at most budget - 1 in a round
            assert out.text == TOKENIZER.decode(out.tokens)
    long = run(MODES[mode], [[1, 2]], SamplingParams(max_new_tokens=9, temperature=0))[0].tokens
    for budget in range(1, 8):
        behind = SamplingParams(max_new_tokens=budget, temperature=0, stop_tokens=[long[budget]])
        out = run(MODES[mode], [[1, 2]], behind)[0]
        n = next((i + 1 for i, t in enumerate(long[:budget]) if t == long[budget]), budget)
        assert out.tokens == long[:n] and out.finish_reason == (
            "length" if long[budget] not in long[:budget] else "stop"
        )


@every_mode
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_decoding_ends_at_the_context_and_reads_past_no_table(mode, arch):
    model = tiny_model(arch, block_size=24)
    prompts = [[1] * 21, [2] * 5, [3] * 24, [4] * 23]  # short rows draft on beside rows that are full
    outs = run(all_modes(model)[mode], prompts, SamplingParams(max_new_tokens=10, temperature=0))
    assert [len(out.tokens) for out in outs] == [3, 10, 0, 1]
    assert [out.finish_reason for out in outs] == ["context", "length", "context", "context"]
    outs = run(all_modes(model)[mode], [[1] * 21], SamplingParams(max_new_tokens=10, temperature=0))
    assert len(outs[0].tokens) == 3 and outs[0].finish_reason == "context"


def test_no_draft_is_made_that_could_not_be_committed():
    asked = []

    class Spy(ModelDrafter):
        def propose(self, rows, max_k, sampler):
            asked.append((max_k, [len(sampler.histories[row]) for row in rows]))
            return super().propose(rows, max_k, sampler)

    for budget in range(6):
        asked.clear()
        prompt = [1, 2, 3]
        speculative_generate(MODEL, Spy(MODEL), [prompt], SamplingParams(max_new_tokens=budget, temperature=0), 8)
        assert asked == ([(budget - 1, [3])] if budget > 1 else [])  # it accepts everything: one round, bonus included


def test_an_empty_batch_gives_nothing():
    for decode in MODES.values():
        assert decode([], SamplingParams()) == []


# ----------------------------------------------------------------------------------------------------------------------
# The kill switch and Ctrl-C

SWITCHED = ["model", "auto", "ngram", "exit", "coupled", "early", "propagate"]


@pytest.mark.parametrize("by", ["environment", "file"])
@pytest.mark.parametrize("mode", SWITCHED)
def test_the_kill_switch_makes_rounds_plain_while_it_is_on_and_only_then(mode, by, monkeypatch, tmp_path):
    control = tmp_path / "control"
    options = {"control": str(control)} if by == "file" else {}
    rounds = []  # of row 0: was the switch on when the round began, and how many tokens came

    def throw(on: bool):
        if by == "environment":
            monkeypatch.setenv("NANOSPEC_PLAIN", "1" if on else "0")
        else:
            control.write_text("plain\n" if on else "auto")

    def on_tokens(row, ids):
        if row == 0:
            rounds.append((on_tokens.on, len(ids)))
            n = sum(k for _, k in rounds)
            on_tokens.on = 8 <= n < 16
            throw(on_tokens.on)

    on_tokens.on = False
    verify = "rejection" if mode in ("model", "ngram", "exit") else "coupled"
    for temperature in (0, 1) if verify == "coupled" else (0,):  # where the text must not change, it is compared
        rounds.clear()
        sampling = SamplingParams(max_new_tokens=28, temperature=temperature, seed=5)
        outs = MODES[mode](PROMPTS[:2], sampling, on_tokens=on_tokens, **options)
        throw(False)
        if mode not in ("early", "propagate"):
            assert [out.tokens for out in outs] == [out.tokens for out in generate(MODEL, PROMPTS[:2], sampling)]
        position = 0
        seen = {True: [], False: []}
        for on, n in rounds:
            seen[on] += outs[0].sources[position : position + n]
            position += n
        assert set(seen[True]) == {"plain"} and len(seen[True]) >= 4
        assert set(seen[False]) & {"draft", "corrected", "exit"}  # before and after, the mode's own rounds
        assert set(seen[False]) & {"draft", "corrected", "exit"} == set(outs[0].sources) & {
            "draft",
            "corrected",
            "exit",
        }
        for out in outs:
            check_counters(out)
    for value in ("", "0"):
        monkeypatch.setenv("NANOSPEC_PLAIN", value)
        out = MODES[mode](PROMPTS[:1], SamplingParams(max_new_tokens=28, seed=5))[0]
        assert set(out.sources) != {"plain"}
    out = MODES[mode](PROMPTS[:1], SamplingParams(max_new_tokens=4, seed=5), control=str(tmp_path / "missing"))[0]
    assert len(out.tokens) == 4  # no file asks for nothing


@pytest.mark.parametrize("mode", ["model", "auto", "ngram", "exit", "combined", "coupled"])
def test_the_control_file_caps_drafts_from_the_next_round_on(mode, tmp_path, monkeypatch):
    control, noted, judged = tmp_path / "control", [], Batch.judged
    said = itertools.chain(["k=1", "k=1", "auto", "", "k = 2", "k=2\n", "k=0", "plain"], itertools.repeat("auto"))

    def note(self, row, tokens, log_probs, n_accepted, n_drafted, layer_passes):
        noted.append((control.read_text() if control.exists() else "auto", n_drafted))
        return judged(self, row, tokens, log_probs, n_accepted, n_drafted, layer_passes)

    monkeypatch.setattr(Batch, "judged", note)
    sampling = SamplingParams(max_new_tokens=40, temperature=0 if mode in ("model", "ngram", "exit") else 1, seed=5)
    expected = generate(MODEL, PROMPTS[:1], sampling)[0].tokens
    verify = "coupled" if mode == "combined" else "rejection"
    decode = speculating(MODEL, ExitDrafter(MODEL, (1, 3), 0.6), 5, verify) if mode == "combined" else MODES[mode]
    out = decode(PROMPTS[:1], sampling, on_tokens=lambda *_: control.write_text(next(said)), control=str(control))[0]
    assert out.tokens == expected and len(noted) > 9
    check_counters(out)
    most = {"k=1": 1, "k = 2": 2, "k=2\n": 2, "k=0": 0, "plain": 0}
    for text, k in noted:
        assert k <= most.get(text, 8), text
    free = max(k for text, k in noted if text in ("", "auto"))
    assert free > 1 or mode == "auto"  # which chooses by itself
    assert (
        mode in ("ngram", "auto") or max(k for text, k in noted if text == "k=1") == 1
    )  # these begin with a match or a measurement


def test_the_control_file_says_one_of_four_things_and_anything_else_once(tmp_path):
    file = tmp_path / "control"
    control = Control(str(file))
    assert control.cap() is None  # no file
    for text, cap in {"plain": 0, " plain \n": 0, "k=3": 3, "k = 12\n": 12, "k=0": 0, "auto": None, "": None}.items():
        file.write_text(text)
        assert control.cap() == cap, text
    file.write_text("k=-1")
    with pytest.warns(UserWarning, match="control: 'k=-1' is none of plain, k=N and auto; decoding goes on as started"):
        assert control.cap() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        for text in ("plain now", "k=", "PLAIN", "k=2.5", "plain\nk=2", "k=" + "9" * 5000, "\0"):
            file.write_text(text)
            assert control.cap() is None, text
        file.write_bytes(b"\xff\xfe")
        assert control.cap() is None
        file.write_text("plain")
        assert control.cap() == 0
        file.unlink()
        assert control.cap() is None


def test_a_control_that_is_no_file_is_one_warning_and_never_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path, what in (
        ("pipe", "no ordinary file"),
        ("folder", "no ordinary file"),
        ("file/x", os.strerror(errno.ENOTDIR)),
    ):
        control = Control(str(tmp_path / path))
        with pytest.warns(UserWarning, match=what) as said:
            assert [control.cap(), control.cap()] == [None, None] and len(said) == 1


def test_a_control_file_that_did_not_change_is_not_opened_and_one_that_did_is_never_missed(tmp_path, monkeypatch):
    file, opened = tmp_path / "control", []
    read = Control.read
    monkeypatch.setattr(Control, "read", lambda self, mode: opened.append(mode) or read(self, mode))
    control = Control(str(file))
    now = time.time()
    for i in range(20):  # written anew with the same size within one tick of the file system's clock
        file.write_text(f"k={i % 10}")
        os.utime(file, (now, now))
        assert control.cap() == i % 10
    old = time.time() - 60
    os.utime(file, (old, old))
    assert control.cap() == 9
    opened.clear()
    assert [control.cap() for _ in range(50)] == [9] * 50 and not opened
    file.write_text("plain")
    assert control.cap() == 0 and opened


@every_mode
def test_an_interruption_keeps_what_was_committed(mode):
    sampling = SamplingParams(max_new_tokens=20, temperature=1, seed=2, stop_tokens=(8,))
    full = run(MODES[mode], PROMPTS, sampling, tokenizer=TOKENIZER)
    for calls in (1, 2, 4, 7)[: max(out.stats.rounds for out in full)]:
        streams = [[] for _ in PROMPTS]

        def on_tokens(row, ids, calls=calls, streams=streams):
            streams[row].append(ids)
            if sum(map(len, streams)) == calls:
                raise KeyboardInterrupt

        try:
            outs = MODES[mode](PROMPTS, sampling, tokenizer=TOKENIZER, on_tokens=on_tokens)
        except KeyboardInterrupt:
            pytest.fail("the interruption reached the caller")
        assert any(out.finish_reason == "interrupted" for out in outs)
        for whole, out, stream in zip(full, outs, streams):
            check_counters(out)
            n = len(out.tokens)
            assert (
                out.tokens == whole.tokens[:n]
                and [t for ids in stream for t in ids] == out.tokens[: sum(map(len, stream))]
            )
            assert out.finish_reason in (("interrupted",) if n < len(whole.tokens) else (whole.finish_reason,))
            assert out.text == TOKENIZER.decode(out.tokens)


# ----------------------------------------------------------------------------------------------------------------------
# What it costs


@contextlib.contextmanager
def counted(model):
    """Rows that went through each layer of the model."""
    rows, original = [0] * model.config.n_layer, type(model).run_layers

    def run_layers(x, cache, positions, first, last):
        for layer in range(first, last):
            rows[layer] += int((positions >= 0).sum())
        return original(model, x, cache, positions, first, last)

    model.run_layers = run_layers
    yield rows
    del model.run_layers


def test_nothing_runs_twice_and_rows_that_ended_cost_nothing(monkeypatch):
    """Rows through each layer of the target, exactly: the prompt once, then each committed token and each draft once; no prefix
    is read again, at any depth. A batch costs what its rows cost alone, though they end at different times.
    """
    prompts, n_layer = [list(range(20)), [1], [2, 3]], MODEL.config.n_layer
    sampling = SamplingParams(max_new_tokens=12, temperature=0)
    for mode, decode in MODES.items():
        if mode == "itself":  # the drafter's own rows would be counted too
            continue
        outs = []
        for prompt in prompts:
            with counted(MODEL) as rows:
                outs += decode([prompt], sampling)
            stats, read = outs[-1].stats, len(prompt) - 1
            if mode == "propagate":
                assert rows == [read + sum(layers > i for layers in outs[-1].layers_run) for i in range(n_layer)]
            else:
                assert rows == [read + stats.rounds + stats.drafted] * n_layer, mode
        stopping = dataclasses.replace(sampling, stop_tokens=(outs[0].tokens[6], outs[1].tokens[3]))
        alone = 0
        for prompt in prompts:
            with counted(MODEL) as rows:
                decode([prompt], stopping)
            alone += sum(rows)
        with counted(MODEL) as rows:
            outs = decode(prompts, stopping)
        assert sum(rows) == alone or mode == "auto", mode
        assert len({out.stats.rounds for out in outs}) > 1, mode
    # rows that draft less than their neighbours: what is drafted beyond their own length stays shallow
    monkeypatch.setattr(DraftLength, "ask", lambda self, rows, plans: [1 + 3 * (row % 2) for row in rows])
    with counted(MODEL) as rows:
        outs = speculative_generate(MODEL, ExitDrafter(MODEL, 2), prompts, SamplingParams(24, seed=1), 4)
    deep = sum(len(p) - 1 for p in prompts) + sum(out.stats.rounds + out.stats.drafted for out in outs)
    assert rows[2:] == [deep] * 2 and rows[0] > deep


def test_nothing_leaks_from_one_call_into_the_next():
    """The same drafter objects, after calls that ended in other ways, give the same counters and the same tokens."""
    sampling = SamplingParams(max_new_tokens=10, seed=4)
    for mode, decode in MODES.items():
        before = run(decode, PROMPTS, sampling)
        snapshot = [(list(out.tokens), counters(out)) for out in before]
        decode([[5, 6]], SamplingParams(max_new_tokens=3, temperature=0))
        decode(PROMPTS + PROMPTS, SamplingParams(max_new_tokens=2, seed=9, repetition_penalty=1.3, logit_bias={2: 5.0}))
        with pytest.raises(ValueError):
            decode([[]], sampling)
        decode([[3]] * 2, sampling, on_tokens=lambda row, ids: (_ for _ in ()).throw(KeyboardInterrupt))
        after = run(decode, PROMPTS, sampling)
        assert [(out.tokens, counters(out)) for out in after] == snapshot, mode
        assert [(out.tokens, counters(out)) for out in before] == snapshot, mode  # nor does the next change the last
    first = SamplingParams()
    first.logit_bias[1] = 2.0
    assert SamplingParams().logit_bias == {}


def test_fifty_generations_leave_no_memory_behind():
    drafters = [ModelDrafter(tiny_model()), NGramDrafter(), ExitDrafter(MODEL, 2)]
    sampling = SamplingParams(max_new_tokens=4)

    def some(n):
        for i in range(n):
            if i % 4 == 3:
                early_exit_generate(MODEL, PROMPTS, sampling, threshold=0.5, audit=True)
            else:
                speculative_generate(MODEL, drafters[i % 4], PROMPTS, sampling, 3)
        gc.collect()
        live = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        return len(live), sum(x.numel() for x in live), len(gc.get_objects())

    some(4)
    tensors, numbers, objects = some(4)
    after = some(48)
    assert after[:2] == (tensors, numbers) and after[2] - objects < 50


def test_speed_counts_every_token_and_all_time_behind_prefill():
    """Blocks come in at once: what is divided must not favour whoever commits more tokens in the first of them."""
    stats = DecodeStats(
        accepted_histogram=[0, 0, 0, 0, 2],
        bonus=2,
        token_seconds=[3.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0],
        seconds=4.0,
        prefill_seconds=2.0,
    )
    assert stats.tokens_per_second == 5.0
    [out] = generate(tiny_model(), [[1, 2, 3]], SamplingParams(5))
    assert 0 < out.stats.prefill_seconds < out.stats.first_token_seconds < out.stats.seconds


# ----------------------------------------------------------------------------------------------------------------------
# A packed model on a CPU

BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed_model(bits: int) -> GPT:
    """bfloat16 activations, sharp enough that drafts fall, flat enough that they often stand."""
    model = tiny_model(poisoned=False, n_embd=64, n_hidden=1056, vocab_size=48, block_size=256, dtype=torch.float32)
    for name, weight in model.state_dict().items() if bits < 16 else ():
        if weight.dim() == 2:
            model.set_weight(name, kernels.quantize(weight, 8 if "embedding" in name else bits, 32))
    return model.to(torch.bfloat16).pack()


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not BF16, reason="a CPU without bfloat16 instructions: other products")
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_speculation_with_a_packed_model_is_plain_decoding_bit_for_bit(bits, one_thread):
    """In bfloat16, no near-ties excepted: up to 7 drafts a pass, greedy and coupled, and in batches of up to 8 tokens.

    On one thread: PyTorch's attention rounds one value in millions otherwise on its other threads.
    """
    model = packed_model(bits)
    drafter = packed_model(4)
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 9, 8]]
    accepted = 0
    for sampling in (SamplingParams(90, temperature=0), SamplingParams(90, temperature=0.7, seed=4)):
        alone = [generate(model, [p], replace(sampling, seed=sampling.seed + i))[0] for i, p in enumerate(prompts)]
        batched = generate(model, prompts, sampling)
        ways = {"ngram": (NGramDrafter(), 7), "model": (ModelDrafter(drafter), 3), "exit": (ExitDrafter(model, 2), 5)}
        for i, prompt in enumerate(prompts):
            assert (batched[i].tokens, batched[i].logprobs) == (alone[i].tokens, alone[i].logprobs)
            for name, (way, k) in ways.items():
                seeded = replace(sampling, seed=sampling.seed + i)
                [out] = speculative_generate(model, way, [prompt], seeded, k, "coupled")
                assert (out.tokens, out.logprobs) == (alone[i].tokens, alone[i].logprobs), (name, i)
                accepted += out.stats.accepted
    assert accepted > 100  # the property is empty without


def test_threads_are_picked_and_prefill_has_its_own():
    before = torch.get_num_threads()
    try:
        model = packed_model(16)
        began = time.perf_counter()
        count = pick_threads(model, 0.2)
        assert time.perf_counter() - began < 20
        n_cores = len(os.sched_getaffinity(0))
        assert count == torch.get_num_threads() and 1 <= count <= n_cores
        if n_cores > 1:
            assert 1 <= model.prefill_threads <= n_cores
        seen, model.prefill_threads = [], n_cores
        run_layers = model.run_layers
        model.run_layers = lambda x, *args: (seen.append((x.shape[1], torch.get_num_threads())), run_layers(x, *args))[
            1
        ]
        torch.set_num_threads(1)
        generate(model, [[1, 2, 3]], SamplingParams(2, temperature=0))
        assert seen == [(2, n_cores), (1, 1), (1, 1)] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_cost_of_quantisation_is_measured():
    """Against itself nothing is lost; perplexity is what it says; fewer bits lose more; bytes are those of the bits."""
    wide = {"n_embd": 128, "n_hidden": 256, "vocab_size": 48, "n_vocab_used": 44}
    model = tiny_model(poisoned=False, dtype=torch.float32, **wide)
    tokens = torch.randint(44, (3, 40), generator=torch.Generator().manual_seed(0))
    same = compare_on_text(model, model, tokens)
    law = model(tokens)[:, :-1].double().log_softmax(-1)
    perplexity = math.exp(-law.gather(2, tokens[:, 1:, None]).mean())
    assert same["perplexity"] == same["reference_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert (same["agreement"], same["kl"]) == (1, 0)
    lost = []
    for bits in (8, 4):
        small = copy.deepcopy(model)
        for name, weight in model.state_dict().items():
            if weight.dim() == 2:
                small.set_weight(name, kernels.quantize(weight, 8 if "embedding" in name else bits, 32))
        n = {
            m: sum(w.numel() for k, w in model.state_dict().items() if w.dim() == 2 and ("embedding" in k) == (m == 8))
            for m in (8, 4)
        }
        vectors = 4 * sum(w.numel() for w in model.state_dict().values() if w.dim() == 1)
        plain = n[8] + n[4] * (1 if bits == 8 else 0.5) + vectors
        assert plain < small.weight_bytes() < 1.3 * plain < model.weight_bytes()
        loose = compare_on_text(small, model, tokens)
        packed = compare_on_text(small.pack(), model, tokens)
        assert packed["kl"] == pytest.approx(loose["kl"], rel=0.05) and 0 < loose["agreement"] <= 1
        lost.append(loose["kl"])
    assert 0 < lost[0] < lost[1] / 10


@pytest.mark.parametrize("mode", all_modes(MODEL))
def test_no_position_runs_again_through_the_layers(mode, monkeypatch):
    """Time per token grows with the context as the bytes of its cache do: what is computed grows with new tokens alone.

    A prompt of 40 tokens costs 36 prompt positions more than one of 4; then a round runs its last token and its drafts.
    """
    honest, seen = GPT.run_layers, []

    def counting(model, x, cache, positions, first, last):
        if model is MODEL and cache is not None:
            seen.append(int((positions >= 0).sum()) * (last - first))
        return honest(model, x, cache, positions, first, last)

    monkeypatch.setattr(GPT, "run_layers", counting)
    n_layer = MODEL.config.n_layer
    for n_prompt in (4, 40):
        seen.clear()
        [out] = run(all_modes(MODEL)[mode], [list(range(1, 24))[:4] * (n_prompt // 4)], SamplingParams(16, seed=2))
        most = n_prompt - 1 + out.stats.rounds + out.stats.drafted
        if mode == "itself":  # the drafter is the target, with a cache of its own
            most = 2 * (n_prompt - 1 + out.stats.rounds + out.stats.drafted)
        assert 0 < sum(seen) <= most * n_layer
