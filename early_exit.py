"""Early exit: stop the pass at the first exit head that is confident, and settle the debt to the deep layers later.

    layers 0..3    o o o o o o o o o         computed: 9 positions
    exit 4         . . . . . . | p p p       parked: the rows of positions 6, 7, 8 wait here
    layers 4..7    o o o o o o               computed: 6
    exit 8         . . . . | p p             positions 4, 5 wait here
    layers 8..15   o o o o                   computed: 4

A row that goes deeper takes the rows parked on its way along, in one pass, so every stored key and value is the full
model's for the emitted tokens: the only error is the choice made at an exit. Self-speculation (speculative.py) is the same
machine with another policy: it drafts by parking and verifies by flushing, and emits only what the deep pass confirms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Real

import torch

import kernels
from decode import Batch, Block, Generation, SamplingParams, check_drawn, pack, run_loop
from model import GPT
from rounds import captured, new_pool, runs_alone


class Depths:
    """How many positions of each row each segment of layers has computed, and the hidden rows parked between segments.

    Segment s is layers bounds[s] .. bounds[s+1]-1. Invariants: computed[row] never grows with depth; parked[row][s] are
    exactly the hidden rows (n, C) of positions computed[row][s] .. computed[row][s-1]-1, in order.
    """

    def __init__(self, batch: Batch, exit_layers: Sequence[int], kv_fill: str = "recompute"):
        self.batch, self.kv_fill = batch, kv_fill
        self.bounds = (0, *exit_layers, batch.model.config.n_layer)
        self.n_segments = len(self.bounds) - 1
        self.computed = [[len(tokens) - 1] * self.n_segments for tokens in batch.tokens]  # what prefill has read
        self.parked: list[list[torch.Tensor | None]] = [[None] * self.n_segments for _ in batch.tokens]
        self.layer_passes = [0] * len(batch.tokens)  # since take_passes
        model = batch.model
        self.nothing = torch.zeros(0, model.config.n_embd, dtype=model.dtype, device=model.device)  # hidden rows (0, C)

    def embed(self, rows: list[int], tokens: list[list[int]]) -> list[torch.Tensor]:
        """Hidden rows (n, C) of the next tokens of each row, those behind what segment 0 has computed."""
        ids, positions = pack(tokens, [self.computed[row][0] for row in rows], self.batch.model.device)
        x = self.batch.model.embed(ids, positions)
        return [x[i, : len(t)] for i, t in enumerate(tokens)]

    def run(self, rows: list[int], segment: int, arriving: list[torch.Tensor]) -> list[torch.Tensor]:
        """Push the arriving hidden rows (n, C), behind those parked here, through a segment: hidden rows per row.

        A row for which nothing arrives and nothing is parked takes no part.
        """
        joined = [
            x if self.parked[row][segment] is None else torch.cat((self.parked[row][segment], x))
            for row, x in zip(rows, arriving)
        ]
        going = [i for i, x in enumerate(joined) if len(x)]
        if not going:
            return joined
        lengths, live = [len(joined[i]) for i in going], [rows[i] for i in going]
        x = joined[going[0]][None] if len(going) == 1 else pad([joined[i] for i in going])
        starts = [self.computed[row][segment] for row in live]
        _, positions = pack([[0] * n for n in lengths], starts, x.device)
        first, last = self.bounds[segment], self.bounds[segment + 1]
        x = self.batch.model.run_layers(x, self.batch.rows_cache(live), positions, first, last)
        for i, (row, n) in enumerate(zip(live, lengths)):
            joined[going[i]] = x[i, :n]
            self.computed[row][segment] += n
            self.parked[row][segment] = None
            self.layer_passes[row] += last - first
        return joined

    def deepen(self, rows: list[int], arriving: list[torch.Tensor]) -> list[torch.Tensor]:
        """Flush: everything that arrives or is parked goes through all segments, to the full depth."""
        for segment in range(self.n_segments):
            arriving = self.run(rows, segment, arriving)
        return arriving

    def descend(self, rows: list[int], tokens: list[list[int]], ask) -> Iterator[tuple[int, list[int], torch.Tensor]]:
        """Run one new token per row down until its row leaves; yields (layers run, rows that leave, their logits (n, V)).

        ask(segment, rows, x (n, C)) is the policy: the logits of the head behind that segment, and who is sure enough to
        leave with them; or None, and nobody. What leaves early is parked there (or propagated) before it is yielded.
        """
        going, hidden = rows, self.embed(rows, tokens)
        for segment in range(self.n_segments):
            hidden = self.run(going, segment, hidden)
            logits, sure = ask(segment, going, hidden)
            if logits is None or not any(sure):
                continue
            leaving = [row for row, yes in zip(going, sure) if yes]
            if segment + 1 < self.n_segments:
                left = [x for x, yes in zip(hidden, sure) if yes]
                if self.kv_fill == "propagate":
                    self.propagate(leaving, segment + 1, left)
                else:
                    for row, x in zip(leaving, left):
                        self.park(row, segment + 1, x)
            yield self.bounds[segment + 1], leaving, logits if all(sure) else logits[sure]
            going, hidden = ([kept for kept, yes in zip(both, sure) if not yes] for both in (going, hidden))
            if not going:
                return

    def park(self, row: int, segment: int, x: torch.Tensor) -> None:
        waiting = self.parked[row][segment]
        self.parked[row][segment] = x if waiting is None else torch.cat((waiting, x))

    def propagate(self, rows: list[int], segment: int, hidden: list[torch.Tensor]) -> None:
        """Approximate: project the hidden row of each row to the keys and values of all segments from here on."""
        starts = [self.computed[row][segment] for row in rows]
        _, positions = pack([[0] * len(x) for x in hidden], starts, hidden[0].device)
        model, cache = self.batch.model, self.batch.rows_cache(rows)
        model.fill_kv(torch.stack(hidden), cache, positions, self.bounds[segment])
        for row, x in zip(rows, hidden):
            for deeper in range(segment, self.n_segments):
                self.computed[row][deeper] += len(x)

    def crop(self, row: int, length: int) -> None:
        """Roll back to `length` positions: later ones are forgotten, at every depth and where they are parked."""
        computed = self.computed[row] = [min(n, length) for n in self.computed[row]]
        for segment in range(1, self.n_segments):
            n_parked = computed[segment - 1] - computed[segment]
            waiting = self.parked[row][segment]
            self.parked[row][segment] = waiting[:n_parked] if waiting is not None and n_parked else None

    def n_parked(self, row: int) -> int:
        return self.computed[row][0] - self.computed[row][-1]

    def take_passes(self, row: int) -> int:
        n, self.layer_passes[row] = self.layer_passes[row], 0
        return n


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    """Ragged (n_i, C) -> (B, max n, C), zeros behind."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def last_rows(hidden: list[torch.Tensor]) -> torch.Tensor:
    """Ragged (n_i, C) -> their last rows (B, C)."""
    return hidden[0][-1:] if len(hidden) == 1 else torch.stack([x[-1] for x in hidden])


