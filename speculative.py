"""Speculative decoding: a drafter proposes k tokens, the target verifies them in one pass, exact acceptance keeps its law.

    committed     .... a                 the target's cache holds all but the last token, a
    draft              a -> b c d        k = 3 proposals
    verify             a b c d           one pass of k + 1 rows gives the target's laws behind a, b, c, d
    accept             b c | x           d fell: x is drawn from what the target has and the drafter lacks
    commit        .... a b c x           roll back by setting lengths: d's cache entry is overwritten next round

A drafter is any object with reset(prompts), propose(rows, max_k, sampler) and commit(rows, tokens, hidden):
see ModelDrafter for one with a cache, NGramDrafter for one without a model.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence

import torch

import kernels
from auto import GREEDY, GUESS, SAMPLED, DraftLength, Plan, costs_of, passes, stored, weights_read
from checkpoint import load_draft_head
from decode import PREFILL_CHUNK, Batch, Block, Generation, SamplingParams, capped, pack, read_tokens, run_loop
from early_exit import Depths, check_confidence, check_thresholds, last_rows, pad
from model import GPT, DraftHead
from rounds import Drafting, Rounds, RoundStep, runs_alone


class ModelDrafter:
    """A smaller model with the same tokens proposes; it has its own cache and reads what was committed."""

    name, dynamic = "model", True  # it asks sampler.more between drafts

    def __init__(self, model: GPT):
        self.model, self.capacity = model, model.config.block_size

    def check_target(self, target: GPT) -> None:
        ours, theirs = self.model.config.n_vocab_used, target.config.n_vocab_used
        if ours != theirs:
            raise ValueError(f"the drafter knows {ours} token ids, the target {theirs}: they need the same tokenizer")

    def attach(self, batch: Batch) -> None:
        self.capacity = min(batch.capacity, self.model.config.block_size)
        config, target = self.model.config, batch.model.config
        self.prior, self.belief = stored(self.model, batch.sampling.temperature, GUESS)
        self.cost = passes(target, weights_read(config, config.n_layer, config.vocab_size))

    def reset(self, prompts: list[list[int]]) -> None:
        self.tokens = [list(prompt) for prompt in prompts]  # committed
        self.held = [0] * len(prompts)  # positions of them in the cache
        self.fed: list[list[int]] = [[] for _ in prompts]  # drafts that the cache holds behind them
        self.cache = self.model.new_cache(len(prompts), self.capacity)
        self.warned = False

    def propose(self, rows: list[int], max_k: int, sampler):
        """1. read the committed tokens that the cache lacks   2. draw, feed what was drawn, draw again, max_k times."""
        room = [min(max_k, self.capacity - len(self.tokens[row]) + 1) for row in rows]
        live = [row for row, k in zip(rows, room) if k > 0]
        if min(room) < min(max_k, 1):
            self.warn_full()
        n = torch.tensor([max(k, 0) for k in room], device=sampler.device)
        if not live:
            return torch.zeros(len(rows), 0, dtype=torch.int64, device=sampler.device), None, n
        cache = self.cache.rows(live)
        pending = [self.tokens[row][self.held[row] :] for row in live]
        x = read_tokens(self.model, cache, pending, [self.held[row] for row in live])
        drafted = torch.zeros(len(live), 0, dtype=torch.int64, device=sampler.device)
        laws = []
        for j in range(max(room)):
            if j > 0:
                column = drafted[:, -1].tolist()
                positions = [len(self.tokens[row]) + j - 1 for row in live]
                ids, at = pack([[t] for t in column], positions, self.model.device)
                at.masked_fill_(at >= self.capacity, -1)  # a row without room sits out
                x = self.model.run_layers(self.model.embed(ids, at), cache, at, 0, self.model.config.n_layer)[:, 0]
            tokens, law = sampler.draft(live, self.model.logits(x), drafted)
            drafted = torch.cat((drafted, tokens[:, None]), 1)
            laws.append(law)
            if not sampler.more(live):
                break
        n = n.clamp(max=drafted.shape[1])
        for row, tokens, k in zip(live, drafted.tolist(), (k for k in n.tolist() if k > 0)):
            self.held[row] = len(self.tokens[row])
            self.fed[row] = tokens[: k - 1]
        logits = None if laws[0] is None else torch.stack(laws, 1)
        if len(live) == len(rows):
            return drafted, logits, n
        where = [i for i, k in enumerate(room) if k > 0]
        return *(None if x is None else _spread(x, where, len(rows)) for x in (drafted, logits)), n

    def commit(self, rows: list[int], tokens: list[list[int]], hidden) -> None:
        for row, new in zip(rows, tokens):
            n_same = 0  # accepted drafts are held already; the last committed token is left to be read, for its logits
            while n_same < min(len(new) - 1, len(self.fed[row])) and new[n_same] == self.fed[row][n_same]:
                n_same += 1
            self.held[row] += n_same
            self.tokens[row] += new
            self.fed[row] = []

    def warn_full(self) -> None:
        if not self.warned:
            self.warned = True
            full = self.model.config.block_size
            warnings.warn(f"the drafter's context of {full} tokens is full: decoding goes on plainly", stacklevel=3)

    # On the device (rounds.py) a round begins with the last two committed tokens; those before them are to be held.

    def drafting(self) -> Drafting:
        return Drafting(self.model, self.cache, self.model.config.n_layer, (), self.capacity)

    def catch_up(self, rows: list[int]) -> None:
        fits = [len(self.tokens[row]) <= self.capacity for row in rows]
        pending = [self.tokens[row][self.held[row] : -1] if fit else [] for row, fit in zip(rows, fits)]
        read_tokens(self.model, self.cache.rows(rows), pending, [self.held[row] for row in rows])
        for row, tokens in zip(rows, pending):
            self.held[row] += len(tokens)

    def drafted_on_device(self, rows: list[int]) -> None:
        for row in rows:
            self.held[row] = max(len(self.tokens[row]) - 2, 0)


def _spread(x: torch.Tensor, where: list[int], n_rows: int) -> torch.Tensor:
    """Rows of x to places `where` of n_rows, zeros elsewhere."""
    out = x.new_zeros(n_rows, *x.shape[1:])
    out[where] = x
    return out


class NGramDrafter:
    """Proposes what followed the last occurrence of the row's longest recent suffix (prompt lookup; Saxena 2023)."""

    def __init__(self, max_ngram: int = 4):
        if not isinstance(max_ngram, int) or max_ngram < 1:
            raise ValueError(f"max_ngram is {max_ngram!r}: it must be an integer >= 1")
        self.max_ngram, self.prior = max_ngram, GUESS

    def attach(self, batch: Batch) -> None:
        self.prior = GUESS if batch.sampling.temperature == 0 else 0.4  # what is drawn repeats itself less

    def reset(self, prompts: list[list[int]]) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.seen: list[dict[tuple, int]] = [{} for _ in prompts]  # n-gram -> index of the token that followed it last
        self.commit(range(len(prompts)), prompts, None)

    def match(self, row: int) -> tuple[int, int]:
        """Length of the longest suffix that was there before, 0 where none was, and the index of what followed it."""
        tokens, seen = self.tokens[row], self.seen[row]
        for n in range(min(self.max_ngram, len(tokens)), 0, -1):
            follows = seen.get(tuple(tokens[-n:]))
            if follows is not None:
                return n, follows
        return 0, 0

    def plans(self, rows: list[int]) -> list[Plan]:
        lengths = [self.match(row)[0] for row in rows]
        offers = [(0, n) if n else None for n in lengths]  # the longer, the surer
        return [Plan("n-gram", offers, prior=self.prior, cost=0.0)]

    def propose(self, rows: list[int], max_k: int, sampler):
        drafts = []
        for row in rows:
            tokens = self.tokens[row]
            n, follows = self.match(row)
            if n == 0:
                drafts.append([])
                continue
            copied = tokens[follows : follows + max_k]
            while len(copied) < max_k:  # the copy runs into itself: a repeating pattern goes on repeating
                copied.append(copied[len(copied) - (len(tokens) - follows)])
            drafts.append(copied)
        n = torch.tensor([len(d) for d in drafts], device=sampler.device)
        padded = [d + [0] * (max_k - len(d)) for d in drafts]
        return torch.tensor(padded, dtype=torch.int64, device=sampler.device).view(len(rows), max_k), None, n

    def commit(self, rows, tokens: Sequence[Sequence[int]], hidden) -> None:
        for row, new in zip(rows, tokens):
            history, seen = self.tokens[row], self.seen[row]
            for token in new:
                for n in range(1, min(self.max_ngram, len(history)) + 1):
                    seen[tuple(history[-n:])] = len(history)
                history.append(token)


