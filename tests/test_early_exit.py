"""Early exit and self-speculation as one machine: what is parked, what is stored, who leaves where, and what it costs."""

import math
import random

import numpy as np
import pytest
import torch
from helpers import (
    SAMPLE,
    Tables,
    cached,
    check_laws,
    chi_square_p,
    counters,
    exiting,
    numpy_law,
    numpy_race,
    run,
    sample_size,
    speculating,
    tiny_model,
    true_states,
)

import early_exit
import kernels
from decode import Batch, SamplingParams, generate
from early_exit import Depths, early_exit_generate
from speculative import ExitDrafter, speculative_generate

PROMPTS = [[1, 2, 3, 1, 2], [7], [4, 5, 6, 7, 8, 9, 4, 5, 6]]


@pytest.fixture
def machines(monkeypatch):
    """The Depths that the engine makes, in order."""
    made = []

    class Kept(Depths):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(early_exit, "Depths", Kept)
    monkeypatch.setattr("speculative.Depths", Kept)
    return made


def check_depths(depths, row: int, tokens: list[int], highest=None) -> None:
    """The invariants for a row whose first computed[0] positions hold tokens, against a full forward without a cache.

    highest: how many positions each segment has ever written; above them the poisoned cache must be untouched.
    """
    model, computed, bounds = depths.batch.model, depths.computed[row], depths.bounds
    assert computed == sorted(computed, reverse=True) and computed[0] == len(tokens)
    nothing = torch.zeros(4, 0, 2, 4).double()
    states, k, v = true_states(model, tokens) if tokens else (None, nothing, nothing)
    cache = depths.batch.cache
    all_k, all_v = cached(cache, row, cache.capacity)
    for segment, n in enumerate(computed):
        layers = slice(bounds[segment], bounds[segment + 1])
        for got, expected in ((all_k, k), (all_v, v)):
            assert torch.allclose(got[layers, :n], expected[layers, :n], rtol=0, atol=1e-9), (row, segment)
            if highest is not None:
                assert got[layers, highest[segment] :].isnan().all()
        waiting = depths.parked[row][segment]
        if segment:
            n_waiting = computed[segment - 1] - n
            assert (0 if waiting is None else len(waiting)) == n_waiting
            if n_waiting:
                assert torch.allclose(waiting, states[bounds[segment], n : n + n_waiting], rtol=0, atol=1e-9)
        else:
            assert waiting is None
    assert depths.n_parked(row) == computed[0] - computed[-1]


@torch.no_grad()
@pytest.mark.parametrize("arch, exit_layers", [("gpt2", (1, 2, 3)), ("llama", (1, 2, 3)), ("llama", (2,))])
def test_invariants_hold_under_random_exit_masks_and_crops(arch, exit_layers):
    """1,440 rows with exit masks of their own over the three cases, crops and flushes in between, in ragged batches of 20."""
    rng, model = random.Random(arch + str(exit_layers)), tiny_model(arch, exit_layers=exit_layers)
    n_rows, n_steps = 20, 12
    seen = dict.fromkeys(("exit", "crop", "cropped parked rows", "flush"), 0)
    nothing = torch.zeros(0, 16, dtype=torch.float64)
    for _ in range(24):
        text = [[rng.randrange(24) for _ in range(rng.randrange(1, 6))] for _ in range(n_rows)]
        batch = Batch(model, text, SamplingParams(max_new_tokens=n_steps + 1))
        batch.prefill()
        depths = Depths(batch, exit_layers)
        text = [prompt[:-1] for prompt in text]  # what has been computed
        highest = [list(counts) for counts in depths.computed]
        for _ in range(n_steps):
            rows = sorted(rng.sample(range(n_rows), rng.randrange(1, n_rows)))
            action = rng.random()
            if action < 0.22:
                for row in rows:
                    length = max(0, len(text[row]) - rng.choice((0, 1, 1, 2, 3, 20)))
                    seen["cropped parked rows"] += depths.computed[row][-1] < length < depths.computed[row][0]
                    seen["crop"] += length < len(text[row])
                    depths.crop(row, length)
                    text[row] = text[row][:length]
            elif action < 0.29:
                seen["flush"] += sum(depths.n_parked(row) > 0 for row in rows)
                depths.deepen(rows, [nothing] * len(rows))
                assert all(depths.n_parked(row) == 0 for row in rows)
            else:
                shallow = [rng.randrange(len(exit_layers)) for _ in rows]
                leave = {row: s if rng.random() < 0.85 else len(exit_layers) for row, s in zip(rows, shallow)}
                left = {}

                def ask(segment, going, hidden, leave=leave):  # leave: the segment behind which a row leaves
                    assert all(leave[row] >= segment for row in going)
                    return torch.stack([x[-1] for x in hidden]), [leave[row] <= segment for row in going]

                new = [[rng.randrange(24)] for _ in rows]
                for layers, leaving, x in depths.descend(rows, new, ask):
                    left |= {row: (layers, state) for row, state in zip(leaving, x)}
                for row, tokens in zip(rows, new):
                    text[row] += tokens
                assert {row: depths.bounds[min(leave[row], len(exit_layers)) + 1] for row in rows} == {
                    row: layers for row, (layers, _) in left.items()
                }
                row = rng.choice(rows)
                layers, state = left[row]
                assert torch.allclose(state, true_states(model, text[row])[0][layers, -1], rtol=0, atol=1e-9)
                seen["exit"] += sum(layers < 4 for layers, _ in left.values())
            for row in rows:
                highest[row] = [max(a, b) for a, b in zip(highest[row], depths.computed[row])]
            row = rng.choice(rows)
            check_depths(depths, row, text[row], highest[row])
        for row in range(n_rows):
            check_depths(depths, row, text[row], highest[row])
    assert seen["exit"] > 900 and seen["crop"] > 250 and min(seen.values()) > 50, seen


