"""Random numbers, the sampling rule, acceptance, confidence and attention, each against its definition."""

import copy
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import chi_square_p, numpy_law, numpy_race, numpy_uniform, sample_size

import kernels
from decode import SamplingParams
from model import GPTConfig, KVCache

ALMOST_ONE = 1.0 - 2.0**-24


# ----------------------------------------------------------------------------------------------------------------------
# Random numbers


def test_philox_gives_the_known_answers():
    """kat_vectors of Random123 for philox4x32-10, all three in one call, and one by one as integers."""
    counters = [[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]]
    keys = [[0] * 2, [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]]
    expected = [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]
    arrays = np.stack(kernels.philox(*np.array(counters, np.uint64).T, *np.array(keys, np.uint64).T), 1)
    for words in (arrays.tolist(), [kernels.philox(*counter, *key) for counter, key in zip(counters, keys)]):
        assert [[f"{word:08x}" for word in row] for row in words] == expected


def test_accept_uniform_is_its_formula_and_never_one(monkeypatch):
    extremes = [0, 1, 0xFFFF, 0x10000, 0xFFFF0000, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFF, 0x80000000, 0x12345678]
    words = torch.tensor(extremes)
    monkeypatch.setattr(kernels, "philox", lambda c0, at, *others: (extremes[at],) * 4)
    zeros = torch.zeros(len(extremes), dtype=torch.int64)
    got = kernels.accept_uniform(zeros, torch.arange(len(extremes)), zeros)
    exact = [Fraction(w >> 16, 2**16) + Fraction(w & 0xFFFF, 2**32) for w in extremes]
    expected = [min(np.float32(float(x)), np.float32(ALMOST_ONE)) for x in exact]  # one rounding, then the clamp
    assert got.dtype == torch.float32 and got.tolist() == [float(x) for x in expected]
    assert got.max() == ALMOST_ONE and got.min() == 0
    noise = kernels._exponential(words, words)
    assert torch.isfinite(noise).all() and (noise > 0).all()  # u64 is kept away from both ends


