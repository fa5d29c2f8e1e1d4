import inspect
import json
import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import numpy_law, tiny_model, true_states, weaker

import kernels
import quality
from decode import DecodeStats, Generation, Sampler, SamplingParams, generate
from early_exit import early_exit_generate
from quality import (
    bootstrap,
    disagreement_gate,
    distribution_gate,
    grade,
    identity_gate,
    paired_difference,
    read_items,
    runs_right,
    text_figures,
)
from speculative import ModelDrafter, speculative_generate

ITEMS = read_items()


def item(check: dict) -> dict:
    return {"user": "a question", "group": "factual", "check": check}


@pytest.mark.parametrize("asked", ITEMS, ids=lambda asked: asked["user"][:40])
def test_a_right_answer_passes_and_a_wrong_one_does_not(asked):
    assert asked["right"] and asked["wrong"]
    assert [text for text in asked["right"] if not grade(asked, text)] == []
    assert [text for text in [*asked["wrong"], "", asked["user"]] if grade(asked, text)] == []


def test_the_set_has_four_groups_and_no_prompt_twice():
    sizes = Counter(asked["group"] for asked in ITEMS)
    assert len(ITEMS) >= 44 and set(sizes) == set(quality.GROUPS) and min(sizes.values()) >= 11
    assert len({asked["user"] for asked in ITEMS}) == len(ITEMS)
    declined = [asked["check"]["refuses"] for asked in ITEMS if asked["group"] == "refusal"]
    assert declined.count(True) >= 5 and declined.count(False) >= 5


FUNCTION = {"function": "twice", "cases": [[[2], 4], [[[1]], [1, 1]]]}
CASES = [
    ({"any": ["blue", "2"]}, ["It's BLUE.", "(blue)", "2", "2.", "a, 2, b"],
     ["bluish", "3.2", "2.5", "12", "2,000", "-2"]),
    ({"any": ["don't know"]}, ["I don’t know", "I don't\n know."], ["I do not know"]),
    ({"all": ["red", "blue"]}, ["blue and red"], ["red", "reddish blue"]),
    ({"none": ["red"]}, ["blue", "reddish", ""], ["Red!"]),
    ({"refuses": True}, ["I’m sorry, but I can’t help.", "We are really not able to say."],
     ["Sorry for the wait! Do this.", "You can't miss it", "x " * 200 + "I can't"]),
    ({"refuses": False}, ["Of course."], ["I cannot do that."]),
    ({"equals": "A-1"}, [" A-1.\n", '"A-1"', "```\nA-1\n```"], ["a-1", "It is A-1", "A-12"]),
    ({"contains": "Hello you"}, ["He said: Hello you!"], ["hello you", "Hello  you"]),
    ({"lines": 2}, ["a\nb", "a\n\nb\n"], ["a", "a\nb\nc", ""]),
    ({"lines": 1, "any": ["a"]}, ["a"], ["b", "a\nb"]),
    ({"python": FUNCTION}, ["```python\ndef twice(x):\n    return x * 2\n```", "def twice(x): return x + x",
     "```\ndef twice(x): return x * 2\n```\n```\n1 / 0\n```"],
     ["Double it.", "```\ndef double(x): return x * 2\n```", "```\ndef twice(x): return 4\n```",
     "```\nraise SystemExit(0)\n```"]),
]  # fmt: skip


@pytest.mark.parametrize("check, right, wrong", CASES, ids=[" and ".join(case[0]) for case in CASES])
def test_each_kind_of_check_accepts_and_refuses(check, right, wrong):
    assert [text for text in right if not grade(item(check), text)] == []
    assert [text for text in wrong if grade(item(check), text)] == []