@pytest.mark.parametrize("kv_fill", ["recompute", "propagate"])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_threshold_above_one_equals_plain(arch, kv_fill, monkeypatch):
    """And no exit's head is asked on the way."""
    monkeypatch.setattr(kernels, "confidence", None)
    model = tiny_model(arch)
    for sampling in (SamplingParams(12, temperature=0), SamplingParams(12, 0.9, top_p=0.9, repetition_penalty=1.2)):
        plain = generate(model, PROMPTS, sampling)
        for threshold in (1.0001, math.inf, [2, 1.5, 9]):
            outs = run(exiting(model, threshold=threshold, kv_fill=kv_fill), PROMPTS, sampling)
            for out, expected in zip(outs, plain):
                assert out.tokens == expected.tokens and out.logprobs == expected.logprobs
                assert out.sources == ["plain"] * 12 and out.layers_run == [4] * 12
                assert counters(out) == counters(expected)


def test_threshold_zero_leaves_at_the_first_exit_and_is_flushed_every_max_parked():
    model = tiny_model()
    for max_parked in (1, 3, 8):
        for audit in (False, True):
            fixed = {"threshold": 0, "max_parked": max_parked, "audit": audit}
            out = run(exiting(model, **fixed), [[1, 2, 3]], SamplingParams(2 * max_parked + 3, temperature=0))[0]
            pattern = (["exit"] * max_parked + ["plain"]) * 2 + ["exit"]
            assert out.sources == pattern and out.layers_run == [1 if s == "exit" else 4 for s in pattern]
            assert out.stats.exit_histogram == {1: 2 * max_parked + 1}
            # an exit costs one layer, a flush one pass however many rows ride along; the audit flushes what is left
            assert out.stats.layer_passes == 2 * (max_parked + 4) + 1 + (3 if audit else 0)
            assert out.stats.audited == (2 * max_parked + 1 if audit else 0)
    out = run(exiting(model, threshold=0, kv_fill="propagate"), [[1, 2, 3]], SamplingParams(20, temperature=0))[0]
    assert out.layers_run == [1] * 20 and out.stats.mean_layers == 1.0  # nothing waits, so nothing is flushed
    single = {"threshold": [2, 0, 2]}
    out = run(exiting(model, **single, max_parked=2), [[1]], SamplingParams(6, temperature=0))[0]
    assert out.layers_run == [2, 2, 4, 2, 2, 4]


def test_a_confidence_equal_to_the_threshold_leaves():
    """An exit that knows one token is sure of it: 1 >= 1 leaves, and only above 1 does nobody."""
    model = tiny_model(exit_vocab=(5,))
    for threshold, layers in ((1, [1] * 6), (1.0, [1] * 6), (math.nextafter(1, 2), [4] * 6)):
        out = run(exiting(model, threshold=threshold), [[1, 2]], SamplingParams(6, temperature=0))[0]
        assert out.layers_run == layers and (out.tokens == [5] * 6) == (layers[0] == 1)