def test_words_are_a_function_of_seed_id_index_stream_and_round():
    """Against Philox written anew in NumPy: the layout of the counter is the contract with the device kernels."""
    seeds = torch.tensor([0, 1, -1, 2**32, 2**63 - 1, -(2**63), 12345, 77])
    index = torch.tensor([0, 1, 2, 3, 1000, 2**20, 5, 2**31])
    rounds = torch.tensor([0, 5, 1, 2**20, 3, 0, 9, 1])
    law = torch.rand(8, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for stream in range(4):
        got = kernels.race(law, seeds, index, stream, rounds).tolist()
        assert got == numpy_race(law.numpy(), seeds.numpy(), index.numpy(), stream, rounds.numpy()).tolist()
    expected = numpy_uniform(seeds.numpy(), index.numpy(), rounds.numpy())
    assert kernels.accept_uniform(seeds, index, rounds).tolist() == expected.tolist()


def test_race_is_the_same_dense_or_sparse_alone_or_in_a_batch():
    n_vocab = 61
    torch.manual_seed(0)
    few = torch.zeros(40, n_vocab, dtype=torch.float64).masked_fill_(torch.rand(40, n_vocab) < 0.1, 1.0)
    few[:, 60] += 0.3  # the last id of an odd vocabulary, and no empty row
    few *= torch.rand_like(few)
    full = torch.rand(200, n_vocab, dtype=torch.float64)
    seeds, index = torch.arange(40) * 7, torch.arange(40) % 5
    sparse = kernels.race(few, seeds, index, kernels.DRAFT, index + 1)
    alone = [
        kernels.race(few[i : i + 1], seeds[i : i + 1], index[i : i + 1], 1, index[i : i + 1] + 1) for i in range(40)
    ]
    dense = kernels.race(
        torch.cat((few, full)),
        torch.cat((seeds, torch.arange(200))),
        torch.cat((index, torch.zeros(200, dtype=torch.int64))),
        kernels.DRAFT,
        torch.cat((index + 1, torch.zeros(200, dtype=torch.int64))),
    )[:40]
    assert sparse.tolist() == dense.tolist() == torch.cat(alone).tolist()
    assert (few.gather(1, sparse[:, None]) > 0).all() and len(set(sparse.tolist())) > 10


def test_race_draws_from_the_law():
    """N = 185,000 (8 cells at most): total variation 1% with power 0.99 at alpha = 1e-6. Scale does not matter."""
    law = np.array([0.05, 0.0, 0.3, 0.02, 0.13, 0.4, 0.1])
    n = sample_size(np.count_nonzero(law))
    seeds = torch.arange(n)
    rows = torch.tensor(law * 3.7).expand(n, -1)
    tokens = kernels.race(rows, seeds, torch.full_like(seeds, 11), kernels.SAMPLE, torch.zeros_like(seeds))
    assert chi_square_p(np.bincount(tokens, minlength=7), law) > 1e-6


@pytest.mark.parametrize("what", ["seed", "index", "stream", "round"])
def test_draws_that_differ_in_one_coordinate_are_independent(what):
    """Joint law of two draws, 9 cells, N = 191,000: total variation 1% with power 0.99 at alpha = 1e-6."""
    law = np.array([0.2, 0.5, 0.3])
    n = sample_size(9)
    seeds = torch.arange(n) * 2
    zeros = torch.zeros_like(seeds)
    rows = torch.tensor(law).expand(n, -1)
    first = kernels.race(rows, seeds, zeros, kernels.DRAFT, zeros)
    other = {"seed": (seeds + 1, zeros, 1, zeros), "index": (seeds, zeros + 1, 1, zeros)}
    other |= {"stream": (seeds, zeros, 3, zeros), "round": (seeds, zeros, 1, zeros + 1)}
    second = kernels.race(rows, *other[what])
    counts = np.bincount(first * 3 + second, minlength=9)
    assert chi_square_p(counts, np.outer(law, law)) > 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# Logits -> law


def test_filters_that_are_off_change_no_bit():
    torch.manual_seed(0)
    logits = torch.randn(4, 50) * 5
    for temperature in (1.0, 0.7):
        bare = kernels.process_logits_ref(logits, temperature)
        assert torch.equal(kernels.process_logits_ref(logits, temperature, 0, 1.0, 0.0), bare)
        for top_k in (50, 51, 10**9):  # above V clamps
            assert torch.equal(kernels.process_logits_ref(logits, temperature, top_k), bare)
    assert torch.equal(kernels.process_logits_ref(logits, 1.0), logits - logits.amax(-1, keepdim=True))
    assert torch.equal(kernels.penalise(logits[:, None], None, None, 1.0, None)[:, 0], logits)
    seen = torch.rand(4, 50) < 0.5
    assert torch.equal(kernels.penalise(logits[:, None], seen, None, 1.0, torch.zeros(50))[:, 0], logits)


def test_law_equals_the_definition_in_numpy():
    """Penalty, bias, temperature, top-k, top-p, min-p in that order; half of the trials have ties at every cut."""
    rng = np.random.default_rng(0)
    for trial in range(300):
        n_vocab = int(rng.integers(2, 40))
        logits = rng.normal(size=n_vocab) * 3
        if trial % 2:
            logits = np.round(logits)
        if trial % 5 == 0 and n_vocab > 3:
            logits[rng.integers(0, n_vocab, 2)] = -np.inf
        if not np.isfinite(logits).any():
            continue
        sampling = SamplingParams(
            temperature=float(rng.choice([0, 0.3, 1, 2])),
            top_k=int(rng.choice([0, 1, 3, n_vocab])),
            top_p=float(rng.choice([1, 0.05, 0.61, 0.917])),
            min_p=float(rng.choice([0, 0.02, 0.2])),
            repetition_penalty=float(rng.choice([1, 1.7, 0.6])),
            logit_bias={0: 2.5, 1: -1.25} if trial % 3 == 0 else {},
        )
        history = set(rng.integers(0, n_vocab, 5).tolist())
        seen = torch.zeros(1, n_vocab, dtype=torch.bool)
        seen[0, list(history)] = True
        bias = torch.zeros(n_vocab)
        for i, value in sampling.logit_bias.items():
            bias[i] = value
        penalised = kernels.penalise(torch.tensor(logits)[None, None], seen, None, sampling.repetition_penalty, bias)[0]
        law = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        got = kernels.process_logits_ref(penalised, *law).softmax(-1)[0].numpy()
        expected = numpy_law(logits, sampling, history)
        assert ((got > 0) == (expected > 0)).all(), (trial, sampling)
        assert np.abs(got - expected).max() < 1e-12, (trial, sampling)


def test_ties_at_a_cut_are_all_kept_wherever_they_stand():
    torch.manual_seed(0)
    for n_vocab in (5, 16, 37, 50):
        logits = torch.full((n_vocab,), -1.0)
        logits[0], logits[1] = 3.0, 2.0  # then n_vocab - 2 tokens tied
        order = torch.randperm(n_vocab)
        for law in ({"top_k": 3}, {"top_p": 0.999}, {"min_p": math.exp(-4.0) * 0.999}):
            kept = kernels.process_logits_ref(logits[order], 1.0, **law) > -torch.inf
            assert kept.all(), (n_vocab, law)
        for law in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}):
            kept = (kernels.process_logits_ref(logits[order], 1.0, **law) > -torch.inf)[order.argsort()]
            assert not kept[2:].any() and kept[0], (n_vocab, law)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_small_temperatures_are_finite_and_reach_argmax(dtype):
    torch.manual_seed(1)
    logits = (torch.randn(30, 40) * 20).to(dtype)
    logits[0], logits[1] = 0.0, torch.finfo(torch.float16).max
    logits[2, 5:] = -torch.inf
    logits[3, 1:], logits[3, 0] = -torch.inf, -7.0
    seeds = torch.arange(30)
    for temperature in (0, 1e-300, 1e-45, 1e-6, 1e-4):
        tokens, log_probs, _ = kernels.sample_token(logits, seeds, seeds, temperature)
        best = logits.amax(-1)
        assert torch.equal(logits.gather(-1, tokens[:, None])[:, 0], best), temperature  # up to exact ties
        assert torch.isfinite(log_probs).all(), temperature
        if temperature == 0:
            assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]  # ties to the lowest id
            law = kernels.process_logits_ref(logits, 0).softmax(-1)
            assert torch.equal(law, torch.nn.functional.one_hot(tokens, 40).to(law.dtype))
    even = kernels.sample_token(logits[:1].expand(500, -1), torch.arange(500), torch.zeros(500).long(), 1e-6)[0]
    assert len(set(even.tolist())) == 40  # a row of equals stays uniform


