"""What only a GPU can show, in one command of at most eight minutes on a Hopper card.

    python tests/gpu_check.py                                # all sections, a table, results/gpu.json
    python tests/gpu_check.py --only numbers,rounds          # some of them
    TRITON_INTERPRET=1 python tests/gpu_check.py --record    # on a CPU: re-make what the card is compared with

    numbers      kernels against float64, and against what the interpreter computed (tests/data/interpreted.safetensors)
    invariance   rows of a block bit for bit those of the rows alone
    rounds       captured rounds against the host's steps, token for token
    law          chi-square of acceptance with ten million draws
    kernels      timed by graph replays over rotated buffers that no cache holds, beside the copy ceiling of the same run
    steps        whole steps and rounds, and what a caller sees of them
    memory       compute-sanitizer over the small shapes, where it is installed

Each section runs in a process of its own, and what it found is written before the next begins.
"""

import argparse
import functools
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import kernels
from bench import environment
from checkpoint import write_atomically
from decode import PlainStep, SamplingParams, generate, run_loop
from model import GPT, GPTConfig, KVCache
from speculative import ExitDrafter, ModelDrafter, SpeculativeStep, speculative_generate

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).parent / "data" / "interpreted.safetensors"
LIMITS = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}  # norm-wise, against float64
SHAPES = {
    "gpt2-xl": {"arch": "gpt2", "vocab_size": 50304, "n_vocab_used": 50257, "block_size": 1024, "n_layer": 48, "n_head": 25, "n_embd": 1600, "exit_layers": (12,)},
    "llama-3-8b": {
        "arch": "llama", "vocab_size": 128256, "block_size": 8448, "n_layer": 32, "n_head": 32, "n_kv_head": 8, "n_embd": 4096, "n_hidden": 14336,
        "tie_weights": False, "rope_theta": 5e5, "exit_layers": (8,),
    },
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Small calls of every kernel: name -> run(impl, cast) -> tensors, with cast(tensor) = the data, rounded and moved


def small_calls() -> dict[str, Callable]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=random) * scale

    calls = {}
    x, wide, bias, residual = normal(5, 128), normal(96, 128, scale=0.1), normal(96), normal(5, 96)
    gain, shift = 1 + normal(128, scale=0.1), normal(128, scale=0.1)
    for name, kwargs in {
        "linear": {},
        "linear, LayerNorm, bias, GELU": {"bias": bias, "norm": (gain, shift, 1e-5), "activation": "gelu"},
        "linear, RMSNorm, SwiGLU": {"norm": (gain, None, 1e-5), "activation": "swiglu"},
        "linear, bias, residual": {"bias": bias, "residual": residual},
    }.items():

        def run(impl, cast, kwargs=kwargs):
            kwargs = {k: cast(v) if torch.is_tensor(v) else v for k, v in kwargs.items()}
            if "norm" in kwargs:
                kwargs["norm"] = kernels.Norm(*[cast(v) if torch.is_tensor(v) else v for v in kwargs["norm"]])
            return (kernels.linear(cast(x), cast(wide), impl=impl, **kwargs),)

        calls[name] = run
    for bits in (8, 4):

        def run(impl, cast, bits=bits):
            weight = kernels.quantize(cast(wide, torch.float32), bits)
            return (kernels.linear(cast(x), weight, impl=impl),)

        calls[f"linear, int{bits}"] = run

    qkv = normal(2, 3, 8, 64)
    angle = torch.rand(2, 3, 1, 32, generator=random, dtype=torch.float64) * 6
    cos, sin = torch.cat((angle.cos(),) * 2, -1).float(), torch.cat((-angle.sin(), angle.sin()), -1).float()
    pages = normal(2, 40, 16, 2, 64)
    table = torch.randperm(40, generator=random).int().view(2, 20)
    positions = torch.tensor([[290, 291, 292], [126, 127, -1]])

    def attend(impl, cast):
        k, v = cast(pages[0]).clone(), cast(pages[1]).clone()
        fixed = (cast(table), cast(positions), 4, cast(cos), cast(sin))
        out = kernels.decode_attention(cast(qkv), k, v, *fixed, impl=impl)
        written = cast(table)[0, 18].long()  # the page of positions 288 .. 303
        return out[0], out[1, :2], k[written], v[written]

    calls["decode_attention"] = attend

    def attend_int8(impl, cast):
        config = GPTConfig("llama", 8, 512, 1, 4, 256, n_kv_head=2, n_hidden=8)
        cache = KVCache(config, 2, 320, dtype=torch.int8, device=cast(x).device)
        for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            tensor.zero_()
        outs = []
        for at in range(117, 140, 3):  # behind 117 tokens of zeros
            where = torch.tensor([[at, at + 1, at + 2]] * 2)
            memory = (*cache.layer(0), cache.block_table, cast(where), 4, cast(cos), cast(sin))
            outs.append(kernels.decode_attention(cast(qkv), *memory, cache.scales(0), impl=impl))
        return (outs[-1],)

    calls["decode_attention, int8"] = attend_int8

    def confide(impl, cast, kind="max_prob", vocab=None):
        ids = None if vocab is None else cast(vocab)
        norm = kernels.Norm(cast(gain), cast(shift), 1e-5)
        return kernels.exit_confidence(cast(x), cast(big), norm, ids, 700, kind, impl=impl)

    big = normal(720, 128, scale=0.2)
    some = torch.arange(0, 700, 3)
    for kind in kernels.CONFIDENCES:
        calls[f"exit_confidence, {kind}"] = lambda impl, cast, kind=kind: confide(impl, cast, kind)
    calls["exit_confidence, reduced"] = lambda impl, cast: confide(impl, cast, vocab=some)

    target, noise = normal(16, 5, 1000, scale=3), normal(16, 4, 1000, scale=0.5)
    seeds, index, rounds = torch.arange(16) * 7919 - 5, torch.arange(16) + 40, torch.arange(16) % 3
    n_drafted = torch.tensor([4, 3, 4, 0] * 4)
    for name, law, verify in (
        ("greedy", {"temperature": 0.0}, "rejection"),
        ("rejection", {"temperature": 0.8}, "rejection"),
        ("rejection, cuts", {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01}, "rejection"),
        ("coupled", {"temperature": 0.8, "top_p": 0.95}, "coupled"),
    ):

        def judge(impl, cast, law=law, verify=verify):
            logits = cast(target, torch.float32)
            draft = (target[:, :-1] + noise).flatten(0, 1)
            flat = [cast(t[:, None].expand(16, 4).flatten()) for t in (seeds, index, rounds)]
            drafts, _, processed = kernels.sample_token(
                cast(draft, torch.float32), flat[0], flat[1], **law, stream=kernels.DRAFT, rounds=flat[2],
                keep_law=True, impl=impl,
            )  # fmt: skip
            processed = None if processed is None else processed.view(16, 4, -1)
            rows = [cast(t) for t in (n_drafted, seeds, index, rounds)]
            tokens, n, log_probs = kernels.accept_draft(
                logits, processed, drafts.view(16, 4), *rows, **law, verify=verify, impl=impl
            )
            return tokens, n, log_probs.masked_fill(tokens < 0, 0.0)

        calls[f"accept_draft, {name}"] = judge
    return calls