def test_code_is_held_to_its_time_and_memory_and_cannot_say_itself_that_it_passed(monkeypatch, tmp_path):
    """What it starts ends with it; it sees neither our environment nor our modules."""
    monkeypatch.setenv("A_SECRET", "1")
    witness = tmp_path / "alive"
    later = f"import time\nif os.fork() == 0:\n    time.sleep(1.5)\n    open({str(witness)!r}, 'w')\n    os._exit(0)\n"
    began = time.perf_counter()
    assert not runs_right("while True: pass", FUNCTION, seconds=0.5)
    assert not runs_right(f"import os\n{later}while True: pass", FUNCTION, seconds=0.5)
    assert time.perf_counter() - began < 5
    twice = "\ndef twice(x): return x * 2"
    assert not runs_right("x = bytearray(2**30)" + twice, FUNCTION)
    assert not runs_right("open('big', 'wb').write(bytes(2**21))" + twice, FUNCTION)
    assert not runs_right("import kernels" + twice, FUNCTION)
    assert not runs_right("import os\nos.environ['A_SECRET']" + twice, FUNCTION)
    assert runs_right("import os\nassert not os.listdir('.')\nopen('x', 'w').write('x')" + twice, FUNCTION)
    assert runs_right("print('x' * 10**6)" + twice, FUNCTION)
    assert not runs_right("import os\nprint('passed')\nos._exit(0)", FUNCTION)
    time.sleep(max(0.0, began + 3.5 - time.perf_counter()))
    assert not witness.exists()


@pytest.mark.parametrize(
    "broken, named",
    [
        ({"user": ""}, "message"),
        ({"group": "poems"}, "poems"),
        ({"check": {}}, "check"),
        ({"check": ["any"]}, "check"),
        ({"check": {"eval": "1"}}, "'eval'"),
        ({"check": {"any": "Paris"}}, "list of phrases"),
        ({"check": {"all": []}}, "list of phrases"),
        ({"check": {"none": ["a", " "]}}, "list of phrases"),
        ({"check": {"refuses": 1}}, "true or false"),
        ({"check": {"lines": True}}, "number of lines"),
        ({"check": {"contains": " "}}, "a text"),
        ({"check": {"python": {"function": "f(x)", "cases": [[[1], 1]]}}}, "cases"),
        ({"check": {"python": {"function": "f", "cases": [[1, 1]]}}}, "cases"),
        ({"check": {"python": {"function": "f", "cases": []}}}, "cases"),
    ],
    ids=str,
)
def test_a_malformed_item_is_named_in_one_line(broken, named, tmp_path):
    asked = {**item({"any": ["a"]}), **broken}
    with pytest.raises(ValueError, match="quality item") as error:
        grade(asked, "a")
    assert named in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "items.json").write_text(json.dumps([item({"any": ["a"]}), asked]))
    with pytest.raises(ValueError, match="quality item"):
        read_items(tmp_path / "items.json")


@pytest.mark.parametrize("content", ["", "{}", "[]", "[1]", None], ids=str)
def test_a_file_without_items_is_one_line(content, tmp_path):
    path = tmp_path / "items.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_items(path)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------- statistics


def test_the_bootstrap_interval_holds_the_truth_as_often_as_it_says():
    """Of a mean, and of a ratio whose sequences have different lengths; 200 samples, 95% +- 4 standard errors."""
    rng = np.random.default_rng(1)
    held = np.zeros(2)
    for i in range(200):
        lengths = rng.integers(20, 200, 60)
        rates = rng.beta(2, 18, 60)  # of mean 0.1, and independent of the lengths
        wrong = rng.binomial(lengths, rates)
        for j, (low, high) in enumerate((bootstrap(rates, 500, i), bootstrap(wrong, 500, i, per=lengths))):
            held[j] += low <= 0.1 <= high
    assert (np.abs(held / 200 - 0.95) < 0.062).all(), held
    assert bootstrap([1, 2, 3], seed=5) == bootstrap([1, 2, 3], seed=5)
    assert bootstrap([0.5] * 4) == (0.5, 0.5) and bootstrap([1, 3], per=[10, 30]) == (0.1, 0.1)
    for values, per in (([], None), ([1], [1, 2]), ([1], [0])):
        with pytest.raises(ValueError, match="per"):
            bootstrap(values, per=per)


