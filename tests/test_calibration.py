"""Calibrated exits: the bound holds over calibration sets, what is certified is what decodes, and stale is refused."""

import copy
import dataclasses
import itertools
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SAMPLE, exiting, numpy_law, numpy_race, run, tiny_model, true_states

import checkpoint
import distill
import early_exit
import sample
import train_exit_heads
from certificate import (
    AGREEMENTS,
    Certificate,
    Guard,
    Watch,
    betting_p,
    certified,
    first_passing,
    fit_platt,
    fixed_sequence,
    hoeffding_bentkus_p,
    stricter,
    upper_bound,
)
from checkpoint import Tokenizer, load_checkpoint, load_heads, read_certificates, save_certificate, save_checkpoint
from decode import SamplingParams, generate
from early_exit import calibrate_threshold, early_exit_generate, exits_taken, family, score_exits, scored_loss

GREEDY, SAMPLED = SamplingParams(12, 0.0, seed=3), SamplingParams(12, 0.8, repetition_penalty=1.3, seed=3)


def agreeing_model(**changes):
    """A tiny model whose deep layers add little, so that its exits are often right, the deeper the oftener."""
    model = tiny_model(exit_adapters=(), poisoned=False, **changes)
    for layer, block in enumerate(model.blocks):
        for matrix in (block.attn_out, block.down):
            matrix.weight.data.mul_(0.5**layer)
    for head in model.exits.values():
        head.norm.load_state_dict(model.final_norm.state_dict())
    return model


def prompts_of(n: int, seed=0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 24, rng.integers(1, 9)).tolist() for _ in range(n)]


MODEL = agreeing_model()


# ----------------------------------------------------------------------------------------------------------------------
# The tests: over many calibration sets they are wrong as seldom as they promise


def p_values_of(delta: float) -> dict:
    return {"hoeffding_bentkus": hoeffding_bentkus_p, "betting": lambda losses, risk: betting_p(losses, risk, delta)}


def at_most(share: float, delta: float, n: int) -> bool:
    return share <= delta + 3 * math.sqrt(delta * (1 - delta) / n)


def test_hoeffding_bentkus_takes_the_published_numbers_of_samples():
    """The n that certifies risk at 5% with no loss seen, and with a quarter and half of the risk seen;
    a fifth less does not."""
    for risk, none, quarter, half in (
        (0.01, 301, 739, 1791),
        (0.02, 154, 368, 899),
        (0.05, 61, 146, 350),
        (0.1, 30, 73, 180),
    ):
        for n, share in ((none, 0), (quarter, 0.25), (half, 0.5)):
            few = 8 * n // 10
            assert (
                hoeffding_bentkus_p([share * risk] * n, risk) <= 0.05 < hoeffding_bentkus_p([share * risk] * few, risk)
            )
    assert hoeffding_bentkus_p([0.0] * 50, 0.1) == pytest.approx(0.9**50)
    assert hoeffding_bentkus_p([0.3] * 50, 0.1) == 1.0


@pytest.mark.parametrize("name", ["hoeffding_bentkus", "betting"])
def test_a_mean_at_the_bound_is_rejected_with_chance_delta_at_most(name):
    """Losses of 0 and 1, of which few are 1, and spread ones; the means are exactly the risk, or 1% above it."""
    rng, delta, n_sets, n = np.random.default_rng(1), 0.1, 1000, 80
    p_value = p_values_of(delta)[name]
    for losses in (
        rng.random((n_sets, n)) < 0.05,
        0.1 * rng.random((n_sets, n)),
        np.where(rng.random((n_sets, n)) < 0.1, rng.random((n_sets, n)), 0.0),
    ):
        rejected = np.mean([p_value(x.astype(float).tolist(), 0.05) <= delta for x in losses])
        assert at_most(rejected, delta, n_sets), rejected
    assert p_value([0.0] * n, 0.05) <= delta  # and it can reject


def test_bets_are_made_before_the_loss_is_seen():
    """Against the definition in NumPy: the bet on loss i comes from the losses before it alone."""
    rng = np.random.default_rng(3)
    for n, risk in ((1, 0.3), (7, 0.2), (60, 0.1), (60, 0.02)):
        losses = np.where(rng.random(n) < 0.3, rng.random(n), 0.0) * risk * 3
        i = np.arange(1, n + 1)
        means = (0.5 + losses.cumsum()) / (i + 1)
        variances = (0.25 + ((losses - means) ** 2).cumsum()) / (i + 1)
        before = np.concatenate(([0.25], variances))[:n]
        bets = np.minimum(np.sqrt(2 * np.log(1 / 0.05) / (n * before)), 1.0)
        capital = (1 + bets * (risk - losses)).cumprod()
        assert betting_p(losses.tolist(), risk, 0.05) == pytest.approx(1 / max(1.0, capital.max()))


@pytest.mark.parametrize("name", ["hoeffding_bentkus", "betting"])
def test_the_bound_on_the_mean_holds_and_is_where_the_test_turns(name):
    rng, delta, n_sets = np.random.default_rng(2), 0.1, 300
    p_value, covered = p_values_of(delta)[name], 0
    for losses in np.where(rng.random((n_sets, 60)) < 0.2, 0.5 * rng.random((n_sets, 60)), 0.0).tolist():
        bound = upper_bound(lambda risk: p_value(losses, risk), delta)  # noqa: B023
        assert p_value(losses, bound) <= delta < p_value(losses, bound - 1e-6)
        covered += bound >= 0.05
    assert at_most(1 - covered / n_sets, delta, n_sets)


RISK, DELTA = 0.05, 0.1
# what a sequence does at every setting: nothing, the usual, eight times that; clipped at 1
KINDS, SHARES = np.array([0.0, 1.0, 8.0]), np.array([0.65, 0.3, 0.05])
# errors of ten settings; the seventh is just above the risk
LADDER = 0.0722 * 1.35 ** (np.arange(10.0) - 6)
TRUE_RISKS = (np.minimum(KINDS[None] * LADDER[:, None], 1.0) * SHARES).sum(1)


