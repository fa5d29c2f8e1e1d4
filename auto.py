"""How many drafts a round is worth, learnt while decoding, and never much slower than plain decoding.

    expected tokens of a round     1 + a1 + a1 a2 + ..      a: chance that the draft at a place is accepted, per row
    its cost                       c(k) seconds             of k drafts and a pass of k + 1 rows, as measured lately
    the choice                     drafter and k that give the most tokens a second; k = 0 is plain decoding
    inside a round                 one more draft while the chance that all before it hold, times its own, is worth its cost

An account per row makes it safe: whatever a round may lose against plain decoding, at worst all of its drafts, must fit into
what the row has gained lately plus PRICE of its plain time plus GRACE tokens. Trials of a drafter that does not pay live on
the same account. The prompt that a drafter reads before its first draft comes on top.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

MAX_DRAFT = 8  # drafts a round that "auto" may ask for
PRICE = 0.03  # share of plain decoding's time that trials may cost
GRACE = 5.0  # tokens' time that they may cost beside, per row
CREDIT = 20.0  # tokens' time that may be gained and lost again: a wrong idea of what is plain must not grow into more
MEMORY = 0.9  # weight of what was seen a round earlier; where another drafter drafted: SLOWLY
SLOWLY = 0.995
GUESS = 0.6  # chance that a draft is accepted, of a drafter that nobody has measured
BELIEF = 2.0  # judged drafts that the first guess of an acceptance counts for
MEASURED = 8.0  # and what was kept with the weights
TRUST = 8.0  # and the first guess of each confidence
KEPT = 7  # measured rounds of each length that its cost is the median of
LEARNT = 0.1  # how far a round moves the costs that the next request starts from: an accident moves them little
DEAREST = 0.5  # plain rounds that they are at most, or what weights say: what looks dear must stay cheap enough to be tried again
FRESH = 64  # rounds after which what was measured is old: the context has grown
ACCIDENT = 4.0  # times what a round should take: once in a request that is put down to the machine, and forgotten
HOPE = 1.0  # accepted drafts credited at each place where plans are compared, two to a bin: what nobody tried stays attractive
BINS = 5  # of the drafter's confidence
GREEDY, SAMPLED = 1.0, 0.45  # share of its log-odds that adds to those of acceptance (LOG.md: what confidence is worth)


def speedup(alpha: float, k: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens a second to plain decoding's, of rounds with k drafts that each hold with chance alpha (Leviathan et al. 2023).

    Costs are in plain passes: of a draft, and of the pass that verifies all k.
    """
    return sum(alpha**i for i in range(k + 1)) / (k * draft_cost + verify_cost)


def solve(
    alphas: dict[Hashable, float], costs: dict[Hashable, float], row_cost: float = 0.0, max_k: int = MAX_DRAFT
) -> tuple[Hashable | None, int, float]:
    """The exit (or drafter), the number of drafts and their speedup that the cost model expects most of.

    alphas, costs: chance of acceptance of each, and what a draft of it costs in plain passes; row_cost: what each row more
    adds to the pass that verifies. (None, 0, 1.0) is plain decoding: nothing pays.
    """
    found = [(None, 0, 1.0)]
    for name, alpha in alphas.items():
        found += [(name, k, speedup(alpha, k, costs[name], 1 + k * row_cost)) for k in range(1, max_k + 1)]
    return max(found, key=lambda choice: choice[2])  # of equals the first: plain, then few drafts


def predict(plans: list[Plan]) -> tuple[Hashable | None, int, float]:
    """What solve expects of a drafter's plans, by what is known before anything was measured: name, drafts, speedup."""
    able = [plan for plan in plans if any(plan.offers)]
    return solve({plan.name: plan.prior for plan in able}, {plan.name: plan.cost for plan in able})


def weights_read(config, n_layer: int, n_outputs: int) -> int:
    """Weights that a token takes: n_layer layers, and so many rows of an output matrix (model.GPTConfig)."""
    attention = 2 * config.n_embd * config.head_dim * (config.n_head + config.n_kv_head)
    mlp = (3 if config.arch == "llama" else 2) * config.n_embd * config.n_hidden
    return n_layer * (attention + mlp) + n_outputs * config.n_embd