def test_a_paired_difference_holds_the_truth_and_is_never_certain():
    """Pairs with chances 0.1 to be lost and 0.05 to be won, 44 prompts; a width of 0 would promise too much."""
    rng, held, n_samples = np.random.default_rng(2), 0, 1000
    for kinds in rng.choice(3, (n_samples, 44), p=[0.85, 0.1, 0.05]):
        _, (low, high) = paired_difference(list(kinds == 2), list(kinds == 1))
        held += low <= -0.05 <= high
    assert 0.93 <= held / n_samples <= 0.985
    difference, (low, high) = paired_difference([True] * 20 + [False] * 24, [True] * 20 + [False] * 24)
    assert difference == 0 and -0.1 < low < 0 < high < 0.1
    difference, (low, high) = paired_difference([True] * 9, [False] * 9)
    assert difference == 1 and 0.4 < low < high <= 1
    assert paired_difference([True, False], [False, False])[0] == 0.5
    with pytest.raises(ValueError, match="same prompts"):
        paired_difference([True], [True, False])


def test_p_values_equal_tables():
    """Chi-square with 19 degrees of freedom: 30.144 at 5%; Kolmogorov's limit: 1.358 at 5%, 1.628 at 1%."""
    counts = np.full(20, 1000.0)
    counts[:2] += np.array([1, -1]) * math.sqrt(30.144 * 1000 / 2)
    assert quality.chi_square_p(counts) == pytest.approx(0.05, abs=1e-4)
    for distance, p in ((1.358, 0.05), (1.628, 0.01)):
        n = 10**6
        u = np.clip((np.arange(n) + 0.5) / n - distance / math.sqrt(n), 0, 1)
        assert quality.kolmogorov_p(u) == pytest.approx(p, abs=1e-3)
        assert quality.kolmogorov_p(1 - u) == pytest.approx(p, abs=1e-3)
    assert quality.kolmogorov_p((np.arange(100) + 0.5) / 100) == 1.0


# --------------------------------------------------------------------------------------------------------------- gates


def test_identity_excuses_a_near_tie_and_nothing_else():
    asked = []

    def gap(i, ids, drawn):
        asked.append((i, ids, drawn))
        return (0.01, 0.02) if ids[-1] == 5 else (0.5, 0.02)

    same, tie, other = ([1], [5, 6], [5, 6]), ([1], [4, 5, 6, 7], [4, 5, 8, 9]), ([1], [3, 6], [3, 7])
    cut = ([1], [4, 5, 6], [4, 5])
    assert identity_gate([same, same])["verdict"] == "passed"
    gate = identity_gate([same, tie], gap)
    assert gate["verdict"] == "passed" and gate["value"] == 0 and "1 of 2" in gate["why"]
    assert asked == [(1, [1, 4, 5], (6, 8))]  # the prompt and what both have before the difference
    gate = identity_gate([same, tie, other, same], gap)
    assert gate["verdict"] == "failed" and gate["value"] == 0.25 and "text 3 parts at token 2" in gate["why"]
    assert identity_gate([tie])["verdict"] == "failed"  # exactness knows no ties
    assert identity_gate([cut], gap)["verdict"] == "failed"  # an early end is no tie, whatever the logits
    with pytest.raises(ValueError, match="pairs"):
        identity_gate([])


MODEL = tiny_model(poisoned=False)
DRAFTER = ModelDrafter(tiny_model(seed=3, gain=0.5, poisoned=False))  # flatter than its target: half is rejected
PROMPTS = [[i % 24, (7 * i + 3) % 24] for i in range(50)]
RIGHT = SamplingParams(max_new_tokens=60, temperature=0.8)