def synthetic_sets(n_sets: int, n: int, seed: int):
    """Losses (settings, n) of calibration sets with true risks TRUE_RISKS; a sequence is alike at all settings."""
    rng = np.random.default_rng(seed)
    for _ in range(n_sets):
        yield np.minimum(LADDER[:, None] * rng.choice(KINDS, n, p=SHARES)[None], 1.0)


def by_empirical_risk(losses: np.ndarray, risk: float) -> int:
    """What must not be done: the loosest setting that looks good enough."""
    good = np.flatnonzero(losses.mean(1) <= risk)
    return int(good[-1]) if len(good) else -1


def violations(chosen: list[int], risks: np.ndarray, risk: float) -> float:
    return float(np.mean([i >= 0 and risks[i] > risk for i in chosen]))


@pytest.mark.parametrize("name", ["hoeffding_bentkus", "betting"])
def test_over_1000_calibration_sets_the_chosen_setting_is_within_the_risk_but_for_delta(name):
    """And choosing by the empirical risk fails the same test, on the same sets."""
    assert TRUE_RISKS[5] < RISK < TRUE_RISKS[6] < 1.02 * RISK
    p_value, n_sets = p_values_of(DELTA)[name], 1000
    chosen, naive = [], []
    for losses in synthetic_sets(n_sets, 200, seed=4):
        chosen.append(fixed_sequence((p_value(x.tolist(), RISK) for x in losses), DELTA))
        naive.append(by_empirical_risk(losses, RISK))
    assert at_most(violations(chosen, TRUE_RISKS, RISK), DELTA, n_sets), violations(chosen, TRUE_RISKS, RISK)
    assert not at_most(violations(naive, TRUE_RISKS, RISK), DELTA, n_sets)
    useful = np.mean([i >= 0 and TRUE_RISKS[i] > RISK / 4 for i in chosen])
    assert useful > 0.5, useful  # a procedure that never dares is also never wrong


@pytest.mark.parametrize("name", ["hoeffding_bentkus", "betting"])
def test_tries_after_a_failure_err_together_with_chance_delta_at_most(name):
    """The hardest case: every try is a setting at the bound, and each decodes other texts. At delta itself it fails."""
    rng, n_sets, n = np.random.default_rng(5), 1000, 100
    passed = {"split": 0, "not split": 0}
    for _ in range(n_sets):
        losses = (rng.random((5, n)) < RISK).astype(float).tolist()
        p_value = {level: p_values_of(level)[name] for level in [DELTA / 2**k for k in range(6)]}
        passed["split"] += first_passing(lambda i, level: p_value[level](losses[i], RISK), 4, DELTA) >= 0  # noqa: B023
        passed["not split"] += min(p_value[DELTA](x, RISK) for x in losses) <= DELTA
    assert at_most(passed["split"] / n_sets, DELTA, n_sets), passed
    assert not at_most(passed["not split"] / n_sets, DELTA, n_sets), passed


def test_a_sequence_of_tests_stops_at_the_first_failure_and_tries_stop_at_the_first_success():
    asked = []
    assert fixed_sequence((asked.append(p) or p for p in (0.01, 0.1, 0.2, 0.0, 0.0)), 0.1) == 1 and len(asked) == 3
    assert fixed_sequence([0.2, 0.0], 0.1) == -1 and fixed_sequence([0.0, 0.1], 0.1) == 1
    asked = []
    assert first_passing(lambda *x: asked.append(x) or 0.03, 6, 0.1) == 6 and asked == [(6, 0.05)]
    asked = []
    assert first_passing(lambda *x: asked.append(x) or float(x[0] > 4), 6, 0.1) == 4
    assert asked == [(6, 0.05), (5, 0.025), (4, 0.0125)]
    assert first_passing(lambda *x: 1.0, 2, 0.1) == first_passing(lambda *x: 0.0, -1, 0.1) == -1


# ----------------------------------------------------------------------------------------------------------------------
# The bundled model


@pytest.fixture(scope="module")
def bundled():
    model, tokenizer = load_checkpoint("stdlib", device="cpu")
    return model.pack(), tokenizer


@pytest.fixture(scope="module")
def pool(bundled):
    """Clipped and scaled losses (settings, sequences) of the bundled model's own texts, by one pass each."""
    model, tokenizer = bundled
    text = tokenizer.encode(Path(checkpoint.__file__).read_text() + Path(early_exit.__file__).read_text())
    places = np.random.default_rng(0).integers(0, len(text) - 24, 180)
    prompts, sampling = [text[place : place + 24] for place in places], SamplingParams(24, 0.0)
    outs = [out for i in range(0, len(prompts), 60) for out in generate(model, prompts[i : i + 60], sampling)]
    scores = [score_exits(model, sampling, p, out.tokens, 0, "max_prob") for p, out in zip(prompts, outs)]
    settings = family(scores, len(model.config.exit_layers))
    losses = [[scored_loss(score, t, "disagreement", 8) for score in scores] for t in settings]
    return np.minimum(np.array(losses) / 0.2, 1.0)


@pytest.mark.parametrize("name", ["hoeffding_bentkus", "betting"])
def test_on_the_bundled_model_resampled_calibration_sets_keep_the_bound(pool, name):
    """200 sets of 100 sequences drawn from the pool, whose means are therefore the true risks. The risk asked for lies
    just below that of one setting, where a choice by empirical risk is wrong about every other time."""
    risks, rng, n_sets = pool.mean(1), np.random.default_rng(6), 200
    at = int(np.flatnonzero(risks > 0.05)[0])
    risk, p_value = 0.98 * risks[at], p_values_of(DELTA)[name]
    chosen, naive = [], []
    for _ in range(n_sets):
        losses = pool[:, rng.integers(0, pool.shape[1], 100)]
        chosen.append(fixed_sequence((p_value(x.tolist(), risk) for x in losses), DELTA))
        naive.append(by_empirical_risk(losses, risk))
    assert at_most(violations(chosen, risks, risk), DELTA, n_sets), violations(chosen, risks, risk)
    assert not at_most(violations(naive, risks, risk), DELTA, n_sets), violations(naive, risks, risk)
    assert np.mean([i >= 8 for i in chosen]) > 0.5  # settings that let tokens leave


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_certificate_fits_the_bundled_model(bundled, temperature):
    """It decodes by itself, with exits, and nearly as the full model does."""
    model, tokenizer = bundled
    sampling = SamplingParams(64, temperature, stop_tokens=tokenizer.eos_ids)
    certificate = certified(model, sampling)
    assert certificate.agreement is not None and certificate.p_betting <= certificate.level <= certificate.delta / 2
    outs = early_exit_generate(model, [tokenizer.encode("import os\n\n\ndef ")] * 4, sampling, audit=True)
    again = early_exit_generate(model, [tokenizer.encode("import os\n\n\ndef ")] * 4, sampling, certificate.thresholds)
    assert [out.tokens for out in outs] == [out.tokens for out in again]
    assert sum(out.stats.exited for out in outs) > 0.5 * certificate.exited * sum(out.stats.tokens for out in outs)