def passes(target, n_weights: int) -> float:
    """So many weights in plain passes of a model with the config `target`: what decoding costs is reading them."""
    return n_weights / weights_read(target, target.n_layer, target.vocab_size)


def stored(model, temperature: float, guess: float, exit_layer: int | None = None) -> tuple[float, float]:
    """Chance that a draft of a model, or of an exit, is accepted, as measured and kept with its weights; else the guess. And how
    many judged drafts that is worth."""
    acceptance = getattr(model, "acceptance", {})
    acceptance = acceptance if exit_layer is None else acceptance.get(str(exit_layer), {})
    measured = acceptance.get("sampled" if temperature > 0 else "greedy")
    return (guess, BELIEF) if measured is None else (measured, MEASURED)


class Plan(NamedTuple):
    """One way to draft: which part of a drafter drafts for each row, None where none can, and what it knows beforehand.

    Acceptance is learnt apart for each (part, hint), such as the length of an n-gram that matched; the time by the last part
    in use, the dearest.
    """

    name: str
    offers: list[tuple[int, Hashable] | None]  # of each row
    dynamic: bool = False  # it asks sampler.more between drafts, and may stop before the number it was given
    prior: float = GUESS  # chance that a draft is accepted, before any was seen
    cost: float = 0.05  # of a draft, in passes of the target, before any was timed
    belief: float = BELIEF  # judged drafts that the prior counts for


def costs_of(drafter, loop: str = "host") -> dict[int, dict]:
    """What rounds with this drafter cost, by their number of rows: all that it keeps from one request to the next. Rounds of
    the host and of the device split their time otherwise, and are kept apart."""
    return vars(drafter).setdefault("round_costs", {}).setdefault(loop, {}) if hasattr(drafter, "__dict__") else {}


class Costs:
    """Seconds of a round by its number of drafts: a line through what was measured lately, as one draft more costs less than
    the noise of a measurement; plain rounds, which other operators may serve, have a number of their own.

    before: what earlier requests measured, in plain rounds: of a draft by part, of a "row" more to verify. It is where this
    one starts from, is kept up to date here, and holds nothing of a text.
    """

    def __init__(self, before: dict | None = None):
        self.before = {} if before is None else before
        self.drafting: dict[int, dict[int, deque[float]]] = {}  # by part
        self.verifying: dict[int, deque[float]] = {}
        self.measured: dict[int, int] = {}  # in which round
        self.lines: dict[int | str, tuple[float, float]] = {}  # of parts, and "verify", since something was learnt

    def learn(
        self, part: int, k: int, draft_seconds: float | None, verify_seconds: float, now: int, draft: float = 0.0
    ) -> None:
        """Of a round in which so many drafts were made; draft: what one should cost, in plain rounds."""
        if k and draft_seconds is not None:
            self.drafting.setdefault(part, {}).setdefault(k, deque(maxlen=KEPT)).append(draft_seconds)
        self.verifying.setdefault(k, deque(maxlen=KEPT)).append(verify_seconds)
        self.measured[k] = now
        self.lines = {}
        for old in [k for k, when in self.measured.items() if now - when > 4 * FRESH]:
            del self.measured[old], self.verifying[old]
            for kept in self.drafting.values():
                kept.pop(old, None)
        if k and 0 in self.verifying:
            (_, both), (_, row) = self.line(part, draft), self.lines["verify"]
            for name, seconds in (("row", row), (part, both - row)):
                if name == "row" or self.drafting.get(part):
                    most = DEAREST if name == "row" else max(DEAREST, draft)
                    share, old = min(seconds / self.plain, most), self.before.get(name, 0.0)
                    self.before[name] = old + LEARNT * (share - old)

    def line(self, part: int, draft: float) -> tuple[float, float]:
        """A round of k > 0 drafts takes first + k * second. draft: what one costs, in plain rounds, while none was ever timed."""
        if part not in self.lines:
            drafting = self.drafting.get(part) or {1: [self.before.setdefault(part, draft) * self.plain]}
            if "verify" not in self.lines:
                verifying = self.verifying
                if set(verifying) <= {0}:
                    verifying = verifying | {1: [(1 + self.before.get("row", 0.0)) * self.plain]}
                self.lines["verify"] = _line(verifying)
            self.lines[part] = tuple(map(sum, zip(_line({0: [0.0], **drafting}), self.lines["verify"])))
        return self.lines[part]

    @property
    def plain(self) -> float:
        return _median(self.verifying[0]) if 0 in self.verifying else _line(self.verifying)[0]