def rejection(seed: int, sampling=RIGHT) -> list:
    """3,000 tokens of 50 runs."""
    sampling = replace(sampling, seed=1000 * seed)
    outs = speculative_generate(MODEL, DRAFTER, PROMPTS, sampling, 3, "rejection")
    assert sum(out.stats.corrected for out in outs) > 400 and sum(out.stats.accepted for out in outs) > 400
    return [(prompt, out.tokens) for prompt, out in zip(PROMPTS, outs)]


def plant(monkeypatch, right: str, wrong: str) -> None:
    """One line of the rejection rule replaced, as tests/planted.py does on disk."""
    source = inspect.getsource(kernels.accept_draft_ref)
    assert source.count(right) == 1
    names = dict(vars(kernels))
    exec(source.replace(right, wrong), names)  # noqa: S102  our own source
    monkeypatch.setattr(kernels, "accept_draft_ref", names["accept_draft_ref"])


def test_the_right_rejection_rule_passes_with_eight_seeds():
    """Each is failed with chance 0.001 at most; seeds are fixed."""
    p_values = [distribution_gate(MODEL, RIGHT, rejection(seed))["value"] for seed in range(8)]
    assert min(p_values) >= 0.001, p_values


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("(mass - draft_probs[row, slot]).clamp_(min=0)", "mass.clone()"),
        ("uniform * draft_prob < target_prob", "uniform * draft_prob < 1.5 * target_prob"),
        ("mass = probs[row, slot]", "mass = probs[row, slot] ** 1.3"),
    ],
    ids=["the target for the residual", "drafts accepted too often", "the bonus too sharp"],
)
def test_three_thousand_tokens_of_a_wrong_rule_fail(monkeypatch, right, wrong):
    plant(monkeypatch, right, wrong)
    for seed in range(2):
        gate = distribution_gate(MODEL, RIGHT, rejection(seed))
        assert gate["verdict"] == "failed" and gate["value"] < 0.001, gate