# ----------------------------------------------------------------------------------------------------------------------
# accept_draft


def force_uniforms(monkeypatch, value):
    """value: a number, or one per row and slot."""
    flat = torch.as_tensor(value, dtype=torch.float64).flatten()
    monkeypatch.setattr(kernels, "accept_uniform", lambda seeds, index, rounds: flat.expand(len(seeds)))


def random_block(n_rows, n_slots, n_vocab, seed, dtype=torch.float64, scale=2.0):
    torch.manual_seed(seed)
    target = torch.randn(n_rows, n_slots + 1, n_vocab, dtype=dtype) * scale
    draft = target[:, :-1] + torch.randn(n_rows, n_slots, n_vocab, dtype=dtype)
    return target, draft, torch.arange(n_rows), torch.full((n_rows,), 3), torch.full((n_rows,), 2)


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE, None])
@pytest.mark.parametrize("one_hot", [False, True])
def test_tokens_of_probability_zero_are_never_emitted(monkeypatch, uniform, one_hot):
    if uniform is not None:
        force_uniforms(monkeypatch, uniform)
    target, draft, seeds, index, rounds = random_block(400, 3, 6, 0)
    filters = ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5})
    for law in filters:
        processed = kernels.process_logits_ref(draft, 0.8, **law)
        drafts = processed.softmax(-1).flatten(0, 1).multinomial(1).view(400, 3)
        n_drafted = torch.arange(400) % 4
        args = (target, None if one_hot else processed, drafts, n_drafted, seeds, index, rounds, 0.8)
        tokens, n_accepted, log_probs = kernels.accept_draft(*args, **law)
        probs = kernels.process_logits_ref(target, 0.8, **law).softmax(-1)
        for slot in range(4):
            live = n_accepted >= slot
            chosen = probs[live, slot].gather(-1, tokens[live, slot][:, None])
            assert (chosen > 0).all()
            assert torch.allclose(log_probs[live, slot], chosen[:, 0].log(), atol=1e-12)
        behind = torch.arange(4) > n_accepted[:, None]
        assert (tokens[behind] == -1).all() and (tokens[~behind] >= 0).all() and (n_accepted <= n_drafted).all()


def test_supports_that_do_not_meet_are_always_rejected(monkeypatch):
    for uniform in (0.0, ALMOST_ONE):
        force_uniforms(monkeypatch, uniform)
        target = torch.zeros(50, 3, 6)
        target[..., 3:] = -torch.inf
        draft = torch.zeros(50, 2, 6)
        draft[..., :3] = -torch.inf
        for law in (draft, None):
            args = (torch.full((50, 2), 4), torch.full((50,), 2), torch.arange(50), torch.zeros(50).long())
            tokens, n_accepted, _ = kernels.accept_draft(target, law, *args, torch.zeros(50).long(), 1.0)
            assert (n_accepted == 0).all() and set(tokens[:, 0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-4, 0.7, 1.0])
def test_a_draft_from_the_targets_own_law_is_always_accepted(monkeypatch, temperature):
    """Also at the largest uniform; the bonus is drawn and nothing is NaN. float32 too: u q < q after rounding."""
    for dtype, uniform in itertools.product((torch.float64, torch.float32), (None, ALMOST_ONE)):
        with monkeypatch.context() as patch:
            if uniform is not None:
                force_uniforms(patch, uniform)
            target, _, seeds, index, rounds = random_block(300, 4, 8, 1, dtype)
            processed = kernels.process_logits_ref(target[:, :-1], temperature)
            drafts = processed.softmax(-1).flatten(0, 1).multinomial(1).view(300, 4)
            n_drafted = torch.full((300,), 4)
            args = (target, processed, drafts, n_drafted, seeds, index, rounds, temperature)
            tokens, n_accepted, log_probs = kernels.accept_draft(*args)
            assert (n_accepted == 4).all() and torch.equal(tokens[:, :4], drafts) and torch.isfinite(log_probs).all()