def exit_layer_of(model, states, at, n_parked, thresholds, confidence, max_parked):
    """Where the token behind position at leaves, by the exit policy on the states of a full forward."""
    for exit_layer, threshold in zip(model.config.exit_layers, thresholds):
        logits = model.logits(states[exit_layer, at][None], exit_layer)
        if kernels.confidence(logits, confidence).item() >= threshold and n_parked < max_parked:
            return exit_layer
    return 4


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_early_exit_follows_its_policy_and_its_cache_is_the_full_models(arch, machines):
    """Against a full forward over the emitted tokens: who leaves where, each stored key and value, the waiting rows, and the
    audit, recounted with the full head and the same noise.
    """
    model = tiny_model(arch, exit_vocab=tuple(range(0, 24, 2)) if arch == "llama" else None)
    sampling = SamplingParams(24, temperature=0.9, top_k=8, repetition_penalty=1.2, seed=11)
    total = {"exits": 0, "disagreed": 0, "forced": 0}
    for confidence, thresholds in (("max_prob", [0.5, 0.4, 0.6]), ("margin", [0.3, 0.5, 0.2]), ("entropy", [0.4] * 3)):
        for max_parked, audit in ((2, True), (5, False)):
            fixed = {"threshold": thresholds, "confidence": confidence, "max_parked": max_parked, "audit": audit}
            outs = run(exiting(model, **fixed), PROMPTS, sampling)
            depths = machines.pop()
            for row, (prompt, out) in enumerate(zip(PROMPTS, outs)):
                tokens = prompt + out.tokens
                check_depths(depths, row, tokens[:-1], depths.computed[row])
                check_laws(model, prompt, out, sampling, 11 + row)
                states = true_states(model, tokens)[0]
                n_parked = disagreed = 0
                for i, layers in enumerate(out.layers_run):
                    at = len(prompt) + i
                    expected = exit_layer_of(model, states, at - 1, n_parked, thresholds, confidence, max_parked)
                    assert layers == expected, (row, i, n_parked)
                    total["forced"] += n_parked == max_parked
                    n_parked = 0 if layers == 4 else n_parked + 1
                    if layers < 4:
                        total["exits"] += 1
                        law = numpy_law(model.logits(states[4, at - 1]).numpy(), sampling, tokens[:at])
                        full = numpy_race(law[None], np.array([11 + row]), np.array([at]), SAMPLE, np.array([0]))[0]
                        disagreed += full != tokens[at]
                total["disagreed"] += disagreed
                stats = out.stats
                assert depths.n_parked(row) == (0 if audit else n_parked)
                assert (stats.audited, stats.audit_disagreed) == ((stats.exited, disagreed) if audit else (0, 0))
    assert min(total.values()) > 5, total
    quiet = run(exiting(model, threshold=thresholds, audit=False), PROMPTS, sampling)
    loud = run(exiting(model, threshold=thresholds, audit=True), PROMPTS, sampling)
    assert [out.tokens for out in quiet] == [out.tokens for out in loud]  # looking changes nothing


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_propagate_writes_exactly_what_fill_kv_writes(arch):
    """Against a decoder of four lines: run to the exit, fill the rest, next token. Keys, values, tokens and depths are the same."""
    model = tiny_model(arch)
    thresholds = [0.5, 0.3, 0.4]
    sampling = SamplingParams(16, temperature=0)
    outs = run(exiting(model, threshold=thresholds, kv_fill="propagate"), PROMPTS, sampling)
    cache, exits = model.caches[0], 0
    for row, (prompt, out) in enumerate(zip(PROMPTS, outs)):
        own, tokens, depths = model.new_cache(1, 32), list(prompt), []
        for at in range(len(prompt) + 15):
            positions = torch.tensor([[at]])
            x = model.embed(torch.tensor([[tokens[at]]]), positions)
            for layer in range(4):
                x = model.run_layers(x, own, positions, layer, layer + 1)
                head = (layer + 1,) if layer < 3 else ()
                logits = model.logits(x[:, 0], *head)
                sure = layer == 3 or kernels.confidence(logits).item() >= thresholds[layer]
                if at >= len(prompt) - 1 and sure:
                    model.fill_kv(x, own, positions, layer + 1)
                    tokens.append(int(logits.argmax()))
                    depths.append(layer + 1)
                    break
        x = model.embed(torch.tensor([[tokens[-2]]]), positions)
        assert out.tokens == tokens[len(prompt) :] and out.layers_run == depths
        exits += sum(layers < 4 for layers in depths)
        n = len(tokens) - 1
        for got, expected in zip(cached(cache, row, n), cached(own, 0, n)):
            assert torch.allclose(got, expected, rtol=0, atol=1e-10)
        assert out.stats.layer_passes == sum(depths)
    assert exits > 8