class ExitDrafter:
    """Self-speculation: the target's own first layers draft, the layers above verify (Zhang et al. 2023; LayerSkip).

    exit_layer is one exit, or a rising tuple: then a draft leaves at the first exit whose confidence reaches `threshold`,
    decided on the law and never on the token drawn from it, which keeps sampling lossless; with automatic lengths it may also
    be that all drafts of a round leave at one of them. Shares the target's cache: drafted rows are parked, and verification
    runs only the layers above on them.
    """

    name, dynamic = "exit", True  # it asks sampler.more between drafts

    def __init__(self, model: GPT, exit_layer, threshold: float = 0.5, confidence: str = "max_prob"):
        self.exit_layers = (exit_layer,) if isinstance(exit_layer, int) else tuple(exit_layer)
        known = model.config.exit_layers
        rising = all(a < b for a, b in zip(self.exit_layers, self.exit_layers[1:]))
        if not self.exit_layers or not set(self.exit_layers) <= set(known) or not rising:
            raise ValueError(
                f"exit_layer is {exit_layer!r}: choose one or a rising tuple of this model's exits {known}"
            )
        self.model, self.confidence = model, check_confidence(confidence)
        self.thresholds = check_thresholds(threshold, self.exit_layers)

    def check_target(self, target: GPT) -> None:
        if target is not self.model:
            raise ValueError("ExitDrafter drafts with the target's own layers: give both the same model")

    def attach(self, batch: Batch) -> Depths:
        self.depths = Depths(batch, self.exit_layers)
        config = self.model.config
        adapter = config.n_embd**2 if "draft" in config.exit_adapters else 0
        n_outputs = len(config.exit_vocab or range(config.vocab_size))
        self.known: dict[
            int, tuple[float, float, float]
        ] = {}  # acceptance, cost and belief of each exit, to begin with
        for exit_layer in self.exit_layers:
            # on models here: 0.71 at a quarter of the depth, 0.87 at half
            guess = GUESS + (1 - GUESS) * exit_layer / config.n_layer
            prior, belief = stored(self.model, batch.sampling.temperature, guess, exit_layer)
            cost = passes(config, weights_read(config, exit_layer, n_outputs) + adapter)
            self.known[exit_layer] = prior, cost, belief
        return self.depths

    def reset(self, prompts: list[list[int]]) -> None:
        self.only = None  # index of the exit that all drafts of the round are to leave at

    def plans(self, rows: list[int]) -> list[Plan]:
        """Every exit alone, which a deeper one has to pay for with more acceptance, and all by confidence."""
        found = []
        for part, (exit_layer, known) in enumerate(self.known.items()):
            found.append(Plan(f"exit {exit_layer}", [(part, None)] * len(rows), True, *known))
        if len(found) > 1:
            # what leaves early is sure: right about as often as the deepest exit, at a cost between theirs
            cost, offers = sum(plan.cost for plan in found) / len(found), [(len(found), None)] * len(rows)
            found.append(found[-1]._replace(name="exits", offers=offers, cost=cost))
        return found

    def follow(self, offers: dict[int, tuple | None]) -> None:
        part = max(offer[0] for offer in offers.values() if offer)
        self.only = part if part < len(self.exit_layers) else None

    def propose(self, rows: list[int], max_k: int, sampler):
        def ask(segment: int, going: list[int], hidden: list[torch.Tensor]):
            logits = self.model.logits(last_rows(hidden), self.exit_layers[segment], "draft")
            if segment in (self.only, len(self.exit_layers) - 1):
                return logits, [True] * len(going)
            return logits, (kernels.confidence(logits, self.confidence) >= self.thresholds[segment]).tolist()

        drafted = torch.zeros(len(rows), 0, dtype=torch.int64, device=sampler.device)
        last = [[sampler.histories[row][-1]] for row in rows]
        place = {row: i for i, row in enumerate(rows)}
        laws = []
        n = [max(0, min(max_k, self.depths.batch.room(row) - 1)) for row in rows]
        for j in range(max(n, default=0)):
            going = [i for i in range(len(rows)) if j < n[i]]  # a row whose context or budget ends sits out
            parts = list(self.depths.descend([rows[i] for i in going], [last[i] for i in going], ask, self.only))
            order = [place[row] for _, leaving, _ in parts for row in leaving]
            logits = torch.cat([logits for _, _, logits in parts])
            if order != list(range(len(rows))):
                logits = _spread(logits, order, len(rows))
            tokens, law = sampler.draft(rows, logits, drafted)
            drafted = torch.cat((drafted, tokens[:, None]), 1)
            last = tokens[:, None].tolist()
            laws.append(law)
            if not sampler.more(rows):
                break
        logits = None if not laws or laws[0] is None else torch.stack(laws, 1)
        return drafted, logits, torch.tensor(n, device=sampler.device).clamp(max=drafted.shape[1])

    def commit(self, rows: list[int], tokens: list[list[int]], hidden) -> None:
        pass

    def drafting(self) -> Drafting:
        (exit_layer,) = self.exit_layers
        batch = self.depths.batch
        return Drafting(self.model, batch.cache, exit_layer, (exit_layer, "draft"), batch.capacity)


