"""What the tests share: tiny models, a model made of tables, plain references in NumPy, and the chi-square test."""

import copy
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import speculative
from auto import Plan
from decode import generate
from early_exit import early_exit_generate
from model import GPT, GPTConfig, KVCache
from speculative import ExitDrafter, ModelDrafter, NGramDrafter, speculative_generate


def tiny_model(arch="llama", seed=0, dtype=torch.float64, gain=1.5, poisoned=True, **changes) -> GPT:
    """4 layers of width 16 with exits behind each; sharp laws that depend on the whole context, on shuffled NaN pages."""
    shape = {
        "vocab_size": 24,
        "block_size": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 16,
        "n_kv_head": 2,
        "n_hidden": 24,
    }
    shape |= {"exit_layers": (1, 2, 3), "exit_adapters": ("exit", "draft"), "tie_weights": False}
    torch.manual_seed(seed)
    model = GPT(GPTConfig(arch, **shape | changes)).to(dtype)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = 0.6 if "embedding" in name else 0.3 if "adapters" in name else gain
            weight.data.normal_(0, std if "embedding" in name else std / weight.shape[1] ** 0.5)
        elif "norm" in name and "weight" in name:
            weight.data.uniform_(0.7, 1.3)
        elif name.endswith("bias"):
            weight.data.normal_(0, 0.1)
    return with_poisoned_caches(model) if poisoned else model


def with_poisoned_caches(model: GPT) -> GPT:
    """Every cache that the model makes has small pages in a shuffled order, all NaN; they are kept in model.caches."""
    model.caches = []

    def new_cache(batch, capacity):
        cache = KVCache(model.config, batch, capacity, page_size=4, dtype=model.dtype)
        order = torch.randperm(cache.block_table.numel(), generator=torch.Generator().manual_seed(capacity))
        cache.block_table = order.to(torch.int32).view_as(cache.block_table)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
        model.caches[:] = [cache]
        return cache

    model.new_cache = new_cache
    return model


