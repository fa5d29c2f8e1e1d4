"""A whole round on the device: launches on static buffers that a CUDA graph replays, with the host one round ahead.

    device   | round 0            | round 1            | round 2            |     state in, state out: kernels.RowState
             draft verify accept `-> buffer 0         `-> buffer 1         `-> buffer 0
    host     launch 0, launch 1 .. read 0, commit, launch 2 .. read 1, commit, launch 3 ..

Inside a round nothing waits for the host and no shape depends on data: lengths, limits and the number of drafts are tensors,
and a row that has nothing to do has positions of -1. The host learns of a stop one round late and then sets the row's limit
down, so at most one round is run in vain. Where there is no GPU the same functions are called instead of replayed. The steps
of decode.py, speculative.py and early_exit.py say the same things one at a time: read those first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

import kernels
from model import GPT, KVCache

if TYPE_CHECKING:
    from decode import Batch, Block, SamplingParams


def runs_alone(model: GPT, sampling: SamplingParams) -> bool:
    """Whether the model's rounds need no host: Triton kernels, and no penalty or bias, for which it keeps the history."""
    trivial = sampling.repetition_penalty == 1 and not sampling.logit_bias
    return isinstance(model, GPT) and trivial and kernels.on_triton(model.impl, model.final_norm.weight)


def captured(function: Callable[[], torch.Tensor], device: torch.device, pool) -> Callable[[], torch.Tensor]:
    """The function as a CUDA graph that writes the same tensor at each replay; elsewhere, or interpreted, the function itself.

    It is run once before: the caller sees to it that this changes nothing. Graphs of one pool share their memory, so a
    result is good until another of them is replayed.
    """
    if device.type != "cuda" or kernels.interpreted():
        return function
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        function()  # compiles what is not compiled yet, which a capture must not
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = function()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def new_pool(device: torch.device):
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class Drafting(NamedTuple):
    """The model that drafts on the device. Where its cache is the target's, its rows are parked and verified from there on."""

    model: GPT
    cache: KVCache
    n_layer: int  # layers that a draft runs
    head: tuple  # arguments of model.logits behind x
    capacity: int  # positions that the cache may hold