# ----------------------------------------------------------------------------------------------------------------------
# What is scored is what decodes


def full_law(model, states, at, sampling, history):
    """The full model's law of the token at `at`, and its logits after penalty and bias."""
    plain = dataclasses.replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    logits = model.logits(states[-1][at - 1]).numpy()
    return numpy_law(logits, sampling, history), np.log(numpy_law(logits, plain, history))


@torch.no_grad()
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocab", [None, tuple(range(0, 24, 2))], ids=["all ids", "some ids"])
def test_scores_are_the_exits_own_words_at_each_token_of_the_text(sampling, vocab):
    """Against a full forward, NumPy's law and NumPy's race: confidence, the token with the same noise, and its nats."""
    model = tiny_model(exit_vocab=vocab)
    model.config.exit_platt = {"max_prob": [(1.2, 0.1), (0.8, -0.2), (1.0, 0.3)]}
    [prompt], n_wrong = [[5, 1, 9]], 0
    [out] = generate(model, [prompt], sampling)
    confidences, wrong, nats = score_exits(model, sampling, prompt, out.tokens, 3, "max_prob")
    tokens = prompt + out.tokens
    states = true_states(model, tokens)[0]
    for i, said in enumerate(out.tokens):
        at = len(prompt) + i
        _, log_probs = full_law(model, states, at, sampling, tokens[:at])
        for e, layer in enumerate(model.config.exit_layers):
            logits = model.logits(states[layer, at - 1][None], layer)
            raw = float(torch.softmax(logits, -1).max())
            slope, bias = model.config.exit_platt["max_prob"][e]
            assert float(confidences[e, i]) == pytest.approx(
                1 / (1 + math.exp(-slope * math.log(raw / (1 - raw)) - bias))
            )
            law = numpy_law(logits[0].numpy(), sampling, tokens[:at])
            token = numpy_race(law[None], np.array([3]), np.array([at]), SAMPLE, np.array([0]))[0]
            assert bool(wrong[e, i]) == (token != said)
            assert float(nats[e, i]) == pytest.approx(log_probs[said] - log_probs[token], abs=1e-9)
            n_wrong += token != said
    assert 0 < n_wrong < 36


def test_the_walk_over_scores_leaves_where_the_decoder_leaves():
    """On the very text that was decoded with exits on, whose cache is the full model's: same confidences, same depths,
    also where rows must go deep because too many wait."""
    seen = set()
    for max_parked in (1, 2, 8):
        for thresholds in ([0.6, 0.5, 0.4], [0.3, 2.0, 0.2], [2.0, 2.0, 2.0]):
            outs = run(exiting(MODEL, threshold=thresholds, max_parked=max_parked), prompts_of(6), GREEDY)
            for prompt, out in zip(prompts_of(6), outs):
                confidences, _, _ = score_exits(MODEL, GREEDY, prompt, out.tokens, 0, "max_prob")
                taken = exits_taken(confidences, thresholds, max_parked).tolist()
                assert [(1, 2, 3, 4)[exit] for exit in taken] == out.layers_run
                seen |= set(out.layers_run)
    assert seen == {1, 2, 3, 4}
    confidences = torch.tensor([[0.9, 0.1, 0.9, 0.9], [0.2, 0.5, 0.1, 0.1]], dtype=torch.float64)
    assert exits_taken(confidences, [0.9, 0.5], None).tolist() == [0, 1, 0, 0]  # nothing waits, nothing is forced
    assert exits_taken(confidences, [0.9, 0.5], 2).tolist() == [0, 1, 2, 0]


def test_the_audits_nats_are_those_of_a_full_forward():
    lost = 0
    for sampling in (GREEDY, SAMPLED):
        outs = run(exiting(MODEL, threshold=0.2, audit=True), prompts_of(8), sampling)
        for row, (prompt, out) in enumerate(zip(prompts_of(8), outs)):
            tokens, expected = prompt + out.tokens, 0.0
            with torch.no_grad():
                states = true_states(MODEL, tokens)[0]
                for i, source in enumerate(out.sources):
                    at = len(prompt) + i
                    law, log_probs = full_law(MODEL, states, at, sampling, tokens[:at])
                    full = numpy_race(law[None], np.array([3 + row]), np.array([at]), SAMPLE, np.array([0]))[0]
                    expected += (log_probs[full] - log_probs[tokens[at]]) * (source == "exit")
            assert out.stats.audit_nats == pytest.approx(expected, abs=1e-9)
            lost += expected > 0.01
    assert lost > 3


def test_equal_settings_ask_every_exit_for_the_same_chance_of_agreeing():
    """Confidences on scales of their own, with known chances: behind each exit's threshold the error at the edge is
    the setting's."""
    rng, scales = np.random.default_rng(7), [(0.5, -1.0), (2.0, 0.5)]
    logit = rng.normal(1.0, 2.0, (2, 40000))
    chance = np.stack([1 / (1 + np.exp(-slope * x - bias)) for (slope, bias), x in zip(scales, logit)])
    confidences = torch.tensor(1 / (1 + np.exp(-logit)))
    wrong = torch.tensor(rng.random(chance.shape) > chance).double()
    settings = family([(confidences, wrong, wrong)], 2)
    assert len(settings) == len(AGREEMENTS) == 20 and AGREEMENTS == sorted(AGREEMENTS, reverse=True)
    for agreement, thresholds in zip(AGREEMENTS, settings):
        for (slope, bias), threshold in zip(scales, thresholds):
            if threshold <= 1:
                at_edge = 1 / (1 + math.exp(-slope * math.log(threshold / (1 - threshold)) - bias))
                assert 1 - at_edge == pytest.approx(1 - agreement, rel=0.15)
    for stricter_one, looser in itertools.pairwise(settings):
        assert all(a >= b for a, b in zip(stricter_one, looser))
    never = family([(confidences, torch.ones_like(wrong), wrong)], 2)
    assert all(t > 0.999 for thresholds in never for t in thresholds)  # an exit that is never right drops out