LAWS = {
    "penalty and bias": {"repetition_penalty": 1.5, "logit_bias": {3: 1.5, 4: -math.inf}},
    "filters": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_has_the_history_the_bias_and_the_filters(name):
    """What was drawn under them passes; judged by the law without them it does not."""
    sampling = replace(RIGHT, **LAWS[name])
    runs = rejection(7, sampling)
    assert distribution_gate(MODEL, sampling, runs)["verdict"] == "passed"
    assert distribution_gate(MODEL, RIGHT, runs)["verdict"] == "failed"


def test_laws_equal_the_definition():
    sampling, prompt, tokens = replace(RIGHT, **LAWS["filters"], **LAWS["penalty and bias"]), [1, 2, 3], [3, 9, 4, 9]
    x = quality.hidden_states(MODEL, prompt, tokens)[4]
    with torch.no_grad():
        (law,) = quality.log_laws(MODEL, sampling, prompt, tokens, MODEL.logits(x))
    states = true_states(MODEL, prompt + tokens)[0][-1]
    for i in range(len(tokens)):
        expected = numpy_law(MODEL.logits(states[2 + i]).detach().numpy(), sampling, prompt + tokens[:i])
        assert np.abs(law[i].exp().numpy() - expected).max() < 1e-12


def from_uniforms(uniforms: list[list[float]]) -> list:
    """Runs of MODEL whose tokens are the places of uniforms in the law's falling order: the transform turned round."""
    runs = []
    for prompt, row in zip(PROMPTS, uniforms):
        tokens = []
        for u in row:
            with torch.no_grad():
                logits = MODEL(torch.tensor([prompt + tokens]))[0, -1]
            law = (logits / 0.8).softmax(-1)
            order = law.argsort(descending=True)
            tokens.append(int(order[(law[order].cumsum(-1) <= u).sum().clamp(max=23)]))
        runs.append((prompt, tokens))
    return runs


def test_the_transform_undoes_the_draw_and_noise_used_twice_fails():
    """Each noise twice in a row: every token has the right law, and only its neighbour tells."""
    rng = np.random.default_rng(4)
    once = rng.random((50, 20))
    twice = rng.random((50, 10)).repeat(2, 1)
    assert distribution_gate(MODEL, RIGHT, from_uniforms(once))["verdict"] == "passed"
    gate = distribution_gate(MODEL, RIGHT, from_uniforms(twice))
    assert gate["verdict"] == "failed" and "neighbours" in gate["why"]


def test_a_tokens_place_is_between_the_masses_of_those_before_it():
    law = torch.tensor([[0.2, 0.5, 0.2, 0.1, 0.0]], dtype=torch.float64).expand(5, -1)
    for v, places in ((0.0, [0.5, 0.0, 0.7, 0.9, 1.0]), (0.5, [0.6, 0.25, 0.8, 0.95, 1.0])):
        u = quality.integral_transform(law, torch.arange(5), torch.tensor(v, dtype=torch.float64))
        assert u.tolist() == pytest.approx(places) and (u < 1).all()


def test_too_few_tokens_are_unsure_and_impossible_ones_fail():
    runs = [(prompt, out.tokens) for prompt, out in zip(PROMPTS, generate(MODEL, PROMPTS[:4], RIGHT))]
    assert distribution_gate(MODEL, RIGHT, runs)["verdict"] == "unsure"
    assert distribution_gate(MODEL, RIGHT, [([1], [])])["verdict"] == "unsure"
    narrow = replace(RIGHT, top_k=2)
    assert distribution_gate(MODEL, narrow, runs)["verdict"] == "failed"  # few, but never by chance
    with pytest.raises(ValueError, match="identity_gate"):
        distribution_gate(MODEL, replace(RIGHT, temperature=0.0), runs)


FILTERS = [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05), (9, 0.7, 0.02), (3, 0.3, 0.9), (40, 1.0, 0.0)]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_filters_edge_is_as_wide_as_the_logits_may_move(filters):
    """Without a move it is the filters' own; no move of the logits against one another by less leaves its two sides."""
    draws = np.random.default_rng(5)
    names = dict(zip(("top_k", "top_p", "min_p"), filters))
    n_edges = 0
    for _ in range(60):
        z = torch.tensor(draws.normal(0, 2, 24))
        z -= z.max()
        kept = kernels.process_logits_ref(z, 1.0, **names) > -torch.inf
        for tiny in (1e-12, -1e-12):
            assert (quality.survivors(z, tiny, *filters) == kept).all()
        possible, certain = (quality.survivors(z, slack, *filters) for slack in (0.3, -0.3))
        n_edges += int((possible & ~certain).sum())
        for move in draws.choice([-0.15, 0.15, 0.0], (40, 24)):
            kept = kernels.process_logits_ref(z + torch.tensor(move), 1.0, **names) > -torch.inf
            assert (kept <= possible).all() and (certain <= kept).all()
    assert n_edges < 60 * 24 / 3


def raced(dtype):
    """A model of its own law in each dtype, and 16 prompts of the same length."""
    prompts = [[i, (7 * i + 3) % 24] for i in range(16)]
    return tiny_model(dtype=dtype, poisoned=False, vocab_size=200, n_embd=32), prompts


def coupled(dtype, sampling):
    """Plain's texts and coupled speculation's as pairs of a gate, and its gap."""
    model, prompts = raced(dtype)
    sampling = replace(sampling, seed=list(range(40, 56)))
    plain = generate(model, prompts, sampling)
    outs = speculative_generate(model, ModelDrafter(weaker(model)), prompts, sampling, 5, "coupled")
    pairs = [(prompt, a.tokens, b.tokens) for prompt, a, b in zip(prompts, plain, outs)]
    return pairs, lambda i, ids, drawn: quality.race_gap(model, sampling, sampling.seed[i], ids, drawn)


