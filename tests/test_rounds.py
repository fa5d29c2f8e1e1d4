"""Rounds on the device: the same tokens, sources, log-probabilities, ends and counters as the steps that the host leads.

The device's steps run on the references too, where everything is exact in float64; what only the kernels can show comes last.
"""

import contextlib
import itertools
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import Pieces, check_counters, check_laws, counters, tiny_model, weaker
from torch.utils._python_dispatch import TorchDispatchMode

import decode
import kernels
import sample
import speculative
from auto import Plan
from decode import Batch, PlainStep, SamplingParams, generate, plain_step, run_loop
from early_exit import EarlyExitSegments, EarlyExitStep, early_exit_generate, early_exit_step
from rounds import Rounds, RoundStep
from speculative import (
    ExitDrafter,
    ModelDrafter,
    NGramDrafter,
    SpeculativeRounds,
    SpeculativeStep,
    speculative_generate,
    speculative_step,
)

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1], [1, 8, 2, 8, 1, 8]]
GREEDY, DRAWN = SamplingParams(12, temperature=0.0), SamplingParams(12, temperature=0.9, top_k=12, seed=[5, 1, 1, 8])


def assert_same(mine, theirs, precision=1e-9):
    for a, b in zip(mine, theirs, strict=True):
        assert (a.tokens, a.sources, a.finish_reason, a.text) == (b.tokens, b.sources, b.finish_reason, b.text)
        assert a.layers_run == b.layers_run and counters(a) == counters(b)
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=precision)
        check_counters(a)


def both(drafter, width, verify):
    """The step that the host leads, and the device's."""
    return SpeculativeStep(drafter(), width, verify), SpeculativeRounds(drafter(), width, verify)


def drafters(model) -> dict:
    weak = weaker(model)
    return {
        "weak": lambda: ModelDrafter(weak),
        "itself": lambda: ModelDrafter(model),
        "exit": lambda: ExitDrafter(model, 2),
    }


def every_pair(model, width):
    yield PlainStep(), RoundStep()
    for drafter, verify in itertools.product(drafters(model).values(), ("rejection", "coupled")):
        yield both(drafter, width, verify)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_rounds_of_the_device_equal_the_steps_of_the_host(width, sampling):
    model = tiny_model("gpt2" if width == 2 else "llama")
    for host, device in every_pair(model, width):
        assert_same(run_loop(model, PROMPTS, sampling, device), run_loop(model, PROMPTS, sampling, host))


def test_rounds_in_float32_equal_the_steps_of_the_host():
    model = tiny_model(dtype=torch.float32)
    for host, device in every_pair(model, 3):
        assert_same(run_loop(model, PROMPTS, DRAWN, device), run_loop(model, PROMPTS, DRAWN, host), 1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kv_fill", ["recompute", "propagate"])
def test_segments_of_the_device_equal_the_steps_of_the_host(kv_fill, sampling):
    model = tiny_model()
    for thresholds, confidence, max_parked in (
        ([0.5, 0.5, 0.5], "max_prob", 3),
        ([0.2, 1.5, 0.3], "margin", 1),
        ([0.3, 0.3, 2.0], "entropy", 8),
        ([0.0, 0.0, 0.0], "max_prob", 4),
    ):
        how = (thresholds, confidence, kv_fill, max_parked)
        theirs = run_loop(model, PROMPTS, sampling, EarlyExitStep(*how, False))
        assert_same(run_loop(model, PROMPTS, sampling, EarlyExitSegments(*how)), theirs)


def test_rows_end_where_the_host_would_end_them():
    model, tokenizer = tiny_model(block_size=16), Pieces("abcdefghijklmnopqrstuvwx")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7] * 15, [1] * 16, [5, 6] * 7, [9, 9]]
    probe = run_loop(model, prompts, SamplingParams(40, seed=3), PlainStep())
    stop, pair = probe[0].tokens[3], probe[1].tokens[4:6]
    ends = set()
    for options in (
        {"stop_tokens": [stop]},
        {"stop_strings": [tokenizer.decode(pair)]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 0},
        {"max_new_tokens": 3},
        {"max_new_tokens": 40},
    ):
        sampling = SamplingParams(**{"max_new_tokens": 9, "seed": 3} | options)
        for host, device in every_pair(model, 4):
            theirs = run_loop(model, prompts, sampling, host, tokenizer)
            assert_same(run_loop(model, prompts, sampling, device, tokenizer), theirs)
            ends |= {out.finish_reason for out in theirs}
    assert ends == {"stop", "length", "context"}