class HeadDrafter:
    """A trained block drafts from the target's last hidden states (EAGLE: Li et al. 2024, 2025).

    The pair (hidden state at t, token at t + 1) is its input at place t, and its output stands for the hidden state at t + 1:

        committed          a  b  c            the target's hidden states behind a and b are known
        pairs              (h_a, b) (h_b, c)  those that its cache lacks are read in one pass; the last output proposes d
        further drafts     (u, d) ...         its own output u takes the place of the hidden state behind c

    path is a folder that train_exit_heads.py --stage drafter wrote, or a model.DraftHead. quantize "int8" or "int4" makes it cheaper:
    what it drafts is verified anyway. None, of a folder: int8 where the target is quantised, and in bfloat16 on a CPU; "none": as it is.
    """

    wants_hidden = True

    name, dynamic = "head", True  # it asks sampler.more between drafts

    def __init__(self, model: GPT, path, quantize: str | None = None):
        self.model = model
        if isinstance(path, DraftHead):
            if quantize:
                raise ValueError(f"quantize is {quantize!r}: a DraftHead is taken as it is; give a folder")
            self.head = path
        else:
            pays = model.identity.get("quantize") or (model.device.type == "cpu" and model.dtype == torch.bfloat16)
            self.head = load_draft_head(model, path, quantize or ("int8" if pays else None))
        config, self.prior = self.head.config, self.head.acceptance
        fuse = 2 * config.n_embd**2
        self.cost = passes(model.config, weights_read(config, 1, len(config.exit_vocab)) + fuse)
        self.head.attach(model)

    def check_target(self, target: GPT) -> None:
        if target is not self.model:
            raise ValueError("HeadDrafter reads its own target's hidden states: give both the same model")

    def attach(self, batch: Batch) -> None:
        self.batch = batch

    def reset(self, prompts: list[list[int]]) -> None:
        nothing = torch.zeros(0, self.model.config.n_embd, dtype=self.model.dtype, device=self.model.device)
        self.held = [0] * len(prompts)  # pairs in the cache, drafts not counted
        self.tokens = [list(prompt[1:]) for prompt in prompts]  # of the pairs that it lacks; below, their hidden states
        self.hidden = [[nothing, *chunks] for chunks in self.batch.prompt_hidden]
        self.cache = self.head.new_cache(len(prompts), self.batch.capacity)

    def propose(self, rows: list[int], max_k: int, sampler):
        """1. read the pairs that the cache lacks   2. draw from the last output, feed both, draw again, max_k times."""
        live = [row for row in rows if self.tokens[row]]  # a prompt of one token has no pair yet
        n = torch.tensor([max_k if self.tokens[row] else 0 for row in rows], device=sampler.device)
        if not live:
            return torch.zeros(len(rows), 0, dtype=torch.int64, device=sampler.device), None, n
        cache, x = self.cache.rows(live), self.read(live)
        drafted = torch.zeros(len(live), 0, dtype=torch.int64, device=sampler.device)
        at = torch.tensor([[self.held[row]] for row in live], device=self.model.device)
        laws = []
        for j in range(max_k):
            if j > 0:
                x = self.head(drafted[:, -1:], x[:, None], cache, at.where(at < self.cache.capacity, -1))[:, 0]
                at = at + 1
            tokens, law = sampler.draft(live, self.head.logits(x), drafted)
            drafted = torch.cat((drafted, tokens[:, None]), 1)
            laws.append(law)
            if not sampler.more(live):
                break
        n = n.clamp(max=drafted.shape[1])
        logits = None if laws[0] is None else torch.stack(laws, 1)
        if len(live) == len(rows):
            return drafted, logits, n
        where = [i for i, row in enumerate(rows) if row in live]
        return *(None if x is None else _spread(x, where, len(rows)) for x in (drafted, logits)), n

    def read(self, rows: list[int]) -> torch.Tensor:
        """The pairs that the cache lacks, at least one a row: the last output of each row (B, C)."""
        cache, last = self.cache.rows(rows), None
        tokens, starts = [self.tokens[row] for row in rows], [self.held[row] for row in rows]
        hidden = [torch.cat(self.hidden[row]) for row in rows]
        for begin in range(0, max(map(len, tokens)), PREFILL_CHUNK):
            part = [ids[begin : begin + PREFILL_CHUNK] for ids in tokens]
            ids, positions = pack(part, [start + begin for start in starts], self.model.device)
            x = self.head(ids, pad([x[begin : begin + PREFILL_CHUNK] for x in hidden]), cache, positions)
            ends = x[range(len(part)), [len(ids) - 1 for ids in part]]
            ended = torch.tensor([len(ids) > 0 for ids in part], device=x.device)[:, None]
            last = ends if last is None else torch.where(ended, ends, last)
        for row, ids in zip(rows, tokens):
            self.held[row] += len(ids)
            self.tokens[row], self.hidden[row] = [], []
        return last

    def commit(self, rows: list[int], tokens: list[list[int]], hidden) -> None:
        for row, new, x in zip(rows, tokens, hidden):
            self.tokens[row] += new
            self.hidden[row].append(x)


