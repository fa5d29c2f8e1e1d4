"""A GPT that can stop early: GPT-2 and Llama-style decoders with exit heads, in one set of blocks.

    tokens (B, T) -- embed --> x --[ layers 0 .. e-1 ]--> x --[ layers e .. L-1 ]--> x -- logits --> (B, T, V)
                                                          |
                                                          `- logits(x, exit_layer=e): the head of that exit

The forward is split so that prefill, decode, draft, verify and early exit are the same few calls. The caller owns the
position; KVCache is only memory, so rolling back is a smaller number and a rejected entry is overwritten next time.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

import kernels


@dataclass
class GPTConfig:
    """Shape of a model. arch "gpt2": LayerNorm, learned positions, GELU-tanh, biases; "llama": RMSNorm, rotary, SwiGLU."""

    arch: str  # "gpt2" | "llama"
    vocab_size: int  # rows of the embedding, padding included
    block_size: int  # longest sequence, in tokens
    n_layer: int
    n_head: int
    n_embd: int  # C, the width
    n_kv_head: int | None = None  # G; n_head when None
    head_dim: int | None = None  # D; n_embd // n_head when None
    n_hidden: int | None = None  # of the MLP; 4 * n_embd for gpt2 when None
    n_vocab_used: int | None = None  # ids from here on are padding: -inf everywhere; vocab_size when None
    tie_weights: bool = True  # the output matrix is the embedding
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # {"rope_type": "linear" | "llama3", "factor": ...} as in Hugging Face configs
    qkv_bias: bool | None = None  # True for gpt2, False for llama when None
    exit_layers: tuple[int, ...] = ()  # how many layers ran before each exit, rising, each in 1 .. n_layer-1
    exit_vocab: tuple[int, ...] | None = None  # sorted ids that exit heads know; all when None
    exit_adapters: tuple[str, ...] = ()  # residual adapters of every exit head: "exit", "draft", both or none
    exit_platt: dict | None = None  # kind of confidence -> (slope, bias) of each exit, for the chance of agreeing

    def __post_init__(self):
        def need(ok: bool, name: str, what: str):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}: {what}")

        need(self.arch in ("gpt2", "llama"), "arch", "choose 'gpt2' or 'llama'")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            need(isinstance(getattr(self, name), int) and getattr(self, name) > 0, name, "must be a positive integer")
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        need(self.n_kv_head > 0 and self.n_head % self.n_kv_head == 0, "n_kv_head", f"must divide n_head {self.n_head}")
        if self.head_dim is None:
            need(self.n_embd % self.n_head == 0, "n_embd", f"must be a multiple of n_head {self.n_head}")
            self.head_dim = self.n_embd // self.n_head
        need(self.head_dim > 0 and (self.arch == "gpt2" or self.head_dim % 2 == 0), "head_dim", "must be even and > 0")
        if self.n_hidden is None:
            need(self.arch == "gpt2", "n_hidden", "must be given for arch 'llama'")
            self.n_hidden = 4 * self.n_embd
        need(self.n_hidden > 0, "n_hidden", "must be positive")
        self.n_vocab_used = self.vocab_size if self.n_vocab_used is None else self.n_vocab_used
        need(0 < self.n_vocab_used <= self.vocab_size, "n_vocab_used", f"must be in 1..{self.vocab_size}")
        self.qkv_bias = self.arch == "gpt2" if self.qkv_bias is None else self.qkv_bias
        self.exit_layers = tuple(self.exit_layers)
        rising = all(a < b for a, b in zip(self.exit_layers, self.exit_layers[1:]))
        within = all(0 < e < self.n_layer for e in self.exit_layers)
        need(rising and within, "exit_layers", f"must rise within 1..{self.n_layer - 1}")
        if self.exit_vocab is not None:
            self.exit_vocab = tuple(self.exit_vocab)
            rising = all(a < b for a, b in zip(self.exit_vocab, self.exit_vocab[1:]))
            within = all(0 <= i < self.n_vocab_used for i in self.exit_vocab)
            need(
                len(self.exit_vocab) > 0 and rising and within,
                "exit_vocab",
                f"must rise within 0..{self.n_vocab_used - 1}",
            )
        self.exit_adapters = tuple(self.exit_adapters)
        need(set(self.exit_adapters) <= {"exit", "draft"}, "exit_adapters", "may hold 'exit' and 'draft'")
        scales = dict(self.exit_platt or {}).values()
        fit = all(
            len(x) == len(self.exit_layers) and all(math.isfinite(a) and math.isfinite(b) for a, b in x) for x in scales
        )
        need(fit, "exit_platt", "must hold slope and bias of each exit")


class KVCache:
    """Keys and values of all layers in pages, all allocated at once.

    k, v (L, n_pages, page_size, G, D); block_table (B, max_pages) int32: the page that holds positions
    i * page_size .. of a row. A fresh cache is contiguous: the identity table. Unused slots may hold anything.
    int8 has k_scale, v_scale (L, n_pages, page_size, G) float32 beside it: half the bytes of bfloat16 and 4 more per head.
    """

    def __init__(self, config: GPTConfig, batch: int, capacity: int, page_size=16, dtype=torch.float32, device="cpu"):
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8):
            raise ValueError(f"dtype is {dtype}: a cache holds float64, float32, bfloat16, float16 or int8")
        max_pages = -(-capacity // page_size)
        shape = (config.n_layer, batch * max_pages, page_size, config.n_kv_head, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        quantised = dtype == torch.int8
        self.k_scale = torch.empty(shape[:-1], dtype=torch.float32, device=device) if quantised else None
        self.v_scale = torch.empty_like(self.k_scale) if quantised else None
        self.layers = list(zip(self.k.unbind(), self.v.unbind()))
        self.page_size = page_size
        self.starts: list[int] | None = None  # see finite
        pages = torch.arange(batch * max_pages, dtype=torch.int32, device=device)
        self.block_table = pages.view(batch, max_pages)

    @staticmethod
    def n_bytes(config: GPTConfig, batch: int, capacity: int, page_size=16, dtype=torch.float32) -> int:
        """What a cache's keys, values and their scales take."""
        heads = config.n_layer * batch * -(-capacity // page_size) * page_size * config.n_kv_head
        return 2 * heads * (config.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of one layer: k, v (n_pages, page_size, G, D)."""
        return self.layers[layer]

    def finite(self) -> KVCache:
        """Fill a fresh cache with zeros, and promise that: attention on a CPU may then read unused slots under a mask."""
        self.k.zero_(), self.v.zero_()
        self.starts = [row * self.capacity for row in range(len(self.block_table))]
        return self

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of an int8 cache: k_scale, v_scale (n_pages, page_size, G) of one layer."""
        return None if self.k_scale is None else (self.k_scale[layer], self.v_scale[layer])

    @property
    def capacity(self) -> int:
        """Positions that a row can hold."""
        return self.block_table.shape[1] * self.page_size

    def rows(self, index) -> KVCache:
        """A view of some rows (list of int or index tensor) that shares the pages."""
        view = copy.copy(self)
        view.block_table = self.block_table[index]
        if self.starts is not None:
            view.starts = [self.starts[row] for row in index]
        return view


class Matrix(nn.Module):
    """What Linear and Embedding share: `weight` is a parameter, or a kernels.QuantizedWeight or PackedWeight in its place."""

    def set_weight(self, weight: kernels.Weight) -> None:
        """Take over the weight, without a copy."""
        del self.weight  # a module keeps parameters and other attributes in different places
        self.weight = nn.Parameter(weight) if isinstance(weight, torch.Tensor) else weight

    def _apply(self, fn, recurse=True):
        """Of a quantised weight only the device changes; a packed one is for this CPU and dtype, so it is unpacked."""
        if isinstance(self.weight, kernels.PackedWeight):
            self.set_weight(kernels.unpack(self.weight))
        if isinstance(self.weight, kernels.QuantizedWeight):
            self.weight = self.weight.to(fn(self.weight.data).device)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        weight = kernels.unpack(self.weight)
        quantised = isinstance(weight, kernels.QuantizedWeight)
        if quantised:
            raise ValueError(f"{prefix}weight is quantised: save the model before it is quantised")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if weight is not self.weight:
            destination[prefix + "weight"] = weight


class Linear(Matrix, nn.Linear):
    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def forward(self, x, norm: Norm | None = None, activation=None, residual=None, impl: str = "auto"):
        parameters = None if norm is None else norm.parameters_of()
        return kernels.linear(x, self.weight, self.bias, parameters, activation, residual, impl=impl)

    __call__ = forward  # a module's own call, with its look for hooks, costs as much as a small operator


class Embedding(Matrix, nn.Embedding):
    def reset_parameters(self):
        if not self.weight.is_meta:  # there, the first random number imports 800 modules: a second
            super().reset_parameters()

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def forward(self, tokens, dtype: torch.dtype = torch.float32):
        """tokens (...) int64 -> (..., C), in the weight's dtype, or in `dtype` where it is quantised."""
        if isinstance(self.weight, torch.Tensor):
            return super().forward(tokens)
        return (self.weight.data[tokens] * self.weight.scale[tokens][..., None].float()).to(dtype)


class Norm(nn.Module):
    """LayerNorm (gpt2) or RMSNorm (llama)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.arch == "gpt2" else None
        self.eps = config.norm_eps
        self.packed: kernels.Norm | None = None  # of a packed model: see kernels.normalise

    def parameters_of(self) -> kernels.Norm:
        return self.packed or kernels.Norm(self.weight, self.bias, self.eps)

    def pack(self) -> None:
        """Only RMSNorm in bfloat16 has another form."""
        if self.bias is None and self.weight.dtype == torch.bfloat16:
            weight = self.weight.detach()
            self.packed = kernels.Norm(weight, None, self.eps, torch.cat((weight, weight)))

    def _apply(self, fn, recurse=True):
        self.packed = None
        return super()._apply(fn, recurse)

    def forward(self, x):
        return kernels.normalise(x, self.parameters_of())


class Pass(NamedTuple):
    """What the layers of one pass share."""

    positions: torch.Tensor  # (B, T)
    cache: KVCache | None  # None: each row attends causally within itself
    cos: torch.Tensor | None  # (B, T, 1, D), as sin; None with learned positions
    sin: torch.Tensor | None
    plans: list[kernels.RowPlan] | kernels.Runs | None  # the host's, where no Triton kernel runs
    impl: str


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); q, k and v are one matrix, and so are gate and up."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.arch, self.n_head, self.n_kv, self.head_dim = config.arch, config.n_head, config.n_kv_head, config.head_dim
        width, bias = config.n_embd, config.arch == "gpt2"
        n_up = config.n_hidden if config.arch == "gpt2" else 2 * config.n_hidden
        self.attn_norm = Norm(config)
        self.qkv = Linear(width, (self.n_head + 2 * self.n_kv) * self.head_dim, bias=config.qkv_bias)
        self.attn_out = Linear(self.n_head * self.head_dim, width, bias=bias)
        self.mlp_norm = Norm(config)
        self.up = Linear(width, n_up, bias=bias)  # llama: the gate's rows, then up's
        self.down = Linear(config.n_hidden, width, bias=bias)

    def forward(self, x, layer: int, at: Pass):
        """x (B, T, C) -> (B, T, C); keys and values go to `layer` of at.cache."""
        impl = at.impl
        qkv = self.qkv(x, self.attn_norm, impl=impl).unflatten(-1, (-1, self.head_dim))  # (B, T, H+2G, D)
        if at.cache is None:
            y = kernels.causal_attention(qkv, self.n_head, self.n_kv, at.cos, at.sin)
        else:
            memory = (*at.cache.layer(layer), at.cache.block_table, at.positions)
            y = kernels.decode_attention(
                qkv, *memory, self.n_head, at.cos, at.sin, at.cache.scales(layer), at.plans, impl
            )
        x = self.attn_out(y.flatten(2), residual=x, impl=impl)  # (B, T, H, D) -> (B, T, H*D)
        up = self.up(x, self.mlp_norm, "gelu" if self.arch == "gpt2" else "swiglu", impl=impl)
        return self.down(up, residual=x, impl=impl)

    def keys_values(self, x, at: Pass):
        """Only what the cache needs of x (B, T, C): k, v (B, T, G, D)."""
        skip = self.n_head * self.head_dim
        if isinstance(self.qkv.weight, kernels.PackedWeight):
            kv = self.qkv(x, self.attn_norm, impl=at.impl)[..., skip:]  # its rows cannot be taken apart
        else:
            bias = None if self.qkv.bias is None else self.qkv.bias[skip:]
            rows = kernels.take_rows(self.qkv.weight, slice(skip, None))
            kv = kernels.linear(x, rows, bias, self.attn_norm.parameters_of(), impl=at.impl)
        k, v = kv.unflatten(-1, (-1, self.head_dim)).chunk(2, 2)
        return (k if at.cos is None else kernels.rotate(k, at.cos, at.sin)), v


def new_cache(config: GPTConfig, batch: int, capacity: int, dtype: torch.dtype, device) -> KVCache:
    cache = KVCache(config, batch, capacity, dtype=dtype, device=device)
    return cache.finite() if dtype == torch.bfloat16 and cache.k.device.type == "cpu" else cache


class ExitHead(nn.Module):
    """The exit's own norm, and adapters that add to the hidden state in units of its own size: zero at the start.

    z = norm(x); u = x + rms(x) * adapter(z); the output matrix then reads norm(u), or z where there is no adapter.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = Norm(config)
        self.adapters = nn.ModuleDict({name: Linear(config.n_embd, config.n_embd) for name in config.exit_adapters})

    def forward(self, x, adapter: str, impl: str = "auto"):
        return self.norm(self.adapt(x, adapter, impl))

    def adapt(self, x, adapter: str, impl: str = "auto"):
        """u: what the output matrix reads once it is normalised, which is left to the product."""
        if adapter not in self.adapters:
            return x
        size = kernels.full_precision(x).square().mean(-1, keepdim=True).sqrt().to(x.dtype)
        return x + size * self.adapters[adapter](x, self.norm, impl=impl)


def pack_modules(module: nn.Module, dtype: torch.dtype) -> None:
    """Matrices and norms inside a module as this CPU wants them for activations in dtype; see GPT.pack."""
    for part in module.modules():
        if isinstance(part, Linear):
            part.set_weight(kernels.pack(part.weight, dtype, part.in_features))
        elif isinstance(part, Norm):
            part.pack()


class DraftHead(nn.Module):
    """One block that drafts from what the target has just computed (EAGLE: Li et al. 2024, 2025).

    features (B, T, C): the target's hidden state behind its last layer at positions t, or this block's own output there;
    tokens (B, T): those at t + 1. What comes out stands for the target's hidden state at t + 1. Its head knows only the
    tokens of `vocab`; embedding and output rows are the target's, shared or gathered when it is attached.
    """

    def __init__(self, config: GPTConfig, vocab: tuple[int, ...]):
        """config: the target's."""
        super().__init__()
        self.config = replace(
            config, n_layer=1, exit_layers=(), exit_vocab=tuple(vocab), exit_adapters=(), exit_platt=None
        )
        self.acceptance = 0.6  # of its drafts on held-out text, once it is trained
        self.token_norm, self.feature_norm, self.norm = Norm(config), Norm(config), Norm(config)
        self.fuse = Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.block = Block(config)
        self.register_buffer("vocab", torch.tensor(self.config.exit_vocab), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def attach(self, target: GPT) -> None:
        """Draft for this target from now on; packed like the target."""
        self.target = (target,)  # in a tuple: no part of this module
        self.output = kernels.take_rows(target.output_weight, self.vocab)
        if target.packed:
            pack_modules(self, target.dtype)
            self.output = kernels.pack(self.output, target.dtype, self.config.n_embd)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        (target,) = self.target
        return new_cache(self.config, batch, capacity, target.dtype, target.device)

    def forward(self, tokens, features, cache: KVCache, positions) -> torch.Tensor:
        """-> (B, T, C); keys and values go to `cache` at positions (B, T), -1 is padding."""
        (target,) = self.target
        tokens = self.token_norm(target.embed(tokens, positions))
        x = self.fuse(torch.cat((tokens, self.feature_norm(features)), -1), impl=target.impl)
        return self.block(x, 0, target._pass(positions, cache))

    def logits(self, x) -> torch.Tensor:
        """x (..., C) -> (..., V), -inf outside vocab."""
        (target,) = self.target
        known = kernels.linear(x, self.output, norm=self.norm.parameters_of(), impl=target.impl)
        logits = known.new_full((*known.shape[:-1], self.config.vocab_size), -torch.inf)
        logits[..., self.vocab] = known
        return logits


class GPT(nn.Module):
    """Decoder with exit heads; random float32 weights until a checkpoint is loaded into it.

    Under `with torch.device("meta")` it is built without weights, for set_weight to bring them.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.impl = "auto"  # kernels or references: kernels.IMPLEMENTATIONS
        self.cache_dtype: torch.dtype | None = None  # torch.int8 for instance; the model's own when None
        self.fingerprint: str | None = None  # of the file that the backbone came from: checkpoint.fingerprint
        self.identity: dict = {}  # of the files: what weights, heads, tokenizer and quantisation; see checkpoint
        self.certificates: list[dict] = []  # calibrated thresholds that came with the exits: certificate.Certificate
        self.acceptance: dict = {}  # of its drafts, as measured: {"greedy": .., "sampled": ..}; of exits {layer: the same}
        self.prefill_threads: int | None = None  # see decode.pick_threads; PyTorch's own number when None
        self.token_embedding = Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = Embedding(config.block_size, config.n_embd) if config.arch == "gpt2" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = Norm(config)
        self.exits = nn.ModuleDict({str(e): ExitHead(config) for e in config.exit_layers})
        self.output = None if config.tie_weights else Linear(config.n_embd, config.vocab_size, bias=False)
        if config.arch == "llama":
            cos, sin = rotary_tables(config)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        exit_vocab = None if config.exit_vocab is None else torch.tensor(config.exit_vocab, device="cpu")
        self.register_buffer("exit_vocab", exit_vocab, persistent=False)
        self.packed = False
        self.packed_output: kernels.Weight | None = None  # of a packed model whose output is the embedding
        self.packed_exit_output: kernels.Weight | None = None  # of a packed model: the rows of exit_vocab
        if not self.final_norm.weight.is_meta:
            self.apply(self._init_weights)

    def set_exits(self, layers, vocab=None, adapters=()) -> None:
        """Give the model new exit heads at these layers, in place of its own."""
        self.config = replace(
            self.config, exit_layers=layers, exit_vocab=vocab, exit_adapters=adapters, exit_platt=None
        )
        exits = nn.ModuleDict({str(layer): ExitHead(self.config) for layer in self.config.exit_layers})
        self.exits = exits.apply(self._init_weights).to(self.device, self.dtype)
        self.identity, self.certificates, self.acceptance = {}, [], {}
        self.exit_vocab = None if vocab is None else torch.tensor(vocab, device=self.device)
        self._pack_exit_output()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # residual branches start small, so that depth does not change the scale of x
            for branch in (module.attn_out, module.down):
                nn.init.normal_(branch.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))
        if isinstance(module, ExitHead):
            for adapter in module.adapters.values():
                nn.init.zeros_(adapter.weight)

    @property
    def device(self) -> torch.device:
        return self.final_norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations; quantised weights have their own."""
        return self.final_norm.weight.dtype

    def set_weight(self, name: str, weight: torch.Tensor | kernels.QuantizedWeight) -> None:
        """Put a weight, without a copy, where the state_dict of an unquantised model has `name`; raises ValueError.

        Matrices of the blocks, the output and exit adapters may be quantised to int8 or int4, the token embedding to int8.
        """
        path, _, leaf = name.rpartition(".")
        try:
            module = self.get_submodule(path)
        except AttributeError:
            module = None
        old = None if module is None or leaf in module._buffers else getattr(module, leaf, None)
        matrix = isinstance(module, Matrix) and leaf == "weight"
        if not matrix and not isinstance(old, nn.Parameter):
            raise ValueError(f"{name} is no weight of this model: names are those of its state_dict")
        shape, quantised = module.shape if matrix else old.shape, isinstance(weight, kernels.QuantizedWeight)
        if quantised:
            if not matrix or (weight.bits == 4 and isinstance(module, Embedding)):
                raise ValueError(
                    f"{name} cannot have {weight.bits} bits: choose int8 for the embedding, none for vectors"
                )
            n_data = shape[1] if weight.bits == 8 else -(-shape[1] // kernels.PACK) * (kernels.PACK // 4)
            fits = weight.data.shape == (shape[0], n_data)
        else:
            fits = weight.shape == shape and weight.is_floating_point()
        if not fits:
            data = weight.data if quantised else weight
            raise ValueError(f"{name} is {data.dtype} {tuple(data.shape)}: this model has {tuple(shape)} there")
        if matrix:
            module.set_weight(weight)
        else:
            setattr(module, leaf, nn.Parameter(weight))

    def pack(self) -> GPT:
        """Lay the weights out for decoding on this CPU, for good: they are then no parameters (kernels.pack). Elsewhere nothing.

        The dense ones are freed one by one. `.to()` undoes it; a state_dict holds copies of what was packed.
        """
        if self.device.type != "cpu" or self.dtype == torch.float64 or self.packed:
            return self
        self.packed = True
        self._pack_exit_output()
        pack_modules(self, self.dtype)
        if self.output is None:
            self.packed_output = self._packed(self.token_embedding.weight)
        return self

    def weight_bytes(self) -> int:
        """Memory of all weights as they stand, packed copies included."""
        tensors = list(self.parameters())
        weights = [m.weight for m in self.modules() if isinstance(m, Matrix)] + [
            self.packed_output,
            self.packed_exit_output,
        ]
        for weight in weights:
            if isinstance(weight, kernels.QuantizedWeight):
                tensors += [x for x in weight if isinstance(x, torch.Tensor)]
            elif isinstance(weight, kernels.PackedWeight):
                tensors += [x for x in (weight.data, weight.scales) if x is not None]
        # oneDNN's tensors have no address; the others may be shared
        return sum({(id(t) if t.is_mkldnn else t.data_ptr()): t.numel() * t.element_size() for t in tensors}.values())

    def _pack_exit_output(self) -> None:
        known = self.packed and self.exit_vocab is not None
        rows = kernels.take_rows(self.output_weight, self.exit_vocab) if known else None
        self.packed_exit_output = self._packed(rows) if known else None

    def _packed(self, weight: kernels.Weight) -> kernels.Weight:
        return kernels.pack(weight, self.dtype, self.config.n_embd)

    def _apply(self, fn, recurse=True):
        self.packed, self.packed_output, self.packed_exit_output = False, None, None
        return super()._apply(fn, recurse)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache on the model's device, in cache_dtype or its own dtype."""
        if self.cache_dtype not in (None, torch.int8, self.dtype):
            raise ValueError(f"cache_dtype is {self.cache_dtype}: choose torch.int8, or the model's own {self.dtype}")
        return new_cache(self.config, batch, capacity, self.cache_dtype or self.dtype, self.device)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens, positions (B, T) int64; position -1 is padding -> x (B, T, C)."""
        x = self.token_embedding(tokens, self.dtype)
        return x if self.position_embedding is None else x + self.position_embedding(positions.clamp(min=0))

    def _rotary_at(self, positions):
        if self.config.arch == "gpt2":
            return None, None
        at, (n_rows, n) = positions.clamp(min=0), positions.shape
        if n_rows == 1 and n > 0 and at.device.type == "cpu":
            first = int(at[0, 0])
            if int(positions[0, -1]) == first + n - 1:  # they follow one another: no need to gather
                at = slice(first, first + n)
        # rounded to the activations' dtype here too: set_weight leaves the tables in float32
        shape = (n_rows, n, 1, self.cos.shape[1])  # (B, T, 1, D)
        return self.cos[at].to(self.dtype).view(shape), self.sin[at].to(self.dtype).view(shape)

    def run_layers(self, x, cache: KVCache | None, positions, first: int, last: int) -> torch.Tensor:
        """Layers first .. last-1 on x (B, T, C) at positions (B, T): K/V are written there, everything below is read.

        Positions of a row rise by one; -1 is padding, for which nothing is written. cache None: each row attends causally
        within itself, from position 0 (training and scoring).
        """
        at = self._pass(positions, cache)
        for layer in range(first, last):
            x = self.blocks[layer](x, layer, at)
        return x

    def _pass(self, positions, cache: KVCache | None) -> Pass:
        cos, sin = self._rotary_at(positions)
        few = positions.shape[1] <= kernels.MAX_ROWS
        plans = None
        if cache is not None and not (few and kernels.on_triton(self.impl, cache.k)):
            if few and cache.starts is not None and self.dtype == torch.bfloat16:
                plans = kernels.plan_runs(positions, cache.starts, cache.capacity)
            else:
                plans = kernels.plan_rows(positions, cache.block_table, cache.page_size)
        return Pass(positions, cache, cos, sin, plans, self.impl)

    def fill_kv(self, x, cache: KVCache, positions, first: int) -> None:
        """Write keys and values of layers first .. L-1 as if x (B, T, C) were the input of each; nothing else runs."""
        at = self._pass(positions, cache)
        for layer in range(first, self.config.n_layer):
            k, v = self.blocks[layer].keys_values(x, at)
            memory = (*cache.layer(layer), cache.block_table, positions)
            kernels.append_kv(k, v, *memory, cache.scales(layer), at.plans, at.impl)

    def logits(self, x, exit_layer: int | None = None, adapter: str = "exit") -> torch.Tensor:
        """x (..., C) -> (..., V) by the final head, or by the head of an exit; -inf for padding and outside exit_vocab."""
        n_used, norm, vocab = self.config.n_vocab_used, self.final_norm, None
        weight, index = self.output_weight, None
        if exit_layer is not None:
            head, vocab = self._exit(exit_layer, adapter), self.exit_vocab
            x, norm = head.adapt(x, adapter, self.impl), head.norm
            weight, index = self._exit_output
        logits = kernels.linear(x, weight, norm=norm.parameters_of(), index=index, impl=self.impl)
        if vocab is not None:
            known = logits
            logits = known.new_full((*known.shape[:-1], self.config.vocab_size), -torch.inf)
            logits[..., vocab] = known
        elif n_used < self.config.vocab_size:
            logits[..., n_used:] = -torch.inf
        return logits

    def exit_confidence(self, x, exit_layer: int, kind: str = "max_prob"):
        """What the exit's head says of x (N, C): the best token, its log-probability and a confidence, each (N,)."""
        head = self._exit(exit_layer, "exit")
        x, norm = head.adapt(x, "exit", self.impl), head.norm.parameters_of()
        weight, index = self._exit_output
        n_used = self.config.n_vocab_used if self.exit_vocab is None else None
        tokens, log_probs, confidences = kernels.exit_confidence(x, weight, norm, index, n_used, kind, self.impl)
        if index is None and self.exit_vocab is not None:
            tokens = self.exit_vocab[tokens]
        return tokens, log_probs, self.scaled(confidences, exit_layer, kind)

    def scaled(self, confidence, exit_layer: int, kind: str):
        """A raw confidence of an exit as the chance of agreeing with the full model, where the exit was calibrated."""
        scales = (self.config.exit_platt or {}).get(kind)
        if scales is None:
            return confidence
        return kernels.platt(confidence, *scales[self.config.exit_layers.index(exit_layer)])

    @property
    def output_weight(self) -> kernels.Weight:
        if self.packed_output is not None:
            return self.packed_output
        return self.token_embedding.weight if self.output is None else self.output.weight

    @property
    def _exit_output(self) -> tuple[kernels.Weight, torch.Tensor | None]:
        """The output matrix of exits, and which of its rows: None for all."""
        if self.packed_exit_output is not None:
            return self.packed_exit_output, None
        return self.output_weight, self.exit_vocab

    def _exit(self, exit_layer: int, adapter: str) -> ExitHead:
        if exit_layer not in self.config.exit_layers:
            raise ValueError(f"exit_layer is {exit_layer}: this model has exits {self.config.exit_layers}")
        if adapter not in ("exit", "draft"):
            raise ValueError(f"adapter is {adapter!r}: choose exit or draft")
        return self.exits[str(exit_layer)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (B, T) -> logits (B, T, V), no cache: training and scoring."""
        n_tokens = tokens.shape[1]
        if n_tokens > self.config.block_size:
            raise ValueError(f"{n_tokens} tokens are more than block_size {self.config.block_size}")
        positions = torch.arange(n_tokens, device=tokens.device).expand_as(tokens)
        x = self.run_layers(self.embed(tokens, positions), None, positions, 0, self.config.n_layer)
        return self.logits(x)


def rotary_tables(config: GPTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin (block_size, D) for the half-split rotation, sin signed (-, +): see kernels.rotate. Computed in float64."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    frequency = config.rope_theta**-half
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        frequency = frequency / scaling["factor"]
    elif kind == "llama3":  # long waves are stretched, short ones kept, a ramp between (Llama 3.1)
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling["factor"]
    elif kind != "default":
        raise ValueError(f"rope_scaling is {scaling!r}: rope_type must be default, linear or llama3")
    angle = torch.arange(config.block_size, dtype=torch.float64, device="cpu")[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).float(), torch.cat((-sin, sin), -1).float()