def test_a_rejection_without_residual_falls_back_to_the_target(monkeypatch):
    """The two laws are equal, so that max(target - draft, 0) is empty, and the draft is thrown away all the same."""
    force_uniforms(monkeypatch, 2.0)
    target, _, seeds, index, rounds = random_block(400, 1, 4, 2)
    processed = kernels.process_logits_ref(target[:, :-1], 1.0, top_k=2)
    drafts = processed[:, 0].argmax(-1, keepdim=True)
    args = (target, processed, drafts, torch.ones(400).long(), seeds, index, rounds, 1.0, 2)
    tokens, n_accepted, log_probs = kernels.accept_draft(*args)
    assert (n_accepted == 0).all() and torch.isfinite(log_probs[:, 0]).all()
    assert (processed[:, 0].gather(-1, tokens[:, :1]) > -torch.inf).all()
    assert 0 < (tokens[:, 0] == drafts[:, 0]).sum() < 400  # the whole law, the draft included


LAWS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.7, "min_p": 0.15},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 5e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("one_hot", [False, True])
def test_accept_draft_implies_the_targets_law_exactly(monkeypatch, dtype, bound, one_hot):
    """No sampling: every draft path is a row, its chance of acceptance is found by bisection on the uniform, and the mass
    that the last token is drawn from is what reaches the race. Together they must give the target's joint law of three tokens.
    """
    n_vocab, n_slots = 5, 2
    paths = torch.tensor(list(itertools.product(range(n_vocab), repeat=n_slots)))
    torch.manual_seed(3)
    logits = [torch.randn(*(n_vocab,) * (j + 1), dtype=dtype) * 1.5 for j in range(n_slots + 1)]  # [prefix..., next]
    drafter = [z + torch.randn_like(z) for z in logits[:n_slots]]
    target = torch.stack([logits[j][tuple(paths[:, :j].T)].expand(len(paths), -1) for j in range(n_slots + 1)], 1)
    draft = torch.stack([drafter[j][tuple(paths[:, :j].T)].expand(len(paths), -1) for j in range(n_slots)], 1)
    rows = torch.arange(len(paths))
    masses = {}

    def recording_race(probs, seeds, index, stream, rounds):
        for row, mass, at in zip(seeds.tolist(), probs.double().numpy(), index.tolist()):
            masses[row, at] = mass / mass.sum()
        return probs.argmax(-1)

    monkeypatch.setattr(kernels, "race", recording_race)
    for law in LAWS:
        processed = kernels.process_logits_ref(draft, **law)
        if one_hot:  # the paths that a greedy drafter takes: one in each position
            greedy = (processed.argmax(-1) == paths).all(-1)
            path_prob = greedy.double().numpy()
        else:
            path_prob = processed.double().softmax(-1).gather(-1, paths[..., None]).prod(1)[:, 0].numpy()

        def judge(uniforms, law=law, draft_logits=None if one_hot else processed):
            force_uniforms(monkeypatch, uniforms)
            zeros = torch.zeros_like(rows)
            args = (target, draft_logits, paths, zeros + n_slots, rows, zeros, zeros)
            return kernels.accept_draft(*args, **law)[1]

        accepts = np.zeros((len(paths), n_slots))
        for slot in range(n_slots):
            low, high = torch.zeros(len(paths)).double(), torch.ones(len(paths)).double()
            uniforms = torch.zeros(len(paths), n_slots).double()
            for _ in range(45):
                uniforms[:, slot] = (low + high) / 2
                passed = judge(uniforms) > slot
                low, high = torch.where(passed, uniforms[:, slot], low), torch.where(passed, high, uniforms[:, slot])
            accepts[:, slot] = low.numpy()
        laws = [kernels.process_logits_ref(z, **law).double().softmax(-1).numpy() for z in logits]
        truth = laws[0][:, None, None] * laws[1][:, :, None] * laws[2]
        implied = np.zeros_like(truth)
        for n in range(n_slots + 1):
            uniforms = torch.zeros(len(paths), n_slots).double()
            uniforms[:, n:] = 2.0  # fall here
            masses.clear()
            judge(uniforms)
            for row, path in enumerate(paths.tolist()):
                weight = path_prob[row] * accepts[row, :n].prod() * (1 - accepts[row, n] if n < n_slots else 1)
                if weight <= 0 or (row, n) not in masses:
                    assert weight < 1e-12
                    continue
                last = masses[row, n]
                if n == 0:
                    implied += weight * last[:, None, None] * laws[1][:, :, None] * laws[2]
                elif n == 1:
                    implied[path[0]] += weight * last[:, None] * laws[2][path[0]]
                else:
                    implied[path[0], path[1]] += weight * last
        assert np.abs(implied - truth).max() < bound, law
        assert abs(implied.sum() - 1) < bound


def test_a_round_without_drafts_draws_exactly_the_plain_token():
    target, draft, seeds, index, rounds = random_block(60, 2, 7, 4)
    law = {"temperature": 0.9, "top_p": 0.9}
    processed = kernels.process_logits_ref(draft, **law)
    drafts, none = processed.argmax(-1), torch.zeros(60, dtype=torch.int64)
    plain, log_probs, _ = kernels.sample_token(target[:, 0], seeds, index, **law)
    for verify in ("rejection", "coupled"):
        for args in ((target, processed, drafts, none), (target[:, :1], None, drafts[:, :0], none)):
            tokens, n_accepted, got = kernels.accept_draft(*args, seeds, index, rounds, **law, verify=verify)
            assert (n_accepted == 0).all() and torch.equal(tokens[:, 0], plain)
            assert torch.allclose(got[:, 0], log_probs, atol=1e-12)