class ChainDrafter:
    """Several drafters: for each row drafts the first that has something to offer, such as n-grams before a model.

    With automatic lengths the measured times and acceptances decide each round who of them drafts at all.
    """

    def __init__(self, *drafters):
        if not drafters:
            raise ValueError("drafters are none: give at least one")
        self.drafters = drafters
        self.wants_hidden = any(getattr(drafter, "wants_hidden", False) for drafter in drafters)

    def check_target(self, target: GPT) -> None:
        for drafter in self.drafters:
            if hasattr(drafter, "check_target"):
                drafter.check_target(target)

    def attach(self, batch: Batch) -> Depths | None:
        found = [drafter.attach(batch) for drafter in self.drafters if hasattr(drafter, "attach")]
        shared = [depths for depths in found if depths]
        if len(shared) > 1:
            raise ValueError(
                f"drafters hold {len(shared)} ExitDrafters: at most one may share the target's cache; give it all exits"
            )
        return shared[0] if shared else None

    def reset(self, prompts: list[list[int]]) -> None:
        for drafter in self.drafters:
            drafter.reset(prompts)

    def plans(self, rows: list[int]) -> list[Plan]:
        """Each drafter alone, then each behind those before it that cannot draft for every row."""
        alone, joined, self.parts = [], [], []
        for drafter in self.drafters:
            before = joined[-1].offers if joined else [None] * len(rows)
            name = [joined[-1].name] if joined and any(before) else []
            for plan in plans_of(drafter, rows):
                part, own = len(self.parts), next((offer for offer in plan.offers if offer), (0, None))
                self.parts.append((drafter, own[0]))
                plan = plan._replace(offers=[offer and (part, offer[1]) for offer in plan.offers])
                alone.append(plan)
                offers = [first or offer for first, offer in zip(before, plan.offers)]
                joined.append(plan._replace(name=", then ".join([*name, plan.name]), offers=offers))
        found = {tuple(plan.offers): plan for plan in (*joined, *alone)}  # the shorter name where two are the same
        last = tuple(joined[-1].offers)
        return [plan for offers, plan in found.items() if offers != last] + [found[last]]

    def follow(self, offers: dict[int, tuple | None]) -> None:
        self.part = {row: offer[0] for row, offer in offers.items() if offer}
        for part, (drafter, own) in enumerate(self.parts):
            rows = [row for row, used in self.part.items() if used == part]
            if rows and hasattr(drafter, "follow"):
                drafter.follow({row: (own, offers[row][1]) for row in rows})

    def propose(self, rows: list[int], max_k: int, sampler):
        parts = {}
        for part in sorted(set(self.part.values())):
            where = [i for i, row in enumerate(rows) if self.part.get(row) == part]
            if where:
                parts[part] = where, *self.parts[part][0].propose([rows[i] for i in where], max_k, sampler)
        width = max((tokens.shape[1] for _, tokens, _, _ in parts.values()), default=0)
        drafted = torch.zeros(len(rows), width, dtype=torch.int64, device=sampler.device)
        n = torch.zeros(len(rows), dtype=torch.int64, device=sampler.device)
        laws = None
        for where, tokens, law, count in parts.values():
            drafted[where, : tokens.shape[1]] = tokens.to(drafted)
            n[where] = torch.as_tensor(count, device=n.device)
            if law is not None:
                if laws is None:
                    laws = law.new_full((len(rows), width, law.shape[2]), -torch.inf)
                laws[where, : law.shape[1]] = law
        if laws is not None:  # a copied draft is certain
            copied = [i for where, _, law, _ in parts.values() if law is None for i in where]
            laws[copied] = laws[copied].scatter(2, drafted[copied][..., None], 0.0)
        return drafted, laws, n

    def commit(self, rows: list[int], tokens: list[list[int]], hidden) -> None:
        for drafter in self.drafters:
            drafter.commit(rows, tokens, hidden)


