"""auto.py: how many drafts pay, on a clock of its own, and the promise that it is never much slower than plain decoding."""

import random
from collections import deque
from statistics import mean

import numpy as np
import pytest
import torch
from helpers import Tables, chi_square_p, sample_size, tiny_model

import auto
import speculative
from auto import Acceptance, Costs, DraftLength, Plan, passes, predict, solve, speedup, weights_read
from decode import SamplingParams, generate, run_loop
from distill import new_draft_head
from early_exit import Depths
from speculative import (
    ChainDrafter,
    ExitDrafter,
    HeadDrafter,
    ModelDrafter,
    NGramDrafter,
    SpeculativeRounds,
    SpeculativeStep,
    speculative_generate,
)

CHANCES = {
    "random": lambda rng, t, n: rng.random() < 0.02,
    "perfect": lambda rng, t, n: True,
    "0.8": lambda rng, t, n: rng.random() < 0.8,
    "0.6": lambda rng, t, n: rng.random() < 0.6,
    "0.4": lambda rng, t, n: rng.random() < 0.4,
    "perfect, then random": lambda rng, t, n: t < n / 2 or rng.random() < 0.02,
    "random, then perfect": lambda rng, t, n: t >= n / 2 or rng.random() < 0.02,
    "in bursts": lambda rng, t, n: rng.random() < (0.9 if t // 40 % 2 else 0.1),
}
PRICES = [(0.02, 0.01), (0.1, 0.05), (0.25, 0.0), (0.25, 0.1), (0.6, 0.3)]  # of a draft, and of a row more to verify


def decode(draft_len, accepted, n_tokens, price, n_rows=1, seed=0, noise=0.05, growth=0.0, known=None):
    """Virtual seconds until each row has its tokens; a plain round takes one, growth more per token of context."""
    rng, lengths, rows = random.Random(seed), DraftLength(draft_len, n_rows, known=known), range(n_rows)
    done, seconds, ends = [0] * n_rows, 0.0, [0.0] * n_rows
    while True:
        rows = [row for row in rows if done[row] < n_tokens]
        if not rows:
            return ends
        asked = [min(k, n_tokens - done[row] - 1) for row, k in zip(rows, lengths.ask(rows))]
        n_accepted = []
        for row, k in zip(rows, asked):
            n = 0
            while n < k and accepted(rng, done[row] + n, n_tokens):
                n += 1
            n_accepted.append(n)
        scale = 1 + growth * max(done)
        drafting = max(asked) * price[0] * rng.lognormvariate(0, noise)
        verifying = scale * (1 + price[1] * max(asked)) * rng.lognormvariate(0, noise)
        lengths.learn(rows, asked, n_accepted, drafting, verifying)
        seconds += drafting + verifying
        for row, n in zip(rows, n_accepted):
            done[row] += n + 1
            ends[row] = seconds


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("name", CHANCES)
def test_never_5_percent_and_8_tokens_slower_than_plain_and_95_percent_of_the_best_length(name, price):
    """On a noisy clock; the second with two plain rounds more, which measure what plain decoding costs."""
    for n_tokens, n_seeds in ((60, 8), (600, 4)):
        taken = [decode("auto", CHANCES[name], n_tokens, price, seed=seed)[0] for seed in range(n_seeds)]
        assert max(taken) <= 1.05 * n_tokens + 8
        fixed = [
            mean(decode(k, CHANCES[name], n_tokens, price, seed=seed)[0] for seed in range(n_seeds)) for k in range(9)
        ]
        assert mean(taken) <= min(fixed) / 0.95 + (2 if n_tokens > 60 else 5)


@pytest.mark.parametrize("name", ["random", "0.6", "perfect, then random"])
def test_the_promise_holds_for_every_row_of_a_batch_and_where_the_context_grows(name):
    for n_rows, growth in ((4, 0.0), (1, 0.002), (3, 0.002)):
        plain = decode(0, CHANCES[name], 400, (0.2, 0.05), n_rows, noise=0.0, growth=growth)[0]
        taken = decode("auto", CHANCES[name], 400, (0.2, 0.05), n_rows, noise=0.02, growth=growth)
        assert max(taken) <= 1.05 * plain + 8 * plain / 400


def test_a_drafter_that_takes_time_and_offers_nothing_is_asked_for_no_more_than_the_promise_allows():
    lengths, seconds = DraftLength("auto", 1), 0.0
    for _ in range(300):
        taken = 0.5 if lengths.ask([0])[0] else 0.0
        lengths.learn([0], [0], [0], taken, 1.0)
        seconds += taken + 1.0
    assert 300 < seconds <= 1.03 * 300 + 5


def test_what_trials_may_cost_is_a_share_of_the_time_that_passed_not_of_what_it_would_be_at_the_end():
    lengths = DraftLength("auto", 1)
    for price in (1.0, 3.0):
        for _ in range(100):
            lengths.ask([0])
            lengths.learn([0], [0], [0], 0.0, price)
    plan = Plan("", [(0, None)])
    lengths.account[0] = 0.04 * 400 + 3.0
    assert not lengths.affords([0], plan, 1, grace=1.0) and lengths.affords([0], plan, 1, grace=3.0)


def test_reading_the_prompt_does_not_make_a_drafter_look_dear():
    """The first time that it drafts a drafter with a cache reads the prompt; here that takes the time of three tokens, or of thirty."""
    taken = []
    for prompt in (0.0, 3.0, 30.0):
        lengths, done, seconds = DraftLength("auto", 1), 0, 0.0
        while done < 300:
            [k] = lengths.ask([0])
            drafting, prompt = (0.1 * k + prompt, 0.0) if k else (0.0, prompt)
            lengths.learn([0], [k], [k], drafting, 1 + 0.05 * k)
            done, seconds = done + k + 1, seconds + drafting + 1 + 0.05 * k
        taken.append(seconds)
    assert taken[0] < 90 and taken[1] < taken[0] + 4 and taken[2] < taken[0] + 31


@pytest.mark.parametrize("draft, verify", [(0.2, 40.0), (40.0, 1.0)])
def test_one_accident_of_the_machine_is_forgotten_and_a_second_is_not(draft, verify):
    """A round with two drafts that lasts forty times as long as a plain one: drafting goes on; behind a second it is too dear."""
    for accidents in ((), {5}, {5, 15}):
        lengths, drafted, seconds = DraftLength("auto", 1), 0, 0.0
        for _ in range(100):
            [k] = lengths.ask([0])
            drafted += k > 0
            taken = (draft, verify) if k and drafted in accidents else (0.1 * k, 1 + 0.02 * k)
            lengths.learn([0], [k], [min(k, 1)], *taken)
            seconds += sum(taken)
        if len(accidents) < 2:
            assert drafted > 80 and seconds < 130 + 41 * len(accidents)
        else:
            assert drafted == 15 and lengths.account[0] > 15


def test_a_plan_that_only_hope_speaks_for_hides_none_that_pays():
    """What was never tried is tried first, though less is expected of it; once it has failed the other one drafts on."""
    plans = [Plan("a", [(0, None)], prior=0.7, cost=0.1, belief=50.0), Plan("b", [(1, None)], prior=0.6, cost=0.1)]
    lengths, drafted = DraftLength("auto", 1), []
    for _ in range(60):
        [k] = lengths.ask([0], plans)
        if k:
            drafted.append(lengths.plan.name)
        lengths.learn([0], [k], [k * (lengths.plan.name == "a")], 0.1 * k, 1.0)
    assert drafted[0] == "b" and drafted.count("a") > 40


def test_a_plan_that_is_too_dear_or_only_hoped_for_hides_none_that_pays():
    cheap, dear = Plan("cheap", [(0, None)], prior=0.6), Plan("dear", [(1, None)], prior=0.97)
    for slack, chosen in ((5.0, dear), (0.8, cheap)):
        length = with_costs(1.0, 0.3)
        length.costs.lines[1] = 1.0, 0.5
        length.account[0] = auto.GRACE - slack
        assert length.favourite([0], [dear, cheap]) is chosen
    known, hoped = (
        Plan("known", [(0, None)], prior=0.51, belief=1e3),
        Plan("hoped", [(1, None)], prior=0.45, belief=0.5),
    )
    length = with_costs(1.0, 0.3)
    length.costs.lines[1] = 1.0, 0.6
    assert length.best([0], hoped, auto.HOPE) > length.best([0], known, auto.HOPE) and length.best([0], hoped)[0] < 1
    assert length.favourite([0], [hoped, known]) is known


def test_stopping_by_confidence_counts_in_what_a_plan_promises():
    """Sure drafts hold and others fall: more is expected of a plan that may stop than of any fixed length."""
    length = with_costs(1.0, 0.3)
    for _ in range(50):
        length.of(0, (0, None)).learn(1, 1, [0.9]), length.of(0, (0, None)).learn(1, 0, [0.1])
    assert length.best([0], length.plan)[0] > 1.05 * length.best([0], length.plan._replace(dynamic=False))[0]


def test_costs_are_lines_through_medians():
    costs = Costs()
    for seconds in (9.0, 1.0, 1.2):
        costs.learn(0, 0, 0.0, seconds, now=1)
    assert costs.plain == 1.2 and costs.line(0, 0.1) == pytest.approx((1.2, 0.12))
    costs.learn(0, 4, None, 1.6, now=1)  # it also read the prompt
    assert costs.line(0, 0.1) == pytest.approx((1.2, 0.12 + 0.1))
    for _ in range(2):
        costs.learn(0, 4, 0.8, 1.6, now=1)
    assert costs.line(0, 0.1) == pytest.approx((1.2, 0.2 + 0.1))  # a draft, and a row more to verify
    assert costs.line(1, 0.1) == pytest.approx((1.2, 0.12 + 0.1))  # a part that has not drafted yet
    costs.learn(0, 2, 0.4, 0.4, now=1)  # one measurement among many bends the line little
    assert costs.line(0, 0.1)[1] == pytest.approx(0.3, abs=0.01) and costs.plain == 1.2
    costs.learn(0, 0, 0.0, 1.0, now=4 * auto.FRESH + 2)
    assert not costs.drafting[0] and list(costs.verifying) == [0]  # the rest is forgotten
    assert 0 < costs.before["row"] < 0.1 < costs.before[0] < 0.2
    assert costs.line(0, 0.1) == pytest.approx((1.0, costs.before[0] + costs.before["row"]))  # but for this
    falling = Costs()
    falling.learn(0, 1, 0.1, 2.0, now=1), falling.learn(0, 3, 0.3, 1.0, now=1)
    assert falling.line(0, 0.1) == pytest.approx((1.5, 0.1))


def test_a_request_starts_from_what_rounds_cost_in_those_before():
    """Where drafts do not pay, the first request finds that out and the later ones know; a dear accident is tried again."""
    price, known = (0.6, 0.4), {}
    lost = [decode("auto", CHANCES["0.6"], 60, price, 4, seed, known=known)[0] - 60 for seed in range(12)]
    assert lost[0] > 4 and mean(lost[4:]) < 0.6 * lost[0]
    assert known[4][0] > 0.2 and known[4]["row"] > 0.1  # on their way up, until drafts are no longer tried
    dear = Costs(known[4])
    dear.learn(0, 0, 0.0, 1.0, now=1)
    for _ in range(100):
        dear.learn(0, 1, 5.0, 6.0, now=1)
    assert known[4] == pytest.approx({0: auto.DEAREST, "row": auto.DEAREST}, abs=1e-3)
    new = Costs(known[4])
    new.learn(0, 0, 0.0, 1.0, now=1)
    assert new.line(1, 0.8) == pytest.approx((1.0, auto.DEAREST + 0.8), abs=1e-3)  # a part that was never timed
    for _ in range(100):
        dear.learn(1, 1, 5.0, 6.0, now=1, draft=0.8)  # by its weights it is dear too
    assert known[4][1] == pytest.approx(0.8, abs=1e-3)
    # while in truth drafts cost little
    taken = [decode("auto", CHANCES["perfect"], 120, PRICES[0], 4, seed, known=known)[0] for seed in range(12)]
    assert max(taken) < 130 and mean(taken[8:]) < 60, taken
    drafter = NGramDrafter()
    assert (
        auto.costs_of(drafter) is auto.costs_of(drafter) is not auto.costs_of(drafter, "device")
        and auto.costs_of(object()) == {}
    )


def test_a_drafter_keeps_its_costs_and_nothing_of_a_text():
    model, drafter = tiny_model(), NGramDrafter()
    for seed in (0, 1):
        speculative_generate(model, drafter, [[1, 2, 3, 1, 2]] * 2, SamplingParams(40, 1.0, seed=seed), "auto")
    kept = auto.costs_of(drafter)
    assert 2 in kept and all(
        0 <= x <= 1 and (name == "row" or isinstance(name, int)) for costs in kept.values() for name, x in costs.items()
    )


def test_acceptance_is_learnt_by_place_by_hint_and_by_confidence():
    seen = Acceptance(0.5)
    assert [seen.at(i) for i in range(3)] == [0.5] * 3 and seen.expected()[:3] == [1.0, 1.5, 1.75]
    for _ in range(30):
        seen.fade(auto.MEMORY)
        seen.learn(3, 1, [0.9, 0.3, 0.1])  # the third was never judged
    assert seen.at(0) > 0.9 and seen.at(1) < 0.2 and seen.at(1) == seen.at(2)
    assert seen.of(0.95) > 0.9 and seen.of(0.3) < 0.2 and seen.of(0.15) == pytest.approx(0.1)
    seen.learn(3, 3, [0.9])  # a drafter may know of one draft only
    lengths = DraftLength("auto", 2)
    for hint, n_accepted in ((4, 2), (1, 0)) * 20:
        lengths.ask([0], [Plan("n-gram", [(0, hint)])])
        lengths.learn([0], [2], [n_accepted], 0.0, 1.0)
    assert lengths.of(0, (0, 4)).at(0) > 0.7 and lengths.of(0, (0, 1)).at(0) < 0.3
    assert lengths.of(1, (0, 4)).at(0) == Plan("", []).prior  # the other row has learnt nothing


def test_a_confidence_is_added_to_the_acceptance_until_it_is_known_better():
    """Log-odds add: at an acceptance of one half a greedy draft holds as often as it is sure; a sampled one is flatter."""
    centres = [0.1, 0.3, 0.5, 0.7, 0.9]
    assert [Acceptance(0.5).of(c) for c in centres] == pytest.approx(centres)
    assert Acceptance(0.8).of(0.9) == pytest.approx(36 / 37) and Acceptance(0.8).of(0.1) == pytest.approx(4 / 13)
    sampled = [Acceptance(0.5, slope=auto.SAMPLED).of(c) for c in centres]
    assert sampled == pytest.approx([0.271, 0.406, 0.5, 0.594, 0.729], abs=1e-3)
    for prior in (0.0, 1.0):  # as measured on a few drafts
        assert all(0 < Acceptance(prior).of(c) < 1 for c in (0.0, 0.5, 1.0))


def test_rounds_that_stop_by_confidence_are_counted():
    """Tokens and drafts of a round for each of the six rules, against rounds that are played."""
    seen, rng, n = Acceptance(0.5), random.Random(0), 20_000
    seen.learn(1, 1, [0.9])
    shares = [8 / 5 / 9] * 4 + [(8 / 5 + 1) / 9]
    for upper, (tokens, drafts) in enumerate(seen.stopping()):
        played = [0, 0]
        for _ in range(n):
            going, held, k = True, 1, 0
            while going and k < auto.MAX_DRAFT:
                i = rng.choices(range(5), shares)[0]
                played[0] += held
                held *= rng.random() < seen.of((i + 0.5) / 5)
                played[1], k, going = played[1] + 1, k + 1, i >= 5 - upper
            played[0] += held
        assert (tokens, drafts) == pytest.approx([x / n for x in played], rel=0.02), upper


def test_stopping_by_confidence_beats_every_fixed_length():
    """A drafter that says how sure it is, and is half of the time: on the same clock, against what it gives at any length."""

    def seconds(draft_len, seed):
        rng, lengths, done, taken = random.Random(seed), DraftLength(draft_len, 1), 0, 0.0
        while done < 300:
            [k] = lengths.ask([0], [Plan("drafter", [(0, None)], True, 0.6, 0.3)])
            sure = []
            while len(sure) < k:
                sure.append(rng.choice((0.25, 0.95)))
                if draft_len == "auto" and not lengths.more([0], [[x] for x in sure]):
                    break
            held = [rng.random() < x for x in sure] + [False]
            lengths.learn([0], [len(sure)], [held.index(False)], 0.3 * len(sure), 1 + 0.03 * len(sure), {0: sure})
            done, taken = done + held.index(False) + 1, taken + 1 + 0.33 * len(sure)
        return taken

    best, *others = (mean(seconds(k, seed) for seed in range(6)) for k in ("auto", *range(9)))
    assert best < 0.97 * min(others), (best, others)


# -------------------------------------------------------------------------------------------------------- the cost model

# layers, final head and draft head in layers; exit; best speedup at an acceptance of .4, .5, .6, .7, .8, .9
PUBLISHED = {
    "GPT-2 124M, exit 1": (12, 5.45, 0.89, 1, [1.28, 1.44, 1.64, 1.94, 2.40, 3.30]),
    "GPT-2 124M, exit 3": (12, 5.45, 0.89, 3, [1.14, 1.23, 1.36, 1.52, 1.78, 2.23]),
    "GPT-2 XL, exit 6": (48, 2.62, 0.43, 6, [1.24, 1.40, 1.58, 1.84, 2.26, 3.04]),
    "SmolLM2, exit 2": (30, 8.0, 1.33, 2, [1.33, 1.49, 1.72, 2.05, 2.59, 3.66]),
    "SmolLM2, exit 8": (30, 8.0, 1.33, 8, [1.12, 1.20, 1.31, 1.47, 1.70, 2.11]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_solver_gives_the_table_of_the_cost_model(name):
    """Shapes in layers: a draft runs the exit's layers and its small head, and verification reads each weight once more.

    At an acceptance of 0.9 the best length of a cheap exit is beyond MAX_DRAFT."""
    n_layer, head, draft_head, exit_layer, expected = PUBLISHED[name]
    cost = (exit_layer + draft_head) / (n_layer + head)
    for alpha, best in zip((0.4, 0.5, 0.6, 0.7, 0.8, 0.9), expected):
        chosen, k, found = solve({exit_layer: alpha}, {exit_layer: cost}, max_k=32)
        assert chosen == exit_layer and found == pytest.approx(best, abs=0.006)
        assert found == speedup(alpha, k, cost) >= max(speedup(alpha, j, cost) for j in (k - 1, k + 1))


def test_the_solver_weighs_exits_and_is_plain_where_nothing_pays():
    assert speedup(1.0, 4, 0.25) == 5 / 2 and speedup(0.5, 2, 0.1, 1.3) == pytest.approx(1.75 / 1.5)
    assert speedup(0.7, 0, 0.3) == 1.0 and speedup(0.0, 3, 0.0) == 1.0
    costs = {4: 0.28, 8: 0.52}
    assert solve({4: 0.5, 8: 0.95}, costs)[:2] == (8, 5) and solve({4: 0.7, 8: 0.8}, costs)[:2] == (4, 2)
    assert solve({4: 0.2, 8: 0.5}, costs) == (None, 0, 1.0) and solve({}, {}) == (None, 0, 1.0)
    assert solve({4: 0.9}, costs, row_cost=0.0)[1] > solve({4: 0.9}, costs, row_cost=0.3)[1] > 0
    assert solve({"free": 1.0}, {"free": 0.0}, max_k=5) == ("free", 5, 6.0)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_costs_are_the_weights_that_a_token_reads(arch):
    model = tiny_model(arch)
    per_layer = sum(p.numel() for n, p in model.blocks[0].named_parameters() if p.dim() == 2)
    assert weights_read(model.config, 3, 10) == 3 * per_layer + 10 * 16
    assert passes(model.config, 4 * per_layer + 24 * 16) == 1.0


def test_automatic_lengths_begin_with_what_the_solver_makes_of_the_stored_acceptance(monkeypatch):
    """A drafter's first round is by the exit that the figures kept with the weights speak for, at that temperature."""
    model, firsts, slopes = tiny_model(block_size=256), [], []
    model.acceptance = {
        "1": {"greedy": 0.2, "sampled": 0.9}, "2": {"greedy": 0.99, "sampled": 0.2}, "3": {"greedy": 0.3, "sampled": 0.2}
    }  # fmt: skip
    choose = DraftLength._choose

    def noted(self, rows, plans):
        k, plan, reason = choose(self, rows, plans)
        firsts.append((predict(plans)[0], plan.name if k else None))
        assert self.slope == slopes[-1] and all(seen.belief == auto.MEASURED for seen in self.acceptance[0].values())
        return k, plan, reason

    monkeypatch.setattr(DraftLength, "_choose", noted)
    for temperature, best in ((0.0, "exit 2"), (0.8, "exit 1")):
        Clock(monkeypatch), firsts.clear(), slopes.append(auto.SAMPLED if temperature else auto.GREEDY)
        sampling = SamplingParams(8, temperature)
        speculative_generate(model, ExitDrafter(model, (1, 2, 3)), [[1, 2]], sampling, "auto", "coupled")
        assert next(found for found in firsts if found[1]) == (best, best)
    drafter, slopes = ExitDrafter(model, (1, 2)), [auto.GREEDY]
    speculative_generate(model, drafter, [[1, 2]], SamplingParams(2, 0.0), "auto")
    monkeypatch.setattr(DraftLength, "_choose", choose)
    first, second, both = drafter.plans([0])
    assert (both.name, both.prior, both.cost) == ("exits", 0.99, pytest.approx((first.cost + second.cost) / 2))
    small = tiny_model(n_layer=1, exit_layers=())
    for kept, expected in (({"greedy": 0.8, "sampled": 0.5}, [0.8, 0.5, 0.8]), ({}, [auto.GUESS] * 3)):
        small.acceptance, drafter, found = kept, ModelDrafter(small), []
        for temperature in (0.0, 1.0, 0.0):
            speculative_generate(model, drafter, [[1, 2]], SamplingParams(2, temperature), "auto")
            found.append(speculative.plans_of(drafter, [0])[0].prior)
        assert found == expected and 0.2 < drafter.cost < 0.5
        belief = auto.MEASURED if kept else auto.BELIEF
        assert drafter.belief == speculative.plans_of(drafter, [0])[0].belief == belief


# ------------------------------------------------------------------------------------------------------ in the engine


class Clock:
    """Stands for the module time: a pass of the target takes 1 and 0.05 a draft, a draft 0.1."""

    def __init__(self, monkeypatch):
        self.now, self.passes = 0.0, 0
        deepen = Depths.deepen

        def timed(depths, rows, arriving):
            self.now += 1 + 0.05 * (max(map(len, arriving)) - 1)
            self.passes += 1
            return deepen(depths, rows, arriving)

        monkeypatch.setattr(Depths, "deepen", timed)
        monkeypatch.setattr(speculative, "time", self)

    def perf_counter(self):
        return self.now


class Oracle:
    """Knows the text, and proposes it, or nonsense where `wrong` says so."""

    def __init__(self, texts, wrong, clock=None, cost=0.1):
        self.texts, self.wrong, self.clock, self.cost = texts, wrong, clock, cost

    def reset(self, prompts):
        self.done = [len(prompt) for prompt in prompts]

    def propose(self, rows, max_k, sampler):
        drafts = []
        for row in rows:
            text, n = self.texts[row], self.done[row]
            ahead = [*text[n : n + max_k], *[0] * max_k][:max_k]
            drafts.append([(t + self.wrong(n + i)) % 24 for i, t in enumerate(ahead)])
        if self.clock:
            self.clock.now += self.cost * max_k
        return torch.tensor(drafts), None, torch.full((len(rows),), max_k)

    def commit(self, rows, tokens, hidden):
        for row, new in zip(rows, tokens):
            self.done[row] += len(new)


@pytest.mark.parametrize("wrong", [lambda t: 0, lambda t: 1, lambda t: t > 100], ids=["perfect", "wrong", "half"])
def test_the_engine_keeps_the_promise_and_the_text(wrong, monkeypatch):
    model, prompts = tiny_model(block_size=256), [[1, 2], [3, 4, 5]]
    for n_rows, sampling in ((1, SamplingParams(200, 0.0)), (2, SamplingParams(200, 0.8, seed=4))):
        plain = generate(model, prompts[:n_rows], sampling)
        with monkeypatch.context() as patch:
            clock = Clock(patch)
            texts = [prompt + out.tokens for prompt, out in zip(prompts, plain)]
            oracle = Oracle(texts, wrong, clock)
            outs = speculative_generate(model, oracle, prompts[:n_rows], sampling, "auto", "coupled")
        assert [out.tokens for out in outs] == [out.tokens for out in plain]
        assert clock.now <= 1.05 * 200 + 8
        assert clock.now == pytest.approx(max(out.stats.draft_seconds + out.stats.verify_seconds for out in outs))
        for out in outs:
            assert sum(out.stats.reasons.values()) == out.stats.rounds
        if not wrong(200):
            assert clock.now < 75 and outs[0].stats.reasons["Oracle pays"] > 15
        elif wrong(0):
            assert outs[0].stats.drafted < 60 and outs[0].stats.reasons["not worth it"] > 100


def test_state_leaks_into_no_other_request(monkeypatch):
    model, sampling = tiny_model(block_size=256), SamplingParams(100, 0.0)
    plain = generate(model, [[1, 2]], sampling)[0].tokens
    histograms = []
    for wrong in (0, 1, 0):
        with monkeypatch.context() as patch:
            oracle = Oracle([[1, 2, *plain]], lambda t, w=wrong: w, Clock(patch))
            out = speculative_generate(model, oracle, [[1, 2]], sampling, "auto")[0]
        histograms.append(out.stats.drafted_histogram)
    assert histograms[0] == histograms[2] != histograms[1]


def test_a_chain_lets_the_first_draft_that_can_and_is_lossless():
    """Rows of one batch are drafted for by different drafters, greedily and with laws, and drafters with caches keep up."""
    model, small = tiny_model(seed=3), tiny_model(seed=2)
    prompts = [[5, 6, 7] * 4, [1, 2, 3], [9] * 6]
    for verify, sampling in (("rejection", SamplingParams(30, 0.0)), ("coupled", SamplingParams(30, 0.9, seed=3))):
        plain = [out.tokens for out in generate(model, prompts, sampling)]
        for drafter in (
            ModelDrafter(small),
            ExitDrafter(model, 2),
            Oracle([p + t for p, t in zip(prompts, plain)], int),
        ):
            chain = ChainDrafter(NGramDrafter(), drafter)
            for draft_len in (3, "auto"):
                outs = speculative_generate(model, chain, prompts, sampling, draft_len, verify)
                assert [out.tokens for out in outs] == plain
    with pytest.raises(ValueError, match="at most one"):
        speculative_generate(
            model, ChainDrafter(ExitDrafter(model, 1), ExitDrafter(model, 2)), [[1]], SamplingParams(2)
        )


def test_a_chain_keeps_the_law_where_one_row_copies_and_another_draws():
    """Every second row has one copied draft, the others two drawn ones, in the same round: joint law of two tokens."""
    laws = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5], [0.1, 0.6, 0.3]], dtype=torch.float64)
    drawn = torch.tensor([[0.3, 0.3, 0.4], [0.6, 0.2, 0.2], [0.3, 0.4, 0.3]], dtype=torch.float64)
    model, small = (Tables(x.log().expand(3, 3, 3)) for x in (laws, drawn))

    class Copying:
        """Copies for every second row, a token that the law makes neither sure nor impossible."""

        def reset(self, prompts):
            pass

        def plans(self, rows):
            return [Plan("copy", [None if row % 2 else (0, None) for row in rows])]

        def propose(self, rows, max_k, sampler):
            return torch.ones(len(rows), 1, dtype=torch.int64), None, [1] * len(rows)

        def commit(self, rows, tokens, hidden):
            pass

    n_rows = sample_size(9, total_variation=0.05)
    counts = np.zeros((2, 3, 3))
    for first in range(0, n_rows, 500):
        prompts = [[0, 0]] * 1000
        chain = ChainDrafter(Copying(), ModelDrafter(small))
        outs = speculative_generate(model, chain, prompts, SamplingParams(3, seed=2 * first), 2)
        for row, out in enumerate(outs):
            counts[row % 2][tuple(out.tokens[:2])] += 1
    expected = (laws[0][:, None] * laws).numpy()
    assert chi_square_p(counts[0], expected) > 1e-6 and chi_square_p(counts[1], expected) > 1e-6