class EarlyExitStep:
    """One token per row from the first confident exit, or from the full depth."""

    def __init__(self, thresholds, confidence: str, kv_fill: str, max_parked: int, audit: bool):
        self.thresholds, self.confidence, self.kv_fill = thresholds, confidence, kv_fill
        self.max_parked, self.audit = max_parked, audit

    def start(self, batch: Batch) -> None:
        self.depths = Depths(batch, batch.model.config.exit_layers, self.kv_fill)

    def __call__(self, batch: Batch, rows: list[int], cap: int | None) -> list[Block]:
        """Each row by itself:

        1. run the next segment on the row's new position, with those parked there in front
        2. ask the exit's head; confident and not forced: park (or propagate), emit from this head, done
        3. at the full depth: emit from the full head
        Forced deep: the kill switch, a threshold above 1, or max_parked rows waiting already.
        """
        began = time.perf_counter()
        depths, model, n_layer = self.depths, batch.model, batch.model.config.n_layer

        def ask(segment: int, going: list[int], hidden: list[torch.Tensor]):
            if segment == depths.n_segments - 1:
                if self.audit:
                    for row, x in zip(going, hidden):
                        self.judge(batch, row, x[:-1], len(batch.tokens[row]) - len(x) + 1)
                return model.logits(last_rows(hidden)), [True] * len(going)
            # the new row counts as parked already: segment 0 has computed it and the last has not
            free = [cap != 0 and depths.n_parked(row) <= self.max_parked for row in going]
            if self.thresholds[segment] > 1 or not any(free):
                return None, free
            x, exit_layer = last_rows(hidden), depths.bounds[segment + 1]
            *_, confidence = model.exit_confidence(x, exit_layer, self.confidence)
            sure = confidence >= self.thresholds[segment]
            if not sure.any():  # most rows go on, and all logits cost more than what the confidence needs
                return None, sure.tolist()
            logits = model.logits(x, exit_layer)
            if batch.sampler.bias is not None:  # it may forbid all that a reduced vocabulary knows
                sure &= (logits + batch.sampler.bias).amax(-1) > -torch.inf
            return logits, [a and b for a, b in zip(free, sure.tolist())]

        blocks: dict[int, Block] = {}
        last_tokens = [batch.tokens[row][-1:] for row in rows]
        for n_run, leaving, logits in depths.descend(rows, last_tokens, ask):
            source = "plain" if n_run == n_layer else "exit"
            for row, token, log_prob in zip(leaving, *batch.sampler.sample(leaving, logits)):
                blocks[row] = Block([token], [log_prob], [source], [n_run], 0, depths.take_passes(row))
        for row in rows:
            batch.generations[row].stats.verify_seconds += time.perf_counter() - began
        return [blocks[row] for row in rows]

    def judge(self, batch: Batch, row: int, hidden: torch.Tensor, first_index: int) -> None:
        """Audit: what the full head says, with the same noise, of tokens that an exit emitted at first_index .."""
        if not len(hidden):
            return
        full = batch.sampler.full_tokens(row, batch.model.logits(hidden), first_index)
        emitted = batch.tokens[row][first_index : first_index + len(full)]
        stats = batch.generations[row].stats
        stats.audited += len(full)
        stats.audit_disagreed += sum(a != b for a, b in zip(full, emitted))

    def commit(self, batch: Batch, rows: list[int], kept: list[list[int]]) -> None:
        ended = [row for row in rows if batch.generations[row].finish_reason and self.depths.n_parked(row)]
        if self.audit and ended:
            for row, x in zip(ended, self.depths.deepen(ended, [self.depths.nothing] * len(ended))):
                self.judge(batch, row, x, len(batch.tokens[row]) - len(x))
                batch.generations[row].stats.layer_passes += self.depths.take_passes(row)