def plans_of(drafter, rows: list[int]) -> list[Plan]:
    """What a drafter may do for the next round; one that says nothing drafts for all rows, with no hint."""
    if hasattr(drafter, "plans"):
        return drafter.plans(rows)
    known = {name: getattr(drafter, name) for name in ("dynamic", "prior", "cost", "belief") if hasattr(drafter, name)}
    return [Plan(getattr(drafter, "name", type(drafter).__name__), [(0, None)] * len(rows), **known)]


def proposed(name: str, found, device) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """What a drafter returned: token ids (B, K), processed logits (B, K, V) or None, how many of each row count (B,)."""
    try:
        tokens, logits, n = found
        tokens, counts = tokens.to(device), torch.as_tensor(n)
        logits = None if logits is None else logits.to(device)
        whole = not tokens.is_floating_point() and not counts.is_floating_point()
        good = whole and tokens.dim() == 2 and counts.dim() == 1 and (logits is None or logits.dim() == 3)
    except (TypeError, ValueError, AttributeError):
        good = False
    if not good:
        raise ValueError(
            f"{name}.propose returned {' '.join(repr(found).split())[:200]}: give token ids (rows, drafts), their processed logits "
            "(rows, drafts, vocabulary) or None, and how many drafts of each row count (rows)"
        )
    return tokens.to(torch.int64), logits, counts.tolist()