# ----------------------------------------------------------------------------------------------------------------------
# Self-speculation on the same machine


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_self_speculation_stores_and_hands_on_what_a_full_forward_computes(arch, machines):
    """Keys and values of every accepted position, at every depth; and the hidden states that drafters are given."""
    model = tiny_model(arch)
    handed, first = {}, []

    class Spy(ExitDrafter):
        def propose(self, rows, max_k, sampler):
            contexts = [list(sampler.histories[row]) for row in rows]
            tokens, laws, n = super().propose(rows, max_k, sampler)
            if laws is not None and self.exit_layers == (1,):
                first.extend(zip(contexts, laws[:, 0]))
            return tokens, laws, n

        def commit(self, rows, tokens, hidden):
            for row, new, x in zip(rows, tokens, hidden):
                assert len(new) == len(x)
                handed.setdefault(row, []).append(x)

    for temperature, exit_layer, draft_len in ((0, 2, 4), (1.0, (1, 3), 3), (0.7, (1, 2, 3), 5), (0.7, 1, 8)):
        sampling = SamplingParams(20, temperature=temperature, seed=3)
        handed.clear()
        outs = speculative_generate(model, Spy(model, exit_layer, threshold=0.6), PROMPTS, sampling, draft_len)
        depths = machines.pop()
        assert sum(out.stats.accepted for out in outs) > 5 and sum(out.stats.corrected for out in outs) > 5
        for row, (prompt, out) in enumerate(zip(PROMPTS, outs)):
            tokens = prompt + out.tokens
            check_depths(depths, row, tokens[:-1])
            assert depths.n_parked(row) == 0
            states = true_states(model, tokens)[0][-1]
            assert torch.allclose(torch.cat(handed[row]), states[len(prompt) - 1 : -1], rtol=0, atol=1e-9)
            if exit_layer == 2:  # k shallow passes for the drafts, one more for the last, then one through the rest
                n_drafts = [k for k, rounds in enumerate(out.stats.drafted_histogram) for _ in range(rounds)]
                assert out.stats.layer_passes == sum(2 * k + 4 for k in n_drafts)
    assert len(first) > 20
    for context, law in first:  # the exit's head with the adapter that was trained to draft
        logits = model.logits(true_states(model, context)[0][1, -1], 1, "draft") / 0.7
        assert torch.allclose(law.softmax(-1), logits.softmax(-1), rtol=0, atol=1e-9)


def test_an_exit_vocabulary_without_the_targets_tokens_accepts_nothing_and_changes_nothing():
    sampling = SamplingParams(20, temperature=0)
    plain = generate(tiny_model(), PROMPTS, sampling)
    never = [i for i in range(24) if all(i not in out.tokens for out in plain)][:3]
    model = tiny_model(exit_vocab=tuple(never))
    for drafter in (ExitDrafter(model, 2), ExitDrafter(model, (1, 3))):
        outs = run(speculating(model, drafter, 3), PROMPTS, sampling)
        assert [out.tokens for out in outs] == [out.tokens for out in plain]
        assert all(out.stats.accepted == 0 and out.stats.drafted > 20 for out in outs)
    # a bias that forbids all that the exit knows leaves the drafter without a law: nothing is accepted, no NaN comes out
    for temperature in (0, 1):
        forbidding = SamplingParams(12, temperature=temperature, logit_bias=dict.fromkeys(never, -math.inf))
        for verify in ("rejection", "coupled"):
            outs = speculative_generate(model, ExitDrafter(model, 2), PROMPTS, forbidding, 3, verify)
            assert all(math.isfinite(lp) for out in outs for lp in out.logprobs)
            assert not {t for out in outs for t in out.tokens} & set(never)
            if temperature == 0 or verify == "coupled":
                assert [out.tokens for out in outs] == [out.tokens for out in generate(model, PROMPTS, forbidding)]