class Rounds:
    """The device's side of a batch: what its rounds read and write, and the graph of each width (drafts a round).

    All rows take part until the end: one at its limit is masked, so that no shape changes.
    """

    def __init__(self, batch: Batch, drafting: Drafting | None = None):
        self.model, self.cache, self.sampler, self.drafting = batch.model, batch.cache, batch.sampler, drafting
        shared = drafting is not None and drafting.cache is batch.cache
        self.n_own_layers = drafting.n_layer if shared else 0  # of the target, that a draft runs
        n_rows, self.device = len(batch.tokens), batch.model.device
        lengths = [len(tokens) for tokens in batch.tokens]
        rooms = [0 if out.finish_reason else batch.room(row) for row, out in enumerate(batch.generations)]
        last = [[0, *tokens][-2:] for tokens in batch.tokens]
        columns = (lengths, [n + room for n, room in zip(lengths, rooms)], [0] * n_rows, last)
        self.state = kernels.RowState(*(torch.tensor(column, device=self.device) for column in columns))
        self.k = torch.zeros(n_rows, dtype=torch.int64, device=self.device)  # drafts that each row asks for
        self.slots = torch.arange(kernels.MAX_ROWS, device=self.device)
        self.graphs: dict[int, Callable] = {}
        self.pool = new_pool(self.device)
        size = n_rows * (2 * kernels.MAX_ROWS + 2)
        pinned = self.device.type == "cuda"  # or the copy would wait for the round
        self.ring = [torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=pinned) for _ in range(2)]
        self.n_launched = 0
        self.in_flight: deque[tuple] = deque()  # rounds that were launched and not read: at most two

    def prepare(self, width: int) -> None:
        """Capture the round of that width."""
        if width not in self.graphs:
            limits = self.state.limits.clone()
            self.state.limits.zero_()  # every row rests, so that a first run moves and writes nothing
            self.graphs[width] = captured(partial(self.round, width), self.device, self.pool)
            self.state.limits.copy_(limits)

    def launch(self, width: int) -> None:
        """Start a round; the host does not wait."""
        self.prepare(width)
        result = self.graphs[width]()
        landing = self.ring[self.n_launched % 2][: result.numel()].view_as(result)
        landing.copy_(result, non_blocking=True)
        event = torch.cuda.Event() if self.device.type == "cuda" else None
        if event is not None:
            event.record()
        self.in_flight.append((width, landing, event))
        self.n_launched += 1

    def read(self) -> tuple[int, list[list[float]]]:
        """Wait for the oldest round in flight: its width and its results (see `round`)."""
        width, landing, event = self.in_flight.popleft()
        if event is not None:
            event.synchronize()
        return width, landing.tolist()

    def round(self, width: int) -> torch.Tensor:
        """Results (B, 2 * width + 4) float64: the new tokens, n_accepted, n_drafted, the tokens' log-probabilities.

        1. where each row stands, and how many drafts it takes: no more than it may commit, or than the drafter can hold
        2. draft
        3. verify: the last committed token and the drafts
        4. accept, commit
        """
        model, drafting, last = self.model, self.drafting, self.state.last
        lengths, rounds = torch.stack((self.state.lengths, self.state.rounds))  # as they are before the commit
        n_drafted = (self.state.limits - lengths - 1).clamp(max=width)  # below 0 in rows at their limit
        if width > 0:
            n_drafted = n_drafted.minimum(self.k).minimum((drafting.capacity + 1 - lengths).clamp(min=0))
        slots = self.slots[: width + 1]
        at = torch.where(slots <= n_drafted[:, None], (lengths - 1)[:, None] + slots, -1)  # (B, width + 1)
        n_drafted = n_drafted.clamp(min=0)
        drafts, laws, x = self.draft(width, at, n_drafted) if width > 0 else (last[:, :0], None, None)
        first = 0 if x is None else drafting.n_layer
        if x is None:
            x = model.embed(torch.cat((last[:, 1:], drafts), 1), at)  # (B, width + 1, C)
        x = model.run_layers(x, self.cache, at, first, model.config.n_layer)
        # advances self.state
        tokens, n_accepted, log_probs = kernels.accept_draft(
            model.logits(x), laws, drafts, n_drafted, self.sampler.seeds, lengths, rounds, **self.sampler.law,
            verify="coupled" if self.sampler.coupled else "rejection", state=self.state, impl=model.impl,
        )  # fmt: skip
        return torch.cat((tokens, n_accepted[:, None], n_drafted[:, None], log_probs.double()), 1)

    def draft(self, width: int, at: torch.Tensor, n_drafted: torch.Tensor):
        """Drafts (B, width), their processed logits (B, width, V) or None, parked rows (B, width + 1, C) or None.

        A model with its own cache begins with the last two committed tokens: after full acceptance it has not seen the last
        but one, and else it writes there what is there already. The target's own layers also run the last draft.
        """
        model, cache, n_layer, head, capacity = self.drafting
        coupled, shared = self.sampler.coupled, cache is self.cache
        stream, rounds = (kernels.SAMPLE, None) if coupled else (kernels.DRAFT, self.state.rounds)
        at = at if shared else at.masked_fill(at >= capacity, -1)
        tokens, laws, parked = [], [], []
        for j in range(width + 1 if shared else width):
            ids, here = tokens[-1][:, None] if tokens else self.state.last[:, 1:], at[:, j : j + 1]
            if j == 0 and not shared:
                ids, here = self.state.last, (here - 1 + self.slots[:2]).clamp(min=-1)
            x = model.run_layers(model.embed(ids, here), cache, here, 0, n_layer)[:, -1:]
            parked.append(x)
            if j == width:
                break
            logits = kernels.fit_vocabulary(model.logits(x[:, 0], *head), self.model.config.vocab_size)
            token, _, law = kernels.sample_token(
                logits, self.sampler.seeds, self.state.lengths + j, **self.sampler.law, stream=stream, rounds=rounds,
                keep_law=True, impl=model.impl,
            )  # fmt: skip
            tokens.append(torch.where(j < n_drafted, token, 0))  # behind them nothing was computed
            laws.append(law)
        laws = None if laws[0] is None else torch.stack(laws, 1)
        return torch.stack(tokens, 1), laws, torch.cat(parked, 1) if shared else None


class RoundStep:
    """A step of run_loop whose rounds the device runs by itself; this one's are plain. Others say in `begin` what to capture
    and in `launch` how wide the next round is: see SpeculativeRounds.

    The control file acts on the round that is launched next, not on the one in flight. Graphs are captured with the prompt's
    reading and on its clock; a round's time, whose parts no host sees, counts as verify_seconds.
    """

    def __init__(self, coupled: bool = False):
        self.coupled = coupled

    def start(self, batch: Batch) -> None:
        began = time.perf_counter()
        self.rounds = self.begin(batch)
        for out in batch.generations:
            out.stats.prefill_seconds += time.perf_counter() - began

    def begin(self, batch: Batch) -> Rounds:
        rounds = Rounds(batch)
        rounds.prepare(0)
        return rounds

    def __call__(self, batch: Batch, rows: list[int], cap: int | None) -> list[Block]:
        began = time.perf_counter()
        if not self.rounds.in_flight:
            self.launch(batch, rows, cap)
        if any(batch.room(row) > 1 for row in rows):  # else the round in flight ends them all, whatever it brings
            self.launch(batch, rows, cap)
        self.width, results = self.rounds.read()
        n, blocks = self.width + 1, []
        for row in rows:
            tokens, (n_accepted, n_drafted) = map(int, results[row][:n]), map(int, results[row][n : n + 2])
            layer_passes = batch.model.config.n_layer + n_drafted * self.rounds.n_own_layers
            blocks.append(batch.judged(row, list(tokens), results[row][n + 2 :], n_accepted, n_drafted, layer_passes))
        for row in rows:
            batch.generations[row].stats.verify_seconds += time.perf_counter() - began
        return blocks

    def launch(self, batch: Batch, rows: list[int], cap: int | None) -> None:
        self.rounds.launch(0)

    def commit(self, batch: Batch, rows: list[int], kept: list[list[int]]) -> None:
        for row in rows:
            if batch.generations[row].finish_reason == "stop":  # the device knows of the other ends
                self.rounds.state.limits[row].zero_()  # an assignment would copy from the host, and wait