class SpeculativeStep:
    """Draft, verify, accept: up to k + 1 tokens per row from one pass of the target."""

    def __init__(self, drafter, draft_len: int | str, verify: str):
        self.drafter, self.draft_len, self.coupled = drafter, draft_len, verify == "coupled"
        self.wants_hidden = getattr(drafter, "wants_hidden", False)

    def start(self, batch: Batch) -> None:
        slope = SAMPLED if batch.sampling.temperature > 0 else GREEDY
        self.lengths = DraftLength(self.draft_len, len(batch.tokens), known=costs_of(self.drafter), slope=slope)
        attach = getattr(self.drafter, "attach", None)  # a drafter that shares the target's pass brings its own Depths
        self.depths = (attach(batch) if attach else None) or Depths(batch, ())
        self.drafter.reset([list(tokens) for tokens in batch.tokens])

    def __call__(self, batch: Batch, rows: list[int], cap: int | None) -> list[Block]:
        """One round; a row with k = 0 takes a plain step in it.

        1. draft: up to k tokens per row, no more than could be committed beside the token that the target adds
        2. verify: the last committed token and the drafts, whatever of them is not computed yet, to the full depth
        3. accept
        """
        began = time.perf_counter()
        wanted = [0] * len(rows) if cap == 0 else self.lengths.ask(rows, plans_of(self.drafter, rows))
        asked = [max(0, min(capped(k, cap), batch.room(row) - 1)) for row, k in zip(rows, wanted)]
        drafts, draft_logits, n_drafted = self._draft(batch, rows, asked)
        drafted_at = time.perf_counter()
        ids = [list(tokens[:n]) for tokens, n in zip(drafts.tolist(), n_drafted)]
        new = []
        for row, tokens in zip(rows, ids):
            held, length = self.depths.computed[row][0], len(batch.tokens[row])
            new.append((batch.tokens[row][-1:] + tokens)[held - length + 1 :])
        arriving = self.depths.embed(rows, new) if any(new) else [self.depths.nothing] * len(rows)
        self.hidden = self.depths.deepen(rows, arriving)
        x = self.hidden[0][None] if len(rows) == 1 else pad(self.hidden)  # (B, K+1, C)
        tokens, n_accepted, log_probs = batch.sampler.verify(
            rows, batch.model.logits(x), drafts, draft_logits, n_drafted
        )
        verified_at = time.perf_counter()
        blocks = []
        for i, row in enumerate(rows):
            passes = self.depths.take_passes(row)
            blocks.append(batch.judged(row, tokens[i], log_probs[i], n_accepted[i], n_drafted[i], passes))
            stats = batch.generations[row].stats
            stats.draft_seconds += drafted_at - began
            stats.verify_seconds += verified_at - drafted_at
            stats.add_reason("kill switch" if cap == 0 else self.lengths.reason, wanted[i], n_drafted[i])
        times = drafted_at - began, verified_at - drafted_at
        if cap != 0:  # a round that was not asked for teaches nothing
            self.lengths.learn(rows, n_drafted, n_accepted, *times, batch.sampler.confidences)
        return blocks

    def _draft(self, batch: Batch, rows: list[int], asked: list[int]):
        """Drafts (B, K), their processed logits (B, K, V) or None, and how many count per row; K is the most of any row."""
        where = [i for i, k in enumerate(asked) if k > 0]
        if not where:
            return torch.zeros(len(rows), 0, dtype=torch.int64, device=batch.model.device), None, [0] * len(rows)
        max_k, n_vocab = max(asked), batch.model.config.n_vocab_used
        if hasattr(self.drafter, "follow"):
            self.drafter.follow(dict(zip(rows, self.lengths.plan.offers)))
        batch.sampler.judge_drafts(self.lengths.more if self.lengths.fixed is None else None)
        device, name = batch.model.device, type(self.drafter).__name__
        tokens, logits, counts = proposed(
            name, self.drafter.propose([rows[i] for i in where], max_k, batch.sampler), device
        )
        n_drafted = [0] * len(rows)
        for i, count in zip(where, counts):
            n_drafted[i] = min(count, asked[i])
        width = max(n_drafted)
        shapes = [x.shape[:2] for x in (tokens, logits) if x is not None]
        if len(counts) != len(where) or min(counts) < 0 or any(b != len(where) or k < width for b, k in shapes):
            drawn = "" if logits is None else f" from logits {tuple(logits.shape)}"
            raise ValueError(
                f"{name} proposed tokens {tuple(tokens.shape)}{drawn} with n {counts}, asked for {len(where)} rows of at most {max_k}"
            )
        own = torch.tensor([n_drafted[i] for i in where], device=tokens.device)
        tokens = tokens[:, :width].where(torch.arange(width, device=tokens.device) < own[:, None], 0)
        if width and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab:
            raise ValueError(f"{name} proposed a token outside 0..{n_vocab - 1}")
        logits = None if logits is None else logits[:, :width]
        for i, row in enumerate(rows):  # drafts beyond a row's own k were run for nothing
            self.depths.crop(row, len(batch.tokens[row]) + n_drafted[i])
        if len(where) < len(rows):
            tokens, logits = (None if x is None else _spread(x, where, len(rows)) for x in (tokens, logits))
        return tokens, logits, n_drafted

    def commit(self, batch: Batch, rows: list[int], kept: list[list[int]]) -> None:
        for row in rows:
            self.depths.crop(row, len(batch.tokens[row]) - 1)
        self.drafter.commit(rows, kept, [x[: len(tokens)] for x, tokens in zip(self.hidden, kept)])