def caster(device, dtype, exact: bool = False) -> Callable:
    """cast(tensor, to=dtype): floating point rounded to `to`, then float64 where exact; whole numbers as they are."""

    def cast(tensor, to=dtype):
        if not tensor.is_floating_point():
            return tensor.to(device)
        return tensor.to(to).to(device, torch.float64 if exact else to)

    return cast


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm-wise relative error; for whole numbers the share that differs."""
    if not got.is_floating_point() or got.dtype == torch.int8:
        return float((got != exact).double().mean())
    got, exact = got.double().cpu(), exact.double().cpu()
    finite = exact.isfinite()
    return float((got[finite] - exact[finite]).norm() / exact[finite].norm().clamp(min=1e-30))


def check_numbers(device: str) -> dict:
    """Every small call in three dtypes against float64, and against the interpreter's outputs where they are recorded."""
    from safetensors.torch import load_file

    recorded = load_file(RECORDED) if RECORDED.exists() else {}
    worst = {}
    for dtype, limits in LIMITS.items():
        for name, run in small_calls().items():
            got = run("triton", caster(device, dtype))
            exact = run("torch", caster("cpu", dtype, exact=True))
            errors = [error_of(a.cpu(), b) for a, b in zip(got, exact) if a.is_floating_point()]
            # quantised keys may round to a neighbour; a confidence is as exact as its largest logit: 16 of its limits
            limit = limits * (8 if "int8" in name and dtype != torch.float32 else 16 if "confidence" in name else 1)
            row = worst[f"{name}, {str(dtype)[6:]}"] = {"error": max(errors, default=0.0), "limit": limit}
            known = [recorded.get(f"{name}|{str(dtype)[6:]}|{i}") for i in range(len(got))]
            if known[0] is not None:
                row["from_interpreter"] = max(error_of(a.cpu(), b) for a, b in zip(got, known))
            row["ok"] = row["error"] <= limit and row.get("from_interpreter", 0) <= 2 * limit
    return worst