def _line(kept: dict[int, deque[float]]) -> tuple[float, float]:
    """At 0, and per draft: the rising line through the medians (weighted least squares); level through a single one."""
    n, x, y, xx, xy = 0, 0, 0.0, 0, 0.0
    for k, measured in kept.items():
        weight, seconds = len(measured), _median(measured)
        n, x, y = n + weight, x + weight * k, y + weight * seconds
        xx, xy = xx + weight * k * k, xy + weight * k * seconds
    spread = n * xx - x * x
    rise = max((n * xy - x * y) / spread, 0.0) if spread else 0.0
    return (y - rise * x) / n, rise


def _median(values) -> float:
    return sorted(values)[(len(values) - 1) // 2]  # of two the smaller: a first round also warms up


class Acceptance:
    """Chance that the draft at each place is accepted, of one row with one drafter: (judged, accepted), older ones fading.

    By place, and where the drafter says how sure it is by that: `prior` is what either starts from, and a confidence of one
    half changes nothing.
    """

    def __init__(self, prior: float, belief: float = BELIEF, slope: float = GREEDY):
        self.prior, self.belief = prior, belief
        self.places = [[0.0, 0.0] for _ in range(MAX_DRAFT)]
        self.bins = [[0.0, 0.0] for _ in range(BINS)]
        odds = min(max(prior, 0.01), 0.99)
        odds /= 1 - odds
        self.guesses = [1 / (1 + ((BINS - i - 0.5) / (i + 0.5)) ** slope / odds) for i in range(BINS)]

    def at(self, place: int) -> float:
        """What is not known of a place is taken from the places before it."""
        guess = self.prior
        for judged, accepted in self.places[: place + 1]:
            guess = (accepted + self.belief * guess) / (judged + self.belief)
        return guess

    def expected(self, hope: float = 0.0) -> list[float]:
        """Tokens of a round with 0, 1, .. MAX_DRAFT drafts, had so many more drafts been judged and accepted."""
        totals, chance, guess = [1.0], 1.0, self.prior
        for judged, accepted in self.places:
            guess = (accepted + self.belief * guess + hope) / (judged + self.belief + hope)
            chance *= guess
            totals.append(totals[-1] + chance)
        return totals

    def of(self, confidence: float) -> float:
        """Of a draft that the drafter was so sure of."""
        return self._chance(_bin(confidence))

    def _chance(self, i: int, hope: float = 0.0) -> float:
        judged, accepted = self.bins[i]
        return (accepted + TRUST * self.guesses[i] + hope) / (judged + TRUST + hope)

    def stopping(self, hope: float = 0.0) -> list[tuple[float, float]]:
        """Tokens and drafts of a round that goes on behind drafts of the upper bins alone: of none, of the highest, .. of all."""
        total, goes_on, holds = TRUST + sum(judged for judged, _ in self.bins), 0.0, 0.0
        sums = [(goes_on, holds)]
        for i in reversed(range(BINS)):
            share = (self.bins[i][0] + TRUST / BINS) / total
            goes_on, holds = goes_on + share, holds + share * self._chance(i, hope)
            sums.append((goes_on, holds))
        return [(1 + holds * _series(h), _series(g)) for g, h in sums]

    def fade(self, share: float) -> None:
        # a drafter's word holds longer than a text does
        for kept, counts in ((share, self.places), (share**0.2, self.bins)):
            for seen in counts:
                seen[0], seen[1] = kept * seen[0], kept * seen[1]

    def learn(self, n_drafted: int, n_accepted: int, confidences: list[float]) -> None:
        for place in range(min(n_accepted + 1, n_drafted)):
            bins = [self.bins[_bin(sure)] for sure in confidences[place : place + 1]]  # some say it of the first alone
            for seen in (self.places[min(place, MAX_DRAFT - 1)], *bins):
                seen[0] += 1
                seen[1] += place < n_accepted


def _series(x: float) -> float:
    """1 + x + x^2 + .. of MAX_DRAFT terms."""
    return (1 - x**MAX_DRAFT) / (1 - x) if x < 1 - 1e-9 else MAX_DRAFT


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


class DraftLength:
    """The number of drafts to ask for: fixed, or "auto"; one number for all rows of a round, which share its cost.

    lengths: what may be asked for; known: what rounds of so many rows cost in earlier requests (costs_of); slope: how much a
    confidence says. Rounds go ask, more .., learn.
    """

    def __init__(
        self, draft_len: int | str, n_rows: int, lengths=range(MAX_DRAFT + 1), known: dict | None = None,
        slope: float = GREEDY,
    ):  # fmt: skip
        self.fixed = None if draft_len == "auto" else draft_len
        self.lengths = sorted({0, *lengths})
        self.acceptance: list[dict[tuple[int, Hashable], Acceptance]] = [{} for _ in range(n_rows)]
        self.account = [0.0] * n_rows  # seconds lost against plain decoding, gains taken off
        self.plain_seconds = [0.0] * n_rows  # what plain decoding would have taken
        self.known, self.slope = {} if known is None else known, slope
        self.costs, self.n_rows, self.round = self.new_costs(n_rows), n_rows, 0
        self.started: set[int] = set()  # parts that have drafted
        self.accident = False  # whether there was one
        self.offers: list | None = None  # of the plans that were compared
        self.found, self.due = 0, 0  # which was best, and in which round they are compared again
        self.plan, self.reason, self.best_rate = Plan("", [(0, None)] * n_rows), "fixed", 0.0

    def new_costs(self, n_rows: int) -> Costs:
        return Costs(self.known.setdefault(n_rows, {}))

    def ask(self, rows: list[int], plans: list[Plan] | None = None) -> list[int]:
        """Drafts for the next round of each row; `plan` and `reason` then say how they are to be made, and why. A fixed number
        follows the last plan."""
        plans = plans or [Plan("", [(0, None)] * len(rows))]
        if self.fixed is not None:
            self.plan = plans[-1]
            return [self.fixed] * len(rows)
        k, self.plan, self.reason = self._choose(rows, plans)
        return [k] * len(rows)

    def _choose(self, rows: list[int], plans: list[Plan]) -> tuple[int, Plan, str]:
        if len(rows) != self.n_rows:  # a pass of fewer rows has other costs
            self.costs, self.n_rows = self.new_costs(len(rows)), len(rows)
        self.round += 1
        costs, nothing, plans = self.costs, plans[-1], [plan for plan in plans if any(plan.offers)]
        if len(costs.verifying.get(0, ())) < 2:
            return 0, nothing, "measure"
        if not plans:
            return 0, nothing, "nothing to draft"
        plain_rate = len(rows) / costs.plain
        plan = self.favourite(rows, plans)
        best, k = self.best(rows, plan)
        self.best_rate = max(best, plain_rate)
        if best <= plain_rate:
            k = self.lengths[1]
            return (k, plan, "probe") if self.affords(rows, plan, k, grace=0.0) else (0, plan, "not worth it")
        # a plain round costs what drafting would have gained: the less that is, the oftener the comparison is made
        if self.round - costs.measured[0] > min(8 + 100 * (best / plain_rate - 1), FRESH):
            return 0, plan, "measure"
        wanted = self.lengths[-1] if plan.dynamic else k
        k = max(k for k in self.lengths if k <= wanted and (k == 0 or self.affords(rows, plan, k, GRACE)))
        return (k, plan, f"{plan.name} pays") if k else (0, plan, "not affordable")

    def of(self, row: int, offer: tuple[int, Hashable], plan: Plan | None = None) -> Acceptance:
        seen, plan = self.acceptance[row], plan or self.plan
        if offer not in seen:
            seen[offer] = Acceptance(plan.prior, plan.belief, self.slope)
        return seen[offer]

    def favourite(self, rows: list[int], plans: list[Plan]) -> Plan:
        """The plan that promises most, with hope: looked for every few rounds, as that takes time, and where offers changed."""
        if len(plans) == 1:
            return plans[0]
        offers = [plan.offers for plan in plans]
        if offers != self.offers or self.round >= self.due:
            self.offers, self.due = offers, self.round + 3
            k, plain_rate = self.lengths[1], len(rows) / self.costs.plain
            able = [i for i, plan in enumerate(plans) if self.affords(rows, plan, k, GRACE)] or range(len(plans))
            for hope in (HOPE, 0.0):  # a plan that hope alone speaks for must hide none that pays
                self.found = max(able, key=lambda i: self.best(rows, plans[i], hope))
                if self.best(rows, plans[self.found])[0] > plain_rate:
                    break
        return plans[self.found]

    def best(self, rows: list[int], plan: Plan, hope: float = 0.0) -> tuple[float, int]:
        """The number of drafts with the most tokens a second; of one row also that of stopping by confidence."""
        offers = zip(rows, plan.offers)
        seen = [self.of(row, offer, plan) for row, offer in offers if offer]
        tables = [acceptance.expected(hope) for acceptance in seen]
        n_others, (fixed, each) = len(rows) - len(tables), self.costs.line(self.part(plan), plan.cost)
        rates = [((n_others + sum(table[k] for table in tables)) / (fixed + k * each), k) for k in self.lengths if k]
        if plan.dynamic and len(rows) == 1:
            rates += [(tokens / (fixed + n * each), self.lengths[-1]) for tokens, n in seen[0].stopping(2 * hope)]
        return max(rates)

    @staticmethod
    def part(plan: Plan) -> int:
        return max((offer[0] for offer in plan.offers if offer), default=0)

    def affords(self, rows: list[int], plan: Plan, k: int, grace: float) -> bool:
        """Whether every row can pay for a round whose drafts all fall."""
        plain, (fixed, each) = self.costs.plain, self.costs.line(self.part(plan), plan.cost)
        loss = fixed + k * each - plain
        loss *= 2 if loss > 0 else 1  # at most half of what is left: a bad beginning leaves something to go on with
        return all(self.account[row] + loss <= PRICE * self.plain_seconds[row] + grace * plain for row in rows)

    def more(self, rows: list[int], confidences: list[list[float]]) -> bool:
        """Whether another draft is worth its cost; confidences of the drafts of this round so far, (rows,) each."""
        n, part, gain = len(confidences), self.part(self.plan), 0.0
        for i, row in enumerate(rows):
            seen = self.of(row, (part, None))
            chance = math.prod(seen.of(sure[i]) for sure in confidences)
            gain += chance * seen.at(min(n, MAX_DRAFT - 1))
        return gain >= self.best_rate * self.costs.line(part, self.plan.cost)[1]

    def learn(
        self, rows: list[int], n_drafted: list[int], n_accepted: list[int], draft_seconds: float, verify_seconds: float,
        confidences: dict[int, list[float]] | None = None,
    ) -> None:  # fmt: skip
        """What came of a round: per row how many were drafted and accepted, how sure the drafter was of each, both times."""
        if self.fixed is not None:
            return
        k, part, offers = max(n_drafted), self.part(self.plan), dict(zip(rows, self.plan.offers))
        reading = k > 0 and part not in self.started  # its first round also reads the prompt, as prefill does
        usual = 0.0
        if k and 0 in self.costs.verifying and not self.accident:
            fixed, each = self.costs.line(part, self.plan.cost)
            usual = fixed + k * each
        if usual and verify_seconds + (0.0 if reading else draft_seconds) > ACCIDENT * usual:
            self.accident, draft_seconds, verify_seconds = True, 0.0, usual
        else:
            self.costs.learn(part, k, None if reading else draft_seconds, verify_seconds, self.round, self.plan.cost)
        plain = self.costs.plain
        if reading:
            self.started.add(part)
            draft_seconds = min(draft_seconds, k * self.plan.cost * plain)
        for row, drafted, accepted in zip(rows, n_drafted, n_accepted):
            self.plain_seconds[row] += (accepted + 1) * plain
            # a drafter that was asked may also take time and offer nothing
            account = self.account[row] + draft_seconds + (verify_seconds - (accepted + 1) * plain if k else 0.0)
            self.account[row] = max(account, -CREDIT * plain)
            for offer, acceptance in self.acceptance[row].items():
                if drafted and offer == offers[row]:
                    acceptance.fade(MEMORY)
                elif self.round % 8 == 0:  # all at once, which takes less time
                    acceptance.fade(SLOWLY**8)
            if drafted:
                self.of(row, offers[row] or (0, None)).learn(drafted, accepted, (confidences or {}).get(row, []))