def test_a_chain_asks_each_drafter_for_the_rows_that_are_its_own():
    asked = []

    class Fixed:
        def __init__(self, token, rows):
            self.token, self.rows = token, rows

        def plans(self, rows):
            return [Plan(str(self.token), [(0, None) if row in self.rows else None for row in rows])]

        def propose(self, rows, max_k, sampler):
            asked.append((self.token, list(rows)))
            law = torch.full((len(rows), max_k, 8), -torch.inf)
            law[..., self.token] = 0.0
            return torch.full((len(rows), max_k), self.token), law if self.token == 2 else None, [max_k] * len(rows)

    class Here:
        device = "cpu"

    chain = ChainDrafter(Fixed(1, {0, 2}), Fixed(2, {0, 1}))
    plans = chain.plans([0, 1, 2, 3])
    assert [plan.name for plan in plans] == ["1", "2", "1, then 2"]
    assert plans[-1].offers == [(0, None), (1, None), (0, None), None]
    chain.follow(dict(zip([0, 1, 2, 3], plans[-1].offers)))
    tokens, laws, n = chain.propose([0, 1, 2, 3], 2, Here)
    assert asked == [(1, [0, 2]), (2, [1])] and n.tolist() == [2, 2, 2, 0]
    assert tokens.tolist() == [[1, 1], [2, 2], [1, 1], [0, 0]]
    assert laws.argmax(-1)[:3].tolist() == tokens[:3].tolist() and torch.equal(laws[:3].exp().sum(-1), torch.ones(3, 2))