def record() -> None:
    import interpreter
    from safetensors.torch import save_file

    interpreter.repair_bfloat16()
    interpreter.patch_language_once()
    outputs = {}
    for dtype in LIMITS:
        for name, run in small_calls().items():
            for i, tensor in enumerate(run("triton", caster("cpu", dtype))):
                outputs[f"{name}|{str(dtype)[6:]}|{i}"] = tensor.contiguous()
    save_file(outputs, RECORDED)


# ----------------------------------------------------------------------------------------------------------------------
# Row invariance


def check_invariance(device: str) -> dict:
    """A pass of five rows gives, bit for bit, what five passes of one row give; alone and beside another sequence."""
    results = {}
    for name, config in tiny_configs().items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            torch.manual_seed(0)
            model = GPT(config).to(device, dtype)
            model.impl = "triton"
            tokens = torch.randint(config.vocab_size, (2, 45), device=device)
            outs = []
            for split, rows in (((40, 5), [0]), ((40, 1, 1, 1, 1, 1), [0]), ((40, 2, 3), [0, 1])):
                cache, at, parts = model.new_cache(len(rows), 64), 0, []
                for n in split:
                    for begin in range(at, at + n, 10):  # the prompt in blocks of ten, the same in all three
                        end = min(begin + 10, at + n)
                        positions = torch.arange(begin, end, device=device).expand(len(rows), -1)
                        x = model.embed(tokens[rows, begin:end], positions)
                        parts.append(model.logits(model.run_layers(x, cache, positions, 0, config.n_layer))[0])
                    at += n
                outs.append(torch.cat(parts)[40:])
            results[f"{name}, {str(dtype)[6:]}"] = {"ok": all(torch.equal(outs[0], out) for out in outs[1:])}
    return results


def tiny_configs() -> dict[str, GPTConfig]:
    llama = GPTConfig("llama", 512, 512, 4, 8, 256, n_kv_head=2, n_hidden=512, exit_layers=(1, 2))
    return {"gpt2": GPTConfig("gpt2", 512, 512, 4, 4, 256, n_vocab_used=500, exit_layers=(1, 2)), "llama": llama}


# ----------------------------------------------------------------------------------------------------------------------
# Rounds as graphs


def check_rounds(device: str, impl: str = "triton", n_new: int = 40) -> dict:
    """Captured rounds give the tokens that the host's steps give with the same kernels; the same once more when run again."""
    results, prompts = {}, [[1, 2, 3, 4, 5], [7] * 130]
    for name, config in tiny_configs().items():
        torch.manual_seed(0)
        model, drafter = GPT(config).to(device, torch.bfloat16), GPT(config).to(device, torch.bfloat16)
        model.impl = drafter.impl = impl
        with torch.no_grad():  # a drafter that is right often, not always
            for ours, theirs in zip(drafter.parameters(), model.parameters()):
                ours.copy_(theirs + 0.003 * torch.randn_like(theirs))
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(n_new, temperature, seed=3)
            plain = tokens_of(run_loop(model, prompts, sampling, PlainStep()))
            results[f"{name} plain T={temperature:g}"] = {
                "ok": all(tokens_of(generate(model, prompts, sampling)) == plain for _ in range(2))
            }
            makers = {"model": functools.partial(ModelDrafter, drafter)}
            makers["exit"] = functools.partial(ExitDrafter, model, 2)
            for (what, make), k, verify in itertools.product(makers.items(), (2, 8), ("rejection", "coupled")):
                host = tokens_of(run_loop(model, prompts, sampling, SpeculativeStep(make(), k, verify)))
                args = (prompts, sampling, k, verify)
                runs = [tokens_of(speculative_generate(model, make(), *args)) for _ in range(2)]
                ok = runs == [host, host] and (host == plain or (verify, temperature) == ("rejection", 0.8))
                results[f"{name} {what} k={k} {verify} T={temperature:g}"] = {"ok": ok}
    return results


