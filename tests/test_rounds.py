"""Rounds on the device: the same tokens, sources, log-probabilities, ends and counters as the steps that the host leads."""

import itertools

import pytest
import torch
from helpers import Pieces, check_counters, counters, tiny_model, weaker
from torch.utils._python_dispatch import TorchDispatchMode

import decode
import kernels
import rounds
from early_exit import EarlyExitSegments, EarlyExitStep, early_exit_generate
from decode import PlainStep, SamplingParams, generate, run_loop
from rounds import Rounds, RoundStep
from speculative import ExitDrafter, ModelDrafter, SpeculativeRounds, SpeculativeStep, speculative_generate

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1], [1, 8, 2, 8, 1, 8]]
GREEDY, DRAWN = SamplingParams(12, temperature=0.0), SamplingParams(12, temperature=0.9, top_k=12, seed=[5, 1, 1, 8])


def with_impl(model, impl="triton"):
    model.impl = impl
    return model


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert (a.tokens, a.sources, a.finish_reason, a.layers_run) == (
            b.tokens, b.sources, b.finish_reason, b.layers_run)  # fmt: skip
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4 if a.logprobs else None)
        assert counters(a) == counters(b)
        check_counters(a)


def pairs(model, width):
    """name -> (step by step, the device's rounds), as functions that make the step."""
    weak = weaker(model)
    ways = {"plain": (PlainStep, RoundStep)}
    drafters = {
        "weak": lambda: ModelDrafter(weak),
        "itself": lambda: ModelDrafter(model),
        "exit": lambda: ExitDrafter(model, 2),
    }
    for (name, drafter), verify in itertools.product(drafters.items(), ("rejection", "coupled")):
        ways[f"{name}-{verify}"] = tuple(
            lambda step=step, drafter=drafter, verify=verify: step(drafter(), width, verify)
            for step in (SpeculativeStep, SpeculativeRounds)
        )
    return ways


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_rounds_of_the_device_equal_the_steps_of_the_host(arch, width, sampling):
    model = tiny_model(arch)
    for name, (step, alone) in pairs(model, width).items():
        print(name)
        assert_same(run_loop(model, PROMPTS, sampling, alone()), run_loop(model, PROMPTS, sampling, step()))


EXITS = [([0.5, 0.5, 0.5], "max_prob", 3), ([0.2, 1.5, 0.3], "margin", 1), ([0.3, 0.3, 2.0], "entropy", 8),
         ([2.0, 2.0, 2.0], "max_prob", 2), ([0.0, 0.0, 0.0], "max_prob", 4)]  # fmt: skip


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kv_fill", ["recompute", "propagate"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_segments_of_the_device_equal_the_steps_of_the_host(arch, kv_fill, sampling):
    model = tiny_model(arch)
    for thresholds, confidence, max_parked in EXITS:
        how = (thresholds, confidence, kv_fill, max_parked)
        theirs = run_loop(model, PROMPTS, sampling, EarlyExitStep(*how, False))
        assert_same(run_loop(model, PROMPTS, sampling, EarlyExitSegments(*how)), theirs)