@pytest.mark.parametrize("step", [SpeculativeStep, SpeculativeRounds])
def test_rounds_under_the_kill_switch_teach_nothing(step, monkeypatch):
    """Led by the host, and by the device (of which this is the reference)."""
    model, taught = tiny_model(), []
    monkeypatch.setattr(DraftLength, "learn", lambda *how: taught.append(how))
    for plain in ("1", "0"):
        monkeypatch.setenv("NANOSPEC_PLAIN", plain)
        run_loop(
            model, [[1, 2, 3]], SamplingParams(5, 0.0), step(ModelDrafter(tiny_model(seed=2)), "auto", "rejection")
        )
        assert len(taught) == (0 if plain == "1" else 5)


def test_what_is_drawn_is_expected_to_repeat_itself_less():
    priors = []
    for temperature in (0.0, 1.0, 0.0):
        speculative_generate(tiny_model(), drafter := NGramDrafter(), [[1, 2]], SamplingParams(2, temperature), "auto")
        priors.append(drafter.plans([0])[0].prior)
    assert priors[0] == priors[2] > priors[1]


def test_the_better_of_two_drafters_is_found(monkeypatch):
    """Whichever stands first, and where the good one turns bad half-way."""
    model, sampling = tiny_model(block_size=256), SamplingParams(200, 0.0)
    text = [1, 2, *generate(model, [[1, 2]], sampling)[0].tokens]
    for first, second in ((0, 1), (1, 0)):
        with monkeypatch.context() as patch:
            clock = Clock(patch)
            chain = ChainDrafter(*(Oracle([text], lambda t, w=w: w, clock) for w in (first, second)))
            out = speculative_generate(model, chain, [[1, 2]], sampling, "auto")[0]
        assert clock.now < 85 and out.stats.acceptance_rate > 0.85
    with monkeypatch.context() as patch:
        clock = Clock(patch)
        chain = ChainDrafter(Oracle([text], lambda t: t > 100, clock), Oracle([text], lambda t: t <= 100, clock))
        speculative_generate(model, chain, [[1, 2]], sampling, "auto")
        assert clock.now < 110


