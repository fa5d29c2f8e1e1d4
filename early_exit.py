"""Early exit: stop the pass at the first exit head that is confident, and settle the debt to the deep layers later.

    layers 0..3    o o o o o o o o o         computed: 9 positions
    exit 4         . . . . . . | p p p       parked: the rows of positions 6, 7, 8 wait here
    layers 4..7    o o o o o o               computed: 6
    exit 8         . . . . | p p             positions 4, 5 wait here
    layers 8..15   o o o o                   computed: 4

A row that goes deeper takes the rows parked on its way along, in one pass, so every stored key and value is the full
model's for the emitted tokens: the only error is the choice made at an exit. Self-speculation (speculative.py) is the same
machine with another policy: it drafts by parking and verifies by flushing, and emits only what the deep pass confirms.

How sure an exit must be is calibrate_threshold's to choose, with a bound on what that costs; Guard watches it in use.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from numbers import Real

import torch

import kernels
from certificate import (
    AGREEMENTS,
    LOSSES,
    Certificate,
    Guard,
    Watch,
    betting_p,
    certified,
    conditions,
    first_passing,
    fit_platt,
    fixed_sequence,
    hoeffding_bentkus_p,
    stricter,
    upper_bound,
)
from decode import (
    Batch,
    Block,
    Control,
    Generation,
    Sampler,
    SamplingParams,
    check_drawn,
    generate,
    heed,
    pack,
    run_loop,
)
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

    def run(
        self, rows: list[int], segment: int, arriving: list[torch.Tensor], end: int | None = None
    ) -> list[torch.Tensor]:
        """Push the arriving hidden rows (n, C), behind those parked here, through a segment: hidden rows per row.

        A row for which nothing arrives and nothing is parked takes no part. Up to segment end - 1 where there is an end: then
        nothing may be parked on the way.
        """
        end = segment + 1 if end is None else end
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
        first, last = self.bounds[segment], self.bounds[end]
        x = self.batch.model.run_layers(x, self.batch.rows_cache(live), positions, first, last)
        for i, (row, n) in enumerate(zip(live, lengths)):
            joined[going[i]] = x[i, :n]
            self.computed[row][segment:end] = [starts[i] + n] * (end - segment)
            self.parked[row][segment] = None
            self.layer_passes[row] += last - first
        return joined

    def deepen(self, rows: list[int], arriving: list[torch.Tensor]) -> list[torch.Tensor]:
        """Flush: everything that arrives or is parked goes through all segments, to the full depth."""
        waits = [any(self.parked[row][segment] is not None for row in rows) for segment in range(self.n_segments)]
        starts = [segment for segment, parked in enumerate(waits) if parked or segment == 0]
        for segment, end in zip(starts, [*starts[1:], self.n_segments]):  # a call per segment would only cost time
            arriving = self.run(rows, segment, arriving, end)
        return arriving

    def descend(
        self, rows: list[int], tokens: list[list[int]], ask, only: int | None = None
    ) -> Iterator[tuple[int, list[int], torch.Tensor]]:
        """Run one new token per row down until its row leaves; yields (layers run, rows that leave, their logits (n, V)).

        ask(segment, rows, x (n, C)) is the policy: the logits of the head behind that segment, and who is sure enough to
        leave with them; or None, and nobody. only: the one segment behind which it is asked, where all leave. What leaves
        early is parked there (or propagated) before it is yielded.
        """
        going, hidden = rows, self.embed(rows, tokens)
        for segment in range(self.n_segments) if only is None else (only,):
            hidden = self.run(going, segment if only is None else 0, hidden, segment + 1)
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


def excess_nats(logits: torch.Tensor, full: torch.Tensor, emitted: torch.Tensor) -> torch.Tensor:
    """By how much emitted (T,) tokens are less likely than full (T,) under logits (T, V), in nats: (T,) float64."""
    likely, unlikely = (logits.double().gather(-1, x[:, None])[:, 0] for x in (full, emitted))
    return likely - unlikely


class EarlyExitStep:
    """One token per row from the first confident exit, or from the full depth."""

    def __init__(
        self, thresholds, confidence: str, kv_fill: str, max_parked: int, audit: bool, guard: Guard | None = None
    ):
        self.thresholds, self.confidence, self.kv_fill = thresholds, confidence, kv_fill
        self.max_parked, self.audit, self.guard = max_parked, audit, guard

    def start(self, batch: Batch) -> None:
        self.depths = Depths(batch, batch.model.config.exit_layers, self.kv_fill)
        self.watch = None if self.guard is None else Watch(self.guard, self.max_parked + 1)

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
                        n_wrong = self.judge(batch, row, x[:-1], len(batch.tokens[row]) - len(x) + 1)
                        self.hear(batch, row, n_wrong, len(x))  # the deepest token is the full head's own
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

    def judge(self, batch: Batch, row: int, hidden: torch.Tensor, first_index: int) -> int:
        """Audit: what the full head says, with the same noise, of tokens that an exit emitted at first_index ..

        Returns how many of them it would have drawn otherwise.
        """
        if not len(hidden):
            return 0
        full, logits = batch.sampler.full_tokens(row, batch.model.logits(hidden), first_index)
        emitted = torch.tensor(batch.tokens[row][first_index : first_index + len(full)], device=full.device)
        stats, n_wrong = batch.generations[row].stats, int((full != emitted).sum())
        stats.audited += len(full)
        stats.audit_disagreed += n_wrong
        if n_wrong:
            stats.audit_nats += float(excess_nats(logits, full, emitted).sum())
        return n_wrong

    def hear(self, batch: Batch, row: int, n_wrong: int, n_tokens: int) -> None:
        """Tell the guard of a flush of n_tokens emitted tokens; if that alarms it, all rows go on more strictly."""
        if self.watch is None or not self.watch.hear(n_wrong, n_tokens):
            return
        warnings.warn(
            f"early exit: the audit found {self.watch.n_wrong} of {self.watch.n_tokens} tokens wrong, more than the"
            f" promised {self.guard.risk:g}: thresholds are now one step stricter",
            stacklevel=2,
        )
        self.thresholds = stricter(self.thresholds)
        self.watch = Watch(self.guard, self.max_parked + 1)
        for other, out in enumerate(batch.generations):
            out.stats.tightened += other == row or out.finish_reason is None

    def commit(self, batch: Batch, rows: list[int], kept: list[list[int]]) -> None:
        ended = [row for row in rows if batch.generations[row].finish_reason and self.depths.n_parked(row)]
        if self.audit and ended:
            for row, x in zip(ended, self.depths.deepen(ended, [self.depths.nothing] * len(ended))):
                self.hear(batch, row, self.judge(batch, row, x, len(batch.tokens[row]) - len(x)), len(x))
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
    model: GPT,
    sampling: SamplingParams,
    thresholds,
    confidence: str,
    kv_fill: str,
    max_parked: int,
    audit: bool,
    guard: Guard | None = None,
):
    """EarlyExitStep, or where each segment can be one launch its counterpart: the same tokens.

    That takes Triton kernels, no penalty, no bias and no audit, and no more parked rows than an attention kernel takes.
    """
    if runs_alone(model, sampling) and not audit and max_parked < kernels.MAX_ROWS:
        return EarlyExitSegments(thresholds, confidence, kv_fill, max_parked)
    return EarlyExitStep(thresholds, confidence, kv_fill, max_parked, audit, guard)


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


def check_machine(exits, confidence: str, kv_fill: str, max_parked: int) -> None:
    if not exits:
        raise ValueError("this model has no exit heads: train them with train_exit_heads.py --stage exits")
    check_confidence(confidence)
    if kv_fill not in ("recompute", "propagate"):
        raise ValueError(f"kv_fill is {kv_fill!r}: choose recompute or propagate")
    if not isinstance(max_parked, int) or max_parked < 1:
        raise ValueError(f"max_parked is {max_parked!r}: it must be an integer >= 1")


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
    guard: Guard | bool | None = None,
    control: str | None = None,
) -> list[Generation]:
    """Decode with early exits (Schuster et al. 2022; deferred keys and values: Bae et al. 2023).

    A token leaves at the first exit whose head's confidence ("max_prob", "margin" or "entropy", of its raw logits) reaches
    the threshold, and is drawn from that head with the plain step's noise. A threshold above 1 is plain decoding, token for
    token; None takes the calibrated ones of the checkpoint, or is a ValueError that says what they do not hold for.
    kv_fill: "recompute" keeps the cache exact with at most max_parked rows waiting; "propagate" projects the exit's
    hidden state, approximate. audit counts in stats how often the full head would have drawn another token, and what
    that costs in nats. guard, which needs audit: a Guard, or True for one with the certificate's risk and delta.
    """
    exits = model.config.exit_layers
    check_machine(exits, confidence, kv_fill, max_parked)
    if threshold is None or guard is True:
        certificate = certified(model, sampling, confidence, kv_fill, max_parked)
        threshold = certificate.thresholds if threshold is None else threshold
        if guard is True and certificate.loss != "disagreement":
            raise ValueError("guard is True, but the certificate bounds nats: give Guard(risk), a share of tokens")
        guard = Guard(certificate.risk, certificate.delta) if guard is True else guard
    thresholds = check_thresholds(threshold, exits)
    if audit and kv_fill == "propagate":
        raise ValueError("audit needs kv_fill='recompute': propagated rows never reach the full head")
    if guard and not audit:
        raise ValueError(f"guard is {guard!r}, and audit is False: it listens to the audit, so give audit=True")
    step = early_exit_step(model, sampling, thresholds, confidence, kv_fill, max_parked, audit, guard or None)
    return run_loop(model, prompts, sampling, step, tokenizer, on_tokens, control)


# ----------------------------------------------------------------------------------------------------------------------
# Thresholds with a guarantee: Learn-then-Test (Angelopoulos et al. 2021)
#
@torch.inference_mode()
def score_exits(model: GPT, sampling: SamplingParams, prompt: list[int], new: list[int], seed: int, confidence: str):
    """One full-depth pass over prompt and its T new tokens, which asks every exit at each of them.

    The text is plain decoding's with that seed. Returns three (exits, T) tensors in float64: confidences, whether the
    exit's token with the same noise is another than the text's, and by how many nats it is less likely.
    """
    ids = torch.tensor([prompt + new[:-1]], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    sampler = Sampler(replace(sampling, seed=[seed]), [prompt + new], model)
    said, x, first = torch.tensor(new, device=model.device), model.embed(ids, positions), 0
    confidences, tokens = [], []
    for layer in model.config.exit_layers:
        x = model.run_layers(x, None, positions, first, layer)
        logits = model.logits(x[0, len(prompt) - 1 :], layer)  # (T, V)
        sure = model.scaled(kernels.confidence(logits, confidence), layer, confidence).double()
        token, law = sampler.full_tokens(0, logits, len(prompt))
        possible = law.amax(-1) > -torch.inf  # a bias may forbid all that a reduced vocabulary knows
        confidences.append(sure.where(possible, -1.0))
        tokens.append(token.where(possible, said))
        first = layer
    x = model.run_layers(x, None, positions, first, model.config.n_layer)
    _, law = sampler.full_tokens(0, model.logits(x[0, len(prompt) - 1 :]), len(prompt))
    nats = [excess_nats(law, said, token) for token in tokens]
    return (
        torch.stack(confidences).cpu(),
        torch.stack([t != said for t in tokens]).double().cpu(),
        torch.stack(nats).cpu(),
    )


def exits_taken(confidences: torch.Tensor, thresholds: Sequence[float], max_parked: int | None) -> torch.Tensor:
    """Index of the exit where each token leaves (T,), the number of exits for the full depth; confidences (exits, T).

    max_parked: a row goes deep when so many wait; None: nothing waits.
    """
    sure = confidences >= torch.tensor(thresholds, dtype=torch.float64)[:, None]
    sure = torch.cat((sure, torch.ones(1, sure.shape[1], dtype=torch.bool)))
    taken, n_parked = sure.int().argmax(0).tolist(), 0
    for i, exit in enumerate(taken):
        if exit == len(thresholds) or n_parked == max_parked:
            taken[i], n_parked = len(thresholds), 0
        else:
            n_parked += 1
    return torch.tensor(taken)


def scored_loss(scores, thresholds: Sequence[float], loss: str, max_parked: int | None) -> float:
    """The loss of one text at a setting, by what score_exits found."""
    confidences, wrong, nats = scores
    taken = exits_taken(confidences, thresholds, max_parked)
    of_each = wrong if loss == "disagreement" else nats
    of_each = torch.cat((of_each, torch.zeros(1, of_each.shape[1])))
    return max(float(of_each.gather(0, taken[None]).mean()), 0.0)


def family(scores: list, n_exits: int) -> list[list[float]]:
    """Thresholds of each exit for each of AGREEMENTS, from the strictest setting on.

    One number decides for all exits: the chance of agreeing that each asks for, which a fit (Platt 1999) to the scored
    texts turns into a confidence of that exit. So a setting means equal errors at all exits, whatever scale their
    confidences have, and depths that seldom agree drop out by themselves.
    """
    fits = []
    for i in range(n_exits):
        confidences, wrong = (torch.cat([score[part][i] for score in scores]) for part in (0, 1))
        fits.append(fit_platt(confidences.clamp(1e-7, 1 - 1e-7), wrong == 0))  # float32 is 1 from there on
    settings = []
    for agreement in AGREEMENTS:
        logits = [(math.log(agreement / (1 - agreement)) - bias) / slope for slope, bias in fits]
        thresholds = [1 / (1 + math.exp(-min(max(x, -30.0), 30.0))) for x in logits]
        settings.append([t if t <= 1 - 1e-7 else 2.0 for t in thresholds])
    return settings


@torch.inference_mode()
def free_losses(model, prompts, sampling, thresholds, loss, confidence, kv_fill, max_parked, batch_size):
    """Decode with exits on: loss of each sequence, and the generations."""
    losses, generations = [], []
    for first in range(0, len(prompts), batch_size):
        part = slice(first, first + batch_size)
        own = replace(sampling, seed=sampling.seed[part])
        audit = kv_fill == "recompute"
        outs = early_exit_generate(model, prompts[part], own, thresholds, confidence, kv_fill, max_parked, audit)
        for prompt, seed, out in zip(prompts[part], own.seed, heed(outs)):
            n_wrong, nats = out.stats.audit_disagreed, out.stats.audit_nats
            if not audit:  # propagated keys mislead the full head too: every token is judged, by a pass without them
                ids, said = torch.tensor([prompt + out.tokens[:-1]]), torch.tensor(out.tokens)
                logits = model(ids.to(model.device))[0, len(prompt) - 1 :]
                sampler = Sampler(replace(sampling, seed=[seed]), [prompt + out.tokens], model)
                full, law = sampler.full_tokens(0, logits, len(prompt))
                n_wrong = int((full.cpu() != said).sum())
                nats = float(excess_nats(law, full, said.to(full.device)).sum())
            losses.append((n_wrong if loss == "disagreement" else max(nats, 0.0)) / len(out.tokens))
        generations += outs
    return losses, generations


def calibrate_threshold(
    model: GPT,
    prompts: list[list[int]],
    sampling: SamplingParams,
    risk: float,
    delta: float = 0.05,
    clip: float = 0.2,
    loss: str = "disagreement",
    confidence: str = "max_prob",
    kv_fill: str = "recompute",
    max_parked: int = 8,
    *,
    honest: bool = False,
    batch_size: int = 32,
    data: str = "",
    say: Callable[[str], None] | None = None,
) -> Certificate:
    """Thresholds with which the expected clipped loss of a sequence is at most risk, with probability 1 - delta.

    prompts: ids, drawn like those to be served and used in no training; row i has seed + i. loss: "disagreement", the
    share of tokens that differ from what the full model would have drawn there with the same noise, or "nll", by how
    many nats a token they are less likely than those, before temperature and filters. A sequence counts at most clip,
    so that a few hundred are enough; the share that is cut is reported. say hears a line of progress now and then.

    1. a third of the prompts: decoded plainly, and one full-depth pass over each text scores every exit (score_exits)
    2. settings: family(), from the strictest to the loosest
    3. the loosest setting whose scores would pass, were there as many as sequences left: the first candidate
    4. the other prompts: decoded with exits on at the candidate, tested by betting; if it fails, one setting stricter

    The guarantee is that of the tests in step 4 alone, which know nothing of what chose their candidate: try k is
    tested at delta / 2^k, so all of them together err with chance delta (first_passing). Scores on texts decoded
    without exits only propose. honest=True decodes at every setting instead, from the strictest on until one fails,
    each at delta (fixed_sequence): up to 20 times as long, and not misled by the scores. Where nothing passes, the
    thresholds are above 1. Raises ValueError for what cannot be promised, such as a risk that takes more prompts.
    """
    check_machine(model.config.exit_layers, confidence, kv_fill, max_parked)
    guarantee = Guard(risk, delta)  # checks both
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}: choose {', '.join(LOSSES)}")
    if not isinstance(clip, Real) or not risk < clip or (loss == "disagreement" and clip > 1):
        raise ValueError(f"clip is {clip!r}: it must be above the risk, {risk:g}, and at most 1 for a share of tokens")
    if Control(None).cap() == 0:
        raise ValueError("NANOSPEC_PLAIN is set, and would hide what exits do: unset it to calibrate")
    full = [i for i, prompt in enumerate(prompts) if len(prompt) >= model.config.block_size]
    if full or sampling.max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens is {sampling.max_new_tokens}, prompts without room are {full}: nothing to decode"
        )
    say = say or (lambda line: None)
    scaled_risk, n_scored = risk / clip, len(prompts) // 3
    n, first_level = len(prompts) - n_scored, delta if honest else delta / 2
    needed = next(m for m in range(1, 10**6) if betting_p([0.0] * m, scaled_risk, first_level) <= first_level)
    if n < needed or n_scored < 1:
        enough = next(m for m in range(3, 10**6) if m - m // 3 >= needed)
        raise ValueError(
            f"prompts has {len(prompts)}: even without an error, risk {risk:g} at clip {clip:g} takes at least"
            f" {enough}; give more, or a higher risk"
        )
    sampling = replace(sampling, seed=sampling.row_seeds(len(prompts)))
    n_exits, waiting = len(model.config.exit_layers), max_parked if kv_fill == "recompute" else None

    say(f"{n_scored} sequences are decoded plainly, and scored")  # 1
    scores = []
    for first in range(0, n_scored, batch_size):
        part = slice(first, min(first + batch_size, n_scored))
        own = replace(sampling, seed=sampling.seed[part])
        outs = heed(generate(model, prompts[part], own))
        scores += [
            score_exits(model, sampling, prompt, out.tokens, seed, confidence)
            for prompt, out, seed in zip(prompts[part], outs, own.seed)
        ]
    settings = family(scores, n_exits)  # 2
    kept, kept_sampling = prompts[n_scored:], replace(sampling, seed=sampling.seed[n_scored:])
    tried: list[dict] = []

    def test(index: int, level: float) -> float:
        how = (loss, confidence, kv_fill, max_parked, batch_size)
        losses, outs = free_losses(model, kept, kept_sampling, settings[index], *how)
        scaled = [min(x / clip, 1.0) for x in losses]
        n_tokens = sum(out.stats.tokens for out in outs)
        p_values = {
            "betting": lambda r: betting_p(scaled, r, level),
            "hoeffding_bentkus": lambda r: hoeffding_bentkus_p(scaled, r),
        }
        figures = {"thresholds": settings[index], "agreement": AGREEMENTS[index], "level": level, "n": len(losses)}
        figures |= {"empirical_risk": clip * sum(scaled) / n, "clipped_share": sum(x > clip for x in losses) / n}
        figures |= {"exited": sum(out.stats.exited for out in outs) / n_tokens}
        figures |= {"mean_layers": sum(out.stats.layer_passes for out in outs) / n_tokens}
        figures |= {f"p_{name}": p(scaled_risk) for name, p in p_values.items()}
        figures |= {f"bound_{name}": clip * upper_bound(p, level) for name, p in p_values.items()}
        tried.append(figures)
        passed = figures["p_betting"] <= level
        say(
            f"agreement {AGREEMENTS[index]:.4f}: loss {figures['empirical_risk']:.4f}, {figures['exited']:.1%} exit,"
            f" p {figures['p_betting']:.3g} {'<=' if passed else '>'} {level:.3g}"
        )
        return figures["p_betting"]

    def as_scored(thresholds):
        scaled = [min(scored_loss(score, thresholds, loss, waiting) / clip, 1.0) for score in scores]
        return betting_p((scaled * 3)[:n], scaled_risk, first_level)  # as many as will be tested: two thirds

    if honest:
        last = fixed_sequence((test(i, delta) for i in range(len(settings))), delta)
        chosen = tried[last] if last >= 0 else None
    else:
        candidate = fixed_sequence(map(as_scored, settings), first_level)  # 3
        chosen = tried[-1] if first_passing(test, candidate, delta) >= 0 else None  # 4
    if chosen is None:
        nothing = {"thresholds": [2.0] * n_exits, "agreement": None, "level": delta, "n": n}
        nothing |= dict.fromkeys(("empirical_risk", "clipped_share", "exited"), 0.0)
        nothing |= {"mean_layers": float(model.config.n_layer)}
        nothing |= dict.fromkeys(("p_betting", "p_hoeffding_bentkus", "bound_betting", "bound_hoeffding_bentkus"), 0.0)
        chosen = nothing
    holds_for = conditions(model, sampling, confidence, kv_fill, max_parked)
    promise = {"loss": loss, "clip": clip, **asdict(guarantee)}
    certificate = Certificate(
        **chosen, **promise, tried=tried, holds_for=holds_for, data=data, date=date.today().isoformat()
    )
    say(str(certificate))
    return certificate