class EarlyExitSegments:
    """EarlyExitStep in one launch per segment (rounds.py), its head and the draw included; the host decides after each.

    orders (4, B)                      what the host asks of a segment: last token, first position, hidden rows to run (none:
                                       the row sits out), those that wait in front of the next segment already
    waiting (B, max_parked + 2, C)     hidden rows in front of each deeper segment; the last place is a bin
    """

    def __init__(self, thresholds, confidence: str, kv_fill: str, max_parked: int):
        self.thresholds, self.confidence, self.kv_fill, self.max_parked = thresholds, confidence, kv_fill, max_parked

    def start(self, batch: Batch) -> None:
        began = time.perf_counter()
        self.batch, model = batch, batch.model
        config, n_rows, device = model.config, len(batch.tokens), model.device
        self.bounds = (0, *config.exit_layers, config.n_layer)
        self.computed = [[len(tokens) - 1] * (len(self.bounds) - 1) for tokens in batch.tokens]  # as in Depths
        self.orders = torch.zeros(4, n_rows, dtype=torch.int64, device=device)
        self.slots = torch.arange(self.max_parked + 1, device=device)
        shape = (n_rows, self.max_parked + 2, config.n_embd)
        self.waiting = [None] + [torch.zeros(shape, dtype=model.dtype, device=device) for _ in config.exit_layers]
        deepest, pool = len(config.exit_layers), new_pool(device)
        keys = [(segment, False) for segment in range(deepest)]
        keys += [(segment, True) for segment in range(deepest) if self.thresholds[segment] <= 1] + [(deepest, True)]
        calls = {key: partial(self.segment, *key) for key in keys}
        if self.kv_fill == "propagate":
            calls |= {segment: partial(self.propagate, segment) for segment in range(1, deepest + 1)}
        self.graphs = {key: captured(call, device, pool) for key, call in calls.items()}  # while every row sits out
        for out in batch.generations:
            out.stats.prefill_seconds += time.perf_counter() - began

    def launch(self, key, orders: dict[int, tuple]) -> torch.Tensor:
        """Give rows their orders, the others none, and run."""
        columns = [orders.get(row, (0, 0, 0, 0)) for row in range(len(self.batch.tokens))]
        self.orders.copy_(torch.tensor(list(zip(*columns))), non_blocking=True)
        return self.graphs[key]()

    def segment(self, segment: int, ask: bool) -> torch.Tensor:
        """Rows that wait, and where it begins the new token, through a segment: token, log-probability, sure or not (B, 3)."""
        batch, model, deepest = self.batch, self.batch.model, segment == len(self.bounds) - 2
        tokens, start, n, below = self.orders
        slots = self.slots[: 1 if segment == 0 else None]
        going = slots < n[:, None]  # (B, T)
        at = torch.where(going, start[:, None] + slots, -1)
        x = model.embed(tokens[:, None], at) if segment == 0 else self.waiting[segment][:, :-1]  # (B, T, C)
        x = model.run_layers(x, batch.cache, at, self.bounds[segment], self.bounds[segment + 1])
        if not deepest:  # it waits there, however soon it goes on
            place = torch.where(going, below[:, None] + slots, len(self.slots))
            self.waiting[segment + 1].scatter_(1, place[:, :, None].expand_as(x), x)
        if not ask:
            return x
        x = x.gather(1, (n - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]  # (B, C)
        if not deepest and batch.sampling.temperature == 0:  # the head's best token is the one drawn: no logits
            tokens, log_probs, confidence = model.exit_confidence(x, self.bounds[segment + 1], self.confidence)
        else:
            logits = model.logits(x) if deepest else model.logits(x, self.bounds[segment + 1])
            tokens, log_probs, _ = kernels.sample_token(
                logits, batch.sampler.seeds, start + n, **batch.sampler.law, impl=model.impl
            )
            if not deepest:
                confidence = kernels.confidence(logits, self.confidence)
                confidence = model.scaled(confidence, self.bounds[segment + 1], self.confidence)
        sure = going[:, 0] if deepest else confidence >= self.thresholds[segment]
        return torch.stack((tokens.double(), log_probs.double(), sure.double()), 1)

    def propagate(self, segment: int) -> torch.Tensor:
        """Approximate: the one row that waits in front of a segment gives the keys and values of all layers from there on."""
        _, start, n, _ = self.orders
        at = torch.where(n > 0, start, -1)[:, None]
        self.batch.model.fill_kv(self.waiting[segment][:, :1], self.batch.cache, at, self.bounds[segment])
        return at

    def __call__(self, batch: Batch, rows: list[int], cap: int | None) -> list[Block]:
        began = time.perf_counter()
        computed, blocks, going, n_segments = self.computed, {}, rows, len(self.bounds) - 1
        for segment in range(n_segments):
            deepest, n_run, orders = segment == n_segments - 1, self.bounds[segment + 1], {}
            for row in going:
                held = computed[row]
                n = held[segment - 1] - held[segment] if segment > 0 else 1
                below = 0 if deepest else held[segment] - held[segment + 1]
                orders[row] = (batch.tokens[row][-1], held[segment], n, below)
                held[segment] += n
            free = [deepest or (cap != 0 and computed[r][0] - computed[r][-1] <= self.max_parked) for r in going]
            ask = deepest or (self.thresholds[segment] <= 1 and any(free))
            results = self.launch((segment, ask), orders)
            if not ask:
                continue
            results = results.tolist()
            leaving = [row for row, may in zip(going, free) if may and results[row][2]]
            for row in leaving:
                token, log_prob, _ = results[row]
                check_drawn(row, log_prob)
                blocks[row] = Block([int(token)], [log_prob], ["plain" if deepest else "exit"], [n_run], 0, n_run)
            going = [row for row in going if row not in blocks]
            if self.kv_fill == "propagate" and leaving and not deepest:
                orders = {row: (0, computed[row][segment + 1], 1, 0) for row in leaving}
                self.launch(segment + 1, orders)
                for row in leaving:
                    computed[row][segment + 1 :] = [computed[row][0]] * (n_segments - segment - 1)
            if not going:
                break
        for row in rows:
            batch.generations[row].stats.verify_seconds += time.perf_counter() - began
        return [blocks[row] for row in rows]

    def commit(self, batch: Batch, rows: list[int], kept: list[list[int]]) -> None:
        pass


def early_exit_step(
    model: GPT, sampling: SamplingParams, thresholds, confidence: str, kv_fill: str, max_parked: int, audit: bool
):
    """EarlyExitStep, or where each segment can be one launch its counterpart: the same tokens.

    That takes Triton kernels, no penalty, no bias and no audit, and no more parked rows than an attention kernel takes.
    """
    if runs_alone(model, sampling) and not audit and max_parked < kernels.MAX_ROWS:
        return EarlyExitSegments(thresholds, confidence, kv_fill, max_parked)
    return EarlyExitStep(thresholds, confidence, kv_fill, max_parked, audit)


def check_thresholds(threshold, exit_layers: Sequence[int]) -> list[float]:
    """One threshold, or one per exit -> one per exit; ValueError for what cannot be one."""
    values = [threshold] * len(exit_layers) if isinstance(threshold, Real) else threshold
    if not isinstance(values, (list, tuple)) or len(values) != len(exit_layers):
        raise ValueError(f"threshold is {threshold!r}: give one number, or one for each exit of {tuple(exit_layers)}")
    for value in values:
        if not isinstance(value, Real) or math.isnan(value) or value < 0:
            raise ValueError(f"threshold is {threshold!r}: confidences run from 0 to 1; above 1 never exits")
    return list(values)


def check_confidence(confidence: str) -> str:
    if confidence not in kernels.CONFIDENCES:
        raise ValueError(f"confidence is {confidence!r}: choose {', '.join(kernels.CONFIDENCES)}")
    return confidence


def early_exit_generate(
    model: GPT,
    prompts: list[list[int]],
    sampling: SamplingParams,
    threshold: float | Sequence[float] | None = None,
    confidence: str = "max_prob",
    kv_fill: str = "recompute",
    max_parked: int = 8,
    audit: bool = False,
    tokenizer=None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    *,
    control: str | None = None,
) -> list[Generation]:
    """Decode with early exits (Schuster et al. 2022; deferred keys and values: Bae et al. 2023).

    A token leaves at the first exit whose head's confidence ("max_prob", "margin" or "entropy", of its raw logits) reaches
    the threshold, and is drawn from that head with the plain step's noise. A threshold above 1 is plain decoding, token for
    token. kv_fill: "recompute" keeps the cache exact with at most max_parked rows waiting; "propagate" projects the exit's
    hidden state, approximate. audit counts in stats how often the full head would have drawn another token.
    """
    exits = model.config.exit_layers
    if not exits:
        raise ValueError("this model has no exit heads: train them with train_exit_heads.py --stage exits")
    if threshold is None:
        raise ValueError("threshold is None, and this checkpoint holds no calibrated ones: give a number, such as 0.9")
    thresholds = check_thresholds(threshold, exits)
    check_confidence(confidence)
    if kv_fill not in ("recompute", "propagate"):
        raise ValueError(f"kv_fill is {kv_fill!r}: choose recompute or propagate")
    if not isinstance(max_parked, int) or max_parked < 1:
        raise ValueError(f"max_parked is {max_parked!r}: it must be an integer >= 1")
    if audit and kv_fill == "propagate":
        raise ValueError("audit needs kv_fill='recompute': propagated rows never reach the full head")
    step = early_exit_step(model, sampling, thresholds, confidence, kv_fill, max_parked, audit)
    return run_loop(model, prompts, sampling, step, tokenizer, on_tokens, control)