def test_a_drafter_may_be_shorter_and_padded_otherwise():
    model = tiny_model(vocab_size=26, n_vocab_used=24)
    for changes in ({"block_size": 11}, {"vocab_size": 24, "n_vocab_used": 24}, {"vocab_size": 32, "n_vocab_used": 24}):
        short = tiny_model(seed=1, **{"vocab_size": 26, "n_vocab_used": 24} | changes)
        for verify in ("rejection", "coupled"):
            outs, said = [], []
            for step in both(lambda short=short: ModelDrafter(short), 3, verify):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    outs.append(run_loop(model, PROMPTS, DRAWN, step))
                said.append([str(w.message) for w in caught])
            assert_same(*outs[::-1])
            assert said[0] == said[1] and len(said[0]) == (short.config.block_size == 11)


def test_the_target_as_its_own_drafter_accepts_everything():
    model, n = tiny_model(block_size=128), 100
    for width in range(1, 9):
        step = SpeculativeRounds(ModelDrafter(model), width, "rejection")
        for out in run_loop(model, PROMPTS[:2], SamplingParams(n, temperature=0.0), step):
            assert out.stats.corrected == 0 and out.stats.rounds == -(-n // (width + 1))


def test_log_probabilities_are_the_models_own():
    model = tiny_model()
    for drafter in drafters(model).values():
        for prompt, out in zip(PROMPTS, run_loop(model, PROMPTS, DRAWN, SpeculativeRounds(drafter(), 3, "rejection"))):
            check_laws(model, prompt, out, DRAWN)


# ----------------------------------------------------------------------------------------------------------------------
# How many drafts: the kill switch one round late, rows that ask for less, automatic lengths


def follow(monkeypatch, flags):
    """The kill switch as a list, one entry a round."""
    flags = iter(flags)
    monkeypatch.setattr(decode.Control, "cap", lambda self: 0 if next(flags, False) else None)


class Noted(SpeculativeRounds):
    """Notes of each round: plain was asked, drafts, room before it."""

    def __call__(self, batch, rows, cap):
        room = max(batch.room(row) for row in rows)
        blocks = super().__call__(batch, rows, cap)
        self.noted.append((cap == 0, max(block.n_drafted for block in blocks), room))
        return blocks


SCHEDULES = {
    "3,0,0,3": "0110",
    "begins plainly": "1110",
    "in and out": "0100110101",
    "once": "00010",
    "for good": "01" + "1" * 30,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kill_switch_leaves_a_coupled_text_and_the_drafters_cache_alone(monkeypatch, schedule):
    model, flags = tiny_model(), [c == "1" for c in SCHEDULES[schedule]]
    expected = [out.tokens for out in run_loop(model, PROMPTS, DRAWN, PlainStep())]
    for name, drafter in drafters(model).items():
        follow(monkeypatch, flags)
        step = Noted(drafter(), 3, "coupled")
        step.noted = []
        outs = run_loop(model, PROMPTS, DRAWN, step)
        assert [out.tokens for out in outs] == expected
        for (before, *_), (now, n, room) in itertools.pairwise([step.noted[0], *step.noted]):
            if before == now and room > 1:  # a change of mind finds one round in flight
                assert (n == 0) == now
        if name == "itself":  # a key or value that it missed would show in what it proposes
            assert all(out.stats.corrected == 0 for out in outs)


@pytest.mark.parametrize("draft_len", [4, "auto"])
def test_a_cap_in_the_middle_narrows_rounds_and_leaves_a_coupled_text_alone(monkeypatch, draft_len):
    model, sampling = tiny_model(), SamplingParams(24, temperature=0.9, seed=2)
    expected = [out.tokens for out in run_loop(model, PROMPTS, sampling, PlainStep())]
    for name, drafter in drafters(model).items():
        caps, noted = iter([None, None, 1, 1, 0, 2, 2, 2]), []

        class Capped(SpeculativeRounds):
            def launch(self, batch, rows, cap, noted=noted):
                super().launch(batch, rows, cap)
                noted.append((cap, max(self.asked) if self.rounds.in_flight[-1][0] else 0))

        monkeypatch.setattr(decode.Control, "cap", lambda self, caps=caps: next(caps, None))
        outs = run_loop(model, PROMPTS, sampling, Capped(drafter(), draft_len, "coupled"))
        assert [out.tokens for out in outs] == expected
        assert all(k <= cap for cap, k in noted if cap is not None) and {cap for cap, _ in noted} == {None, 0, 1, 2}
        if draft_len == 4:
            assert {cap: k for cap, k in noted if k} == {None: 4, 1: 1, 2: 2}, name
            assert all(sum(out.stats.drafted_histogram[1:3]) > 0 for out in outs)


@pytest.mark.parametrize("kv_fill", ["recompute", "propagate"])
def test_the_kill_switch_reaches_segments_at_once(monkeypatch, kv_fill):
    model, how = tiny_model(), ([0.3, 0.5, 0.5], "max_prob", kv_fill, 3)
    outs = []
    for step in (EarlyExitStep(*how, False), EarlyExitSegments(*how)):
        follow(monkeypatch, [c == "1" for c in "0010110001"])
        outs.append(run_loop(model, PROMPTS, GREEDY, step))
    assert_same(outs[1], outs[0])
    assert all(out.layers_run[2] == 4 and min(out.layers_run) < 4 for out in outs[1])


def test_rows_may_ask_for_fewer_drafts_than_the_round_is_wide(monkeypatch):
    model, n_asked = tiny_model(), {}

    def ask(self, rows, plans=None):
        for row in rows:
            n_asked[row] = n_asked.get(row, -1) + 1
        return [(3, 0, 1, 2)[(row + n_asked[row]) % 4] for row in rows]

    monkeypatch.setattr(speculative.DraftLength, "ask", ask)
    monkeypatch.setattr(speculative.DraftLength, "more", lambda self, rows, confidences: True)
    prompts = [*PROMPTS, *PROMPTS[:2]]  # with that many rows no round is without drafts before one of them has ended
    sampling = SamplingParams(7, temperature=0.9, seed=2)
    for drafter, verify in itertools.product(drafters(model).values(), ("rejection", "coupled")):
        outs = []
        for step in both(drafter, "auto", verify):
            n_asked.clear()
            outs.append(run_loop(model, prompts, sampling, step))
        if verify == "coupled":
            assert [a.tokens for a in outs[0]] == [b.tokens for b in outs[1]]
        else:
            assert outs[0][0].tokens == outs[1][0].tokens
        assert {n for out in outs[1] for n, k in enumerate(out.stats.drafted_histogram) if k} == {0, 1, 2, 3}


def test_automatic_lengths_learn_one_round_late_and_leave_a_coupled_text_alone(monkeypatch):
    """Every round takes the same time: a drafter that is always right, and thought cheap, drafts as many as may be."""
    monkeypatch.setattr(speculative, "plans_of", lambda drafter, rows: [Plan("", [(0, None)] * len(rows))])
    monkeypatch.setattr(speculative, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    model, sampling = tiny_model(), SamplingParams(40, temperature=0.8, seed=4)
    expected = [out.tokens for out in run_loop(model, PROMPTS, sampling, PlainStep())]
    for name, drafter in drafters(model).items():
        outs = run_loop(model, PROMPTS, sampling, SpeculativeRounds(drafter(), "auto", "coupled"))
        assert [out.tokens for out in outs] == expected
        if name == "itself":
            assert all(len(out.stats.drafted_histogram) == 9 and out.stats.corrected == 0 for out in outs)


def test_rounds_that_cannot_stop_in_between_are_asked_for_the_best_length_not_the_longest(monkeypatch):
    """Of drafters that may stop early the host asks for the most, and lets them stop."""
    asked, choose = [], speculative.DraftLength._choose

    def noted(self, rows, plans):
        asked.append(plans)
        return choose(self, rows, plans)

    monkeypatch.setattr(speculative.DraftLength, "_choose", noted)
    model = tiny_model()
    for drafter in drafters(model).values():
        for step, dynamic in zip(both(drafter, "auto", "coupled"), (True, False)):
            asked.clear()
            run_loop(model, PROMPTS, GREEDY, step)
            assert {plan.dynamic for plans in asked for plan in plans} == {dynamic}


# ----------------------------------------------------------------------------------------------------------------------
# The host is one round ahead, and chooses who leads


@pytest.mark.parametrize("stop", [False, True])
def test_the_host_launches_a_round_before_it_reads_the_one_before(monkeypatch, stop):
    model, log = tiny_model(), []
    launch, read = Rounds.launch, Rounds.read
    monkeypatch.setattr(Rounds, "launch", lambda self, width: log.append("launch") or launch(self, width))
    monkeypatch.setattr(Rounds, "read", lambda self: log.append("read") or read(self))
    sampling = SamplingParams(9, temperature=0.0)
    for _, device in every_pair(model, 2):
        log.clear()
        tokens = run_loop(model, PROMPTS[:1], sampling, PlainStep())[0].tokens
        how = SamplingParams(9, temperature=0.0, stop_tokens=[tokens[-2]] if stop else [])
        out = run_loop(model, PROMPTS[:1], how, device)[0]
        n = out.stats.rounds
        assert log.count("read") == n and log.count("launch") - n in (0, 1)  # at most one in vain
        if isinstance(device, RoundStep) and not isinstance(device, SpeculativeRounds) and not stop:
            assert log.count("launch") == n
        ahead = list(itertools.accumulate(1 if event == "launch" else -1 for event in log))
        assert max(ahead) == min(2, log.count("launch")) and min(ahead) >= 0


def test_a_stopped_row_rests_and_disturbs_nobody():
    model = tiny_model()
    alone = run_loop(model, PROMPTS[1:], GREEDY, PlainStep())
    stop = run_loop(model, PROMPTS[:1], GREEDY, PlainStep())[0].tokens[2]
    for _, device in every_pair(model, 4):
        sampling = SamplingParams(12, temperature=0.0, stop_tokens=[stop])
        outs = run_loop(model, PROMPTS, sampling, device)
        for mine, theirs in zip(outs[1:], alone):
            assert mine.tokens == theirs.tokens[: len(mine.tokens)]
        lengths = device.rounds.state.lengths.tolist()
        assert outs[0].finish_reason == "stop" and device.rounds.state.limits[0] == 0
        assert lengths[0] <= len(PROMPTS[0]) + len(outs[0].tokens) + 2 * (device.width + 1)


def test_the_device_leads_where_it_can():
    model, sampling = tiny_model(dtype=torch.float32), SamplingParams()
    ours, other = ModelDrafter(weaker(model)), tiny_model(dtype=torch.float32)
    exits = ([0.5] * 3, "max_prob", "recompute")

    class Own(ModelDrafter):
        """May propose what it likes."""

    assert type(plain_step(model, sampling)) is PlainStep  # float32 on a CPU: the references
    model.impl = ours.model.impl = "triton"
    assert type(plain_step(model, sampling)) is RoundStep
    assert type(early_exit_step(model, sampling, *exits, 8, False)) is EarlyExitSegments
    for drafter in (ours, ExitDrafter(model, 1)):
        assert type(speculative_step(model, sampling, drafter, 4, "rejection")) is SpeculativeRounds
        assert type(speculative_step(model, sampling, drafter, "auto", "rejection")) is SpeculativeRounds
        assert type(speculative_step(model, sampling, drafter, 16, "rejection")) is SpeculativeStep
    for drafter in (Own(ours.model), ModelDrafter(other), ExitDrafter(model, (1, 2)), NGramDrafter()):
        assert type(speculative_step(model, sampling, drafter, 4, "rejection")) is SpeculativeStep
    for audit, max_parked in ((True, 8), (False, 16)):
        assert type(early_exit_step(model, sampling, *exits, max_parked, audit)) is EarlyExitStep
    for options in ({"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}):
        assert type(plain_step(model, SamplingParams(**options))) is PlainStep
    model.double()
    assert type(plain_step(model, sampling)) is PlainStep


def test_bfloat16_is_not_left_to_the_interpreter(monkeypatch):
    """It computes with the bits as integers: in a process without tests/interpreter.py the text would be another."""
    model = tiny_model(dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "triton", kernels)  # here or not
    for value, interpreted in (("0", False), ("1", True)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert not kernels.on_triton("auto", model.token_embedding.weight)
        assert kernels.on_triton("auto", torch.zeros(1)) == interpreted
    assert type(plain_step(model, GREEDY)) is PlainStep


def test_the_command_hands_impl_to_target_and_drafter(monkeypatch):
    session = sample.Session(sample.Config(impl="torch", prompt="a"))
    assert session.model.impl == session.drafter.model.impl == "torch"
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        sample.Session(sample.Config(impl="triton", device="cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="bfloat16"):
        sample.Session(sample.Config(impl="triton", device="cpu", dtype="bfloat16"))
    monkeypatch.setattr(sample.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="package triton"):
        sample.Session(sample.Config(impl="triton", device="cpu"))


# ----------------------------------------------------------------------------------------------------------------------
# Inside a round: nothing waits for the host, and every round is the same launches


class OnDevice(TorchDispatchMode):
    """Raises where an operation would wait for the host, or needs a shape that only data can tell. Kernels are exempt."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh", "_unique2")

    def __init__(self):
        super().__init__()
        self.operations, self.in_kernel = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.in_kernel:
            name = function._schema.name.removeprefix("aten::")
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            masks = name in ("index", "index_put", "index_put_") and any(
                x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
            )
            number = name == "lift_fresh" and tensors[0].dim() == 0  # that fills a slice
            if (name in self.FORBIDDEN or masks) and not number:
                raise AssertionError(f"{name} makes the device wait for the host")
            self.operations.append((name, *(tuple(x.shape) for x in tensors)))
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def on_device():
    mode = OnDevice()

    def refuse(*_):
        assert mode.in_kernel, "a tensor was read by the host"
        raise RuntimeError

    reads = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}

    def guarded(read):
        return lambda self, *args, **kwargs: read(self, *args, **kwargs) if mode.in_kernel else refuse()

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):
            from triton.runtime.interpreter import GridExecutor

            call = GridExecutor.__call__

            def launched(self, *args, **kwargs):
                mode.in_kernel = True
                try:
                    return call(self, *args, **kwargs)
                finally:
                    mode.in_kernel = False

            stack.enter_context(mock.patch.object(GridExecutor, "__call__", launched))
        stack.enter_context(mock.patch.multiple(torch.Tensor, **{name: guarded(read) for name, read in reads.items()}))
        with mode:
            yield mode


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
    ],
)
def test_what_waits_is_seen(wait):
    with on_device(), pytest.raises(AssertionError):
        wait(torch.arange(3.0))


def begun(model, sampling, drafter=None, prompts=PROMPTS):
    """Rounds of a batch whose prompts are read."""
    batch = Batch(model, prompts, sampling)
    batch.prefill()
    if drafter is None:
        return Rounds(batch)
    step = SpeculativeRounds(drafter, 3, "rejection")
    step.start(batch)
    step.drafter.catch_up(list(range(len(prompts)))) if step.apart else None
    step.rounds.k.fill_(3)
    return step.rounds


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernels that compute something else, but wait for nothing."""

    def accept(*args, state, impl, verify, **law):
        tokens, n_accepted, log_probs = kernels.accept_draft_ref(*args, **law, verify=verify)
        return kernels.commit_ref(state, tokens, n_accepted), n_accepted, log_probs

    monkeypatch.setattr(kernels, "decode_attention", lambda qkv, k, v, table, at, n_head, *rest: qkv[:, :, :n_head])
    monkeypatch.setattr(kernels, "append_kv", lambda *args: None)
    monkeypatch.setattr(kernels, "linear", lambda *args, impl="auto", **named: kernels.linear_ref(*args[:6], **named))
    monkeypatch.setattr(kernels, "accept_draft", accept)
    monkeypatch.setattr(
        kernels, "sample_token", lambda logits, *args, **law: (logits.argmax(-1), logits.amax(-1), None)
    )


@torch.inference_mode()
@pytest.mark.parametrize("which", ["plain", "weak", "exit"])
def test_a_round_never_waits_for_the_host(stand_ins, which):
    model = tiny_model(dtype=torch.float32, poisoned=False, n_vocab_used=22)
    rounds = begun(model, GREEDY, None if which == "plain" else drafters(model)[which]())
    for each in (model, rounds.drafting.model if rounds.drafting else model):
        each.impl = "triton"
    seen = set()
    for _ in range(5):
        with on_device() as mode:
            rounds.round(0 if which == "plain" else 3)
        seen.add(tuple(mode.operations))
    assert len(seen) == 1 and len(set(rounds.state.lengths.tolist())) > 1


@torch.inference_mode()
def test_a_segment_never_waits_for_the_host(stand_ins):
    model = tiny_model(dtype=torch.float32, poisoned=False, exit_vocab=tuple(range(20)))
    step = EarlyExitSegments([0.5, 2.0, 0.5], "entropy", "propagate", 3)
    step.start(Batch(model, PROMPTS, GREEDY))
    model.impl = "triton"
    for segment in range(4):
        for ask in (False, True):
            with on_device():
                step.segment(segment, ask)
        if segment > 0:
            with on_device():
                step.propagate(segment)


# ----------------------------------------------------------------------------------------------------------------------
# With the kernels


@pytest.fixture
def watch():
    return pytest.importorskip("interpreter").watch


def small_pair(dtype=torch.float32):
    """So small that an interpreted round takes a second or two; what drafts agrees now and then."""
    shape = {"n_layer": 2, "exit_layers": (1,), "n_head": 2, "n_kv_head": 1, "exit_adapters": ()}
    model = tiny_model(dtype=dtype, gain=2.0, seed=3, **shape)
    weak = weaker(model, noise=0.3)
    model.impl = weak.impl = "triton"
    return model, weak


@torch.inference_mode()
@pytest.mark.parametrize("which", ["plain", "model", "exit"])
def test_every_round_is_the_same_launches_and_waits_for_nothing(watch, which):
    model, weak = small_pair()
    drafter = {"plain": None, "model": ModelDrafter(weak), "exit": ExitDrafter(model, 1)}[which]
    rounds = begun(model, SamplingParams(12, temperature=0.9), drafter, PROMPTS[:2])
    named = {"k": rounds.cache.k, "v": rounds.cache.v, "asked": rounds.k, **rounds.state._asdict()}
    traces, outcomes = [], set()
    rounds.state.limits[1] = 0  # a row that rests
    for _ in range(3):
        with watch(**named) as memory, on_device() as mode:
            result = rounds.round(0 if which == "plain" else 2)
        traces.append((memory.launches, mode.operations))
        outcomes |= {tuple(row) for row in result.tolist()}
        assert not memory.violations and not memory.conflicts
    assert traces[0] == traces[1] == traces[2] and traces[0][0]
    assert len(outcomes) > 3 and rounds.state.lengths[1] == len(PROMPTS[1])


def test_interpreted_rounds_give_the_text_of_plain_decoding_bit_for_bit(watch):
    model, weak = small_pair(torch.bfloat16)
    prompts, how = [[3, 1, 4], [2]], SamplingParams(5, temperature=0.0)
    plain = generate(model, prompts, how)
    others = [
        speculative_generate(model, ModelDrafter(weak), prompts, how, 2),
        speculative_generate(model, ExitDrafter(model, 1), prompts, how, 2),
        early_exit_generate(model, prompts, how, 1.5),
    ]
    for outs in others:
        assert [(a.tokens, a.logprobs) for a in outs] == [(b.tokens, b.logprobs) for b in plain]
    for outs in others[:2]:
        assert all(out.stats.accepted and out.stats.corrected for out in outs)
    theirs = run_loop(model, prompts, how, EarlyExitStep([0.5], "max_prob", "recompute", 2, False))  # host, references
    assert_same(early_exit_generate(model, prompts, how, 0.5, max_parked=2), theirs, 1e-4)
    assert {source for out in theirs for source in out.sources} == {"exit", "plain"}


HOWS = [
    ("gpt2", SamplingParams(4, temperature=0.0)),
    ("llama", SamplingParams(4, 0.9, top_k=12, seed=4)),
    ("llama", SamplingParams(3, 0.9, top_p=0.95, repetition_penalty=1.1, logit_bias={3: 1.0}, seed=8)),
]


@pytest.mark.parametrize("arch, how", HOWS, ids=["greedy", "drawn", "penalised"])
def test_the_kernels_give_the_tokens_of_the_references(arch, how):
    """All loops in float32: what TRITON_INTERPRET=1 changes is who computes, never the text."""
    model = tiny_model(arch, dtype=torch.float32, gain=2.0, seed=3, n_layer=2, exit_layers=(1,), exit_adapters=())
    weak = weaker(model, noise=0.3)
    prompts, runs, seen = [[3, 1, 3, 1, 3], [2]], [], set()
    for model.impl in ("torch", "triton"):
        weak.impl = model.impl
        outs = [
            generate(model, prompts[:1], how),
            speculative_generate(model, ModelDrafter(weak), prompts, how, 2),
            speculative_generate(model, ExitDrafter(model, 1), prompts[:1], how, 2, "coupled"),
            speculative_generate(model, NGramDrafter(), prompts[:1], how, 3),
            early_exit_generate(model, prompts, how, 0.5, kv_fill="propagate"),
        ]
        runs.append([out for each in outs for out in each])
    for ours, theirs in zip(*runs):
        assert (ours.tokens, ours.sources, ours.layers_run) == (theirs.tokens, theirs.sources, theirs.layers_run)
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4)
        seen |= set(ours.sources)
    assert seen >= {"plain", "exit"} and len(seen) > 3


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_layer_is_six_launches_and_nothing_else(watch, arch, width):
    model = tiny_model(arch, dtype=torch.float32, exit_adapters=())
    model.impl = "triton"
    cache, x = model.new_cache(2, 32), torch.randn(2, width, model.config.n_embd)
    at = model._pass(torch.arange(width).expand(2, -1), cache)
    with watch() as memory, on_device() as mode:
        model.blocks[0](x, 0, at)
    assert len(memory.launches) == 6
    views = "view _unsafe_view unflatten slice select t transpose detach flatten reshape contiguous expand as_strided"
    workspaces = "empty new_empty empty_strided"  # a copy would be a clone
    assert {name for name, *_ in mode.operations} <= {*views.split(), *workspaces.split()}