class Discarding(ExitDrafter):
    """The counter-example: draws, looks at the probability of what it drew, and throws it away when that is low."""

    def propose(self, rows, max_k, sampler):
        tokens, logits, _n = super().propose(rows, max_k, sampler)
        chosen = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
        return tokens, logits, (chosen >= 0.5).long().cumprod(-1).sum(-1)


@pytest.mark.parametrize("threshold", [0.5, 0.65])
@pytest.mark.parametrize("draft_len", [1, 3])
def test_a_draft_may_leave_by_its_law_but_not_by_the_token_drawn_from_it(draft_len, threshold):
    """Target (.5, .5), first exit (.6, .4), second (.3, .7): the drop rule gives the first token 0.70 where 0.50 is due.

    N = 2,560 rows, joint law of two tokens: a total variation of 8% is seen with power 0.99 at alpha = 1e-6; the drop rule is off
    by 20% and must be seen.
    """

    def table(*law):
        return torch.tensor(law, dtype=torch.float64).log().expand(2, 2, 2)

    model = Tables(table(0.5, 0.5), {1: table(0.6, 0.4), 2: table(0.3, 0.7)})
    n_rows, sampling = sample_size(4, total_variation=0.08), SamplingParams(draft_len + 2, seed=5)

    def p_value(drafter):
        outs = speculative_generate(model, drafter, [[0, 1]] * n_rows, sampling, draft_len)
        counts = np.zeros((2, 2))
        np.add.at(counts, tuple(np.array([out.tokens[:2] for out in outs]).T), 1)
        return chi_square_p(counts, np.full((2, 2), 0.25))

    assert p_value(ExitDrafter(model, (1, 2), threshold=threshold)) > 1e-6
    if threshold == 0.5:
        assert p_value(Discarding(model, 1)) < 1e-6


@pytest.mark.parametrize(
    "call, message",
    [
        ({}, "threshold is None, and this checkpoint holds no calibrated ones"),
        ({"threshold": -0.1}, "threshold is -0.1: confidences run from 0 to 1"),
        ({"threshold": math.nan}, "threshold is nan: confidences run from 0 to 1"),
        ({"threshold": [0.5, 0.6]}, r"threshold is [0.5, 0.6]: give one number, or one for each exit of (1, 2, 3)"),
        ({"threshold": "high"}, "threshold is 'high': give one number"),
        ({"threshold": [0.5, "x", 1]}, "threshold is [0.5, 'x', 1]: confidences"),
        ({"threshold": 0.5, "confidence": "router"}, "confidence is 'router': choose max_prob, margin, entropy"),
        ({"threshold": 0.5, "kv_fill": "zero"}, "kv_fill is 'zero': choose recompute or propagate"),
        ({"threshold": 0.5, "max_parked": 0}, "max_parked is 0: it must be an integer >= 1"),
        ({"threshold": 0.5, "max_parked": 2.5}, "max_parked is 2.5"),
        ({"threshold": 0.5, "kv_fill": "propagate", "audit": True}, "audit needs kv_fill='recompute'"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError) as error:
        early_exit_generate(tiny_model(), [[1]], SamplingParams(4), **call)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_model_without_exits_says_how_to_get_them():
    with pytest.raises(ValueError, match="this model has no exit heads: train them with"):
        early_exit_generate(tiny_model(exit_layers=()), [[1]], SamplingParams(4), 0.5)


def test_a_head_that_knows_no_allowed_token_is_not_sure():
    """The bias forbids every token of the reduced vocabulary: the row goes deeper instead of failing."""
    model = tiny_model(exit_vocab=(2, 3, 5))
    sampling = SamplingParams(8, 0, logit_bias={2: -math.inf, 3: -math.inf, 5: -math.inf})
    [out] = early_exit_generate(model, [[1, 2]], sampling, threshold=0.0)
    assert out.tokens == generate(model, [[1, 2]], sampling)[0].tokens and set(out.sources) == {"plain"}
