"""Models of known shapes with random weights, and a drafter that is right as often as asked: to time loops and kernels.

What such a model says means nothing, so no figure of quality, and no acceptance, is learnt from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

import kernels
from checkpoint import QUANTISED, pick_device, pick_dtype, quantisation
from decode import SamplingParams, generate
from model import GPT, GPTConfig

SHAPES = {
    "gpt2": GPTConfig("gpt2", 50304, 1024, 12, 12, 768, n_vocab_used=50257),
    "gpt2-medium": GPTConfig("gpt2", 50304, 1024, 24, 16, 1024, n_vocab_used=50257),
    "gpt2-large": GPTConfig("gpt2", 50304, 1024, 36, 20, 1280, n_vocab_used=50257),
    "gpt2-xl": GPTConfig("gpt2", 50304, 1024, 48, 25, 1600, n_vocab_used=50257),
    "smollm2-135m": GPTConfig("llama", 49152, 8192, 30, 9, 576, n_kv_head=3, n_hidden=1536, rope_theta=1e5),
    "llama-3-8b": GPTConfig(
        "llama", 128256, 8192, 32, 32, 4096, n_kv_head=8, n_hidden=14336, rope_theta=5e5, tie_weights=False
    ),
}


def random_model(name: str, device="auto", dtype="auto", quantize: str | None = None, seed: int = 0) -> GPT:
    """A model of the shape that `name` says, "gpt2-xl", or with another number of layers, "llama-3-8b:4"; ValueError."""
    shape, _, layers = name.partition(":")
    if shape not in SHAPES or not (layers == "" or (layers.isdecimal() and int(layers) > 0)):
        raise ValueError(f"--model random:{name}: choose {', '.join(SHAPES)}, with :LAYERS behind it for fewer or more")
    config = dataclasses.replace(SHAPES[shape], n_layer=int(layers or SHAPES[shape].n_layer))
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    if quantize not in QUANTISED:
        raise ValueError(f"quantize is {quantize!r}: choose int8 or int4, or leave it out")
    with torch.device("meta"):
        model = GPT(config)
    noise = torch.randn(999_983, generator=torch.Generator().manual_seed(seed)).to(device, dtype) * 0.02
    for key, weight in model.state_dict().items():
        bits, group = quantisation(key, config, quantize)
        if "norm" in key or key.endswith("bias"):
            value = torch.full(weight.shape, float(key.endswith("weight")), dtype=dtype, device=device)
        else:
            value = noise.repeat(-(-weight.numel() // len(noise)))[: weight.numel()].view(weight.shape)  # drawn once
        model.set_weight(key, value if bits is None else kernels.quantize(value, bits, group))
    model.fingerprint, model.identity = f"random:{name}", {"weights": f"random:{name}", "quantize": quantize}
    return model.to(device).eval()


class SyntheticDrafter:
    """Proposes the target's own next tokens, each with chance `acceptance`, and a wrong one else; of several acceptances each
    holds for an equal part of the new text, so that 1, 0 is a drafter that turns from perfect to useless half-way.

    It has to be told the texts, `tell`, so what is verified must be plain decoding's text: greedy or coupled. A drafter beneath
    drafts too, at its cost, and is not listened to; without one a draft costs nothing.
    """

    def __init__(self, target: GPT, acceptance: Sequence[float], drafter=None, seed: int = 0):
        for a in acceptance:
            if not 0 <= a <= 1:
                raise ValueError(f"--synthetic-acceptance is {a}: it must be from 0 to 1")
        self.target, self.acceptance, self.drafter, self.seed = target, acceptance, drafter, seed
        self.told: dict[tuple, tuple[list[int], list[bool]]] = {}

    def tell(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        """Decode what is not known yet, and settle at which places the drafter will be right."""
        law = repr(dataclasses.replace(sampling, seed=0))  # another temperature or length is another text
        self.asked = [(*prompt, seed, law) for prompt, seed in zip(prompts, sampling.row_seeds(len(prompts)))]
        if all(key in self.told for key in self.asked):
            return
        for key, prompt, out in zip(self.asked, prompts, generate(self.target, prompts, sampling)):
            text, n = prompt + out.tokens, len(out.tokens)
            draw = torch.rand(n, generator=torch.Generator().manual_seed(self.seed + len(self.told))).tolist()
            chances = [self.acceptance[i * len(self.acceptance) // n] for i in range(n)]
            self.told[key] = text, [True] * len(prompt) + [x < chance for x, chance in zip(draw, chances)]

    def reset(self, prompts: list[list[int]]) -> None:
        self.rows, self.lengths = [self.told[key] for key in self.asked], [len(prompt) for prompt in prompts]
        if self.drafter is not None:
            self.drafter.reset(prompts)

    def propose(self, rows: list[int], max_k: int, sampler):
        if self.drafter is not None:
            self.drafter.propose(rows, max_k, sampler)
        drafts, n_drafted = torch.zeros(len(rows), max_k, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
        for i, row in enumerate(rows):
            (text, right), at = self.rows[row], self.lengths[row]
            wrong = self.target.config.n_vocab_used
            ids = [t if good else (t + 1) % wrong for t, good in zip(text[at : at + max_k], right[at:])]
            drafts[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            n_drafted[i] = len(ids)
        return drafts.to(self.target.device), None, n_drafted

    def commit(self, rows: list[int], tokens: list[list[int]], hidden) -> None:
        for row, new in zip(rows, tokens):
            self.lengths[row] += len(new)
        if self.drafter is not None:
            self.drafter.commit(rows, tokens, hidden)