def weaker(model: GPT, noise=0.15, seed=1) -> GPT:
    """A drafter that agrees with the model often, not always: its weights with noise on them."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    if hasattr(model, "caches"):
        with_poisoned_caches(other)
    for weight in other.parameters():
        weight.data.add_(torch.randn_like(weight) * noise * weight.std().nan_to_num(0))
    return other


def cached(cache: KVCache, row: int, n: int):
    """Keys and values of positions 0 .. n-1 of a row: two (L, n, G, D)."""
    at = torch.arange(n)
    slots = cache.block_table[row].long()[at // cache.page_size] * cache.page_size + at % cache.page_size
    return cache.k.flatten(1, 2)[:, slots], cache.v.flatten(1, 2)[:, slots]


@torch.no_grad()
def true_states(model: GPT, tokens: list[int]):
    """The full forward without a cache: inputs of every layer and the last output (L+1, T, C), k and v (L, T, G, D)."""
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    x = model.embed(ids, positions)
    at = model._pass(positions, None)
    states, keys, values = [x[0]], [], []
    for layer, block in enumerate(model.blocks):
        k, v = block.keys_values(x, at)
        x = model.run_layers(x, None, positions, layer, layer + 1)
        states.append(x[0]), keys.append(k[0]), values.append(v[0])
    return torch.stack(states), torch.stack(keys), torch.stack(values)


class Pieces:
    """A tokenizer that is a list of strings."""

    bos_id, eos_ids = None, ()

    def __init__(self, pieces):
        self.pieces, self.n_vocab = list(pieces), len(pieces)

    def encode(self, text, special=False):
        return [self.pieces.index(c) for c in text]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


# ----------------------------------------------------------------------------------------------------------------------
# Every way to decode, and what must hold of whatever comes out


def speculating(model, drafter, draft_len=4, verify="rejection"):
    """speculative_generate as a function(prompts, sampling, **options)."""
    return lambda *args, **options: speculative_generate(model, drafter, *args, draft_len, verify, **options)


def exiting(model, **fixed):
    """early_exit_generate as a function(prompts, sampling, **options)."""
    return lambda *args, **options: early_exit_generate(model, *args, **fixed, **options)


def all_modes(model: GPT) -> dict:
    """name -> function(prompts, sampling, **options); reproducible ones only, so automatic lengths come with coupled, and
    with a clock on which drafting and verifying take the same time, however much it is."""
    weak = weaker(model)

    def auto(*args, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculative, "time", SimpleNamespace(perf_counter=itertools.count(0, 1e-9).__next__))
            patch.setattr(speculative, "plans_of", lambda drafter, rows: [Plan("", [(0, None)] * len(rows), True)])
            return speculative_generate(model, ModelDrafter(weak), *args, "auto", "coupled", **options)

    return {
        "plain": lambda *args, **options: generate(model, *args, **options),
        "model": speculating(model, ModelDrafter(weak), 3),
        "itself": speculating(model, ModelDrafter(model), 8),
        "auto": auto,
        "ngram": speculating(model, NGramDrafter(), 4),
        "exit": speculating(model, ExitDrafter(model, 2), 3),
        "combined": speculating(model, ExitDrafter(model, (1, 3), threshold=0.6), 5),
        "coupled": speculating(model, ExitDrafter(model, (1, 2, 3), threshold=0.6), 2, "coupled"),
        "early": exiting(model, threshold=0.5, max_parked=3, audit=True),
        "propagate": exiting(model, threshold=[0.25, 0.3, 0.35], kv_fill="propagate", confidence="margin"),
    }


def run(decode, prompts, sampling, **options):
    """Decode, check what must hold of any generation, return the generations."""
    streams = [[] for _ in prompts]
    outs = decode(prompts, sampling, on_tokens=lambda row, ids: streams[row].append(list(ids)), **options)
    assert len(outs) == len(prompts)
    for out, stream in zip(outs, streams):
        assert [t for ids in stream for t in ids] == out.tokens and all(stream)
        check_counters(out, n_rounds=len(stream))
        at = 0
        for ids in stream:  # a round is drafts and then one token more, unless it was cut at the row's end
            *drafts, last = out.sources[at : at + len(ids)]
            at += len(ids)
            assert set(drafts) <= {"draft"} and (last != "draft" or at == len(out.tokens))
    return outs


def check_counters(out, n_rounds=None) -> None:
    """The identities of the counters, and the lists against one another."""
    stats, n = out.stats, len(out.tokens)
    assert len(out.logprobs) == len(out.sources) == len(out.layers_run) == len(stats.token_seconds) == n
    assert all(lp <= 1e-9 and math.isfinite(lp) for lp in out.logprobs)
    counts = [stats.accepted, stats.corrected, stats.bonus, stats.plain, stats.exited]
    assert [out.sources.count(s) for s in ("draft", "corrected", "bonus", "plain", "exit")] == counts
    assert stats.tokens == sum(counts) == n
    for histogram, by_position, total in (
        (stats.accepted_histogram, stats.accepted_by_position, stats.accepted),
        (stats.drafted_histogram, stats.drafted_by_position, stats.drafted),
    ):
        assert sum(histogram) == stats.rounds
        assert sum(i * rounds for i, rounds in enumerate(histogram)) == sum(by_position) == total
        assert by_position == sorted(by_position, reverse=True)
        assert by_position == [sum(histogram[i + 1 :]) for i in range(len(by_position))]
    assert all(a <= d for a, d in zip(stats.accepted_by_position, stats.drafted_by_position))
    assert len(stats.accepted_by_position) <= len(stats.drafted_by_position)
    assert stats.target_passes == stats.rounds and (n_rounds is None or stats.rounds == n_rounds)
    assert stats.corrected + stats.bonus + stats.plain + stats.exited <= stats.rounds <= n
    rejected = stats.drafted - stats.accepted  # those behind a correction were drafted in vain too
    assert stats.corrected <= rejected and (stats.corrected == 0) == (rejected == 0)
    exits = [layers for layers, source in zip(out.layers_run, out.sources) if source == "exit"]
    assert stats.exit_histogram == {layers: exits.count(layers) for layers in exits}
    assert stats.acceptance_rate == (stats.accepted / stats.drafted if stats.drafted else None)
    judged = stats.accepted + stats.corrected
    assert stats.alpha == (stats.accepted / judged if judged else None)
    assert stats.mean_accepted_length == (n / stats.rounds if n else None)
    assert stats.mean_layers == (stats.layer_passes / n if n else None)
    assert (stats.first_token_seconds is None) == (n == 0) and all(t >= 0 for t in stats.token_seconds)
    assert stats.seconds == 0 or abs(sum(stats.token_seconds) - stats.seconds) < 1e-9
    json.dumps(stats.to_dict())


def counters(out) -> dict:
    """Everything in the statistics that is not a time, up to rounding."""
    stats = {k: v for k, v in out.stats.to_dict().items() if "second" not in k}
    return stats | {"audit_nats": round(out.stats.audit_nats, 9)}


def check_laws(model: GPT, prompt, out, sampling, seed=None) -> None:
    """Logprobs are those of a full forward over the emitted tokens, by the head that emitted each; the law's noise where given."""
    tokens = [*prompt, *out.tokens]
    states = true_states(model, tokens)[0]
    unfiltered = dataclasses.replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    for i, token in enumerate(out.tokens):
        at, layers = len(prompt) + i, out.layers_run[i]
        head = (layers,) if out.sources[i] == "exit" else ()
        logits = model.logits(states[layers][at - 1], *head).detach().numpy()
        law = numpy_law(logits, unfiltered if sampling.temperature == 0 else sampling, tokens[:at])
        assert abs(out.logprobs[i] - math.log(law[token])) < 1e-8, (i, out.sources[i])
        if sampling.temperature == 0:
            assert token == int(np.argmax(law)), (i, out.sources[i])
        elif seed is not None:
            winner = numpy_race(law[None], np.array([seed]), np.array([at]), SAMPLE, np.array([0]))
            assert token == winner[0], (i, out.sources[i])