def test_a_drafter_without_an_offer_hides_no_other():
    """A bad drafter behind one that has nothing to offer is tried again and again, at its price."""
    lengths = DraftLength("auto", 1)
    for _ in range(300):
        [k] = lengths.ask([0], [Plan("n-gram", [None]), Plan("model", [(1, None)])])
        lengths.learn([0], [k], [0], 0.5 * k, 1.0)
    assert lengths.plain_seconds == [300.0] and 5 < sum(lengths.account) <= 0.03 * 300 + 5
    lengths.ask([0], [Plan("n-gram", [None])])
    assert lengths.reason == "nothing to draft"


def test_exits_are_tried_one_by_one_and_together(monkeypatch):
    """A plan of one exit drafts like a drafter that has only that one; the last plan is the tuple's own policy."""
    model, sampling = tiny_model(seed=3), SamplingParams(20, 0.0)
    counted = []
    for number in range(4):
        monkeypatch.setattr(DraftLength, "_choose", lambda self, rows, plans, n=number: (2, plans[n], "told"))
        monkeypatch.setattr(DraftLength, "more", lambda self, rows, confidences: True)
        out = speculative_generate(model, ExitDrafter(model, (1, 2, 3), threshold=0.4), [[1, 2]], sampling, "auto")[0]
        alone = ExitDrafter(model, number + 1) if number < 3 else ExitDrafter(model, (1, 2, 3), threshold=0.4)
        fixed = speculative_generate(model, alone, [[1, 2]], sampling, 2)[0]
        assert out.tokens == fixed.tokens and out.stats.accepted_histogram == fixed.stats.accepted_histogram
        counted.append(out.stats.layer_passes)
    assert len(set(counted[:3])) == 3