class SpeculativeRounds(RoundStep):
    """SpeculativeStep whose rounds the device runs by itself, drafts included.

    A round is as wide as the captured graph that fits the most drafts that a row asks for; automatic lengths are learnt one
    round late. A plain round is the target's alone: a drafter with its own cache reads what it missed before it drafts
    again, and for that once the host waits.
    """

    WIDTHS = (1, 2, 4, 8)  # of automatic lengths: one graph each

    def __init__(self, drafter: ModelDrafter | ExitDrafter, draft_len: int | str, verify: str):
        super().__init__(verify == "coupled")
        self.drafter, self.draft_len = drafter, draft_len

    def begin(self, batch: Batch) -> Rounds:
        self.lengths = DraftLength(self.draft_len, len(batch.tokens), self.WIDTHS, costs_of(self.drafter, "device"))
        self.whys: deque[tuple[str, int]] = deque()  # reasons and widths of the rounds in flight
        self.drafter.attach(batch)
        self.drafter.reset(batch.tokens)
        rounds = Rounds(batch, self.drafter.drafting())
        self.apart = rounds.n_own_layers == 0  # the drafter has its own cache
        self.behind = self.apart
        self.widths = self.WIDTHS if self.draft_len == "auto" else (self.draft_len,)
        for width in self.widths:
            rounds.prepare(width)
        self.asked = [0] * len(batch.tokens)
        self.read_at = time.perf_counter()
        return rounds

    def launch(self, batch: Batch, rows: list[int], cap: int | None) -> None:
        asked = [0] * len(batch.tokens)
        if cap != 0:  # a graph drafts as many as it was captured for: it cannot stop in between
            [plan] = plans_of(self.drafter, rows)
            for row, k in zip(rows, self.lengths.ask(rows, [plan._replace(dynamic=False)])):
                asked[row] = capped(k, cap)
        width = max(asked)
        if width and self.behind:
            if self.rounds.in_flight:  # it is not known yet what the drafter missed
                return
            self.drafter.catch_up(rows)
        if width and asked != self.asked:
            self.asked = asked
            self.rounds.k.copy_(torch.tensor(asked), non_blocking=True)
        self.behind = self.apart and width == 0
        if width:
            width = min(w for w in self.widths if w >= width)
        self.whys.append(("kill switch" if cap == 0 else self.lengths.reason, width))
        self.rounds.launch(width)

    def __call__(self, batch: Batch, rows: list[int], cap: int | None) -> list[Block]:
        blocks = super().__call__(batch, rows, cap)
        began, self.read_at = self.read_at, time.perf_counter()
        accepted = [block.sources.count("draft") for block in blocks]
        reason, width = self.whys.popleft()
        if reason != "kill switch":  # what of the time was drafting no host sees
            self.lengths.learn(rows, [block.n_drafted for block in blocks], accepted, 0.0, self.read_at - began)
        for row, block in zip(rows, blocks):
            batch.generations[row].stats.add_reason(reason, width, block.n_drafted)
            if self.width > 0 and self.apart and len(batch.tokens[row]) > self.drafter.capacity and batch.room(row) > 1:
                self.drafter.warn_full()
        return blocks

    def commit(self, batch: Batch, rows: list[int], kept: list[list[int]]) -> None:
        super().commit(batch, rows, kept)
        self.drafter.commit(rows, kept, None)
        if self.width > 0 and self.apart:
            self.drafter.drafted_on_device(rows)