# ----------------------------------------------------------------------------------------------------------------------
# A model made of tables: the law of the next token depends on the last two, so a batch of thousands costs a few tensors


class Tables:
    """The model interface on lookup tables: logits = table[the token before, the last token] (V, V, V), one per exit.

    The token before is read back from the cache, at position - 1: a wrong position, or a stale entry, changes the law.
    """

    device, dtype, impl = torch.device("cpu"), torch.float64, "torch"

    def __init__(self, table: torch.Tensor, exits: dict | None = None):
        exits = exits or {}
        self.tables = {None: table, **exits}
        n_layer = max(exits, default=0) + 1
        self.config = GPTConfig(
            "gpt2", len(table), 64, n_layer=n_layer, n_head=1, n_embd=2, exit_layers=tuple(sorted(exits))
        )

    def new_cache(self, batch, capacity):
        return TableCache(torch.full((batch, capacity + 1), -(10**6)), torch.arange(batch))

    def embed(self, tokens, positions):
        return torch.stack((tokens, tokens), -1).double()

    def run_layers(self, x, cache, positions, first, last):
        if first > 0:
            return x
        row, slot = (positions >= 0).nonzero(as_tuple=True)
        owner, at = cache.index[row], positions[row, slot]
        cache.ids[owner, at] = x[row, slot, 0].long()
        x = x.clone()
        x[row, slot, 1] = torch.where(at > 0, cache.ids[owner, (at - 1).clamp(min=0)], 0).double()
        return x

    def logits(self, x, exit_layer=None, adapter="exit"):
        return self.tables[exit_layer][x[..., 1].long(), x[..., 0].long()]


class TableCache:
    def __init__(self, ids, index):
        self.ids, self.index = ids, index

    def rows(self, index):
        return TableCache(self.ids, self.index[index])


def random_table(n_vocab: int, seed: int, scale=1.0) -> torch.Tensor:
    return torch.randn(n_vocab, n_vocab, n_vocab, generator=torch.Generator().manual_seed(seed)).double() * scale


# ----------------------------------------------------------------------------------------------------------------------
# References in NumPy, written from the definitions, one row at a time


def numpy_law(logits, sampling, history=()) -> np.ndarray:
    """The law of the next token (V,): penalty -> bias -> temperature -> top-k -> top-p -> min-p, in float64."""
    z = np.array(logits, dtype=np.float64)
    for i in set(history):
        z[i] = z[i] / sampling.repetition_penalty if z[i] > 0 else z[i] * sampling.repetition_penalty
    for i, bias in sampling.logit_bias.items():
        z[i] += bias
    if sampling.temperature == 0:
        return np.eye(len(z))[int(np.argmax(z))]
    z = (z - z.max()) / sampling.temperature
    alive = np.isfinite(z)
    if 0 < sampling.top_k < len(z):
        alive &= z >= sorted(z)[-sampling.top_k]

    def normal():
        weight = np.where(alive, np.exp(z), 0.0)
        return weight / weight.sum()

    if sampling.top_p < 1:
        law, mass = normal(), 0.0
        for i in sorted(range(len(z)), key=lambda i: -law[i]):
            if mass >= sampling.top_p:
                break
            mass, cut = mass + law[i], law[i]
        alive &= law >= cut
    if sampling.min_p > 0:
        law = normal()
        alive &= law >= sampling.min_p * law.max()
    return normal()