# ------------------------------------------------------------------------------------------------- stopping in a block


class Dropping(ExitDrafter):
    """The counter-example: it throws the draft away of which it was not sure."""

    def propose(self, rows, max_k, sampler):
        tokens, logits, _n = super().propose(rows, max_k, sampler)
        chosen = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
        return tokens, logits, (chosen >= 0.5).long().cumprod(-1).sum(-1)


def test_stopping_by_the_law_of_the_last_draft_is_lossless(monkeypatch):
    """Target (.5, .5) everywhere; the exit says (.9, .1) after a 0 and (.55, .45) after a 1, where drafting stops: on a
    token that was drawn, but it is kept and judged. A drafter that drops it is caught. Joint law of three tokens."""

    def table(law):
        return torch.tensor(law, dtype=torch.float64).log().expand(2, 2, 2)

    model = Tables(table([0.5, 0.5]), {1: table([[0.9, 0.1], [0.55, 0.45]])})
    monkeypatch.setattr(DraftLength, "_choose", lambda self, rows, plans: (3, plans[-1], "worth it"))
    lengths = []

    def more(self, rows, confidences):
        lengths.append(len(confidences))
        return confidences[-1][0] >= 0.65

    monkeypatch.setattr(DraftLength, "more", more)
    n_rows = sample_size(8, total_variation=0.25)

    def p_value(drafter):
        counts = np.zeros((2, 2, 2))
        for row in range(n_rows):  # one by one, or the first row would decide for all
            out = speculative_generate(model, drafter, [[1, 0]], SamplingParams(4, seed=row), "auto")[0]
            counts[tuple(out.tokens[:3])] += 1
        return chi_square_p(counts, np.full((2, 2, 2), 1 / 8))

    assert p_value(ExitDrafter(model, 1)) > 1e-6 and set(lengths) == {1, 2, 3}
    assert p_value(Dropping(model, 1)) < 1e-6


