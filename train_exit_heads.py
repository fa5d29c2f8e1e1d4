"""Train the bundled models, and exit heads, on text that every machine has: the standard library of its Python.

    python train_exit_heads.py --stage base                        # a target that learns its exits with it
    python train_exit_heads.py --stage draft --model runs/base     # its drafter, a tenth of its cost
    python train_exit_heads.py --stage exits --model runs/base     # exit heads alone, all else frozen
    python train_exit_heads.py --stage calibrate --model runs/base --risk 0.01         # thresholds with a guarantee
    python train_exit_heads.py --stage report --model runs/base --draft runs/draft    # figures on held-out text

A run shows loss, tokens/s and time left, logs to OUT/log.jsonl, and leaves in OUT the files of a checkpoint, in
bfloat16, which load_checkpoint(OUT) reads. Ctrl-C writes a checkpoint and ends with status 130; the same command with
--resume goes on as if nothing had happened. `torchrun --nproc-per-node=N train_exit_heads.py ...` uses N processes.
"""

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pickle
import platform
import random
import signal
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import distill
from bench import environment
from certificate import LOSSES
from checkpoint import (
    BUNDLED,
    EXIT_HEADS,
    Tokenizer,
    bundled_heads,
    check_pair,
    find_checkpoint,
    find_heads,
    flag,
    load_checkpoint,
    load_heads,
    parse_flags,
    pick_device,
    save_certificate,
    save_checkpoint,
    save_draft_head,
    save_heads,
    write_atomically,
)
from decode import SamplingParams, generate, heed
from early_exit import calibrate_threshold
from kernels import CONFIDENCES
from model import GPT, GPTConfig
from speculative import ExitDrafter, ModelDrafter, speculative_generate

END_OF_TEXT = "<|endoftext|>"
# Without look-arounds the pattern runs in linear time in both tiktoken and tokenizers, whatever the input. A newline
# takes the indentation after it along, a word takes one space before it, and the last branch lets nothing fall out.
SPLIT_PATTERN = r" ?[\p{L}_]+|\p{N}{1,2}| ?[^\s\p{L}\p{N}_]+|(?:\r?\n)+[ \t]*|[ \t]+|\s"
# Tests, near-copies of one table (encodings, pydoc_data) and applications would flatter the held-out figure.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "__pycache__"}


# ---------------------------------------------------------------------------------------------------------- text


def read_corpus(path: str = "") -> tuple[list[tuple[str, bytes]], str]:
    """Sorted (name, content) of the training text and the sha256 of all of it. No path: the standard library."""
    root = Path(path or sysconfig.get_path("stdlib"))
    if root.is_file():
        found = [root]
        root = root.parent
    elif path:
        found = [p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".")]
    else:
        found = [p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(root).parts[:-1])]
    documents = sorted((p.relative_to(root).as_posix(), p.read_bytes()) for p in found)
    if not sum(len(content) for _, content in documents):
        raise ValueError(f"--data: no text in {root}")
    digest = hashlib.sha256()
    for name, content in documents:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return [document for document in documents if document[1]], digest.hexdigest()