def speculative_step(model: GPT, sampling: SamplingParams, drafter, draft_len: int | str, verify: str):
    """SpeculativeStep, or where the device can go on alone its counterpart: the same tokens.

    Alone means Triton kernels for target and drafter, a ModelDrafter or an ExitDrafter with one exit, no penalty and no bias,
    and no more drafts than an attention kernel takes.
    """
    known = type(drafter) is ModelDrafter or (type(drafter) is ExitDrafter and len(drafter.exit_layers) == 1)
    if (
        known
        and runs_alone(model, sampling)
        and runs_alone(drafter.model, sampling)
        and drafter.model.device == model.device
        and (draft_len == "auto" or draft_len < kernels.MAX_ROWS)
    ):
        return SpeculativeRounds(drafter, draft_len, verify)
    return SpeculativeStep(drafter, draft_len, verify)


def speculative_generate(
    model: GPT,
    drafter,
    prompts: list[list[int]],
    sampling: SamplingParams,
    draft_len: int | str = 4,
    verify: str = "rejection",
    tokenizer=None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    *,
    control: str | None = None,
) -> list[Generation]:
    """Decode with a drafter, losslessly: the same law as plain decoding (rejection) or the same tokens (coupled, greedy).

    draft_len is the number of drafts per round (0 is plain), or "auto". verify "rejection" accepts most; "coupled" gives
    token for token what plain decoding with that seed gives, whatever the drafter.
    """
    good = draft_len == "auto" or (isinstance(draft_len, int) and not isinstance(draft_len, bool) and draft_len >= 0)
    if not good:
        raise ValueError(f"draft_len is {draft_len!r}: it must be an integer >= 0, or 'auto'")
    if verify not in ("rejection", "coupled"):
        raise ValueError(f"verify is {verify!r}: choose rejection or coupled")
    if hasattr(drafter, "check_target"):
        drafter.check_target(model)
    return run_loop(
        model,
        prompts,
        sampling,
        speculative_step(model, sampling, drafter, draft_len, verify),
        tokenizer,
        on_tokens,
        control,
    )
