"""Drawing and judging tokens on the device: the kernels against their references, their law, and what they touch."""

import math

import numpy as np
import pytest
import torch
from helpers import chi_square_p, numpy_race, numpy_uniform, sample_size

pytest.importorskip("triton")

import triton.language as tl
from interpreter import interpreted, shuffled, watch

import kernels
from kernels import DRAFT, RESAMPLE, SAMPLE

LAWS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.7, "min_p": 0.15},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]
SAMPLED = LAWS[1]


def random_block(n_rows, n_slots, n_vocab, seed, law=SAMPLED, dtype=torch.float32, noise=0.5, one_hot=False):
    """Arguments of accept_draft up to rounds: drafts from laws near the target's, ragged, large indices, negative seeds."""
    g = torch.Generator().manual_seed(seed)
    target = (torch.randn(n_rows, n_slots + 1, n_vocab, generator=g) * 2).to(dtype)
    near = target[:, :-1].float() + torch.randn(n_rows, n_slots, n_vocab, generator=g) * noise
    law_of_draft = kernels.process_logits_ref(near, **law)
    drafts = torch.zeros(n_rows, n_slots, dtype=torch.int64)
    if n_slots:
        drafts = law_of_draft.softmax(-1).flatten(0, 1).multinomial(1, generator=g).view(n_rows, n_slots)
    whole = [(0, n_slots + 1), (-(2**62), 2**62), (0, 2**31 - 100), (0, 2**31 - 1)]
    n_drafted, seeds, index, rounds = (torch.randint(a, b, (n_rows,), generator=g) for a, b in whole)
    law_of_draft = None if one_hot or law["temperature"] == 0 else law_of_draft
    return target, law_of_draft, drafts, n_drafted, seeds, index, rounds


def same(got, expected, atol=1e-5):
    """Tokens and counts equal, log-probabilities of emitted tokens close."""
    tokens, n_accepted, log_probs = expected
    assert got[0].tolist() == tokens.tolist() and got[1].tolist() == n_accepted.tolist()
    live = tokens >= 0
    assert (got[2] - log_probs)[live].abs().max() < atol


# ----------------------------------------------------------------------------------------------------------------------
# Noise


@interpreted
def words_kernel(seeds, index, stream, rounds, out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    half_ids = 7 + tl.arange(0, BLOCK)
    zero = half_ids * 0
    at, round = tl.load(index + row).to(tl.int32), tl.load(rounds + row).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), half_ids, zero + at, zero + stream, zero + round)
    for i, word in enumerate((w0, w1, w2, w3)):
        tl.store(out + (row * 4 + i) * BLOCK + tl.arange(0, BLOCK), word.to(tl.int64))