def tokens_of(outs) -> list[list[int]]:
    return [out.tokens for out in outs]


# ----------------------------------------------------------------------------------------------------------------------
# The law of acceptance


def check_law(device: str, n_draws: int = 10_000_000, per_launch: int = 100_000, impl="triton", shift=0.1) -> dict:
    """Draft two tokens, judge them, count the first token that comes out: chi-square against the target's law.

    The control draws the drafts from another law than the one that is declared: it must fail.
    """
    n_vocab, results = 32, {}
    random = torch.Generator().manual_seed(1)
    target = torch.randn(n_vocab, generator=random).to(device)
    draft = (target.cpu() + torch.randn(n_vocab, generator=random)).to(device)
    for name, declared, limit_holds in (
        ("rejection", draft, True),
        ("control: wrong drafter", draft * (1 + shift), False),
    ):
        counts = torch.zeros(n_vocab, dtype=torch.int64, device=device)
        for begin in range(0, n_draws, per_launch):
            seeds = torch.arange(begin, begin + per_launch, device=device)
            index, rounds = torch.full_like(seeds, 17), torch.full_like(seeds, 3)
            how = {"stream": kernels.DRAFT, "rounds": rounds, "impl": impl}
            laws = draft.expand(per_launch, -1)
            drafts = [kernels.sample_token(laws, seeds, index + j, 1.0, **how)[0] for j in range(2)]
            tokens = kernels.accept_draft(
                target.expand(per_launch, 3, -1), declared.expand(per_launch, 2, -1), torch.stack(drafts, 1),
                torch.full_like(seeds, 2), seeds, index, rounds, 1.0, impl=impl,
            )[0]  # fmt: skip
            counts += torch.bincount(tokens[:, 0], minlength=n_vocab)
        expected = target.double().softmax(-1) * n_draws
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        # 31 degrees of freedom, significance 1e-6: 96.6
        results[name] = {"chi2": chi2, "limit": 96.6, "draws": n_draws, "ok": (chi2 < 96.6) == limit_holds}
    return results


# ----------------------------------------------------------------------------------------------------------------------
# Speed


def replay_seconds(calls: list[Callable], least: float = 0.03) -> float:
    """Median seconds of one call, by replays of a graph that makes them all: rotate enough data and no cache holds it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # for what the calls read
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def time_of(n: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(n):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / n

    n = max(1, math.ceil(least / max(time_of(2), 1e-6)))
    return statistics.median(time_of(n) for _ in range(5)) / len(calls)


def rotations(n_bytes: int) -> int:
    """Copies of an operand so that a round of them is 256 MiB: five times the second-level cache of a Hopper card."""
    return max(1, math.ceil(2**28 / n_bytes))


def copy_ceiling(device: str, n_bytes: int = 2**31) -> float:
    """Bytes read and written per second by torch's copy of 2 GiB."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / replay_seconds([lambda: target.copy_(source)])


def speed_row(name: str, n_bytes: int, ours: float, ceiling: float, others: dict[str, float]) -> dict:
    row = {"us": ours * 1e6, "bytes": n_bytes, "of_ceiling": n_bytes / ours / ceiling}
    row["others_us"] = {name: seconds * 1e6 for name, seconds in others.items()}
    best = min(others.values(), default=None)
    row["to_best_other"] = None if best is None else ours / best
    return {name: row}