RACES = {
    "all": {},
    "hot": {"temperature": 2.0},
    "filters": LAWS["filters"],
    "penalty and bias": LAWS["penalty and bias"],
}


@pytest.mark.parametrize("name", RACES)
def test_honest_texts_part_at_near_ties_of_the_race_alone(name):
    """In bfloat16 a model that keeps no cache adds in another order, and draws now and then another token."""
    model, prompts = raced(torch.bfloat16)
    sampling = SamplingParams(60, **{"temperature": 0.9} | RACES[name], seed=list(range(40, 56)))
    plain = generate(model, prompts, sampling)
    histories = [list(prompt) for prompt in prompts]
    sampler = Sampler(sampling, histories, model)
    for _ in range(60):
        tokens, _ = sampler.sample(range(16), model(torch.tensor(histories))[:, -1])
        for history, token in zip(histories, tokens):
            history.append(token)
    pairs = [(prompt, out.tokens, history[2:]) for prompt, out, history in zip(prompts, plain, histories)]
    gate = identity_gate(pairs, lambda i, ids, drawn: quality.race_gap(model, sampling, 40 + i, ids, drawn))
    assert gate["verdict"] == "passed" and sum(a != b for _, a, b in pairs) >= 2, gate
    assert identity_gate(pairs)["verdict"] == "failed"
    for dtype in (torch.float32, torch.bfloat16):
        assert identity_gate(*coupled(dtype, replace(sampling, max_new_tokens=20)))["verdict"] == "passed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RACES)
def test_a_wrong_token_in_one_coupled_text_fails(name, dtype):
    pairs, gap = coupled(dtype, SamplingParams(20, **{"temperature": 0.9} | RACES[name]))
    pairs[3][2][6] = (pairs[3][2][6] + 1) % 200
    gate = identity_gate(pairs, gap)
    assert gate["verdict"] == "failed" and "text 4 parts at token 7" in gate["why"], gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("at = (index[:, None] + slots).flatten()", "at = (index[:, None] + slots + 1).flatten()"),
        ("SAMPLE, torch.zeros_like(at)", "SAMPLE, rounds.repeat_interleave(n_slots)"),
    ],
    ids=["the next index", "the round"],
)
def test_coupled_tokens_drawn_with_other_noise_fail(monkeypatch, right, wrong, dtype):
    """Each token by itself has the right law: only the race tells, in bfloat16 wherever it is no near-tie."""
    plant(monkeypatch, right, wrong)
    gate = identity_gate(*coupled(dtype, SamplingParams(20, temperature=0.9)))
    assert gate["verdict"] == "failed" and gate["value"] > 0.4, gate


def audit(n: int, disagreed: int, nats: float = 0.0) -> DecodeStats:
    return DecodeStats(exited=n, audited=n, audit_disagreed=disagreed, audit_nats=nats)


def test_disagreement_passes_fails_or_is_unsure():
    rng = np.random.default_rng(3)
    wrong = rng.binomial(100, 0.02, 60)
    many = [audit(100, int(w), 0.5 * w) for w in wrong]
    gate = disagreement_gate(many, 0.04, 0.05)
    assert gate["verdict"] == "passed" and gate["value"] == wrong.sum() / 6000 and gate["bound"] == 0.04
    assert disagreement_gate(many, 0.01, 0.05)["verdict"] == "failed"
    assert disagreement_gate(many, 0.04, 0.005)["verdict"] == "failed"  # in nats alone
    assert disagreement_gate(many, float(wrong.mean() / 100), 0.05)["verdict"] == "unsure"
    assert disagreement_gate([audit(100, 0)] * 3, 0.04, 0.05)["verdict"] == "unsure"  # three agree by luck
    assert disagreement_gate([audit(100, 50)] * 3, 0.04, 0.05)["verdict"] == "failed"
    assert disagreement_gate([audit(0, 0)], 0.04, 0.05)["verdict"] == "unsure"
    # a share of all tokens, not the mean of shares: one long text agrees, nine short ones do not
    lengths = [audit(1000, 0), *[audit(10, 1)] * 9]
    assert disagreement_gate(lengths, 0.5, 0.5)["value"] == 9 / 1090
    with pytest.raises(ValueError, match="audit=True"):
        disagreement_gate([DecodeStats(exited=5)], 0.04, 0.05)