def joint_law(model: Tables, prompt, sampling, n_tokens=3) -> np.ndarray:
    """P(next n_tokens | prompt) by enumeration: n_tokens axes of V."""
    n_vocab = model.config.vocab_size

    def walk(history, depth):
        law = numpy_law(model.tables[None][history[-2], history[-1]].numpy(), sampling, history)
        if depth == 1:
            return law
        below = [
            walk([*history, i], depth - 1) if law[i] > 0 else np.zeros((n_vocab,) * (depth - 1)) for i in range(n_vocab)
        ]
        return np.stack([p * b for p, b in zip(law, below)])

    return walk(list(prompt), n_tokens)


# ----------------------------------------------------------------------------------------------------------------------
# The chi-square test


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """P-value of counts under law (both flat); 0 when something impossible happened. Rare cells (below 5) are pooled."""
    counts, law = counts.ravel().astype(float), law.ravel()
    if counts[law <= 0].any():
        return 0.0
    counts, expected = counts[law > 0], law[law > 0] * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(expected) < 2:
        return 1.0
    statistic = float(((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    return gamma_tail((len(expected) - 1) / 2, statistic / 2)


def gamma_tail(shape: float, x: float) -> float:
    return float(
        torch.special.gammaincc(torch.tensor(shape, dtype=torch.float64), torch.tensor(x, dtype=torch.float64))
    )


def sample_size(n_cells: int, total_variation=0.01, alpha=1e-6, power=0.99) -> int:
    """Smallest N with the stated power against every law at that distance.

    The chi-square divergence of a law at total variation d is at least 4 d^2 (Cauchy-Schwarz), so the statistic is at least a
    non-central chi-square with non-centrality 4 d^2 N, here in the normal approximation of its lower tail.
    """
    df = n_cells - 1
    low, high = 0.0, 1e4
    while high - low > 1e-6:  # the critical value of the test
        middle = (low + high) / 2
        low, high = (middle, high) if gamma_tail(df / 2, middle / 2) > alpha else (low, middle)
    z = -torch.special.ndtri(torch.tensor(1 - power, dtype=torch.float64)).item()
    shift = 0.0
    while df + shift - z * math.sqrt(2 * (df + 2 * shift)) < high:
        shift += 0.1
    return math.ceil(shift / (4 * total_variation**2))


# ----------------------------------------------------------------------------------------------------------------------
# The sampling rule written a second time, in NumPy: Philox, the race, and the rejection rule for many seeds at once

SAMPLE, DRAFT, ACCEPT, RESAMPLE = range(4)


def numpy_philox(counter, key):
    """Four counter words and two key words, uint64 arrays that broadcast -> four words."""
    mask, c0, c1, c2, c3, k0, k1 = np.uint64(0xFFFFFFFF), *counter, *key
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        shift = np.uint64(32)
        c0, c1, c2, c3 = (product1 >> shift) ^ c1 ^ k0, product1 & mask, (product0 >> shift) ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return c0, c1, c2, c3


def _numpy_words(ids, seeds, index, stream, rounds):
    seeds = seeds.astype(np.int64).view(np.uint64)[:, None]
    columns = [
        np.broadcast_to(np.asarray(x).astype(np.uint64), seeds[:, 0].shape)[:, None] for x in (index, stream, rounds)
    ]
    return numpy_philox(
        (ids[None].astype(np.uint64), *columns), (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32))
    )


def numpy_uniform(seeds, index, rounds) -> np.ndarray:
    word = _numpy_words(np.zeros(1), seeds, index, ACCEPT, rounds)[0][:, 0]
    halves = (word >> np.uint64(16)) * 2.0**-16 + (word & np.uint64(0xFFFF)) * 2.0**-32
    return np.minimum(halves.astype(np.float32), np.float32(1 - 2**-24))


def numpy_race(law, seeds, index, stream, rounds) -> np.ndarray:
    """law (N, V) -> (N,): argmax of prob / E over the tokens of non-zero probability."""
    n_vocab = law.shape[1]
    words = _numpy_words(np.arange((n_vocab + 1) // 2), seeds, index, stream, rounds)
    high = np.stack((words[0], words[2]), -1).reshape(len(law), -1)[:, :n_vocab]
    low = np.stack((words[1], words[3]), -1).reshape(len(law), -1)[:, :n_vocab]
    u = np.clip(high * 2.0**-32 + low * 2.0**-64, 2.0**-64, 1 - 2.0**-53)
    return np.argmax(np.where(law > 0, law / -np.log1p(-u), -1.0), -1)