def speed_linear(shape: str, device: str, ceiling: float) -> dict:
    config, rows = GPTConfig(**SHAPES[shape]), {}
    width, out_qkv = config.n_embd, (config.n_head + 2 * config.n_kv_head) * config.head_dim
    gpt2 = config.arch == "gpt2"
    n_up = config.n_hidden * (1 if gpt2 else 2)
    for name, n_out, n_in, kwargs in (
        ("qkv", out_qkv, width, {"norm"}),
        ("attn_out", width, config.n_head * config.head_dim, {"residual"}),
        ("up", n_up, width, {"norm", "activation"}),
        ("down", width, config.n_hidden, {"residual"}),
        ("head", config.vocab_size, width, {"norm"}),
    ):
        for bits in (16, 8, 4):
            for n in (1, 6):
                x = torch.randn(n, n_in, device=device, dtype=torch.bfloat16)
                n_copies = rotations(n_out * n_in * bits // 8)
                dense = torch.randn(n_out, n_in, device=device, dtype=torch.bfloat16) * 0.02
                weights = [dense.clone() if bits == 16 else kernels.quantize(dense, bits) for _ in range(n_copies)]
                n_bytes = sum(t.nbytes for t in ([dense] if bits == 16 else weights[0]) if torch.is_tensor(t))
                options = {}
                if "norm" in kwargs:
                    gain = torch.ones(n_in, device=device, dtype=torch.bfloat16)
                    options["norm"] = kernels.Norm(gain, torch.zeros_like(gain) if gpt2 else None, 1e-5)
                if "activation" in kwargs:
                    options["activation"] = "gelu" if gpt2 else "swiglu"
                if "residual" in kwargs:
                    options["residual"] = torch.randn(n, n_out, device=device, dtype=torch.bfloat16)
                ours = replay_seconds([functools.partial(kernels.linear, x, w, **options) for w in weights])
                others = {}
                if bits == 16:
                    others["F.linear"] = replay_seconds([functools.partial(F.linear, x, w) for w in weights])
                rows |= speed_row(f"{shape} {name} {bits}-bit n={n}", n_bytes, ours, ceiling, others)
    return rows


def speed_attention(
    shape: str, context: int, n_new: int, device: str, ceiling: float, cache_dtype=torch.bfloat16
) -> dict:
    config = GPTConfig(**SHAPES[shape])
    n_copies = rotations(2 * context * config.n_kv_head * config.head_dim * 2)
    small = GPTConfig(**SHAPES[shape] | {"n_layer": n_copies})
    cache = KVCache(small, 1, context, page_size=64, dtype=cache_dtype, device=device)
    for pages in (cache.k, cache.v):
        pages.zero_()
    n_heads = config.n_head + 2 * config.n_kv_head
    qkv = torch.randn(1, n_new, n_heads, config.head_dim, device=device, dtype=torch.bfloat16)
    positions = torch.arange(context - n_new, context, device=device)[None]
    cos = sin = None
    if config.arch == "llama":
        cos, sin = torch.rand(2, 1, n_new, 1, config.head_dim, device=device, dtype=torch.bfloat16)

    def attend(layer):
        kernels.decode_attention(
            qkv, *cache.layer(layer), cache.block_table, positions, config.n_head, cos, sin, cache.scales(layer)
        )

    ours = replay_seconds([lambda layer=layer: attend(layer) for layer in range(n_copies)])
    others = {}
    q = qkv[0, :, : config.n_head].transpose(0, 1)[None].contiguous()  # (1, H, T, D)
    if cache_dtype == torch.bfloat16:
        flat = [(cache.k[i].flatten(0, 1)[:context], cache.v[i].flatten(0, 1)[:context]) for i in range(n_copies)]
        heads = [(k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for k, v in flat]  # (1, G, S, D)
        others["SDPA"] = replay_seconds(
            [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in heads]
        )  # without the causal mask inside the block, the append and the rotation
        if n_new == 1:
            others |= public_attention(q[0, :, 0], flat)
    n_bytes = 2 * context * config.n_kv_head * config.head_dim * cache.k.element_size()
    return speed_row(f"{shape} attention S={context} T={n_new} {str(cache_dtype)[6:]}", n_bytes, ours, ceiling, others)


def public_attention(q: torch.Tensor, caches) -> dict[str, float]:
    """The best public decode attention that can be imported here."""
    try:
        import flashinfer
    except ImportError:
        return {}
    run = flashinfer.single_decode_with_kv_cache
    return {"flashinfer": replay_seconds([lambda k=k, v=v: run(q, k, v, use_tensor_cores=True) for k, v in caches])}


def speed_sampling(device: str, ceiling: float) -> dict:
    rows = {}
    for n_vocab, n_drafts in ((50304, 5), (128256, 5)):
        for name, temperature, top_p in (("", 0.8, 1.0), (" top-p", 0.8, 0.9), (" greedy", 0.0, 1.0)):
            law = {"temperature": temperature, "top_p": top_p}
            target = torch.randn(1, n_drafts + 1, n_vocab, device=device) * 3
            near = target[:, :-1] + torch.randn(1, n_drafts, n_vocab, device=device) * 0.3
            draft = None if temperature == 0 else near
            ones = torch.ones(1, dtype=torch.int64, device=device)
            drafts = target[:, :-1].argmax(-1)
            args = (target, draft, drafts, ones * n_drafts, ones, ones, ones)
            ours = replay_seconds([functools.partial(kernels.accept_draft, *args, **law)] * 8)
            n_bytes = target.nbytes + (0 if draft is None else draft.nbytes)
            rows |= speed_row(f"accept_draft V={n_vocab} K={n_drafts}{name}", n_bytes, ours, ceiling, {})
            ours = replay_seconds([functools.partial(kernels.sample_token, target[:, 0], ones, ones, **law)] * 8)
            rows |= speed_row(f"sample_token V={n_vocab}{name}", target[:, 0].nbytes, ours, ceiling, {})
    return rows


def speed_exit_head(shape: str, device: str, ceiling: float) -> dict:
    config = GPTConfig(**SHAPES[shape])
    weights = [
        torch.randn(config.vocab_size, config.n_embd, device=device, dtype=torch.bfloat16)
        for _ in range(rotations(config.vocab_size * config.n_embd * 2))
    ]
    gain = torch.ones(config.n_embd, device=device, dtype=torch.bfloat16)
    norm = kernels.Norm(gain, torch.zeros_like(gain) if config.arch == "gpt2" else None, 1e-5)
    x = torch.randn(1, config.n_embd, device=device, dtype=torch.bfloat16)
    ours = replay_seconds([lambda w=w: kernels.exit_confidence(x, w, norm) for w in weights])
    return speed_row(f"{shape} exit head", weights[0].nbytes, ours, ceiling, {})


def random_model(shape: str, device: str) -> GPT:
    """Random bfloat16 weights, made on the card."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return GPT(GPTConfig(**SHAPES[shape])).to(torch.bfloat16).eval()
    finally:
        torch.set_default_dtype(default)


def speed_steps(shape: str, device: str, context: int, ceiling: float) -> dict:
    """A plain step and a verification of six rows, each one graph; torch.compile's step of the same model beside them."""
    model, rows, seconds = random_model(shape, device), {}, {}
    n_layer = model.config.n_layer
    cache = model.new_cache(1, context + 64)
    for pages in (cache.k, cache.v):
        pages.zero_()
    ones = torch.ones(1, dtype=torch.int64, device=device)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embedding" not in name or model.output is None)
    n_bytes = weights + 2 * context * model.config.n_kv_head * model.config.head_dim * 2 * n_layer
    for n in (1, 6):
        tokens = torch.ones(1, n, dtype=torch.int64, device=device)
        positions = torch.arange(context - n, context, device=device)[None]

        def step(tokens=tokens, positions=positions, n=n):
            x = model.run_layers(model.embed(tokens, positions), cache, positions, 0, n_layer)
            kernels.accept_draft(model.logits(x), None, tokens[:, 1:], ones * (n - 1), ones, ones, ones, 0.0)

        seconds[n] = replay_seconds([step])
    others = {}
    try:
        others["torch.compile"] = compiled_step_seconds(model, context)
    except Exception as error:  # noqa: BLE001 - a compiler that fails here is a finding, not the end of the run
        print(f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    rows |= speed_row(f"{shape} plain step S={context}", n_bytes, seconds[1], ceiling, others)
    rows |= speed_row(f"{shape} verification of 6 S={context}", n_bytes, seconds[6], ceiling, {})
    rows[f"{shape} verification of 6 S={context}"]["to_plain_step"] = seconds[6] / seconds[1]
    return rows


def compiled_step_seconds(model: GPT, context: int) -> float:
    """The step as gpt-fast writes it, for torch.compile: a static cache, one mask, SDPA."""
    config, device = model.config, model.device
    shape = (config.n_layer, 1, config.n_kv_head, context, config.head_dim)
    k_cache, v_cache = (torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    token, position = (torch.tensor([[i]], device=device) for i in (1, context - 1))

    def step(token, position):
        x, at = model.embed(token, position), position[0]
        mask = (torch.arange(context, device=device) <= at)[None, None, None]
        for i, block in enumerate(model.blocks):
            qkv = block.qkv(x, block.attn_norm, impl="torch").unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            q, k, v = qkv.split((config.n_head, config.n_kv_head, config.n_kv_head), 1)
            if config.arch == "llama":
                cos, sin = model.cos[position][:, None], model.sin[position][:, None]  # (1, 1, 1, D)
                q, k = ((t * cos + t.roll(config.head_dim // 2, -1) * sin).to(t.dtype) for t in (q, k))
            k_cache[i].index_copy_(2, at, k)
            v_cache[i].index_copy_(2, at, v)
            y = F.scaled_dot_product_attention(q, k_cache[i], v_cache[i], attn_mask=mask, enable_gqa=True)
            x = block.attn_out(y.transpose(1, 2).flatten(2), residual=x, impl="torch")
            up = block.up(x, block.mlp_norm, "gelu" if config.arch == "gpt2" else "swiglu", impl="torch")
            x = block.down(up, residual=x, impl="torch")
        return F.linear(model.final_norm(x), model.output_weight).argmax(-1)

    compiled = torch.compile(step, fullgraph=True)
    return replay_seconds([lambda: compiled(token, position)])


def speed_loops(shape: str, device: str, context: int) -> dict:
    """What a caller sees: microseconds of a round, plain and self-speculative, its graph, the ring and the host in it."""
    model, rows = random_model(shape, device), {}
    prompt, sampling = [1] * context, SamplingParams(32, temperature=0.0)
    exit_layer = model.config.exit_layers[0]
    drafted = functools.partial(speculative_generate, model, ExitDrafter(model, exit_layer))
    for name, run in {"plain": functools.partial(generate, model), f"exit {exit_layer} drafts 4": drafted}.items():
        [out] = run([prompt], sampling)
        seconds = (out.stats.seconds - out.stats.prefill_seconds) / out.stats.rounds
        rows[f"{shape} loop, {name} S={context}"] = {"round_us": seconds * 1e6, "tokens": len(out.tokens)}
    return rows


def check_kernels(device: str, contexts=(1024, 8192), copied: int = 2**31) -> dict:
    ceiling = copy_ceiling(device, copied)
    rows = {"copy ceiling": {"bytes_per_second": ceiling}}
    for shape, fields in SHAPES.items():
        for context in contexts:
            for n_new, dtype in ((1, torch.bfloat16), (6, torch.bfloat16), (1, torch.int8)):
                if context <= fields["block_size"]:
                    rows |= speed_attention(shape, context, n_new, device, ceiling, dtype)
        rows |= speed_linear(shape, device, ceiling) | speed_exit_head(shape, device, ceiling)
    return rows | speed_sampling(device, ceiling)


def check_steps(device: str, context: int = 960, copied: int = 2**31) -> dict:
    ceiling = copy_ceiling(device, copied)
    rows = {"copy ceiling": {"bytes_per_second": ceiling}}
    for shape in SHAPES:
        for measure in (functools.partial(speed_steps, ceiling=ceiling), speed_loops):
            rows |= measure(shape, device, context)
            torch.cuda.empty_cache()
    return rows


# ----------------------------------------------------------------------------------------------------------------------


def check_memory(device: str) -> dict:
    """The small calls again under compute-sanitizer: out of bounds or misaligned; each tensor in an allocation of its own."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"compute-sanitizer": {"ok": None, "note": "not installed"}}
    command = [tool, "--tool", "memcheck", sys.executable, __file__, "--only", "numbers", "--out", ""]
    how = {"timeout": 120, "cwd": ROOT, "env": os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
    try:
        run = subprocess.run(command, check=False, capture_output=True, text=True, **how)
    except subprocess.TimeoutExpired:
        return {"compute-sanitizer": {"ok": None, "note": "took more than 120 s"}}
    clean = "ERROR SUMMARY: 0 errors" in run.stdout
    return {"compute-sanitizer": {"ok": clean, "note": run.stdout.strip().splitlines()[-1:]}}


SECTIONS = {
    "numbers": check_numbers,
    "invariance": check_invariance,
    "rounds": check_rounds,
    "law": check_law,
    "kernels": check_kernels,
    "steps": check_steps,
    "memory": check_memory,
}


def table(section: str, rows: dict) -> list[str]:
    lines = [f"-- {section}"]
    for name, row in rows.items():
        cells = [f"{'' if row.get('ok') is None else 'ok  ' if row['ok'] else 'FAIL'} {name:60}"]
        if "us" in row:
            cells.append(f"{row['us']:9.1f} us  {row['of_ceiling']:6.1%} of the copy ceiling")
            cells += [f"{other} {us:.1f} us" for other, us in row["others_us"].items()]
        shown = ("error", "from_interpreter", "chi2", "to_plain_step", "round_us")
        cells += [f"{key} {row[key]:.3g}" for key in shown if key in row]
        lines.append("  ".join(cells))
    return lines


def apart(section: str, seconds: float) -> dict:
    """A section in a process of its own: a fault on the card ends that section, not the run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--only", section, "--out", str(out)]
        try:
            subprocess.run(command, timeout=max(seconds, 1), check=False)
        except subprocess.TimeoutExpired:
            return {"the time was up": {"ok": None}}
        return json.loads(out.read_text())[section] if out.exists() else {"the section broke off": {"ok": False}}


def main() -> int:
    parser = argparse.ArgumentParser("gpu_check.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {', '.join(SECTIONS)}")
    parser.add_argument("--out", default=str(ROOT / "results" / "gpu.json"), help="file for the result; empty for none")
    parser.add_argument(
        "--seconds", type=float, default=480, help="for all sections together; then the rest is left out"
    )
    parser.add_argument("--record", action="store_true", help="re-make tests/data/interpreted.safetensors (no GPU)")
    flags = parser.parse_args()
    wanted = flags.only.split(",")
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        parser.exit(2, f"gpu_check.py: --only names {unknown[0]!r}: choose from {', '.join(SECTIONS)}\n")
    if flags.record:
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.exit(2, "gpu_check.py: --record asks the interpreter: set TRITON_INTERPRET=1\n")
        record()
        return 0
    if not torch.cuda.is_available():
        parser.exit(2, "gpu_check.py: no CUDA device here; python -m pytest proves what can be proved without one\n")
    import triton

    properties = torch.cuda.get_device_properties(0)
    result = environment() | {"triton": triton.__version__, "capability": f"{properties.major}.{properties.minor}"}
    result["memory_gib"] = round(properties.total_memory / 2**30)
    started = time.perf_counter()
    for section in wanted:
        began = time.perf_counter()
        if len(wanted) > 1:
            rows = apart(section, flags.seconds - (began - started))
        else:
            rows = SECTIONS[section]("cuda")
            print("\n".join(table(section, rows)), f"\n{time.perf_counter() - began:.0f} s", flush=True)
        result[section] = rows
        if flags.out:
            write_atomically(flags.out, lambda p: p.write_text(json.dumps(result, indent=1) + "\n"))
    if len(wanted) > 1:
        print(json.dumps(result))
    failed = any(row.get("ok") is False for section in wanted for row in result[section].values())
    return 1 if failed else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