@interpreted
def noise_kernel(seeds, index, stream, rounds, out, uniform, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    seed, at, round = tl.load(seeds + row), tl.load(index + row), tl.load(rounds + row)
    speed = kernels._speed(seed, BLOCK, at, stream, round, BLOCK)
    tl.store(out + row * BLOCK + tl.arange(0, BLOCK), speed)
    tl.store(uniform + row, kernels._uniform(seed, at, round))


def test_words_and_noise_are_the_references():
    """Bit for bit the words and the accept uniform; the noise to a few ulp, in ids 64 .. 127."""
    seeds = torch.tensor([0, 1, -1, 2**32, 2**63 - 1, -(2**63), 12345, -77])
    index = torch.tensor([0, 1, 2, 3, 1000, 2**20, 5, 2**31 + 7])
    rounds = torch.tensor([0, 5, 1, 2**20, 3, 0, 2**31, 1])
    for stream in range(4):
        out = torch.zeros(8, 4, 16, dtype=torch.int64)
        words_kernel[(8,)](seeds, index, stream, rounds, out, 16)
        half_ids = torch.arange(7, 23)
        assert torch.equal(out.transpose(0, 1), kernels._words(seeds, index, stream, rounds, half_ids))
        noise, uniform = torch.zeros(8, 64, dtype=torch.float64), torch.zeros(8)
        noise_kernel[(8,)](seeds, index, stream, rounds, noise, uniform, 64)
        w0, w1, w2, w3 = kernels._words(seeds, index, stream, rounds, torch.arange(32, 64))
        high, low = torch.stack((w0, w2), -1).flatten(1), torch.stack((w1, w3), -1).flatten(1)
        expected = 1 / kernels._exponential(high, low)
        assert ((noise - expected).abs() <= 8 * 2.0**-53 * expected).all()
        assert torch.equal(uniform, kernels.accept_uniform(seeds, index, rounds))


def force_words(monkeypatch, value):
    """Every Philox word is `value`; the clamps are the kernel's own."""

    def philox(seed, c0, *_):
        word = (c0 * 0).to(tl.uint32) + value
        return word, word, word, word

    monkeypatch.setattr(tl, "philox", philox)


def test_noise_at_both_ends_of_the_uniform(monkeypatch):
    zero = torch.zeros(1, dtype=torch.int64)
    for value, u in ((0, 2.0**-64), (0xFFFFFFFF, 1 - 2.0**-53), (1, 2.0**-32 + 2.0**-64), (0x80000000, None)):
        force_words(monkeypatch, value)
        noise, uniform = torch.zeros(1, 16, dtype=torch.float64), torch.zeros(1)
        noise_kernel[(1,)](zero, zero, 0, zero, noise, uniform, 16)
        u = value * 2.0**-32 + value * 2.0**-64 if u is None else u
        assert noise[0].tolist() == pytest.approx([-1 / math.log1p(-u)] * 16, rel=1e-14)
        assert 0 <= uniform.item() <= 1 - 2.0**-24


# ----------------------------------------------------------------------------------------------------------------------
# Kernels equal references


def test_the_law_that_is_kept_is_float32_whatever_torch_makes_by_default():
    logits, index = torch.randn(2, 37).bfloat16(), torch.arange(2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        law = kernels.sample_token(logits, index, index, 0.7, keep_law=True, impl="triton")[2]
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(law, kernels.process_logits_ref(logits, 0.7))


def test_vectors_may_have_gaps_or_be_one_number_for_all():
    target, laws, drafts, *vectors = random_block(4, 3, 37, seed=5)
    vectors[0] = torch.tensor([3, 1, 0, 2])
    gaps = [torch.stack((x, x + 1), -1)[..., 0] for x in (drafts, *vectors)]
    same(
        kernels.accept_draft(target, laws, *gaps, **SAMPLED, impl="triton"),
        kernels.accept_draft_ref(target, laws, *gaps, **SAMPLED),
    )
    seeds, index = torch.tensor([7]).expand(4), vectors[2]
    ours, theirs = (
        kernels.sample_token(target[:, 0], seeds, index, **SAMPLED, impl=impl) for impl in ("triton", "torch")
    )
    assert ours[0].tolist() == theirs[0].tolist()
    bias = torch.randn(37, 2)[:, 0]
    ours, theirs = (kernels.penalise(target, None, None, 1.0, bias, impl) for impl in ("triton", "torch"))
    assert torch.allclose(ours, theirs)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_kernel_equals_reference(law):
    """Drafted and one-hot, ragged, both rules, three dtypes, K = 0 .. 5: 64 sequences a law, no token differs."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for trial in range(16):
        verify, one_hot = ("rejection", "rejection", "coupled")[trial % 3], trial % 2 == 1
        n_slots, n_vocab = trial % 6, 1200 if trial % 8 == 2 else (32, 61)[trial % 2]
        block = random_block(4, n_slots, n_vocab, trial, law, dtypes[(trial // 3) % 3], one_hot=one_hot)
        expected = kernels.accept_draft(*block, **law, verify=verify, impl="torch")
        same(kernels.accept_draft(*block, **law, verify=verify, impl="triton"), expected)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_sample_token_equals_reference_and_keeps_the_law_that_raced(law):
    torch.manual_seed(1)
    logits, seeds = torch.randn(6, 1100) * 3, torch.arange(6) - 3
    args = (logits, seeds, seeds + 10**6)
    for options in ({}, {"stream": DRAFT, "rounds": seeds + 50, "keep_law": True}):
        expected = kernels.sample_token(*args, **law, **options, impl="torch")
        tokens, log_probs, kept = kernels.sample_token(*args, **law, **options, impl="triton")
        assert torch.equal(tokens, expected[0]) and (log_probs - expected[1]).abs().max() < 1e-5
        assert (kept is None) == (expected[2] is None) == (not options or law["temperature"] == 0)
        if kept is not None:
            assert torch.equal(kept, expected[2])


def test_penalise_equals_reference():
    torch.manual_seed(2)
    ahead, bias = torch.randint(0, 1100, (2, 3)), torch.randn(1100, dtype=torch.float64)
    seen = torch.rand(2, 1100) < 0.3
    bias[5] = -torch.inf
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = (torch.randn(2, 4, 1100) * 3).to(dtype)
        before = logits.clone()
        for known, added in ((seen, bias), (None, bias), (seen, None)):
            args = (logits, known, ahead, 1.7, added)
            assert torch.equal(kernels.penalise(*args, impl="triton"), kernels.penalise_ref(*args))
        assert torch.equal(logits, before)  # a new tensor
        assert kernels.penalise(logits, None, None, 1.0, None, impl="triton") is logits  # nothing to do: no copy


def test_commit_equals_reference():
    """Rows of all states; those that have ended keep theirs, read no logits and get no token."""
    for trial, law in enumerate((LAWS[0], LAWS[1], LAWS[6])):
        for n_slots, verify in ((0, "rejection"), (3, "rejection"), (3, "coupled")):
            block = random_block(6, n_slots, 40, 70 + trial, law)
            lengths, dead = torch.arange(5, 11), torch.tensor([False, True, False, False, True, False])
            states, results = [], []
            for impl in ("torch", "triton"):
                limits, last = lengths + torch.where(dead, 0, 7), lengths[:, None] + torch.arange(2)
                state = kernels.RowState(lengths.clone(), limits, block[6].clone(), last)
                target = block[0].clone()
                if impl == "triton":
                    target[dead] = torch.nan
                args = (target, *block[1:6], state.rounds)
                results.append(kernels.accept_draft(*args, **law, verify=verify, state=state, impl=impl))
                states.append(state)
            same(results[1], results[0])
            assert all(map(torch.equal, *states))
            assert (results[1][0][dead] == -1).all() and (results[1][1][dead] == 0).all()


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.05}, {"top_k": 30, "top_p": 0.6}], ids=str
)
def test_cuts_are_exact(filters):
    """35 rows of seven kinds against float64: the same tokens are kept, all ties at the cut among them."""
    rng = np.random.default_rng(0)
    n_vocab, rows = 1500, []
    for i in range(5):
        normal = rng.normal(size=n_vocab).astype(np.float32) * (1 + i)
        holes, one = normal.copy(), np.full(n_vocab, -np.inf, np.float32)
        holes[rng.random(n_vocab) < 0.7] = -np.inf
        one[17 * i] = 3.0
        peaky = normal.copy()
        peaky[i] += 30
        zeros = np.where(rng.random(n_vocab) < 0.5, 0.0, -0.0) - (np.arange(n_vocab) % 3 == i % 3) * np.float32(1.5)
        grid = torch.tensor(normal).bfloat16().float().numpy()
        rows += [normal, peaky, grid, holes, np.full(n_vocab, -2.5 * i, np.float32), zeros.astype(np.float32), one]
    logits = torch.tensor(np.stack(rows))
    law = {"temperature": 0.8} | filters
    seeds = torch.arange(len(rows))
    kept = kernels.sample_token(logits, seeds, seeds, **law, keep_law=True, impl="triton")[2] > -torch.inf
    scaled = (logits - logits.amax(-1, keepdim=True)) / 0.8  # float32, as the cut sees them
    exact = kernels.process_logits_ref(scaled.double(), **law | {"temperature": 1.0}) > -torch.inf
    assert (kept == exact).all(1).tolist() == [True] * len(rows)


def test_a_row_has_the_same_bits_whatever_rides_along():
    """K, B, the neighbours and the padding of rows change no bit of a row's tokens and log-probabilities."""
    for law in (LAWS[0], LAWS[1], LAWS[6]):
        target, draft, drafts, _, seeds, index, rounds = random_block(3, 3, 5000, 5, law)
        n_drafted = torch.tensor([3, 1, 2])
        rest = (seeds, index, rounds)
        whole = kernels.accept_draft(target, draft, drafts, n_drafted, *rest, **law, impl="triton")
        row = slice(1, 2)
        padded = torch.full((1, 4, 5008), torch.nan)
        padded[..., :5000] = target[row]
        for k, logits in ((3, padded[..., :5000]), (1, target[row])):
            alone = kernels.accept_draft(
                logits[:, : k + 1], None if draft is None else draft[row, :k], drafts[row, :k], n_drafted[row],
                *(x[row] for x in rest), **law, impl="triton",
            )  # fmt: skip
            n = int(whole[1][1])
            assert alone[1].item() == n
            assert torch.equal(alone[0][0, : n + 1], whole[0][1, : n + 1])
            assert torch.equal(alone[2][0, : n + 1], whole[2][1, : n + 1])
        plain = kernels.sample_token(target[:, 0], seeds, index, **law, impl="triton")
        none = kernels.accept_draft(target, draft, drafts, n_drafted * 0, *rest, **law, impl="triton")
        assert torch.equal(none[0][:, 0], plain[0]) and torch.equal(none[2][:, 0], plain[1])  # k = 0 is a plain token


# ----------------------------------------------------------------------------------------------------------------------
# Edges


@pytest.mark.parametrize("bad", ["nan", "inf", "empty"])
def test_spoiled_rows_give_a_token_of_the_vocabulary_and_no_finite_log_prob(bad):
    for law in LAWS:
        for verify in ("rejection", "coupled"):
            target, draft, drafts, _, *rest = random_block(3, 2, 30, 9, law)
            if bad == "empty":
                target[1] = -torch.inf
            else:
                target[1, :, 11] = float(bad)
            args = (target, draft, drafts, torch.full((3,), 2), *rest)
            expected = kernels.accept_draft(*args, **law, verify=verify, impl="torch")
            tokens, n_accepted, log_probs = kernels.accept_draft(*args, **law, verify=verify, impl="triton")
            n = int(n_accepted[1])
            assert ((tokens[1, : n + 1] >= 0) & (tokens[1, : n + 1] < 30)).all(), law
            assert not math.isfinite(log_probs[1, n].item()), law
            assert torch.equal(tokens[::2], expected[0][::2])  # the neighbours notice nothing


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_extreme_uniforms_never_emit_a_token_of_probability_zero(monkeypatch, word):
    force_words(monkeypatch, word)
    target, draft = torch.zeros(4, 3, 8), torch.zeros(4, 2, 8)
    target[..., 4:], draft[..., :4] = -torch.inf, -torch.inf
    zeros = torch.zeros(4, dtype=torch.int64)
    for law in (None, draft):
        args = (target, law, torch.full((4, 2), 5), zeros + 2, torch.arange(4), zeros, zeros, 1.0)
        tokens, n_accepted, _ = kernels.accept_draft(*args, impl="triton")
        assert (n_accepted == 0).all() and (tokens[:, 0] >= 0).all() and (tokens[:, 0] < 4).all()


@interpreted
def two_kernel(seed, index, round):
    return index * 0.0 + 2.0


def test_a_law_is_never_rejected_by_itself_and_an_empty_residual_draws_from_the_law(monkeypatch):
    target, _, drafts, _, seeds, index, rounds = random_block(8, 3, 20, 3)
    law = kernels.process_logits_ref(target[:, :-1], 1.0)
    full = torch.full((8,), 3)
    assert (kernels.accept_draft(target, law, drafts, full, seeds, index, rounds, 1.0, impl="triton")[1] == 3).all()
    monkeypatch.setattr(kernels, "_uniform", two_kernel)
    monkeypatch.setattr(kernels, "accept_uniform", lambda seeds, index, rounds: torch.full(seeds.shape, 2.0))
    args = (target, law, drafts, full, seeds, index, rounds, 1.0)
    same(kernels.accept_draft(*args, impl="triton"), kernels.accept_draft(*args, impl="torch"))


# ----------------------------------------------------------------------------------------------------------------------
# Memory, order, launches


def watched_round(law, verify, n_vocab, n_slots=3, n_rows=2, seed=None, one_hot=False):
    block = random_block(n_rows, n_slots, n_vocab, 4, law, one_hot=one_hot)
    target, draft = block[:2]
    named = {"target": target} | ({} if draft is None else {"draft": draft})
    with watch(**named, drafts=block[2]) as memory:
        if seed is None:
            result = kernels.accept_draft(*block, **law, verify=verify, impl="triton")
        else:
            with shuffled(seed):
                result = kernels.accept_draft(*block, **law, verify=verify, impl="triton")
    return block, result, memory


@pytest.mark.parametrize("law", [LAWS[0], LAWS[1], LAWS[6]], ids=str)
@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_order_of_programs_changes_nothing_and_nothing_conflicts(law, verify):
    _, expected, memory = watched_round(law, verify, 5001)
    assert not memory.violations
    # block winners are read behind the ticket by the program that arrives last
    behind_ticket = {"ranks", "winners", "winner_log_probs"}
    assert {(c.kind, c.name) for c in memory.conflicts} <= {("RAW", name) for name in behind_ticket}
    filtered = law is LAWS[6]
    names = [launch.kernel for launch in memory.launches]
    judge = "_greedy_kernel" if law is LAWS[0] else "_accept_kernel"
    assert names == ["_stats_kernel"] + ["_threshold_kernel"] * filtered + [judge]
    for seed in (1, 2, 3):
        _, got, _ = watched_round(law, verify, 5001, seed=seed)
        assert all(map(torch.equal, got, expected))


def test_logits_are_read_as_designed():
    """Unaligned rows of 50257: the slots that a row needs once for statistics, then one row of the target and one of the draft."""
    block, (_, n_accepted, _), memory = watched_round(LAWS[1], "rejection", 50257, n_slots=2, n_rows=1)
    row = 50257 * 4
    n_drafted = int(block[3].sum())
    fell = int((n_accepted < block[3]).sum())
    slack = 4096  # single logits: of the drafts and of the winners
    every = 50  # programs that judge the drafts for themselves
    assert 0 <= memory.loaded["target"] - row * (n_drafted + 1 + 1) <= slack * (n_drafted + 1)
    assert 0 <= memory.loaded["draft"] - row * (n_drafted + fell) <= 4 * every * n_drafted
    workspace = sum(n for name, n in memory.stored.items() if name not in ("target", "draft"))
    assert workspace < 2 * row  # no second copy of anything


def test_every_output_is_written(monkeypatch):
    """Workspaces and outputs begin as NaN and nonsense."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else 123456789)

    for law in LAWS:
        for verify in ("rejection", "coupled"):
            block = random_block(3, 4, 50, 8, law)
            expected = kernels.accept_draft(*block, **law, verify=verify, impl="triton")
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", poisoned)
                got = kernels.accept_draft(*block, **law, verify=verify, impl="triton")
            assert all(map(torch.equal, got, expected))
            assert torch.isfinite(got[2]).all()


# ----------------------------------------------------------------------------------------------------------------------
# The law that comes out, without sampling: from the kernels' own probabilities


@interpreted
def laws_kernel(
    logits, maxima, sums, out, n_vocab, n_blocks, temperature, BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, slots, ids = tl.program_id(0), tl.arange(0, SLOTS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    maximum, mass, cut = kernels._row_laws(
        maxima, sums, None, None, slots, slots < 1 + row, n_blocks, temperature, BLOCKS, False
    )
    maximum, mass = kernels._pick(maximum, slots, row), kernels._pick(mass, slots, row)
    x = kernels._load_logits(logits + row * n_vocab, ids, n_vocab, n_vocab)
    prob = kernels._law(x, maximum, mass, kernels._pick(cut, slots, row), temperature)[1]
    tl.store(out + row * n_vocab + ids, prob, mask=ids < n_vocab)


def kernel_laws(logits: torch.Tensor, temperature=1.0) -> np.ndarray:
    """The probabilities (N, V) float32 that the kernels judge and draw with."""
    n_rows, n_vocab = logits.shape
    n_blocks = -(-n_vocab // kernels.STATS_BLOCK)
    maxima, sums, out = torch.empty(n_rows, n_blocks), torch.empty(n_rows, n_blocks), torch.empty(n_rows, n_vocab)
    best, ticket = torch.empty(n_rows, n_blocks, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    kernels._stats_kernel[1, n_rows, n_blocks](
        logits, None, None, None, None, maxima, sums, best, ticket, 0, n_vocab, 0, 0, n_rows, n_rows, n_vocab, n_vocab, 0,
        n_blocks, temperature, kernels.STATS_BLOCK,
    )  # fmt: skip
    laws_kernel[n_rows, -(-n_vocab // 4096)](logits, maxima, sums, out, n_vocab, n_blocks, temperature, 64, 16, 4096)
    return out.numpy()


def implied_law(target_probs: np.ndarray, draft_probs: np.ndarray, proposing: np.ndarray) -> np.ndarray:
    """What comes out when drafts are drawn from `proposing` and judged with the other two."""
    p, q = target_probs.astype(np.float64), draft_probs.astype(np.float64)
    accepted = proposing * np.minimum(1, np.divide(p, q, out=np.ones_like(p), where=q > 0))
    residual = np.maximum(target_probs - draft_probs, 0).astype(np.float64)
    return accepted + (1 - accepted.sum()) * residual / residual.sum()


@pytest.mark.parametrize("n_vocab", [32, 50257, 128256])
def test_implied_law_is_the_targets(n_vocab):
    """Drafts near the target, where an error of q shows most. Total variation 5e-6; a rounded q, or a wrong temperature, fails."""
    torch.manual_seed(0)
    target = torch.randn(1, n_vocab) * 3
    draft = kernels.process_logits_ref(target + torch.randn(1, n_vocab) * 0.3, 1.0)
    target_probs = kernel_laws(target, 0.9)[0]
    draft_probs = kernel_laws(draft)[0]
    exact = (target.double() / 0.9).softmax(-1)[0].numpy()
    proposing = draft.double().softmax(-1)[0].numpy()

    def distance(p=target_probs, q=draft_probs, proposing=proposing):
        return np.abs(implied_law(p, q, proposing) - exact).sum() / 2

    assert distance() <= 5e-6
    assert distance(q=torch.tensor(draft_probs).bfloat16().float().numpy()) > 1e-4
    assert distance(p=kernel_laws(target, 0.95)[0]) > 1e-3
    warmer = (draft.double() / 1.05).softmax(-1)[0].numpy()
    assert distance(proposing=warmer) > 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# The law that comes out, by sampling: the kernels' arithmetic in NumPy, fast enough for statistics


def twin_law(logits: np.ndarray, temperature=1.0) -> np.ndarray:
    scaled = (logits - logits.max(-1, keepdims=True)) / np.float32(temperature)
    weights = np.exp(scaled)
    return weights / weights.sum(-1, keepdims=True)


def twin(target, draft, drafts, n_drafted, seeds, index, rounds, temperature=1.0, resample=RESAMPLE, residual=True):
    """accept_draft, rejection rule, float32: target (N, K+1, V), draft (N, K, V) or None -> tokens (N, K+1), n_accepted."""
    n_rows, n_slots = drafts.shape
    rows, n, going = np.arange(n_rows), np.zeros(n_rows, dtype=np.int64), np.ones(n_rows, dtype=bool)
    target_probs = twin_law(target, temperature)
    draft_probs = None if draft is None else twin_law(draft)
    for slot in range(n_slots):
        p = target_probs[rows, slot, drafts[:, slot]]
        q = np.float32(1) if draft is None else draft_probs[rows, slot, drafts[:, slot]]
        going = going & (numpy_uniform(seeds, index + slot, rounds) * q < p) & (slot < n_drafted)
        n += going
    fell, mass = n < n_drafted, target_probs[rows, n]
    if residual:
        at = np.minimum(n, n_slots - 1)
        if draft is None:
            rest = np.where(np.arange(target.shape[-1]) == drafts[rows, at][:, None], np.float32(0), mass)
        else:
            rest = np.maximum(mass - draft_probs[rows, at], 0)
        mass = np.where(fell[:, None] & (rest > 0).any(-1, keepdims=True), rest, mass)
    stream, own_round = np.where(fell, resample, SAMPLE), np.where(fell, rounds, 0)
    tokens = np.concatenate((drafts, np.zeros((n_rows, 1), dtype=np.int64)), 1)
    tokens[rows, n] = numpy_race(mass, seeds, index + n, stream, own_round)
    return np.where(np.arange(n_slots + 1) > n[:, None], -1, tokens), n


def test_twin_equals_kernel():
    """400 sequences: drafted and one-hot, ragged, K = 3, laws near and far."""
    for trial in range(8):
        block = random_block(50, 3, 32, 300 + trial, noise=(0.3, 2.0)[trial % 2], one_hot=trial >= 4)
        temperature = (1.0, 0.7)[trial // 2 % 2]
        tokens, n_accepted, _ = kernels.accept_draft(*block, temperature, impl="triton")
        got = twin(*(None if x is None else x.numpy() for x in block), temperature)
        assert got[0].tolist() == tokens.tolist() and got[1].tolist() == n_accepted.tolist()


def twin_round(n_rounds: int, **wrong):
    """Rounds from one state on a bigram model: tokens (N, 3), n_accepted (N,), and the laws of target and drafter."""
    rng = np.random.default_rng(5)
    target = (rng.normal(size=(32, 32)) * 1.2).astype(np.float32)
    draft = target + (rng.normal(size=(32, 32)) * 0.6).astype(np.float32)
    seeds, index, rounds = np.arange(n_rounds), np.full(n_rounds, 9), np.full(n_rounds, 4)
    drafts, last = [], np.zeros(n_rounds, dtype=np.int64)
    target_rows, draft_rows = [target[last]], []
    for slot in range(2):
        draft_rows.append(draft[last])
        last = numpy_race(twin_law(draft[last]), seeds, index + slot, DRAFT, rounds)
        drafts.append(last)
        target_rows.append(target[last])
    block = (np.stack(target_rows, 1), np.stack(draft_rows, 1), np.stack(drafts, 1), np.full(n_rounds, 2))
    tokens, n_accepted = twin(*block, seeds, index, rounds, **wrong)
    p, q = (torch.tensor(x).double().softmax(-1).numpy() for x in (target, draft))
    return tokens, n_accepted, p, q


def round_p_values(n_rounds: int, **wrong) -> dict[str, float]:
    tokens, n, p, q = twin_round(n_rounds, **wrong)
    first = np.minimum(p, q)[0]  # of a first token that was accepted
    second = first[:, None] * np.minimum(p, q)
    result = {"first": chi_square_p(np.bincount(tokens[:, 0], minlength=32), p[0])}
    law = first @ p / first.sum()
    result["second"] = chi_square_p(np.bincount(tokens[n >= 1, 1], minlength=32), law)
    law = second.sum(0) @ p / second.sum()
    result["bonus"] = chi_square_p(np.bincount(tokens[n == 2, 2], minlength=32), law)
    law = np.array([1 - first.sum(), first.sum() - second.sum(), second.sum()])
    result["accepted"] = chi_square_p(np.bincount(n, minlength=3), law)
    return result


def test_twin_draws_from_the_target():
    """Total variation 1%, power 0.99 at alpha = 1e-6 each: the two tokens behind a draft, the bonus, and how many are accepted."""
    n_rounds = max(250_000, sample_size(32))
    assert min(round_p_values(n_rounds).values()) > 1e-6


@pytest.mark.parametrize(
    "wrong",
    [{"resample": DRAFT}, {"residual": False}, {"temperature": 1.1}],
    ids=["shared stream", "no residual", "warm"],
)
def test_wrong_rules_are_noticed(wrong):
    """What this cannot notice: `<=` for `<`, whose effect is 2^-32 of a draw, and a q rounded to bfloat16 (the implied law does)."""
    assert min(round_p_values(60_000, **wrong).values()) < 1e-6