def test_a_fit_finds_its_scale_from_any_start():
    """Newton's method alone runs away where an exit is sure and seldom right, or far from slope 1."""
    rng = np.random.default_rng(9)
    for slope, bias in ((0.5, -1.0), (0.2, -3.0), (3.0, 4.0), (1.0, -6.0)):
        logit = rng.normal(1.0, 3.0, 40000)
        agrees = rng.random(40000) < 1 / (1 + np.exp(-slope * logit - bias))
        found = fit_platt(torch.tensor(1 / (1 + np.exp(-logit))), torch.tensor(agrees))
        assert found == pytest.approx((slope, bias), rel=0.1), (slope, bias, found)


# ----------------------------------------------------------------------------------------------------------------------
# calibrate_threshold


@pytest.mark.parametrize("honest", [False, True])
def test_what_is_certified_was_decoded_with_exits_on_by_prompts_that_chose_nothing(honest, monkeypatch):
    """The figures of the certificate, recounted on what its thresholds decode on the last two thirds of the prompts."""
    scored, freely = [], []

    def spy(name, heard):
        real = getattr(early_exit, name)

        def heard_and_done(model, prompts, sampling, *more):
            heard.append((prompts, sampling.seed))
            return real(model, prompts, sampling, *more)

        monkeypatch.setattr(early_exit, name, heard_and_done)

    spy("generate", scored), spy("early_exit_generate", freely)
    prompts, said = prompts_of(90), []
    certificate = calibrate_threshold(
        MODEL, prompts, GREEDY, risk=0.06, delta=0.1, clip=0.15, honest=honest, batch_size=25, say=said.append
    )
    monkeypatch.undo()
    assert [p for ps, _ in scored for p in ps] == prompts[:30]
    assert [seed for _, seeds in scored for seed in seeds] == list(range(3, 33))
    n_tests = len(certificate.tried)
    assert [p for ps, _ in freely for p in ps] == prompts[30:] * n_tests
    assert [seed for _, seeds in freely for seed in seeds] == list(range(33, 93)) * n_tests
    assert certificate.agreement is not None and certificate.exited > 0.1 and said[-1] == str(certificate)
    levels = [tried["level"] for tried in certificate.tried]
    assert levels == ([0.1] * n_tests if honest else [0.1 / 2 ** (k + 1) for k in range(n_tests)])
    agreements = [tried["agreement"] for tried in certificate.tried]
    at = AGREEMENTS.index(agreements[0])
    assert agreements == (AGREEMENTS[:n_tests] if honest else [AGREEMENTS[at - k] for k in range(n_tests)])
    passed = [tried["p_betting"] <= tried["level"] for tried in certificate.tried]
    if honest:
        assert passed == [True] * n_tests or passed == [True] * (n_tests - 1) + [False]
        assert n_tests == 20 or not passed[-1]
        assert agreements[sum(passed) - 1] == certificate.agreement
    else:
        assert passed == [False] * (n_tests - 1) + [True] and agreements[-1] == certificate.agreement
    sampling = dataclasses.replace(GREEDY, seed=33)
    outs = run(exiting(MODEL, threshold=certificate.thresholds, audit=True), prompts[30:], sampling)
    losses = [out.stats.audit_disagreed / 12 for out in outs]
    assert certificate.n == 60 and certificate.empirical_risk == pytest.approx(np.minimum(losses, 0.15).mean())
    assert certificate.clipped_share > 0
    assert certificate.clipped_share == pytest.approx(np.mean(np.array(losses) > 0.15))
    assert certificate.exited == pytest.approx(np.mean([out.stats.exited / 12 for out in outs]))
    assert certificate.mean_layers == pytest.approx(np.mean([out.stats.mean_layers for out in outs]))
    scaled = [min(x / 0.15, 1.0) for x in losses]
    assert certificate.p_betting == pytest.approx(betting_p(scaled, 0.4, certificate.level))
    assert certificate.p_hoeffding_bentkus == pytest.approx(hoeffding_bentkus_p(scaled, 0.4))
    assert certificate.empirical_risk < certificate.bound_betting <= 0.06 + 1e-9
    assert certificate.bound_hoeffding_bentkus > certificate.empirical_risk


@pytest.mark.parametrize("kv_fill", ["recompute", "propagate"])
@pytest.mark.parametrize("loss", ["disagreement", "nll"])
def test_a_sequence_loses_what_a_full_forward_over_it_says(loss, kv_fill):
    """Propagated keys mislead the full head too, so there every token is judged, and not only those of exits."""
    model, prompts, thresholds = tiny_model(poisoned=False), prompts_of(12), [0.3, 0.3, 0.3]
    sampling = dataclasses.replace(SAMPLED, max_new_tokens=24, seed=list(range(12)))
    how = (loss, "margin", kv_fill, 4, 5)
    losses, outs = early_exit.free_losses(model, prompts, sampling, thresholds, *how)
    plain = exiting(model, threshold=thresholds, confidence="margin", kv_fill=kv_fill, max_parked=4)
    assert [out.tokens for out in outs] == [out.tokens for out in plain(prompts, sampling)]
    deep_errors = 0
    for row, (prompt, out, found) in enumerate(zip(prompts, outs, losses)):
        tokens, nats, n_wrong = prompt + out.tokens, 0.0, 0
        with torch.no_grad():
            states = true_states(model, tokens)[0]
            for at in range(len(prompt), len(tokens)):
                law, log_probs = full_law(model, states, at, sampling, tokens[:at])
                full = numpy_race(law[None], np.array([row]), np.array([at]), SAMPLE, np.array([0]))[0]
                n_wrong += full != tokens[at]
                deep_errors += full != tokens[at] and out.sources[at - len(prompt)] == "plain"
                nats += log_probs[full] - log_probs[tokens[at]]
        assert found == pytest.approx(
            (n_wrong if loss == "disagreement" else max(nats, 0.0)) / len(out.tokens), abs=1e-9
        )
    assert (deep_errors > 0) == (kv_fill == "propagate") and max(losses) > 0