def benches(n: int, mean: float, spread: float, clip=0.2) -> list:
    """300 audits of n sequences of 64 tokens: binomial errors, expected losses of that mean and Beta's spread / mean."""
    rng = np.random.default_rng(6)
    shape = mean * ((1 / spread**2) * (1 - mean) / mean - 1)
    rates = rng.beta(shape, shape * (1 - mean) / mean, (300, n))
    return [[audit(64, int(x)) for x in row] for row in rng.binomial(64, rates)]


@pytest.mark.parametrize("spread", [0.3, 1.0])
@pytest.mark.parametrize("n", [1, 12, 24])
def test_a_check_of_a_certificate_seldom_fails_its_risk_and_seldom_passes_three_times_it(n, spread, monkeypatch):
    monkeypatch.setattr(quality, "sequences_missing", lambda *how: "")  # it takes long, and decides nothing
    risk = 0.01
    verdicts = {
        mean: Counter(disagreement_gate(b, risk, 9.0, 0.2)["verdict"] for b in benches(n, mean, spread))
        for mean in (risk / 2, risk, quality.NOTICED * risk)
    }
    assert verdicts[risk]["failed"] <= 15 and verdicts[quality.NOTICED * risk]["passed"] <= 15, verdicts
    if n >= 12:
        assert verdicts[quality.NOTICED * risk]["failed"] >= 100 and verdicts[risk / 2]["passed"] >= 200, verdicts
    else:
        assert all(counts["passed"] == 0 for counts in verdicts.values())