def split_documents(documents):
    """Training and held-out documents. A file's name alone decides, so a new Python version keeps the split."""
    held_out = [hashlib.sha256(name.encode()).digest()[0] < 13 for name, _ in documents]  # 13 of 256: about 5%
    if all(held_out) or not any(held_out):  # few files: the last tenth of each is held out instead
        cuts = [len(content) * 9 // 10 for _, content in documents]
        pairs = list(zip(documents, cuts))
        return [(n, c[:cut]) for (n, c), cut in pairs], [(n, c[cut:]) for (n, c), cut in pairs]
    return (
        [d for d, out in zip(documents, held_out) if not out],
        [d for d, out in zip(documents, held_out) if out],
    )


def train_tokenizer(documents, vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the documents: ids 0..255 are the bytes, then merges, the highest id ends a document."""
    try:  # only whoever trains a tokenizer needs the library
        import tokenizers
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    except ImportError:
        raise ValueError("--stage base trains a tokenizer and needs a library for it: pip install tokenizers") from None

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = Split(tokenizers.Regex(SPLIT_PATTERN), "isolated")
    bpe.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator((content.decode("utf-8", errors="replace") for _, content in documents), trainer)
    # The library spells bytes as printable characters: those that are printable stand for themselves, the others
    # follow from U+0100 on, in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}
    vocab = bpe.get_vocab()
    pieces = [bytes(spelled[c] for c in word) for word in sorted(vocab, key=vocab.get)]
    pieces = [bytes([b]) for b in range(256)] + [piece for piece in pieces if len(piece) > 1]
    end = len(pieces)
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    return Tokenizer(ranks, SPLIT_PATTERN, {END_OF_TEXT: end}, bos_id=end, eos_ids=(end,))


def token_stream(documents, tokenizer) -> torch.Tensor:
    """All documents as one int32 tensor (N,), each behind an end-of-text token, which so also starts a text."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [i for _, content in documents for i in start + tokenizer.encode(content.decode("utf-8", errors="replace"))]
    return torch.tensor(ids, dtype=torch.int32)


@functools.lru_cache(maxsize=2)
def epoch_order(n_windows: int, length: int, epoch: int, seed: int) -> tuple[int, list[int]]:
    """An epoch cuts the stream into windows from its own offset, and reads them in its own order."""
    rng = random.Random(f"{seed} {epoch}")
    return rng.randrange(length), rng.sample(range(n_windows), n_windows)


def sequence(stream: torch.Tensor, index: int, length: int, seed: int) -> torch.Tensor:
    """The index-th training sequence, (length + 1,) tokens of the stream.

    A function of its arguments alone, and so exact after a resume and for any number of processes.
    """
    n_windows = (len(stream) - 1) // length - 1  # one fewer than fit: room for the offset
    if n_windows < 1:
        raise ValueError(f"--data: {len(stream)} tokens are too few for sequences of {length}")
    epoch, place = divmod(index, n_windows)
    offset, order = epoch_order(n_windows, length, epoch, seed)
    start = offset + order[place] * length
    return stream[start : start + length + 1].long()


# ------------------------------------------------------------------------------------------------------- losses


class Losses(torch.nn.Module):
    """compute(*models, *batch) -> one number per loss, as a module with one forward: DistributedDataParallel wants it."""

    def __init__(self, compute, *models: GPT):
        super().__init__()
        self.compute, self.models = compute, torch.nn.ModuleList(models)

    def forward(self, *batch):
        return torch.stack(self.compute(*self.models, *batch))


def base_losses(model: GPT, tokens, kept):
    """tokens (B, T+1), layers that run -> cross-entropy of the final head, then of each exit; then KL of each exit to
    the final head, which does not feel that pull."""
    *states, last = hidden_states(model, tokens[:, :-1], kept)
    final, labels = log_law(model, last), tokens[:, 1:]
    guesses = [log_law(model, x, layer) for x, layer in zip(states, model.config.exit_layers)]
    losses = [cross_entropy(guess, labels) for guess in (final, *guesses)]
    return losses + [divergence(final.detach(), guess) for guess in guesses]


def draft_losses(model: GPT, tokens, best, log_probs):
    """tokens (B, T); the target's best tokens and their log-probabilities (B, T, K) -> KL to the target, with all other
    tokens as one; cross-entropy to its argmax; share of equal argmax."""
    law = log_law(model, hidden_states(model, tokens)[-1])
    guess = law.gather(-1, best)
    others, others_guessed = ((1 - x.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log() for x in (log_probs, guess))
    kl = divergence(torch.cat((log_probs, others), -1), torch.cat((guess, others_guessed), -1))
    return [kl, -guess[..., 0].mean(), (law.argmax(-1) == best[..., 0]).float().mean()]


def hidden_states(model: GPT, tokens, kept=None) -> list[torch.Tensor]:
    """x (B, T, C) at each exit and at the end; kept: the layers that run, all of them when None."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    x, states = model.embed(tokens, positions), []
    for layer in range(model.config.n_layer):
        if kept is None or layer in kept:
            x = model.run_layers(x, None, positions, layer, layer + 1)
        if layer + 1 in (*model.config.exit_layers, model.config.n_layer):
            states.append(x)
    return states


def log_law(model: GPT, x, exit_layer=None, adapter="exit"):
    """Log-probabilities of the tokens that are no padding."""
    return model.logits(x, exit_layer, adapter)[..., : model.config.n_vocab_used].float().log_softmax(-1)


def cross_entropy(log_probs, labels):
    return -log_probs.gather(-1, labels[..., None]).mean()


def divergence(teacher, guess):
    """KL(teacher || guess), both log-probabilities (..., V)."""
    return (teacher.exp() * (teacher - guess)).sum(-1).mean()


def products(config, device):
    """Matrix products in --precision, all else in float32."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=config.precision == "bfloat16")


@torch.no_grad()
def evaluate(config, model: GPT, tokenizer: Tokenizer, stream: torch.Tensor, max_windows=None) -> dict:
    """On held-out text: bits per byte of the final head; cross-entropy (nats a token), agreement of the argmax with the
    final head's, and KL to it, of each exit.

    Windows overlap by half and only the second half counts (all of the first window), so that a token is predicted from
    at least T/2 tokens wherever the text has them. max_windows spreads so many windows over the text.
    """
    length, exits = min(model.config.block_size, len(stream) - 1), model.config.exit_layers
    starts = range(0, len(stream) - length, max(length // 2, 1))
    starts = starts[:: -(-len(starts) // (max_windows or len(starts)))]
    ends = set(tokenizer.special.values())  # ends of documents are predicted, but are no bytes of the text
    n_bytes = torch.tensor([0 if i in ends else len(tokenizer.decode_bytes([i])) for i in range(tokenizer.n_vocab)])
    sums, total_bytes, n_tokens = torch.zeros(len(exits) + 1, 3, dtype=torch.float64), 0, 0
    for start in starts:
        window, skipped = stream[start : start + length + 1].long().to(model.device), length // 2 if start else 0
        labels = window[1 + skipped :]
        with products(config, model.device):
            states = [x[0, skipped:] for x in hidden_states(model, window[None, :-1])]
            guesses = [log_law(model, x, layer) for x, layer in zip(states, (*exits, None))]  # (T, V) each
        for row, guess in enumerate(guesses):
            agreement = (guess.argmax(-1) == guesses[-1].argmax(-1)).float().mean()
            figures = torch.stack([cross_entropy(guess, labels), agreement, divergence(guesses[-1], guess)])
            sums[row] += figures.double().cpu() * len(labels)
        n_tokens += len(labels)
        total_bytes += int(n_bytes[labels.cpu()].sum())
    means, names = (sums / n_tokens).tolist(), ("cross_entropy", "agreement", "kl")
    return {
        "bits_per_byte": sums[-1, 0].item() / math.log(2) / max(total_bytes, 1),
        "cross_entropy": means[-1][0],
        "exits": {str(layer): dict(zip(names, row)) for layer, row in zip(exits, means)},
        "tokens": n_tokens,
        "bytes": total_bytes,
    }


# --------------------------------------------------------------------------------------------------------- flags

STAGES = {  # what differs between stages: shapes, and a schedule of about 75, 40 and 15 minutes on two CPU cores
    "base": {"n_layer": 16, "n_embd": 256, "n_head": 4, "n_kv_head": 2, "n_hidden": 768, "block_size": 512}
    | {"steps": 2000, "batch_size": 8, "lr": 4e-3, "exit_layers": (4, 8, 12)},
    "draft": {"n_layer": 2, "n_embd": 192, "n_head": 3, "n_kv_head": 1, "n_hidden": 512, "block_size": 512}
    | {"steps": 2500, "batch_size": 16, "lr": 4e-3},
    "exits": {"block_size": 256, "steps": 400, "batch_size": 8, "lr": 4e-3},
    "drafter": {"block_size": 256, "steps": 1100, "batch_size": 8, "lr": 8e-3},
}


def by_stage(name: str, text: str, parse=int):
    """A flag whose default depends on the stage."""
    defaults = "; ".join(f"{stage} {values[name]}" for stage, values in STAGES.items() if name in values)
    return flag(None, f"{text} ({defaults})", parse=parse)


def layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


PLACES = ("out", "data", "draft", "resume", "recording")  # flags that mean nothing to whoever gets the weights


@dataclasses.dataclass
class TrainConfig:
    stage: str = flag("base", "what to do; all but base need --model", choices=(*STAGES, "calibrate", "report"))
    out: str = flag(
        None,
        "folder of the run (runs/STAGE); report: the result file (results/models.json); calibrate: beside the exits",
        parse=str,
    )
    resume: bool = flag(False, "go on from the checkpoint in --out as if it had never stopped; same flags, same text")
    data: str = flag("", "a file or folder of text instead of Python's standard library")
    model: str = flag("stdlib", "stages draft, exits, report: the frozen target")
    draft: str = flag("stdlib-draft", "stage report: the drafter")
    vocab_size: int = flag(2048, "stage base: more tokens make texts shorter and the heads dearer")
    n_layer: int = by_stage("n_layer", "more layers: better and slower, and more to skip")
    n_embd: int = by_stage("n_embd", "wider is better; size and cost grow with the square")
    n_head: int = by_stage("n_head", "query heads: more of them, each narrower")
    n_kv_head: int = by_stage("n_kv_head", "fewer than --n-head: a smaller cache, slightly worse")
    n_hidden: int = by_stage("n_hidden", "width inside the MLP, where most parameters are")
    block_size: int = by_stage("block_size", "longest text of the model; attention costs its square")
    exit_layers: tuple[int, ...] = by_stage("exit_layers", "depths that get a head; each costs a step 5%", layers)
    adapters: bool = flag(
        True, "stage exits: give each exit a translator to draft and one to exit; a product more per use"
    )
    recording: str = flag(
        "", "stages exits, drafter: folder of the target's texts and states, made when absent (OUT-recording)"
    )
    tokens: int = flag(
        600_000, "stages exits, drafter: positions to record; a drafter wants as many as you can wait for"
    )
    cache_gb: float = flag(
        8.0, "stages exits, drafter: the most that recorded states may take on disk; fewer tokens fit less"
    )
    head_vocab: int = flag(
        8192, "stages exits, drafter: most frequent tokens that heads know; more miss less, cost more"
    )
    unroll: int = flag(3, "stage drafter: drafts in a row that it learns to make from its own outputs; a step's cost")
    samples: int = flag(2816, "stage draft: texts of the target's own, and as many of the corpus; most of the start")
    steps: int = by_stage("steps", "optimiser steps; the schedule stretches with them")
    batch_size: int = by_stage("batch_size", "sequences a step and process: fewer are noisier, but give more steps")
    lr: float = by_stage("lr", "peak rate; Muon's updates have the size of AdamW's, so it holds for both", float)
    weight_decay: float = flag(0.1, "pull of the matrices towards 0; more helps when the text repeats")
    warmup: int = flag(60, "steps with a rising rate; too few risk a spike")
    decay: float = flag(0.35, "last share of the steps, where the rate falls to 0 and the loss drops most")
    layer_dropout: float = flag(0.1, "stage base: chance to skip the last layer in a step; helps exits, costs the end")
    exit_weight: float = flag(0.3, "stage base: weight of each exit beside the final head's 1")
    distill: float = flag(0.5, "share of an exit's or drafter's loss that is KL to the target; the rest is hard labels")
    eval_every: int = flag(200, "steps between looks at held-out text, a few seconds each")
    save_every: float = flag(180.0, "seconds between checkpoints: what a crash can cost")
    precision: str = flag(
        "bfloat16",
        "of matrix products: float32 is slower, and equal for any number of processes to 1e-4",
        choices=("bfloat16", "float32"),
    )
    device: str = flag("auto", "cpu, cuda, or auto")
    seed: int = flag(0, "of weights, order of the text, layer dropout and samples")
    exits: str | None = flag(
        None, "stage calibrate: folder of exit heads (those bundled for the model, else its own)", parse=str
    )
    risk: float = flag(0.01, "stage calibrate: the most that exits may cost on average; less means fewer exits")
    delta: float = flag(0.05, "stage calibrate: chance that the promise is wrong; less takes more prompts")
    clip: float = flag(0.2, "stage calibrate: a text counts at most so much; less takes fewer prompts, and hides more")
    loss: str = flag("disagreement", "stage calibrate: share of other tokens, or nats a token lost", choices=LOSSES)
    prompts: int = flag(
        450, "stage calibrate: a third proposes the thresholds, the rest tests them; time grows with it"
    )
    max_new_tokens: int = flag(128, "stage calibrate: longest text that the promise holds for")
    temperature: float = flag(
        0.0, "stage calibrate: the promise holds for one way of sampling; this, and the next four"
    )
    top_k: int = flag(0, "stage calibrate: 0 is off")
    top_p: float = flag(1.0, "stage calibrate: 1 is off")
    min_p: float = flag(0.0, "stage calibrate: 0 is off")
    repetition_penalty: float = flag(1.0, "stage calibrate: 1 is off")
    confidence: str = flag("max_prob", "stage calibrate: judge of an exit; max_prob costs least", choices=CONFIDENCES)
    kv_fill: str = flag(
        "recompute", "stage calibrate: exact keys later, or approximate ones now", choices=("recompute", "propagate")
    )
    dtype: str = flag("auto", "stage calibrate: what will be served; auto: bfloat16 on a GPU, else float32")
    quantize: str | None = flag(None, "stage calibrate: what will be served", choices=("int8", "int4"), parse=str)
    honest: bool = flag(False, "stage calibrate: test every setting by decoding; up to 20 times as long, finds more")

    def __post_init__(self):
        if self.stage != "calibrate":
            self.out = self.out or ("results/models.json" if self.stage == "report" else f"runs/{self.stage}")
        for name, value in STAGES.get(self.stage, {}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name in ("steps", "batch_size", "block_size", "eval_every", "samples", "tokens", "head_vocab", "unroll"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")
        if not 256 < self.vocab_size:
            raise ValueError(f"--vocab-size is {self.vocab_size}: it must be above 256, one for each byte and one more")
        for name in ("decay", "layer_dropout", "distill"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be from 0 to 1")


# --------------------------------------------------------------------------------------------------------- loop


@dataclasses.dataclass
class Task:
    """What a stage trains. Everything random in `batch` is a function of (seed, step)."""

    model: GPT
    losses: torch.nn.Module  # forward(*batch(step)) -> one number per entry of weights
    weights: dict[str, float]  # name of a loss -> its weight in the sum; 0 is only watched
    batch: object  # step -> arguments, the tokens first
    look: object  # () -> figures on held-out text
    write: object  # (folder, meta) -> None: what everybody else reads
    text_hash: str
    trained: torch.nn.Module  # what of the model learns: the state of a run


def processes() -> tuple[int, int]:
    """(this process, how many there are), as torchrun tells."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def rate(config: TrainConfig, step: int) -> float:
    """Share of the peak rate: up, level, and down to 0. A function of step / steps behind the warm-up, so that a run can
    be stopped on its plateau and resumed with other --steps."""
    return min(1.0, (step + 1) / max(config.warmup, 1), (config.steps - step) / max(config.decay * config.steps, 1))


def kept_layers(config: TrainConfig, step: int) -> set[int]:
    """The layers that run in a step: the deeper, the likelier to be left out, from 0 up to layer_dropout, exponentially
    as in LayerSkip, so that early layers learn to be enough. The same on every process."""
    rng, last = random.Random(f"{config.seed} {step} layers"), max(config.n_layer - 1, 1)
    return {i for i in range(config.n_layer) if rng.random() >= config.layer_dropout * (2 ** (i / last) - 1)}


def make_optimizers(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, whose updates it makes orthogonal; AdamW for embeddings, norms and biases."""
    trained = [(p.ndim == 2 and "embedding" not in name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices, others = ([p for is_matrix, p in trained if is_matrix == which] for which in (True, False))
    optimizers = [torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        muon = functools.partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")  # updates of AdamW's size
        optimizers.append(muon(matrices, lr=config.lr, weight_decay=config.weight_decay))
    return optimizers


def train(config: TrainConfig, task: Task) -> int:
    """The loop of every stage; returns the exit status. The weights, the optimisers' states and the number of steps
    done are the whole state of a run, because nothing random has a state of its own.

    1. losses of this step's batch; their weighted sum is minimised
    2. the optimisers' step, at the rate of this step
    3. a line in the log; now and then a look at held-out text, and a checkpoint
    """
    rank, n_processes = processes()
    model, folder, names = task.model, Path(config.out), list(task.weights)
    weights = torch.tensor(list(task.weights.values()), device=model.device)
    losses, optimizers = task.losses, make_optimizers(model, config)
    folder.mkdir(parents=True, exist_ok=True)
    step, seconds = load_state(config, task, optimizers) if config.resume else (0, 0.0)
    log = folder / "log.jsonl"
    if rank == 0:  # lines beyond the checkpoint will be written again
        lines = log.read_text().splitlines(keepends=True) if config.resume and log.exists() else []
        write_atomically(log, lambda p: p.write_text("".join(x for x in lines if json.loads(x)["step"] < step)))
    if n_processes > 1:  # a layer that is left out leaves parameters without a gradient
        unused = config.stage == "base" and config.layer_dropout > 0
        losses = torch.nn.parallel.DistributedDataParallel(losses, find_unused_parameters=unused)
    heard = []

    def hear(number, _):  # acted on between steps; a second signal is not waited for
        sys.exit(128 + number) if heard else heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    saved_at, started = time.time(), time.time() - seconds
    bar = tqdm(total=config.steps, initial=step, desc=config.stage, disable=rank > 0, dynamic_ncols=True, mininterval=1)
    with bar, log.open("a") as file:
        while step < config.steps and not heard:
            began = time.time()
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = config.lr * rate(config, step)
            arguments = task.batch(step)
            with products(config, model.device):
                parts = losses(*arguments)
            (parts * weights).sum().backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            parts = torch.cat((parts.detach(), weights.new_tensor([max(heard, default=0)])))
            if n_processes > 1:  # a signal that one process heard stops all of them behind the same step
                dist.all_reduce(parts)
                parts[:-1] /= n_processes
                heard = heard or [signal.SIGINT] * bool(parts[-1])
            if not parts.isfinite().all():
                raise ValueError(f"the loss is not finite at step {step}: lower --lr, or --resume the last checkpoint")
            seconds = time.time() - started
            speed = arguments[0].numel() * n_processes / (time.time() - began)
            record = {"step": step, **dict(zip(names, parts.tolist()))}
            record |= {"rate": rate(config, step), "seconds": seconds, "tokens_per_second": speed}
            step += 1
            if rank == 0:
                if step % config.eval_every == 0 or step == config.steps:
                    record["held_out"] = task.look()
                file.write(json.dumps(record) + "\n")
                file.flush()
            bar.set_postfix_str(f"{names[0]} {record[names[0]]:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            if rank == 0 and time.time() - saved_at > config.save_every:
                save_state(config, task, optimizers, step, seconds)
                saved_at = time.time()
    for number, handler in before.items():
        signal.signal(number, handler)
    if rank == 0:
        save_state(config, task, optimizers, step, seconds)
        draw_curves(log, names)
        print(f"{'stopped' if heard else 'done'} after {step} steps: {folder}", file=sys.stderr)
    if n_processes > 1:  # a process that leaves early would tear the others' connections
        dist.barrier()
    return 128 + heard[0] if heard else 0


def save_state(config, task, optimizers, step, seconds) -> None:
    """The run's state in float32 for --resume, and the model as a checkpoint for everybody."""
    state = {"step": step, "seconds": seconds, "corpus": task.text_hash, "model": task.trained.state_dict()}
    state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
    write_atomically(Path(config.out) / "train.pt", lambda p: torch.save(state, p))
    others = [
        field.name for field in dataclasses.fields(config) if field.metadata["help"].startswith("stage calibrate")
    ]
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name not in (*PLACES, *others)}
    own = "the target's own texts" if config.stage in ("exits", "drafter") else ""
    text = Path(config.data).name or own or f"standard library of Python {platform.python_version()}"
    origin = {"text": text, "text_sha256": task.text_hash, "steps_done": step, "seconds": round(seconds)}
    meta = {"flags": flags, "torch": torch.__version__, **origin}
    task.write(config.out, meta)


def write_model(model: GPT, tokenizer: Tokenizer, folder, meta) -> None:
    save_checkpoint(folder, copy.deepcopy(model).bfloat16(), tokenizer, meta)


def load_state(config, task, optimizers) -> tuple[int, float]:
    """Put the run's state into model and optimisers; returns the steps done and the seconds spent."""
    file = Path(config.out) / "train.pt"
    if not file.exists():
        raise ValueError(f"--resume: there is no checkpoint {file}")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError):
        raise ValueError(f"--resume: {file} is truncated, or no checkpoint of a run") from None
    if state["corpus"] != task.text_hash:
        raise ValueError(f"--resume: {file} was trained on another text")
    if {n: t.shape for n, t in state["model"].items()} != {n: t.shape for n, t in task.trained.state_dict().items()}:
        raise ValueError(f"--resume: {file} holds a model of another shape than the flags say")
    task.trained.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]


def draw_curves(log: Path, names: list[str]) -> None:
    """curves.png beside the log, where matplotlib is installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    records = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(9, 5))
    width = min(len(records), 50)
    for name in names if records else ():
        smooth = torch.tensor([record[name] for record in records]).unfold(0, width, 1).mean(-1)
        axes.plot([record["step"] for record in records][width - 1 :], smooth, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel=f"mean of {width} steps (losses in nats a token)", yscale="log")
    axes.legend()
    figure.savefig(log.with_name("curves.png"), dpi=120)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------------- stages


def base_task(config: TrainConfig) -> Task:
    documents, text_hash = read_corpus(config.data)
    training, held_out = split_documents(documents)
    tokenizer = train_tokenizer(training, config.vocab_size)
    stream, held_out = token_stream(training, tokenizer), token_stream(held_out, tokenizer)
    sequence(stream, 0, config.block_size, config.seed)  # a text that is too short is said now
    model = new_model(config, tokenizer, exit_layers=config.exit_layers)

    def batch(step):
        return corpus_batch(config, stream, step, config.block_size + 1).to(model.device), kept_layers(config, step)

    weights = {"loss": 1.0}
    weights |= {f"loss_{e}": config.exit_weight * (1 - config.distill) for e in config.exit_layers}
    weights |= {f"kl_{e}": config.exit_weight * config.distill for e in config.exit_layers}

    def look():
        return evaluate(config, model, tokenizer, held_out, max_windows=32)

    write = functools.partial(write_model, model, tokenizer)
    return Task(model, Losses(base_losses, model), weights, batch, look, write, text_hash, model)


def new_model(config: TrainConfig, tokenizer: Tokenizer, **more) -> GPT:
    torch.manual_seed(config.seed)
    shape = {name: getattr(config, name) for name in ("n_layer", "n_embd", "n_head", "n_kv_head", "n_hidden")}
    shape |= {"vocab_size": tokenizer.n_vocab, "block_size": config.block_size, **more}
    return GPT(GPTConfig(arch="llama", **shape)).to(pick_device(config.device))


def corpus_batch(config, stream, step, length) -> torch.Tensor:
    """This process's (B, length) sequences of a step: N processes read what one would read with N times the batch."""
    rank, n_processes = processes()
    first = (step * n_processes + rank) * config.batch_size
    return torch.stack([sequence(stream, first + i, length - 1, config.seed) for i in range(config.batch_size)])


def frozen_target(config: TrainConfig):
    """The target with its tokenizer, and training and held-out text in its tokens, with the text's hash."""
    documents, text_hash = read_corpus(config.data)
    training, held_out = split_documents(documents)
    target, tokenizer = load_checkpoint(config.model, device=config.device, dtype="float32")
    if tokenizer is None:
        raise ValueError(f"--model {config.model}: it has no tokenizer that could read the text")
    target.requires_grad_(False)
    return target, tokenizer, token_stream(training, tokenizer), token_stream(held_out, tokenizer), text_hash


def own_texts(config: TrainConfig, target: GPT, stream: torch.Tensor, length: int) -> torch.Tensor:
    """(samples, length) tokens of the target's own: 16 to length/2 tokens of the text, which it then continues, three
    times in four greedily and else at temperature 1. Drafts and exits are judged on such text, not on the corpus."""
    texts, rng, n_rows = [], random.Random(f"{config.seed} prompts"), min(64, config.samples)
    for group in tqdm(range(-(-config.samples // n_rows)), desc="the target writes", dynamic_ncols=True):
        shortest = min(16, length // 2)
        n_prompt = rng.randrange(shortest, max(length // 2, shortest + 1))
        starts = [rng.randrange(len(stream) - n_prompt) for _ in range(n_rows)]
        prompts = [stream[start : start + n_prompt].tolist() for start in starts]
        sampling = SamplingParams(length - n_prompt, float(group % 4 == 3), seed=config.seed + group * n_rows)
        written = heed(generate(target, prompts, sampling))
        texts += [prompt + row.tokens for prompt, row in zip(prompts, written)]
    return torch.tensor(texts, dtype=torch.int32)


@torch.no_grad()
def answers(config: TrainConfig, target: GPT, rows: torch.Tensor, n_best: int = 8) -> list[torch.Tensor]:
    """rows (N, T), the target's best tokens and their log-probabilities (N, T, K): the target is ten times the drafter,
    and reads each text once instead of at every step."""
    best, log_probs = [], []
    for part in tqdm(rows.split(16), desc="the target reads", dynamic_ncols=True):
        with products(config, target.device):
            top = log_law(target, hidden_states(target, part.long().to(target.device))[-1]).topk(n_best)
        best.append(top.indices.int().cpu())
        log_probs.append(top.values.half().cpu())
    return [rows, torch.cat(best), torch.cat(log_probs)]


def lessons(config: TrainConfig, target: GPT, stream: torch.Tensor, prepare=lambda rows: [rows]):
    """step -> tokens (B, T), and what prepare(rows (N, T)) adds to them. Two steps read the target's own texts, the next
    one the corpus at full length, so that what is learnt holds for any text and for all positions.

    The texts are kept in OUT/lessons.pt: dear to make, and read there by other processes and by --resume.
    """
    length = min(target.config.block_size, config.block_size or target.config.block_size)
    file, (rank, n_processes) = Path(config.out) / "lessons.pt", processes()
    if len(stream) < length:
        raise ValueError(f"--data: {len(stream)} tokens are too few for sequences of {length}")
    if rank == 0 and not (config.resume and file.exists()):
        corpus = stream[: len(stream) // length * length].view(-1, length)
        corpus = corpus[:: -(-len(corpus) // config.samples)]
        made = [prepare(own_texts(config, target, stream, length // 2)), prepare(corpus)]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda p: torch.save(made, p))
    if n_processes > 1:
        dist.barrier()
    own, corpus = torch.load(file, weights_only=True)

    def batch(step):
        lesson, turn = (corpus, step // 3) if step % 3 == 2 else (own, step - step // 3)
        first, rows = (turn * n_processes + rank) * config.batch_size, []
        for epoch, place in (divmod(first + i, len(lesson[0])) for i in range(config.batch_size)):
            rows.append(epoch_order(len(lesson[0]), 1, epoch, config.seed)[1][place])
        return unpacked((part[rows] for part in lesson), target.device)

    return batch


def unpacked(parts, device):
    """From the small types that lessons are kept in."""
    return [x.to(device, torch.float32 if x.is_floating_point() else torch.int64) for x in parts]


def draft_task(config: TrainConfig) -> Task:
    target, tokenizer, stream, held_out, text_hash = frozen_target(config)
    model = new_model(config, tokenizer)
    table = target.token_embedding.weight
    if model.config.n_embd <= target.config.n_embd:  # start from the target's idea of the tokens, in fewer directions,
        directions = torch.linalg.svd(table, full_matrices=False).Vh[: model.config.n_embd]
        table = table[: tokenizer.n_vocab] @ directions.T
        model.token_embedding.weight.data.copy_(table * 0.02 / table.std())  # but small: as the output, it would shout
    losses = Losses(draft_losses, model)
    weights = {"kl": config.distill, "cross_entropy": 1 - config.distill, "agreement": 0.0}
    batch = lessons(config, target, stream, functools.partial(answers, config, target))
    length = min(config.block_size, target.config.block_size, len(held_out))
    rows = held_out[: len(held_out) // length * length].view(-1, length)
    unseen = answers(config, target, rows[:: -(-len(rows) // 32)])

    @torch.no_grad()
    def look():
        with products(config, model.device):
            parts = losses(*unpacked(unseen, model.device))
        return dict(zip(weights, parts.tolist()))

    return Task(model, losses, weights, batch, look, functools.partial(write_model, model, tokenizer), text_hash, model)


def recorded(config: TrainConfig) -> tuple[GPT, Tokenizer, distill.Recording, str]:
    """The frozen target, and its recording with states behind the last layer, for exits behind theirs too: made where there is
    none yet, and added to where it is shorter than --tokens."""
    target, tokenizer = load_checkpoint(config.model, device=config.device, dtype="float32")
    if tokenizer is None:
        raise ValueError(f"--model {config.model}: it has no tokenizer that could read a prompt")
    target.requires_grad_(False)
    exits = () if config.stage == "drafter" else config.exit_layers or default_exits(target)
    if config.stage == "exits":
        if not exits:
            raise ValueError(f"--model {config.model}: it has one layer, and nothing to exit from")
        # what a model cannot have is said before the long wait
        dataclasses.replace(target.config, exit_layers=exits, exit_platt=None)
    layers, folder = (*exits, target.config.n_layer), Path(config.recording or f"{config.out}-recording")
    config.block_size = min(config.block_size, target.config.block_size)
    rank, n_processes = processes()
    if rank == 0:
        writer = target if config.precision == "float32" else copy.deepcopy(target).bfloat16().pack()
        if knows_code(config):
            prompts = functools.partial(distill.cut_prompts, token_stream(read_corpus(config.data)[0], tokenizer))
        else:
            prompts = functools.partial(distill.own_prompts, writer, tokenizer)
        budget, stop = config.cache_gb * 1e9, tokenizer.eos_ids
        distill.record(writer, prompts, layers, folder, config.tokens, budget, stop, config.seed)
    if n_processes > 1:
        dist.barrier()
    recording = distill.open_recording(folder, target, layers)
    return target, tokenizer, recording, digest_of(recording.tokens)


def knows_code(config: TrainConfig) -> bool:
    """Whether prompts are cut from a text: the bundled models know code, and no conversation."""
    return bool(config.data) or find_checkpoint(config.model).parent == BUNDLED


def digest_of(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def windows(config: TrainConfig, n_positions: int, step: int) -> list[slice]:
    """This process's windows of the first n_positions of a recording in a step."""
    length, (rank, n_processes) = config.block_size, processes()
    n_windows, found = n_positions // length - 1, []
    if n_windows < 1:
        raise ValueError(f"--tokens: {n_positions} recorded positions are too few for windows of {length}")
    for i in range(config.batch_size):
        epoch, place = divmod((step * n_processes + rank) * config.batch_size + i, n_windows)
        offset, order = epoch_order(n_windows, length, epoch, config.seed)
        found.append(slice(offset + order[place] * length, offset + order[place] * length + length))
    return found


def default_exits(target: GPT) -> tuple[int, ...]:
    """Four depths of the upper half: what can be said earlier is too seldom right to pay for the asking."""
    n = target.config.n_layer
    return tuple(sorted({min(max(round(n * share), 1), n - 1) for share in (0.6, 0.73, 0.87, 0.93)} - {0}))


def exits_task(config: TrainConfig) -> Task:
    target, tokenizer, recording, digest = recorded(config)
    layers, vocab = (
        recording.layers[:-1],
        distill.frequent_tokens(recording.tokens[: recording.held_out()], config.head_vocab, tokenizer),
    )
    target.set_exits(layers, vocab, ("exit", "draft") if config.adapters else ())
    for head in target.exits.values():  # new exits begin as the final head
        head.norm.load_state_dict(target.final_norm.state_dict())
    target.exits.requires_grad_(True)
    n_training = recording.held_out()
    weights = {f"{kind}_{e}": 1.0 for kind in ("kl", "loss") for e in layers}

    def batch(step):
        rows = torch.cat([recording.states[window] for window in windows(config, n_training, step)])
        return (rows.to(target.device, torch.float32),)

    def look():
        return distill.judge(target, recording, tokenizer, n_positions=4096)[1]

    def write(folder, meta):
        if meta["steps_done"] == config.steps:  # it takes a minute
            scales, meta["figures"] = distill.judge(target, recording, tokenizer)
            target.config.exit_platt = {"max_prob": scales}
        save_heads(folder, target, meta)
        target.config.exit_platt = None

    return Task(target, Losses(distill.exit_losses, target), weights, batch, look, write, digest, target.exits)


def drafter_task(config: TrainConfig) -> Task:
    target, tokenizer, recording, digest = recorded(config)
    vocab = distill.frequent_tokens(recording.tokens[: recording.held_out()], config.head_vocab, tokenizer)
    head = distill.new_draft_head(target, vocab, config.seed).to(target.device)
    n_training, n, size = recording.held_out(), config.unroll, config.block_size
    held_out = [slice(first, first + size) for first in range(n_training, len(recording.tokens) - size + 1, size)]
    if not held_out:
        raise ValueError(f"--tokens: {len(recording.tokens) - n_training} positions are held out, fewer than {size}")
    if n >= size:
        raise ValueError(f"--unroll is {n}: it must be below --block-size {size}")
    weights = {f"{kind}_{i}": share * 0.8**i for kind, share in
               (("kl", config.distill), ("loss", 1 - config.distill), ("agreement", 0.0)) for i in range(n)}  # fmt: skip
    losses = Losses(functools.partial(distill.draft_head_losses, n_steps=n), head, target)

    streams = (recording.tokens, recording.texts, recording.places(), recording.written)

    def parts_at(spans):
        parts = [torch.stack([x[w] for w in spans]) for x in streams]
        states = torch.stack([recording.states[w, -1] for w in spans]).float()
        return [x.to(target.device) for x in (*parts, states)]

    def batch(step):
        return parts_at(windows(config, n_training, step))

    @torch.no_grad()
    def look():
        looked_at = held_out[:: -(-len(held_out) // 32)]
        with products(config, target.device):
            figures = [losses(*parts_at(looked_at[i : i + 8])) for i in range(0, len(looked_at), 8)]
        return dict(zip(weights, torch.stack(figures).mean(0).tolist()))

    def write(folder, meta):
        save_draft_head(folder, head, target, meta | {"figures": look()})

    return Task(head, losses, weights, batch, look, write, digest, head)


def calibrate(config: TrainConfig) -> int:
    """Certified thresholds for a model's exits, into exits.json beside them (--out: elsewhere)."""
    model, tokenizer = load_checkpoint(config.model, config.device, config.dtype, config.quantize)
    if tokenizer is None:
        raise ValueError(f"--model {config.model}: it has no tokenizer that could read a prompt")
    heads = config.exits or (not model.config.exit_layers and bundled_heads(model, EXIT_HEADS))
    folder = find_heads(heads) if heads else find_checkpoint(config.model)
    if heads:
        load_heads(model, folder)
    model.pack()
    if knows_code(config):
        documents, text_hash = read_corpus(config.data)
        stream = token_stream(split_documents(documents)[1], tokenizer)
        source = distill.cut_prompts(stream, f"{config.seed} calibration")
        name = Path(config.data).name or f"the library of Python {platform.python_version()}"
        data = f"held out of {name}, sha256 {text_hash}"
    else:
        # others than the heads learned from
        source = distill.own_prompts(model, tokenizer, f"{config.seed} calibration")
        data = f"{distill.PROMPTS.name}, seed {config.seed} calibration"
    longest = model.config.block_size - config.max_new_tokens
    if longest < 1:
        raise ValueError(f"--max-new-tokens is {config.max_new_tokens}: the context holds {model.config.block_size}")
    prompts = [next(source)[:longest] for _ in range(config.prompts)]
    names = [field.name for field in dataclasses.fields(SamplingParams) if hasattr(config, field.name)]
    sampling = SamplingParams(**{name: getattr(config, name) for name in names}, stop_tokens=tokenizer.eos_ids)
    names = ("risk", "delta", "clip", "loss", "confidence", "kv_fill", "honest")
    certificate = calibrate_threshold(
        model,
        prompts,
        sampling,
        **{name: getattr(config, name) for name in names},
        data=data,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    folder = Path(config.out or folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_certificate(folder, certificate)
    print(json.dumps(dataclasses.asdict(certificate)))
    return 0


def report(config: TrainConfig) -> int:
    """Figures of finished models on held-out text, into the file --out; how often drafts are accepted, beside their weights too."""
    target, tokenizer, _, held_out, text_hash = frozen_target(config)
    drafter, draft_tokenizer = load_checkpoint(config.draft, device=config.device, dtype="float32")
    check_pair(config.model, tokenizer, config.draft, draft_tokenizer)
    if len(held_out) < 128:
        raise ValueError(f"--data: {len(held_out)} tokens are held out, too few to measure on")
    result = {"target": evaluate(config, target, tokenizer, held_out), "draft": {}}
    n_prompts, draft_len, n_prompt = 32, 4, min(64, target.config.block_size // 2)
    n_new = min(128, target.config.block_size - n_prompt)
    places = torch.linspace(0, len(held_out) - n_prompt - 1, n_prompts).long()
    prompts = [held_out[place : place + n_prompt].tolist() for place in places]
    drafters = {"draft": ModelDrafter(drafter)} | {e: ExitDrafter(target, e) for e in target.config.exit_layers}
    acceptance = {name: {} for name in drafters}
    for (name, proposes), temperature in itertools.product(drafters.items(), (0.0, 1.0)):
        sampling = SamplingParams(n_new, temperature, seed=config.seed)
        outs = heed(speculative_generate(target, proposes, prompts, sampling, draft_len))
        stats = [out.stats for out in outs]
        accepted, drafted = (
            [sum(s[i] for s in (getattr(stat, name) for stat in stats) if i < len(s)) for i in range(draft_len)]
            for name in ("accepted_by_position", "drafted_by_position")
        )
        alpha = sum(accepted) / max(sum(accepted) + sum(s.corrected for s in stats), 1)
        acceptance[name]["sampled" if temperature else "greedy"] = round(alpha, 4)
        figures = result["draft"] if name == "draft" else result["target"]["exits"][str(name)]
        figures[f"temperature {temperature:g}"] = {
            "alpha": alpha,
            "accepted_of_drafted_by_position": [a / max(d, 1) for a, d in zip(accepted, drafted)],
            "tokens_per_target_pass": sum(s.tokens for s in stats) / sum(s.rounds for s in stats),
        }
    sizes = [sum(p.numel() for n, p in m.named_parameters() if "exits" not in n) for m in (target, drafter)]
    result |= {
        "parameters_read_per_token": dict(zip(("target", "draft"), sizes)),
        "cost_of_draft_to_target": sizes[1] / sizes[0],
        "prompts": f"{n_prompts} x {n_prompt} tokens of held-out files, {n_new} new tokens, draft length {draft_len}",
        "text_sha256": text_hash,
    }
    result |= environment()
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config.out, lambda p: p.write_text(json.dumps(result, indent=1) + "\n"))
    keep_acceptance(config.draft, acceptance.pop("draft"))
    keep_acceptance(config.model, acceptance)
    print(json.dumps(result))
    return 0


def keep_acceptance(name: str, acceptance: dict) -> None:
    """Into the config.json of a checkpoint of ours, where automatic draft lengths find it (GPT.acceptance)."""
    file = find_checkpoint(name) / "config.json"
    described = json.loads(file.read_text()) if file.exists() else {}
    if acceptance and described.get("format") == "nanospec":
        described["meta"] = described.get("meta", {}) | {"acceptance": acceptance}
        write_atomically(file, lambda p: p.write_text(json.dumps(described, indent=1) + "\n"))


def main(argv=None) -> int:
    config = parse_flags(TrainConfig, argv, description=__doc__, prog="train_exit_heads.py")
    _, n_processes = processes()
    try:
        if n_processes > 1:
            dist.init_process_group("nccl" if pick_device(config.device).type == "cuda" else "gloo")
        if config.stage in ("calibrate", "report"):
            return calibrate(config) if config.stage == "calibrate" else report(config)
        tasks = {"base": base_task, "draft": draft_task, "exits": exits_task, "drafter": drafter_task}
        task = tasks[config.stage](config)
        return train(config, task)
    except (ValueError, OSError) as error:
        print(f"train_exit_heads.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_exit_heads.py: stopped before the first step", file=sys.stderr)
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