def test_where_nothing_passes_decoding_is_plain_and_that_is_said():
    """Exits that are always sure and never right: a head whose best token is another than the full model's."""
    model = agreeing_model(exit_vocab=(3,))
    sampling = SamplingParams(12, 0.0, logit_bias={3: -4.0})
    for honest in (False, True):
        certificate = calibrate_threshold(model, prompts_of(60), sampling, 0.05, 0.1, clip=0.5, honest=honest)
        if certificate.agreement is None:
            assert min(certificate.thresholds) > 1 and "plain decoding" in str(certificate)
        assert certificate.exited == 0.0
        outs = early_exit_generate(model, prompts_of(4), sampling, certificate.thresholds)
        assert [out.tokens for out in outs] == [out.tokens for out in generate(model, prompts_of(4), sampling)]


def test_a_setting_that_fails_freely_is_followed_by_a_stricter_one(monkeypatch):
    """Teacher-forced scores say that exits are never wrong; decoding finds otherwise."""
    real = early_exit.score_exits

    def rosy(*args):
        confidences, wrong, nats = real(*args)
        return confidences, wrong * (confidences < 0.2), nats

    monkeypatch.setattr(early_exit, "score_exits", rosy)
    certificate = calibrate_threshold(MODEL, prompts_of(120), GREEDY, risk=0.03, delta=0.2, clip=0.5)
    assert len(certificate.tried) > 1 and certificate.tried[0]["empirical_risk"] > 0.03
    assert certificate.agreement is None or certificate.empirical_risk < 0.03


@pytest.mark.parametrize(
    "call, message",
    [
        ({"risk": 0}, "risk is 0: it must be between 0 and 1"),
        ({"delta": 1.0}, "delta is 1.0: it must be between 0 and 1"),
        ({"clip": 0.05}, "clip is 0.05: it must be above the risk, 0.05"),
        ({"clip": 1.5}, "clip is 1.5: it must be above the risk"),
        ({"loss": "bleu"}, "loss is 'bleu': choose disagreement, nll"),
        ({"confidence": "router"}, "confidence is 'router'"),
        ({"kv_fill": "zero"}, "kv_fill is 'zero'"),
        ({"max_parked": 0}, "max_parked is 0"),
        ({"risk": 0.001}, "prompts has 60: even without an error, risk 0.001 at clip 0.2 takes at least "),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError) as error:
        calibrate_threshold(MODEL, prompts_of(60), GREEDY, **{"risk": 0.05, "delta": 0.1} | call)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_stated_number_of_prompts_is_enough_and_one_less_is_not():
    with pytest.raises(ValueError) as error:
        calibrate_threshold(MODEL, prompts_of(3), GREEDY, 0.05, 0.1)
    needed = int(str(error.value).partition(" takes at least ")[2].partition(";")[0])
    with pytest.raises(ValueError, match="even without an error"):
        calibrate_threshold(MODEL, prompts_of(needed - 1), SamplingParams(1, 0.0), 0.05, 0.1)
    calibrate_threshold(MODEL, prompts_of(needed), SamplingParams(1, 0.0), 0.05, 0.1)


def test_calibration_under_the_kill_switch_or_without_exits_or_room_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="no exit heads"):
        calibrate_threshold(tiny_model(exit_layers=()), prompts_of(60), GREEDY, 0.05)
    with pytest.raises(ValueError, match="prompts without room are \\[0\\]"):
        calibrate_threshold(MODEL, [[1] * 64, *prompts_of(60)], GREEDY, 0.05)
    monkeypatch.setenv("NANOSPEC_PLAIN", "1")  # all would be plain, and every setting would pass
    with pytest.raises(ValueError, match="NANOSPEC_PLAIN is set"):
        calibrate_threshold(MODEL, prompts_of(60), GREEDY, 0.05)


# ----------------------------------------------------------------------------------------------------------------------
# The guard


def test_the_guard_is_alarmed_with_chance_delta_at_most_and_soon_where_it_must():
    """1,000 streams of up to 300 flushes, watched all the time; every token, the deep one too, may be wrong."""
    rng, n_sets = np.random.default_rng(8), 1000
    for risk, rate, alarms in ((0.05, 0.05, "few"), (0.01, 0.01, "few"), (0.05, 0.2, "all"), (0.01, 0.05, "all")):
        alarmed = 0
        for _ in range(n_sets if alarms == "few" else 100):
            watch = Watch(Guard(risk, 0.1), 9)
            sizes = rng.integers(1, 10, 300)
            alarmed += any(watch.hear(int(k), int(n)) for k, n in zip(rng.binomial(sizes, rate), sizes))
        if alarms == "few":
            assert at_most(alarmed / n_sets, 0.1, n_sets), (risk, alarmed)
        else:
            assert alarmed >= 95, (risk, alarmed)


def test_stricter_thresholds_come_nearer_to_one_and_end_in_plain_decoding():
    thresholds, steps = [0.2, 0.9, 2.0], 0
    while min(thresholds) <= 1:
        new = stricter(thresholds)
        assert all(a > b or a == 2.0 for a, b in zip(new, thresholds))
        thresholds, steps = new, steps + 1
    assert steps <= 12 and stricter([0.5, 0.8]) == [0.75, 0.9]
    assert stricter([1.0]) == [2.0]