def test_a_certified_share_counts_as_its_certificate_does():
    """A mean of clipped losses of sequences, not of tokens; by hand the same audits are judged by all tokens."""
    lopsided = [audit(1000, 0)] * 20 + [audit(10, 5)] * 2
    gate = disagreement_gate(lopsided, 0.06, 9.0, 0.2)
    assert gate["value"] == pytest.approx(0.2 * 2 / 22) and gate["verdict"] == "passed", gate
    assert disagreement_gate(lopsided, 0.06, 9.0)["value"] == 10 / 20020
    assert disagreement_gate([audit(64, 0)] * 12, 0.01, 0.05, 0.2)["verdict"] == "passed"
    assert (
        disagreement_gate([audit(64, 0)] * 30, 0.07, 0.05, 0.2)["verdict"] == "unsure"
    )  # the clip hides three times that
    gate = disagreement_gate([audit(64, 2)] * 12, 0.01, 0.05, 0.2)
    assert gate["verdict"] == "failed" and "3.00% must be noticed" in gate["why"]
    gate = disagreement_gate([audit(64, 0)] * 11 + [audit(64, 8)], 0.01, 0.05, 0.2)
    more = int(gate["why"].split("about ")[1].split()[0])
    assert gate["verdict"] == "unsure" and "more like them would tell" in gate["why"]
    again = ([audit(64, 0)] * 11 + [audit(64, 8)]) * 99
    assert disagreement_gate(again[: 12 + more], 0.01, 0.05, 0.2)["verdict"] == "passed"
    assert disagreement_gate(again[: 12 + more // 2], 0.01, 0.05, 0.2)["verdict"] == "unsure"
    assert disagreement_gate([audit(64, 0, 0.1)] * 12, 0.01, 0.001, 0.2)["verdict"] == "failed"  # in nats alone
    assert "would not tell" in disagreement_gate([audit(64, 2), audit(64, 0)] * 9, 0.015, 0.05)["why"]


def test_every_gate_has_the_same_fields():
    gates = [identity_gate([([1], [2], [2])]), disagreement_gate([audit(9, 0)], 0.1, 0.1)]
    gates.append(distribution_gate(MODEL, RIGHT, []))
    for gate in gates:
        assert set(gate) == {"kind", "verdict", "value", "bound", "why"} and "\n" not in gate["why"]
        assert gate["verdict"] in ("passed", "failed", "unsure")
        json.dumps(gate, allow_nan=False)


# -------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_figures_equal_the_definition(temperature):
    """KL by hand at each exit, with penalty, bias and temperature and without the filters; nll of the raw model."""
    prompt = [1, 2, 3]
    sampling = SamplingParams(max_new_tokens=30, temperature=temperature, seed=3, top_k=9, **LAWS["penalty and bias"])
    (out,) = early_exit_generate(MODEL, [prompt], sampling, [0.5, 0.4, 0.3])
    assert len(set(out.layers_run)) >= 3 and 0 < out.sources.count("exit") < 30
    other = weaker(MODEL)
    plain = replace(sampling, temperature=temperature or 1.0, top_k=0)
    tokens = prompt + out.tokens
    states, strange = true_states(MODEL, tokens)[0], true_states(other, tokens)[0]
    sums = np.zeros(4)
    for i, token in enumerate(out.tokens):
        at, layers = len(prompt) + i - 1, out.layers_run[i]
        head = (layers,) if out.sources[i] == "exit" else ()
        logits = [MODEL.logits(states[layers][at], *head), MODEL.logits(states[-1][at]), other.logits(strange[-1][at])]
        drew, full, reference = (numpy_law(x.detach().numpy(), plain, tokens[: at + 1]) for x in logits)
        alive = drew > 0
        for j, law in enumerate((full, reference)):
            sums[j] += (drew[alive] * np.log(drew[alive] / law[alive])).sum()
            sums[2 + j] -= float(logits[1 + j].detach().log_softmax(-1)[token])
    kl, kl_reference, nll, nll_reference = sums / len(out.tokens)
    assert text_figures(MODEL, prompt, out, sampling) == pytest.approx({"kl": kl, "nll": nll}, abs=1e-9)
    expected = {"kl": kl_reference, "nll": nll_reference}
    assert text_figures(MODEL, prompt, out, sampling, other) == pytest.approx(expected, abs=1e-9)


def test_what_the_full_model_drew_has_no_divergence():
    (out,) = speculative_generate(MODEL, DRAFTER, [[1, 2]], RIGHT, 3)
    figures = text_figures(MODEL, [1, 2], out, RIGHT)
    assert figures["kl"] == 0.0 and figures["nll"] > 0
    assert text_figures(MODEL, [1], Generation(), RIGHT) == {"kl": None, "nll": None}
    assert figures["nll"] != pytest.approx(-np.mean(out.logprobs))  # those are the law's, at its temperature
    unchanged = replace(RIGHT, temperature=1.0)
    (out,) = generate(MODEL, [[1, 2]], unchanged)
    assert text_figures(MODEL, [1, 2], out, unchanged)["nll"] == pytest.approx(-np.mean(out.logprobs))


def test_padded_and_reduced_vocabularies_leave_the_figures_finite():
    model = tiny_model(poisoned=False, vocab_size=32, n_vocab_used=24, exit_vocab=tuple(range(0, 24, 2)))
    sampling = replace(RIGHT, seed=list(range(9)))  # one per row of the batch that the text came from
    (out,) = early_exit_generate(model, [[1, 2]], replace(sampling, seed=0), 0.3)
    assert "exit" in out.sources
    for reference in (None, tiny_model(seed=5, poisoned=False, vocab_size=24)):
        figures = text_figures(model, [1, 2], out, sampling, reference)
        assert all(map(math.isfinite, figures.values())) and figures["kl"] > 0