def test_coupled_and_greedy_accept_exactly_the_plain_tokens():
    target, _draft, seeds, index, rounds = random_block(80, 3, 7, 5)
    target[:, :, 6] = target[:, :, :6].amax(-1)  # an exact tie of two best: the lower id wins at temperature 0
    for temperature, verify in ((0, "rejection"), (0, "coupled"), (0.8, "coupled")):
        law = {"temperature": temperature, "top_k": 4}
        plain = torch.stack([kernels.sample_token(target[:, t], seeds, index + t, **law)[0] for t in range(4)], 1)
        drafts = torch.where(torch.rand(80, 3) < 0.7, plain[:, :3], (plain[:, :3] + 1) % 7)
        n_drafted = torch.arange(80) % 4
        args = (target, None, drafts, n_drafted, seeds, index, rounds)
        tokens, n_accepted, _ = kernels.accept_draft(*args, **law, verify=verify)
        for row in range(80):
            n = 0
            while n < n_drafted[row] and drafts[row, n] == plain[row, n]:
                n += 1
            assert n_accepted[row] == n and tokens[row].tolist() == plain[row, : n + 1].tolist() + [-1] * (3 - n)


# ----------------------------------------------------------------------------------------------------------------------
# exit_confidence


def test_confidence_is_its_formula():
    torch.manual_seed(0)
    logits = torch.randn(20, 9) * 4
    logits[0], logits[1, 1:] = 0.0, -torch.inf  # no idea; certain
    logits[2, 4:] = -torch.inf  # outside exit_vocab
    for row, z in enumerate(logits.double().tolist()):
        weight = [math.exp(x - max(z)) for x in z]
        probs = sorted((w / sum(weight) for w in weight), reverse=True)
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        n_possible = max(sum(w > 0 for w in weight), 2)
        expected = {"max_prob": probs[0], "margin": probs[0] - probs[1], "entropy": 1 - entropy / math.log(n_possible)}
        for name, value in expected.items():
            for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
                got = kernels.confidence(logits[row : row + 1].to(dtype), name)
                assert abs(got.item() - value) < bound, (row, name)
    assert kernels.confidence(logits).max() == 1 and kernels.confidence(logits, "entropy")[0].abs() < 1e-6
    with pytest.raises(ValueError, match="confidence is 'cosine'"):
        kernels.confidence(logits, "cosine")


# ----------------------------------------------------------------------------------------------------------------------
# decode_attention


def naive_attention(qkv, k_old, v_old, positions, n_head, n_kv, cos, sin):
    """One row, one query, one head at a time in float64: qkv (T, H+2G, D), k_old, v_old (start, G, D)."""
    half = qkv.shape[-1] // 2

    def turned(x, at):
        if cos is None:
            return x
        return x * cos[at] + torch.cat((x[..., half:], x[..., :half]), -1) * sin[at]

    k, v, out = list(k_old), list(v_old), []
    for t, at in enumerate(positions):
        k.append(turned(qkv[t, n_head : n_head + n_kv], at))
        v.append(qkv[t, n_head + n_kv :])
        heads = []
        for h in range(n_head):
            g, q = h // (n_head // n_kv), turned(qkv[t, h], at)
            scores = torch.stack([(q * key[g]).sum() for key in k]) / math.sqrt(qkv.shape[-1])
            weights = (scores - scores.max()).exp()
            heads.append(sum(w * value[g] for w, value in zip(weights / weights.sum(), v)))
        out.append(torch.stack(heads))
    return torch.stack(out), torch.stack(k), torch.stack(v)