def test_the_guard_tightens_the_thresholds_of_its_call_and_says_so():
    sampling = SamplingParams(50, 0.0)
    loose = {"threshold": 0.1, "audit": True, "max_parked": 3}
    free = run(exiting(MODEL, **loose), prompts_of(3), sampling)
    assert sum(out.stats.audit_disagreed for out in free) > 15
    texts = []
    for _ in range(2):  # and nothing of it leaks into the next call
        with pytest.warns(
            UserWarning, match=r"the audit found \d+ of \d+ tokens wrong, more than the promised 0.02: .*stricter"
        ) as heard:
            outs = run(exiting(MODEL, **loose, guard=Guard(0.02)), prompts_of(3), sampling)
        assert all("\n" not in str(line.message) for line in heard)
        assert max(out.stats.tightened for out in outs) == len(heard) > 0
        assert sum(out.stats.audit_disagreed for out in outs) < sum(out.stats.audit_disagreed for out in free)
        for out, before in zip(outs, free):
            assert out.sources[25:].count("exit") < before.sources[25:].count("exit") / 2
        texts.append([out.tokens for out in outs])
    assert texts[0] == texts[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calm = run(exiting(MODEL, **loose, guard=Guard(0.9)), prompts_of(3), sampling)
        after = run(exiting(MODEL, **loose), prompts_of(3), sampling)
    for outs in (calm, after):
        assert [out.tokens for out in outs] == [out.tokens for out in free]
        assert not any(out.stats.tightened for out in outs)


def test_the_guard_hears_every_flush_and_every_token():
    """The counts of its first alarm, from the texts decoded without it: up to there they are the same."""
    sampling, prompts = SamplingParams(50, 0.0), prompts_of(3)
    loose = {"threshold": 0.1, "audit": True, "max_parked": 3}
    free = run(exiting(MODEL, **loose), prompts, sampling)
    with torch.no_grad():
        texts = [prompt + out.tokens for prompt, out in zip(prompts, free)]
        full = [MODEL(torch.tensor([text]))[0].argmax(-1).tolist() for text in texts]
    wrong = [[full[row][len(p) + i - 1] != t for i, t in enumerate(free[row].tokens)] for row, p in enumerate(prompts)]
    watch, waiting = Watch(Guard(0.02), 4), [[], [], []]
    for i, row in ((i, row) for i in range(50) for row in range(3)):
        waiting[row].append(wrong[row][i] and free[row].sources[i] == "exit")
        if free[row].sources[i] == "plain":
            if watch.hear(sum(waiting[row]), len(waiting[row])):
                break
            waiting[row] = []
    expected = f"the audit found {watch.n_wrong} of {watch.n_tokens} tokens wrong"
    assert i < 49 and watch.n_tokens > 5
    with pytest.warns(UserWarning) as heard:
        run(exiting(MODEL, **loose, guard=Guard(0.02)), prompts, sampling)
    assert expected in str(heard[0].message), (expected, str(heard[0].message))


def test_the_guard_needs_the_audit_and_sound_numbers():
    with pytest.raises(ValueError, match="guard is .* give audit=True"):
        early_exit_generate(MODEL, [[1]], GREEDY, 0.5, guard=Guard(0.1))
    with pytest.raises(ValueError, match="risk is 1.5"):
        Guard(1.5)
    with pytest.raises(ValueError, match="holds no calibrated ones"):
        early_exit_generate(MODEL, [[1]], GREEDY, 0.5, audit=True, guard=True)


# ----------------------------------------------------------------------------------------------------------------------
# Storage


def byte_tokenizer(shift=0) -> Tokenizer:
    ranks = {bytes([(i + shift) % 256]): i for i in range(256)}
    return Tokenizer(ranks, r"[\s\S]", {"<|end|>": 256}, 256, (256,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a certificate for greedy decoding of up to 12 tokens."""
    folder = tmp_path_factory.mktemp("models") / "target"
    model = agreeing_model(vocab_size=264, n_vocab_used=257, block_size=160).float()
    save_checkpoint(folder, model, byte_tokenizer())
    model, _ = load_checkpoint(folder, device="cpu")
    with pytest.raises(ValueError, match="threshold is None, and this checkpoint holds no calibrated ones"):
        early_exit_generate(model, [[1]], GREEDY)
    save_certificate(
        folder, calibrate_threshold(model, prompts_of(90), GREEDY, 0.1, 0.1, clip=0.5, data="random bytes")
    )
    return folder


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_a_stored_certificate_is_used_and_says_what_it_promises(folder):
    model, _ = load_checkpoint(folder, device="cpu")
    certificate = certified(model, GREEDY)
    assert certificate.exited > 0 and certificate.data == "random bytes" and len(certificate.date) == 10
    assert str(certificate).startswith("with probability 0.9 at most 0.1 of the tokens differ from the full model's")
    assert dataclasses.asdict(certificate) == read_certificates(folder)[0]
    expected = run(exiting(model, threshold=certificate.thresholds), prompts_of(5), GREEDY)
    for sampling in (GREEDY, dataclasses.replace(GREEDY, seed=99, stop_tokens=(300,))):
        assert [o.tokens for o in run(exiting(model), prompts_of(5), sampling)] == [o.tokens for o in expected]
    shorter = run(exiting(model), prompts_of(5), dataclasses.replace(GREEDY, max_new_tokens=5))
    assert [o.tokens for o in shorter] == [o.tokens[:5] for o in expected]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert exiting(model, audit=True, guard=True)(prompts_of(2), GREEDY)
    model.certificates[0]["loss"] = "nll"  # nats are no share of tokens
    with pytest.raises(ValueError, match="the certificate bounds nats"):
        exiting(model, audit=True, guard=True)(prompts_of(2), GREEDY)


def test_what_a_certificate_does_not_hold_for_is_refused_by_name(folder, tmp_path):
    model, tokenizer = load_checkpoint(folder, device="cpu")
    replace = dataclasses.replace
    for sampling, how, names in (
        (replace(GREEDY, temperature=0.7), {}, ["temperature 0.0 (now 0.7)"]),
        (replace(GREEDY, top_p=0.9, top_k=5), {}, ["top_k 0 (now 5)", "top_p 1.0 (now 0.9)"]),
        (replace(GREEDY, logit_bias={3: -1.0}), {}, ["logit_bias {} (now {'3': -1.0})"]),
        (replace(GREEDY, repetition_penalty=1.1), {}, ["repetition_penalty 1.0 (now 1.1)"]),
        (replace(GREEDY, max_new_tokens=13), {}, ["max_new_tokens 12 (now 13)"]),
        (GREEDY, {"kv_fill": "propagate"}, ["kv_fill recompute (now propagate)"]),
        (GREEDY, {"confidence": "margin"}, ["confidence max_prob (now margin)"]),
        (GREEDY, {"max_parked": 4}, ["max_parked 8 (now 4)"]),
    ):
        refused(model, sampling, names, **how)
    model.cache_dtype = torch.int8
    refused(model, GREEDY, ["cache_dtype None (now int8)"])
    model.cache_dtype = None
    for options, names in (
        ({"dtype": "float64"}, ["dtype float32 (now float64)"]),
        ({"quantize": "int8"}, ["quantize None (now int8)"]),
    ):
        refused(load_checkpoint(folder, device="cpu", **options)[0], GREEDY, names)
    others = {"weights": copy.deepcopy(model), "heads": copy.deepcopy(model), "tokenizer": model}
    others["weights"].blocks[2].up.weight.data[5, 3:9] += 0.01  # row 5 is not sampled: what is sampled must differ
    others["weights"].blocks[2].up.weight.data[0, 3] += 0.01
    others["heads"].exits["2"].norm.weight.data[3] += 0.01
    for name, other in others.items():
        place = copied(folder, tmp_path / name)
        save_checkpoint(place, other, byte_tokenizer(shift=name == "tokenizer"))
        refused(load_checkpoint(place, device="cpu")[0], GREEDY, [f"another {name}: "])
    place = copied(folder, tmp_path / "scaled")
    model.config.exit_platt = {"max_prob": [(1.0, 0.1)] * 3}
    save_checkpoint(place, model, tokenizer)
    refused(load_checkpoint(place, device="cpu")[0], GREEDY, ["another heads: "])


def refused(model, sampling, names, **how):
    with pytest.raises(ValueError) as error:
        early_exit_generate(model, [[1, 2]], sampling, **how)
    text = str(error.value)
    assert text.startswith("threshold is None, and the calibrated ones are for another ") and "\n" not in text
    assert all(name in text for name in names) and text.count("(now") == sum("(now" in name for name in names), text
    assert early_exit_generate(model, [[1, 2]], sampling, 0.5, **how)[0].tokens  # by hand it works


def test_each_way_of_sampling_has_a_certificate_of_its_own(folder, tmp_path):
    place = copied(folder, tmp_path / "several")
    model, _ = load_checkpoint(place, device="cpu")
    warm = dataclasses.replace(GREEDY, temperature=0.7)
    save_certificate(place, calibrate_threshold(model, prompts_of(60), warm, 0.2, 0.1, clip=0.5))
    model, _ = load_checkpoint(place, device="cpu")
    assert certified(model, GREEDY).risk == 0.1 and certified(model, warm).risk == 0.2
    save_certificate(place, calibrate_threshold(model, prompts_of(60), warm, 0.15, 0.1, clip=0.5))
    assert [stored["risk"] for stored in read_certificates(place)] == [0.1, 0.15]  # replaced
    model.exits["1"].norm.weight.data[0] += 0.1
    save_checkpoint(place, model, byte_tokenizer())
    model, _ = load_checkpoint(place, device="cpu")
    save_certificate(place, calibrate_threshold(model, prompts_of(60), warm, 0.25, 0.1, clip=0.5))
    assert [stored["risk"] for stored in read_certificates(place)] == [0.25]  # the others held for other heads


def test_certificates_lie_beside_heads_that_a_model_is_given(folder, tmp_path):
    whole, _ = load_checkpoint(folder, device="cpu")
    checkpoint.save_heads(tmp_path / "heads", whole)
    model, _ = load_checkpoint(folder, device="cpu")
    load_heads(model, tmp_path / "heads")
    assert model.certificates == []  # those of the exits that it had are gone
    save_certificate(tmp_path / "heads", calibrate_threshold(model, prompts_of(60), GREEDY, 0.2, 0.1, clip=0.5))
    load_heads(model, tmp_path / "heads")
    assert certified(model, GREEDY).risk == 0.2
    model.set_exits((2,))
    with pytest.raises(ValueError, match="holds no calibrated ones"):
        certified(model, GREEDY)


def test_a_certificate_is_written_whole_or_not_at_all(folder, tmp_path, monkeypatch):
    place = copied(folder, tmp_path / "cut")
    before = (place / "exits.json").read_bytes()
    certificate = Certificate(
        **read_certificates(place)[0] | {"risk": 0.3, "holds_for": {"heads": None, "weights": 1, "tokenizer": 2}}
    )

    def fails(*_):
        raise OSError("no space")

    monkeypatch.setattr(checkpoint.os, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        save_certificate(place, certificate)
    assert (place / "exits.json").read_bytes() == before and len(list(place.glob(".*"))) == 0
    with pytest.raises(ValueError, match="not loaded"):
        save_certificate(place, dataclasses.replace(certificate, holds_for={}))


def test_a_broken_file_of_certificates_is_one_line_that_names_it(folder, tmp_path):
    place = copied(folder, tmp_path / "broken")
    whole = json.loads((place / "exits.json").read_text())
    lost = {name: value for name, value in whole["certificates"][0].items() if name != "holds_for"}
    for content, words in (
        ("<html>", "not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps(whole | {"format": "x"}), "format is 'x'"),
        (json.dumps(whole | {"certificates": 3}), "field holds_for"),
        (json.dumps(whole | {"certificates": [lost]}), "field holds_for"),
    ):
        (place / "exits.json").write_text(content)
        with pytest.raises(ValueError) as error:
            load_checkpoint(place, device="cpu")
        assert str(place / "exits.json") in str(error.value) and "\n" not in str(error.value)
        assert words in str(error.value), str(error.value)
    later = whole["certificates"][0] | {"invented": 1}
    (place / "exits.json").write_text(json.dumps(whole | {"certificates": [later]}))
    with pytest.raises(ValueError, match="no certificate of this version"):
        certified(load_checkpoint(place, device="cpu")[0], GREEDY)


# ----------------------------------------------------------------------------------------------------------------------
# The commands


def call(capsys, *arguments) -> tuple[int, str, str]:
    status = sample.main(list(map(str, arguments)))
    return status, *capsys.readouterr()


def test_sampling_without_a_threshold_uses_the_certificate(folder, capsys):
    flags = ["--model", folder, "--prompt", "def f(", "--max-new-tokens", 12, "--threads", 0, "--draft", "none"]
    early = [*flags, "--mode", "early-exit"]
    status, out, err = call(capsys, *early, "--temperature", 0, "--json")
    stored = read_certificates(folder)[0]
    assert (status, err) == (0, "") and json.loads(out)["thresholds"] == stored["thresholds"]
    status, out, _ = call(capsys, *early, "--temperature", 0)
    assert "Early exit: with probability 0.9 at most 0.1 of the tokens differ" in out
    for more, words in (
        (["--temperature", 1], "temperature 0.0 (now 1.0)"),
        (["--temperature", 0, "--max-new-tokens", 20], "max_new_tokens 12 (now 20)"),
        (["--temperature", 0, "--exit-layer", "1,2"], "give --exit-threshold"),
    ):
        status, out, err = call(capsys, *early, *more)
        assert status == 2 and err.count("\n") == 1 and words in err, err
        assert call(capsys, *early, *more, "--exit-threshold", 0.5)[0] == 0
    status, out, err = call(capsys, *flags)  # a comparison is greedy
    assert (status, err) == (0, "") and "Early exit: with probability" in out
    status, out, err = call(capsys, *flags, "--temperature", 1)
    assert (status, err) == (
        0,
        "",
    ) and f"Early exit: {sample.BY_HAND} by hand, nothing promised (threshold is None" in out


def test_without_a_text_of_ones_own_calibration_asks_what_the_heads_were_not_asked(folder, tmp_path, capsys):
    """Prompts that the model would record, from another seed; and what is certified is found beside the heads."""
    place = copied(folder, tmp_path / "model")
    flags = ["--stage", "calibrate", "--model", place, "--out", tmp_path, "--risk", "0.2", "--clip", "0.5"]
    flags += ["--prompts", "30", "--max-new-tokens", "4", "--device", "cpu"]
    assert train_exit_heads.main(list(map(str, flags))) == 0
    [stored] = read_certificates(tmp_path)
    assert stored["data"] == f"{distill.PROMPTS.name}, seed 0 calibration" and stored["n"] == 20
    model, tokenizer = load_checkpoint(place, device="cpu")
    learned = distill.own_prompts(model, tokenizer, 0)
    asked = distill.own_prompts(model, tokenizer, "0 calibration")
    assert [next(asked) for _ in range(30)] != [next(learned) for _ in range(30)]


def test_the_report_keeps_acceptance_beside_the_weights_and_changes_nothing_else(folder, tmp_path, capsys):
    """Of the drafter by temperature, of the target's exits each; a drafter that is the target is always accepted."""
    target, drafter = copied(folder, tmp_path / "target"), copied(folder, tmp_path / "drafter")
    (tmp_path / "text.py").write_text("def f(x):\n    return [x + 1 for x in x]\n" * 80)
    before = {place: json.loads((place / "config.json").read_text()) for place in (target, drafter)}
    flags = ["--stage", "report", "--model", target, "--draft", drafter, "--data", tmp_path / "text.py"]
    assert train_exit_heads.main(list(map(str, [*flags, "--out", tmp_path / "report.json"]))) == 0
    capsys.readouterr()
    after = {place: json.loads((place / "config.json").read_text()) for place in (target, drafter)}
    kept = {place: after[place]["meta"].pop("acceptance") for place in after}
    assert after == before and kept[drafter] == {"greedy": 1.0, "sampled": 1.0}
    assert list(kept[target]) == ["1", "2", "3"] and kept[target]["1"]["greedy"] < kept[target]["3"]["greedy"] < 1
    report = json.loads((tmp_path / "report.json").read_text())
    for layer, figures in kept[target].items():
        alphas = [report["target"]["exits"][layer][f"temperature {t}"]["alpha"] for t in (0, 1)]
        assert list(figures.values()) == pytest.approx(alphas, abs=1e-4)
    assert load_checkpoint(target, device="cpu")[0].acceptance == kept[target]
    assert load_checkpoint(folder, device="cpu")[0].acceptance == {}


def test_the_calibrate_stage_writes_what_sampling_uses(folder, tmp_path, capsys):
    place = copied(folder, tmp_path / "model")
    (place / "exits.json").unlink()
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    flags = ["--stage", "calibrate", "--model", place, "--data", tmp_path / "text", "--risk", "0.1", "--clip", "0.5"]
    flags += ["--prompts", "60", "--max-new-tokens", "10", "--temperature", "0.5", "--top-p", "0.9", "--device", "cpu"]
    assert train_exit_heads.main(list(map(str, flags))) == 0
    out, err = capsys.readouterr()
    [stored] = read_certificates(place)
    assert json.loads(out) == stored and str(Certificate(**stored)) in err
    assert stored["n"] == 40 and stored["data"].startswith("held out of text, sha256 ")
    then = stored["holds_for"]
    assert (then["temperature"], then["top_p"], then["max_new_tokens"], then["dtype"]) == (0.5, 0.9, 10, "float32")
    sampling = ["--temperature", "0.5", "--top-p", "0.9", "--max-new-tokens", 10, "--threads", 0, "--json"]
    status, out, err = call(capsys, "--model", place, "--prompt", "a", "--mode", "early-exit", *sampling)
    assert (status, err) == (0, "") and json.loads(out)["thresholds"] == stored["thresholds"]
    checkpoint.save_heads(tmp_path / "heads", load_checkpoint(place, device="cpu")[0])
    before = (place / "exits.json").read_bytes()
    assert train_exit_heads.main(list(map(str, [*flags, "--exits", tmp_path / "heads"]))) == 0
    assert len(read_certificates(tmp_path / "heads")) == 1 and (place / "exits.json").read_bytes() == before
    capsys.readouterr()
    for more in (
        ["--risk", "0.7"],
        ["--max-new-tokens", "160"],
        ["--prompts", "4"],
        ["--exits", str(tmp_path / "nosuch")],
    ):
        assert train_exit_heads.main(list(map(str, flags + more))) == 2
        assert capsys.readouterr().err.count("\n") == 1
