"""Bytes that the kernels move, counted in Triton's interpreter: what no launch can do without, beside what it does.

    python bench.py kernels       # this, then tests/aot.py; on a GPU the timings of tests/gpu_check.py
    python tests/counts.py        # half a minute

loaded / size: how often a launch reads the tensor that its time depends on. 1.00 is the least.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from interpreter import patch_language_once, repair_bfloat16, watch

import kernels
from model import GPTConfig, KVCache, rotary_tables

CONFIG = GPTConfig("llama", 4096, 512, 1, 4, 256, n_kv_head=2, n_hidden=512)
ROWS = (1, 5, 16)  # a plain pass, a verification of four drafts, a full tile


def products():
    """(what, tensor counted, its bytes, memory) of the products of a layer."""
    noise = torch.Generator().manual_seed(0)
    weight, norm = torch.randn(512, 256, generator=noise), kernels.Norm(torch.ones(256), None, 1e-5)
    for kind in ("float32", "int8", "int4"):
        held = weight if kind == "float32" else kernels.quantize(weight, int(kind[3:]), 128)
        data = held if kind == "float32" else held.data
        for n in ROWS:
            x = torch.randn(n, 256, generator=noise)
            with watch(matrix=data) as memory:
                kernels.linear(x, held, norm=norm, impl="triton")
            yield f"product {kind}, RMSNorm, {n} rows", "matrix", data.numel() * data.element_size(), memory


def attention():
    cos, sin = (table[:, None] for table in rotary_tables(CONFIG))  # (S, 1, D)
    for n in ROWS:
        cache = KVCache(CONFIG, 1, 320)
        positions = torch.arange(300 - n, 300)[None]
        qkv = torch.randn(1, n, 8, 64)
        at = (cos[positions], sin[positions])
        k, v = (x.normal_() for x in cache.layer(0))
        with watch(keys=k) as memory:
            kernels.decode_attention(qkv, k, v, cache.block_table, positions, 4, *at, None, None, "triton")
        yield f"attention, 300 positions, {n} rows", "keys", 300 * 2 * 64 * 4, memory


def main() -> int:
    repair_bfloat16()
    patch_language_once()
    print(f"{'launch':36}{'counted':>8}{'size':>10}{'loaded / size':>15}{'stored':>9}  kernels")
    for cases in (products, attention):
        for what, name, size, memory in cases():
            assert not memory.violations and not memory.conflicts, what
            stored = sum(memory.stored.values())
            launched = ", ".join(launch.kernel.strip("_") for launch in memory.launches)
            print(f"{what:36}{name:>8}{size:>10,}{memory.loaded[name] / size:>15.2f}{stored:>9,}  {launched}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