@pytest.mark.parametrize(
    "n_head, n_kv, head_dim, page_size, layout",
    [
        (4, 2, 6, 3, [(0, 0, 5, 0), (7, 1, 3, 1), (11, 0, 1, 4), (2, 5, 0, 0)]),  # (held, pad, real, pad) of each row
        (3, 3, 4, 1, [(0, 0, 1, 0), (8, 0, 1, 0)]),
        (6, 1, 2, 16, [(5, 0, 17, 3), (0, 0, 20, 0)]),
        (5, 5, 10, 4, [(9, 0, 2, 0)]),
    ],
)
@pytest.mark.parametrize("rotary", [False, True])
def test_attention_equals_the_naive_loop_on_shuffled_poisoned_pages(n_head, n_kv, head_dim, page_size, layout, rotary):
    torch.manual_seed(n_head)
    width = sum(layout[0][1:])
    max_pages = -(-max(held + n for held, _, n, _ in layout) // page_size) + 1
    n_pages = len(layout) * max_pages + 3  # three pages belong to nobody
    qkv = torch.randn(len(layout), width, n_head + 2 * n_kv, head_dim, dtype=torch.float64)
    positions = torch.tensor(
        [[-1] * left + list(range(held, held + n)) + [-1] * right for held, left, n, right in layout]
    )
    angle = torch.rand(64, head_dim // 2, dtype=torch.float64) * 6
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    if not rotary:
        cos = sin = None
    table = torch.randperm(n_pages)[: len(layout) * max_pages].view(len(layout), max_pages)
    exact, errors, budget = None, {}, {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        k_pages = torch.full((n_pages, page_size, n_kv, head_dim), torch.nan, dtype=dtype)
        v_pages, used, past = k_pages.clone(), torch.zeros(n_pages, page_size, dtype=torch.bool), []
        for row, (held, _, n, _) in enumerate(layout):
            torch.manual_seed(row)
            past.append((torch.randn(held, n_kv, head_dim).double(), torch.randn(held, n_kv, head_dim).double()))
            for at in range(held + n):
                used[table[row, at // page_size], at % page_size] = True
                if at < held:
                    for pages, values in zip((k_pages, v_pages), past[-1]):
                        pages[table[row, at // page_size], at % page_size] = values[at].to(dtype)
        rope = (None, None) if cos is None else [x[positions.clamp(min=0)][:, :, None].to(dtype) for x in (cos, sin)]
        out = kernels.decode_attention(qkv.to(dtype), k_pages, v_pages, table.int(), positions, n_head, *rope)
        assert torch.equal(k_pages[..., 0, 0].isnan(), ~used) and torch.equal(v_pages[..., 0, 0].isnan(), ~used)
        if exact is None:
            exact = [
                naive_attention(qkv[row, left : left + n], *past[row], range(held, held + n), n_head, n_kv, cos, sin)
                for row, (held, left, n, _) in enumerate(layout)
                if n
            ]
        got = [out[row, left : left + n].double() for row, (_, left, n, _) in enumerate(layout) if n]
        errors[dtype] = max(float((a - b[0]).abs().max()) for a, b in zip(got, exact))
        if dtype == torch.float64:
            for row, (held, left, n, _) in enumerate(layout):
                for pages, which in ((k_pages, 1), (v_pages, 2)):
                    if n:
                        expected = exact[[r for r, cell in enumerate(layout) if cell[2]].index(row)][which]
                        assert torch.allclose(pages[table[row]].flatten(0, 1)[: held + n], expected, atol=1e-14)
        else:
            budget[dtype] = pytorch_error(qkv, past, layout, positions, n_head, n_kv, cos, sin, exact, dtype)
    assert errors[torch.float64] < 1e-12
    for dtype, own in budget.items():
        assert errors[dtype] <= 2 * own, (dtype, errors[dtype], own)


def pytorch_error(qkv, past, layout, positions, n_head, n_kv, cos, sin, exact, dtype) -> float:
    """The error that PyTorch's own attention makes in this dtype, on the same rounded inputs."""
    worst, exact = 0.0, iter(exact)
    for row, (held, left, n, _) in enumerate(layout):
        if not n:
            continue
        new = qkv[row, left : left + n].to(dtype)
        q, k, v = new.split((n_head, n_kv, n_kv), 1)
        if cos is not None:
            at = positions[row, left : left + n]
            q, k = (
                x * cos[at, None].to(dtype) + x.roll(x.shape[-1] // 2, -1) * sin[at, None].to(dtype) for x in (q, k)
            )
        k, v = (torch.cat((old.to(dtype), x)) for old, x in zip(past[row], (k, v)))
        mask = torch.ones(n, held + n, dtype=torch.bool).tril(held)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        worst = max(worst, float((out[0].transpose(0, 1).double() - next(exact)[0]).abs().max()))
    return worst


def test_positions_must_rise_and_fit():
    table = torch.zeros(2, 2, dtype=torch.int32)
    for positions, message in (
        ([[0, 2], [0, 1]], "row 0 must rise"),
        ([[0, 1], [8, 9]], "row 1 is beyond the cache's"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.plan_rows(torch.tensor(positions), table, 4)


def test_entropy_does_not_count_tokens_that_cannot_be_drawn():
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 10:14] = 2.0
    assert abs(kernels.confidence(logits, "entropy").item()) < 1e-6


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_few_rows_is_the_product(bias):
    """Every number of rows on both sides of the switch, within twice the error of the plain product."""
    torch.manual_seed(0)
    weight, offset = torch.randn(33, 40), torch.randn(33) if bias else None
    for shape in [(n, 40) for n in range(10)] + [(1, 1, 40), (2, 3, 40), (3, 5, 40)]:
        x = torch.randn(shape)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        plain, ours = torch.nn.functional.linear(x, weight, offset), kernels.linear(x, weight, offset)
        assert ours.shape == plain.shape and ours.is_contiguous()
        assert (ours - exact).abs().sum() <= 2 * (plain - exact).abs().sum() + 1e-6


def test_a_tiny_top_p_keeps_the_best_token():
    law = kernels.process_logits_ref(torch.tensor([[0.0, 2.0, 1.0]]), 1.0, top_p=1e-320)
    assert law.softmax(-1).tolist() == [[0.0, 1.0, 0.0]]


# ----------------------------------------------------------------------------------------------------------------------
# The CPU's own products


def small_weight(kind: str, n_out: int, n_in: int, dtype):
    """A packed or quantised matrix and the float64 matrix that it stands for."""
    torch.manual_seed(n_out + n_in)
    dense = torch.randn(n_out, n_in) * 0.1
    weight = (
        dense.to(dtype)
        if kind == "dense"
        else kernels.quantize(dense, *{"int8": (8,), "g32": (4, 32), "g128": (4, 128)}[kind])
    )
    packed = kernels.pack(weight, dtype, n_in)
    if kind == "dense":
        return packed, weight.double()
    plain = kernels.unpack(packed)
    return packed, kernels.dequantize(plain, torch.float64, n_in)


@pytest.mark.parametrize("n_out, n_in", [(48, 64), (64, 576), (17, 48), (33, 10), (16, 160), (1, 1)])
@pytest.mark.parametrize("kind", ["dense", "int8", "g32", "g128"])
def test_products_of_packed_matrices_are_within_the_error_budget(kind, n_out, n_in):
    """Any shape: where the operator does not take it, it is dequantised. Error at most twice that of the dense product."""
    for dtype in (torch.bfloat16, torch.float32):
        weight, true = small_weight(kind, n_out, n_in, dtype)
        bias, residual = torch.randn(n_out).to(dtype), torch.randn(60, n_out).to(dtype)
        assert kernels.linear(torch.zeros(0, n_in, dtype=dtype), weight, bias).shape == (0, n_out)
        for n_rows in (1, 3, 8, 60):  # the last is beyond INT8_ROWS
            x = torch.randn(n_rows, n_in + 4).to(dtype)[:, 2 : n_in + 2]  # rows with gaps, not aligned
            y = kernels.linear(x, weight, bias, residual=residual[:n_rows])
            assert y.shape == (n_rows, n_out) and y.dtype == dtype
            parts = (x.double() @ true.T, bias.double(), residual[:n_rows].double())
            dense = kernels.linear_ref(x, true.to(dtype), bias, residual=residual[:n_rows])
            # one rounding of the product, one of the sum, and those of adding up in float32 are any product's right
            limit = 2 * (dense.double() - sum(parts)).abs().max() + 2**-23 * (x.double().abs() @ true.T.abs()).max()
            limit += sum(torch.finfo(dtype).eps * part.abs().max() for part in parts)
            assert (y.double() - sum(parts)).abs().max() <= limit, (n_rows, dtype)


def test_packing_keeps_every_integer_and_goes_back():
    for group, n_in in ((32, 64), (32, 96), (128, 256), (128, 192)):
        weight = kernels.quantize(torch.randn(32, n_in), 4, group)
        packed = kernels.pack(weight, torch.float32, n_in)
        assert packed.bits == 4 and packed.data.numel() == 32 * n_in // 2
        values = [kernels.dequantize(w, torch.float64, n_in) for w in (weight, kernels.unpack(packed))]
        assert torch.allclose(*values, rtol=0, atol=1e-6)
    dense = torch.randn(48, 40).bfloat16()
    assert torch.equal(kernels.unpack(kernels.pack(dense, torch.bfloat16, 40)), dense)
    for weight in (dense.double(), kernels.quantize(dense, 8), kernels.quantize(dense, 4)):
        assert kernels.pack(weight, torch.float64, 40) is weight  # no operator for it


def test_gradients_pass_through_packed_matrices():
    for kind in ("dense", "int8", "g32"):
        weight, true = small_weight(kind, 48, 64, torch.bfloat16)
        x = torch.randn(3, 64).bfloat16().requires_grad_()
        kernels.linear(x, weight).sum().backward()
        assert torch.allclose(x.grad.double(), true.sum(0).expand(3, -1), rtol=0.02, atol=0.02)


BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.skipif(not BF16, reason="a CPU without bfloat16 instructions: oneDNN takes other kernels")
@pytest.mark.parametrize("n_out, n_in", [(960, 576), (576, 1536), (3072, 576), (4096, 576)])
@pytest.mark.parametrize("kind", ["dense", "int8", "g32"])
def test_a_row_of_a_packed_product_has_the_same_bits_whatever_rides_along(kind, n_out, n_in):
    """Up to 8 rows: so greedy speculation of up to 7 drafts can be plain decoding, bit for bit."""
    weight, _ = small_weight(kind, n_out, n_in, torch.bfloat16)
    norm = kernels.Norm(torch.rand(n_in).bfloat16(), None, 1e-5)
    norm = norm._replace(twice=torch.cat((norm.weight, norm.weight)))
    x = torch.randn(8, n_in).bfloat16()
    alone = torch.cat([kernels.linear(row[None], weight, norm=norm, activation="swiglu") for row in x])
    for n_rows in range(2, 9):
        assert torch.equal(kernels.linear(x[:n_rows], weight, norm=norm, activation="swiglu"), alone[:n_rows]), n_rows
        assert torch.equal(kernels.linear(x[-n_rows:], weight, norm=norm, activation="swiglu"), alone[-n_rows:]), n_rows


def test_the_norm_of_packed_models_is_as_exact_as_pytorchs():
    for dtype, n in ((torch.bfloat16, 576), (torch.bfloat16, 6), (torch.float32, 64)):
        x, weight = torch.randn(9, n).to(dtype) * 3, torch.rand(n).to(dtype)
        norm = kernels.Norm(weight, None, 1e-5)
        true = kernels.norm_ref(x.double(), kernels.Norm(weight.double(), None, 1e-5))
        errors = [
            (y.double() - true).abs().max()
            for y in (kernels.norm_ref(x, norm), kernels.normalise(x, norm._replace(twice=torch.cat((weight, weight)))))
        ]
        assert errors[1] <= 2 * errors[0] and errors[1] > 0


# ----------------------------------------------------------------------------------------------------------------------
# The CPU's attention by runs of rows

WIDE = GPTConfig("llama", 24, 700, 2, 9, 576, n_kv_head=3, n_hidden=24)  # SmolLM2's heads


def held(batch: int, capacity: int) -> KVCache:
    """A cache that keeps its promise and no more: large numbers wherever nothing is written."""
    cache = KVCache(WIDE, batch, capacity, dtype=torch.bfloat16).finite()
    cache.k.fill_(1e3), cache.v.fill_(-1e3)
    return cache


def by_runs(qkv, cache: KVCache, positions):
    cos, sin = (torch.randn(1000, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    at = positions.clamp(min=0)
    runs = kernels.plan_runs(positions, cache.starts, cache.capacity)
    turn = (cos[at][:, :, None], sin[at][:, :, None])
    arguments = (cache.block_table, positions, 9, *turn)
    return kernels.decode_attention(qkv, *cache.layer(0), *arguments, plans=runs), (arguments, turn)


@pytest.mark.parametrize("rows", [[0], [3], [0, 1, 2, 3], [0, 2], [3, 0, 1], [1, 2]])
def test_attention_by_runs_is_within_the_error_budget(rows):
    """Ragged rows, padding at either end or throughout, subsets of a batch whose rows form one run or several."""
    torch.manual_seed(len(rows))
    runs = kernels.plan_runs(torch.zeros(len(rows), 1, dtype=torch.int64), held(4, 300).rows(rows).starts, 304)
    assert len(runs.calls) == 1 + sum(b != a + 1 for a, b in itertools.pairwise(rows))
    for n_new in (1, 2, 5, 16):
        cache, starts = held(4, 300), [0, 37, 250, 16]
        cache.k.normal_(), cache.v.normal_()
        view = cache.rows(rows)
        positions = torch.tensor([[starts[row] + t for t in range(n_new)] for row in rows])
        if n_new == 5:
            positions[0, 3:], positions[-1, :2] = -1, -1
        if n_new == 2 and len(rows) > 1:
            positions[1] = -1
        qkv = torch.randn(len(rows), n_new, 15, 64).bfloat16()
        exact, loose = (copy.deepcopy(view) for _ in range(2))
        out, (arguments, turn) = by_runs(qkv, view, positions)
        assert out.shape == (len(rows), n_new, 9, 64)
        loose_out = kernels.decode_attention_ref(qkv, *loose.layer(0), *arguments)
        doubled = [x.double() for x in exact.layer(0)]
        true = kernels.decode_attention_ref(qkv.double(), *doubled, *arguments[:3], *(x.double() for x in turn))
        real = positions >= 0
        limit = 2 * (loose_out.double() - true)[real].abs().max() + 2**-8 * true[real].abs().max()
        assert (out.double() - true)[real].abs().max() <= limit and out.isfinite().all()
        for layer in range(2):
            for got, expected in zip(view.layer(layer), loose.layer(layer)):
                assert torch.equal(got, expected)  # the new keys and values, and nothing else


@pytest.mark.skipif(not BF16, reason="a CPU without bfloat16 instructions: other kernels")
def test_a_tokens_attention_has_the_same_bits_whatever_rides_along():
    """Alone, with other new tokens, with other rows, shorter or longer by far: its past is all that counts."""
    torch.manual_seed(0)
    qkv = torch.randn(1, 700, 15, 64).bfloat16()
    alone = held(1, 700)
    expected = torch.cat([by_runs(qkv[:, t : t + 1], alone, torch.tensor([[t]]))[0] for t in range(700)], 1)
    for n_new in (2, 3, 5, 8, 16):
        cache = held(1, 700)
        for start in range(0, 690 - n_new, n_new):
            at = torch.arange(start, start + n_new)[None]
            assert torch.equal(by_runs(qkv[:, at[0]], cache, at)[0], expected[:, at[0]]), (n_new, start)
    cache = held(3, 700)
    for layer in (cache.k, cache.v):
        layer[:] = (alone.k if layer is cache.k else alone.v).repeat(1, 3, 1, 1, 1)
    for starts in ((3, 690, 61), (600, 10, 15), (0, 0, 511)):
        for n_new in (1, 3):
            at = torch.tensor([[start + t for t in range(n_new)] for start in starts])
            assert torch.equal(by_runs(qkv[0][at], cache, at)[0], expected[0][at]), (starts, n_new)