@pytest.mark.parametrize("kind", ["model", "exit", "head"])
def test_a_drafter_stops_where_the_next_draft_is_not_worth_its_cost(kind, monkeypatch):
    """It stops behind the n-th draft, whatever was asked for; caches stay whole, the text too."""
    model = tiny_model(seed=3)
    drafter = {
        "model": lambda: ModelDrafter(tiny_model(seed=2)),
        "exit": lambda: ExitDrafter(model, 2),
        "head": lambda: HeadDrafter(model, new_draft_head(model, range(2, 24), 0).to(model.dtype)),
    }[kind]()
    sampling = SamplingParams(30, 0.0)
    plain = [out.tokens for out in generate(model, [[1, 2], [3, 4, 5]], sampling)]
    monkeypatch.setattr(DraftLength, "_choose", lambda self, rows, plans: (6, plans[-1], "worth it"))
    monkeypatch.setattr(DraftLength, "more", lambda self, rows, confidences: len(confidences) < 1 + len(rows))
    outs = speculative_generate(model, drafter, [[1, 2], [3, 4, 5]], sampling, "auto")
    assert [out.tokens for out in outs] == plain
    assert all(len(out.stats.drafted_histogram) == 4 and out.stats.drafted_histogram[3] > 3 for out in outs)


def with_costs(first: float, each: float) -> DraftLength:
    """Of one row, in plain rounds' time: a round of k drafts takes first + k * each."""
    length = DraftLength("auto", 1)
    length.costs.verifying[0] = deque([1.0])
    length.costs.lines = {0: (first, each)}
    length.plan, length.best_rate = Plan("drafter", [(0, None)], True, 0.5), 1.0
    return length


def test_a_round_risks_at_most_half_of_what_is_left():
    """Of five tokens' time two drafts may lose two, not three; behind that loss only one; so something is always left."""
    length = with_costs(1.0, 1.0)
    assert [length.affords([0], length.plan, k, grace=5.0) for k in (1, 2, 3)] == [True, True, False]
    length.account[0] = 2.0
    assert [length.affords([0], length.plan, k, grace=5.0) for k in (1, 2)] == [True, False]
    cheap = with_costs(0.5, 0.1)  # a round that cannot lose is affordable whatever was lost
    cheap.account[0] = 5.1
    assert cheap.affords([0], cheap.plan, 1, grace=5.0)


@pytest.mark.parametrize("each, wanted", [(0.1, True), (0.24, True), (0.26, False), (1.0, False)])
def test_one_more_draft_is_made_where_it_promises_its_cost(each, wanted):
    """Both drafts hold with chance 0.25: worth the time of a quarter of a token, and no more."""
    length = with_costs(1.0, each)
    length.of(0, (0, None))
    assert length.more([0], [[0.5]]) is wanted
