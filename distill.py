"""What heads for a frozen model learn from and are judged by: texts of the model's own, with its hidden states on disk.

    prompts ---- the target decodes them ----> tokens   a  b  c  d          one stream of all texts
                        |                      states  h_a h_b h_c          behind some layers and the last
                        `-- keeps every state          |   |
                                               exits   h_a (layer e) should say what h_a (last layer) says
                                               drafter (h_a, b) should say what h_b (last layer) says

No corpus is needed, and the backbone runs once: training reads states, not texts.
"""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tqdm import tqdm

import kernels
from certificate import fit_platt
from checkpoint import fingerprint_of, write_atomically
from decode import Batch, Block, PlainStep, SamplingParams, generate, heed, pack, run_loop
from model import GPT, DraftHead
from tokenizer import Tokenizer, apply_chat

PROMPTS = Path(__file__).resolve().parent / "prompts" / "train.json"
KINDS = {
    "asked": 0.4,
    "openings": 0.12,
    "chat": 0.17,
    "chat_code": 0.1,
    "chat_math": 0.02,
    "rewrite": 0.07,
    "prose": 0.06,
    "code": 0.06,
}
TEMPERATURES = {0.0: 0.45, 0.7: 0.25, 1.0: 0.3}
TOP_K = 64  # of sampled texts: noise for so few tokens costs little, and the rest would lead astray
TEXTS = 128  # decoded together
LONGEST = 320  # tokens of a text, prompt included
QUESTION = 96  # tokens that the target may ask itself


# ------------------------------------------------------------------------------------------------------- prompts


def draw_prompt(rng: random.Random, stock: dict, kind: str) -> str:
    """A prompt from prompts/train.json: a form, filled in. Of kind "asked" nothing, of "openings" the first words."""
    if kind == "asked":
        return ""
    topic, other = rng.sample(stock["topics"], 2)
    words = {"topic": topic, "other": other, "task": rng.choice(stock["tasks"]), "item": rng.choice(stock["items"])}
    words |= {"Topic": topic[0].upper() + topic[1:], "Other": other[0].upper() + other[1:]}
    words |= {"text": rng.choice(stock["texts"]), "a": rng.randrange(2, 100), "b": rng.randrange(2, 20)}
    words |= {"c": rng.randrange(100, 1000)}
    text = rng.choice(stock[kind])
    for name, word in words.items():  # str.format would stumble over the braces of code
        text = text.replace(f"{{{name}}}", str(word))
    return text


def own_prompts(target: GPT, tokenizer: Tokenizer, seed):
    """Endless prompts of many kinds, as token ids. Half of them the target asks itself: of kinds "asked" and "openings" it
    goes on where the user begins to speak, at temperature 1 (Xu et al. 2024)."""
    stock, rng = json.loads(PROMPTS.read_text()), random.Random(f"{seed} prompts")
    kinds = {kind: share for kind, share in KINDS.items() if tokenizer.chat_template or kind in ("prose", "code")}
    mark = "\0"
    whole = apply_chat(tokenizer, [{"role": "user", "content": mark}]) if tokenizer.chat_template else mark
    before, after = whole.split(mark)
    while True:
        drawn = rng.choices(list(kinds), list(kinds.values()), k=TEXTS)
        texts = [draw_prompt(rng, stock, kind) for kind in drawn]
        open_ended = [i for i, kind in enumerate(drawn) if kind in ("asked", "openings")]
        begun = [tokenizer.encode(before + texts[i], special=True) for i in open_ended]
        sampling = SamplingParams(QUESTION, 1.0, TOP_K, seed=rng.randrange(2**31), stop_tokens=tokenizer.eos_ids)
        for i, out in zip(open_ended, heed(generate(target, begun, sampling))):
            said = [token for token in out.tokens if token not in tokenizer.eos_ids]
            texts[i] += tokenizer.decode(said)
        for kind, text in zip(drawn, texts):
            yield tokenizer.encode(text if kind in ("prose", "code") else before + text + after, special=True)


def cut_prompts(stream: torch.Tensor, seed):
    """Endless prompts cut from a text (N,): 16 tokens and more."""
    rng = random.Random(f"{seed} prompts")
    if len(stream) < 2:
        raise ValueError(f"--data: {len(stream)} tokens are too few to cut prompts from")
    while True:
        n = rng.randrange(min(16, len(stream) // 2), min(LONGEST // 2, len(stream)))
        start = rng.randrange(len(stream) - n)
        yield stream[start : start + n].tolist()


# ---------------------------------------------------------------------------------------------------- recordings


@dataclass
class Recording:
    """A stream of N positions of a frozen target.

    tokens (N,) int32: the token after each position; texts (N,) int32: the text it belongs to; written (N,) bool: whether the
    target wrote it (the rest is prompt); temperatures (texts,): what it was drawn at; states (N, depths, C) bfloat16: hidden
    states behind `layers`, the last layer last, mapped from disk.
    """

    tokens: torch.Tensor
    texts: torch.Tensor
    written: torch.Tensor
    temperatures: torch.Tensor
    states: torch.Tensor
    layers: tuple[int, ...]

    def held_out(self) -> int:
        """First position of the texts that no head is trained on: the last twentieth."""
        last = int(self.texts[-1])
        return int((self.texts <= last - max(last // 20, 1)).sum())

    def places(self) -> torch.Tensor:
        """Position of each within its text, (N,) int64."""
        _, which, lengths = self.texts.unique_consecutive(return_inverse=True, return_counts=True)
        return torch.arange(len(self.texts)) - (lengths.cumsum(0) - lengths)[which]


class RecordingStep(PlainStep):
    """Plain decoding that keeps the hidden states behind `layers` of every position."""

    def __init__(self, layers: tuple[int, ...]):
        self.layers = layers

    def start(self, batch: Batch) -> None:
        self.states = []
        for tokens in batch.tokens:
            ids = torch.tensor([tokens[:-1]], dtype=torch.int64, device=batch.model.device)
            self.states.append([x[0] for x in self.run(batch.model, ids, torch.arange(ids.shape[1])[None], None)[1:]])

    def run(self, model: GPT, ids, positions, cache) -> list[torch.Tensor]:
        """x (B, T, C) behind the last layer, then states (B, T, depths, C)."""
        positions = positions.to(model.device)
        x, states, first = model.embed(ids, positions), [], 0
        for layer in self.layers:
            x = model.run_layers(x, cache, positions, first, layer)
            states.append(x)
            first = layer
        return [x, torch.stack(states, 2)]

    def __call__(self, batch: Batch, rows: list[int], plain: bool) -> list[Block]:
        model, n_layer = batch.model, batch.model.config.n_layer
        ids, positions = pack(
            [batch.tokens[row][-1:] for row in rows], [len(batch.tokens[row]) - 1 for row in rows], model.device
        )
        x, states = self.run(model, ids, positions, batch.rows_cache(rows))
        for row, state in zip(rows, states):
            self.states[row].append(state)
        tokens, log_probs = batch.sampler.sample(rows, model.logits(x[:, 0]))
        return [Block([t], [lp], ["plain"], [n_layer], 0, n_layer) for t, lp in zip(tokens, log_probs)]


def record(target: GPT, prompts, layers, folder: Path, n_tokens: int, max_bytes: float, stop, seed: int) -> None:
    """The target decodes prompts(seed), endless, until the recording in `folder` has n_tokens positions, or max_bytes of states.

    Greedy and sampled texts both: heads serve either. What is there already is kept and added to; a group of TEXTS counts
    once it is written whole, so that a break costs no more than the group.
    """
    affordable = max_bytes / (2 * target.config.n_embd * len(layers))
    if not affordable >= 1:
        raise ValueError(f"--cache-gb is {max_bytes / 1e9:g}: it does not hold one position")
    n_tokens = int(min(n_tokens, affordable))
    folder.mkdir(parents=True, exist_ok=True)
    streams = [torch.zeros(0, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.bool, torch.float32)]
    if (folder / "recording.pt").exists():
        open_recording(folder, target, layers)  # says what is wrong with it
        old = open_recording(folder, target)
        layers = old.layers
        streams = [old.tokens, old.texts, old.written, old.temperatures]
    longest, seed = min(LONGEST, target.config.block_size), f"{seed} {len(streams[0])}"
    prompts, rng = prompts(seed), random.Random(f"{seed} lengths")
    with (
        tqdm(total=n_tokens, initial=len(streams[0]), desc="the target writes", unit=" tokens") as bar,
        (folder / "states.bin").open("ab") as file,
    ):
        file.truncate(len(streams[0]) * len(layers) * target.config.n_embd * 2)  # a group that was cut off
        while len(streams[0]) < n_tokens:
            done, n_texts = [], len(streams[3])
            for temperature, share in TEMPERATURES.items():
                group = [next(prompts)[: longest * 3 // 4] for _ in range(round(TEXTS * share))]
                n_new = max(min(rng.randrange(96, 257), longest - max(map(len, group))), 1)
                sampling = SamplingParams(n_new, temperature, TOP_K, seed=rng.randrange(2**31), stop_tokens=stop)
                step = RecordingStep(layers)
                outs = heed(run_loop(target, group, sampling, step))
                done += [(temperature, *parts) for parts in zip(group, outs, step.states)]
            rng.shuffle(done)  # or the texts held out, the last ones, would all be of one temperature
            news = [[], [], [], [temperature for temperature, *_ in done]]
            for i, (_, prompt, out, states) in enumerate(done):
                said = (prompt + out.tokens)[1:]
                states = torch.cat(states).to("cpu", torch.bfloat16)[: len(said)]
                file.write(states.contiguous().view(torch.int16).numpy().tobytes())
                news[0] += said
                news[1] += [n_texts + i] * len(said)
                news[2] += [False] * (len(prompt) - 1) + [True] * len(out.tokens)
            file.flush()
            streams = [torch.cat((old, torch.tensor(new, dtype=old.dtype))) for old, new in zip(streams, news)]
            content = [*streams, tuple(layers), fingerprint_of(target)]
            write_atomically(folder / "recording.pt", partial(torch.save, content))
            bar.update(len(news[0]))


def open_recording(folder: Path, target: GPT, wanted: tuple[int, ...] = ()) -> Recording:
    """What record wrote; states stay on disk. ValueError where it is broken, another model's, or lacks states behind `wanted`,
    which must be the last of its layers (all)."""
    try:
        tokens, texts, written, temperatures, layers, owner = torch.load(folder / "recording.pt", weights_only=True)
        shape = len(tokens), len(layers), target.config.n_embd
        states = torch.from_file(str(folder / "states.bin"), size=math.prod(shape), dtype=torch.bfloat16)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, KeyError):
        raise ValueError(f"{folder}: truncated, or no recording; delete it to record anew") from None
    if owner != fingerprint_of(target):
        raise ValueError(f"{folder}: recorded from another model; give another --recording, or delete it")
    wanted = wanted or layers
    if layers[-len(wanted) :] != wanted:
        raise ValueError(
            f"{folder}: holds states behind layers {layers}, wanted are {wanted}; delete it to record anew"
        )
    return Recording(tokens, texts, written, temperatures, states.view(shape)[:, -len(wanted) :], wanted)


def frequent_tokens(tokens: torch.Tensor, n: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The n most frequent ids, special tokens always among them, sorted; ties go to the lower id, as do ids never seen."""
    special = set(tokenizer.special.values())
    counts = Counter(tokens.tolist())
    ranked = sorted(range(tokenizer.n_vocab), key=lambda i: (i not in special, -counts[i], i))
    return tuple(sorted(ranked[:n]))


# -------------------------------------------------------------------------------------------------------- losses


def known_law(model: GPT, states: torch.Tensor, vocab: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (..., n) over the tokens of vocab (n,), after states (..., C) behind the last layer."""
    logits = kernels.linear(states, model.output_weight, norm=model.final_norm.parameters_of(), index=vocab)
    return kernels.full_precision(logits).log_softmax(-1)


def exit_losses(model: GPT, states: torch.Tensor):
    """states (B, depths, C) -> of each exit the KL to the target's law over exit_vocab (adapter "draft"), then the
    cross-entropy to the target's best token, where exit_vocab holds it (adapter "exit").

    A drafter wants the whole law, an exit its best token and an honest confidence.
    """
    last, vocab = states[:, -1], model.exit_vocab
    known = kernels.take_rows(model.output_weight, vocab)
    with torch.no_grad():
        best = model.logits(last).argmax(-1)
        teacher = known_law(model, last, vocab)
        labels = torch.searchsorted(vocab, best).clamp(max=len(vocab) - 1)
        labels = labels.where(vocab[labels] == best, -100)
    losses = []
    for adapter in ("draft", "exit"):
        for i, layer in enumerate(model.config.exit_layers):
            head = model.exits[str(layer)]
            x, norm = head.adapt(states[:, i], adapter), head.norm.parameters_of()
            guess = kernels.linear(x, known, norm=norm).float()
            if adapter == "draft":
                losses.append(F.kl_div(guess.log_softmax(-1), teacher, reduction="batchmean", log_target=True))
            else:
                losses.append(F.cross_entropy(guess, labels))
    return losses


def unrolled(head: DraftHead, target: GPT, tokens, states, texts, places, n_steps: int):
    """The head's outputs (B, T, C) at n_steps drafts in a row, with its own outputs as features from the second on.

    tokens, texts, places in them (B, T), states (B, T, C). Draft s at place t follows the true features up to place t - s and the head's own
    from there on: its attention reads the keys of step 0 up to t - s, and one key of each later step (Li et al. 2025).
    """
    length, block, groups = tokens.shape[1], head.block, head.block.n_head // head.block.n_kv
    cos, sin = target._rotary_at(places)
    told = head.token_norm(target.embed(tokens, places))
    together = texts[:, :, None] == texts[:, None, :]
    features, keys, values, outputs = states, [], [], []
    for step in range(n_steps):
        x = head.fuse(torch.cat((told, head.feature_norm(features)), -1))
        qkv = block.qkv(x, block.attn_norm).unflatten(-1, (-1, block.head_dim))
        q, k, v = qkv.split((block.n_head, block.n_kv, block.n_kv), 2)
        if cos is not None:
            q, k = kernels.rotate_ref(q, cos, sin), kernels.rotate_ref(k, cos, sin)
        keys.append(k.repeat_interleave(groups, 2).transpose(1, 2))  # (B, H, T, D)
        values.append(v.repeat_interleave(groups, 2).transpose(1, 2))
        q = q.transpose(1, 2) / block.head_dim**0.5
        seen = together & torch.ones_like(together).tril(-step)
        scores = kernels.full_precision(q @ keys[0].transpose(2, 3)).masked_fill(~seen[:, None], -1e9)
        late = [shifted(x, step - s, 2) for s, x in enumerate(keys) if s]  # the key of step s at place t - (step - s)
        scores = torch.cat([scores, *((q * k).sum(-1, keepdim=True).to(scores.dtype) for k in late)], -1)
        weights = scores.softmax(-1).to(q.dtype)
        y = weights[..., :length] @ values[0]
        for i, s in enumerate(range(1, step + 1)):
            y = y + weights[..., length + i, None] * shifted(values[s], step - s, 2)
        x = block.attn_out(y.transpose(1, 2).flatten(2), residual=x)
        activation = "gelu" if block.arch == "gpt2" else "swiglu"
        x = block.down(block.up(x, block.mlp_norm, activation), residual=x)
        outputs.append(x)
        features = shifted(x, 1, 1)
    return outputs


def shifted(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """x with what stood n places before, zeros at the start."""
    if n == 0:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - n)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, n)), kept), dim)


def draft_head_losses(head: DraftHead, target: GPT, tokens, texts, places, written, states, n_steps: int):
    """tokens, texts, places, written (B, T), states (B, T, C) behind the last layer -> of each draft in a row the KL to the target, the
    cross-entropy to its best token, and the share of equal best tokens; all over the head's vocabulary, where the target wrote."""
    with torch.no_grad():
        teacher = known_law(target, states[:, 1:], head.vocab)  # after the token that the head has just been told
        best, chances = teacher.argmax(-1), teacher.exp()
        gained = (chances * teacher).sum(-1)  # minus the teacher's entropy
    same = (texts[:, 1:] == texts[:, :-1]) & written[:, :-1]
    kls, crosses, agreements = [], [], []
    for step, x in enumerate(unrolled(head, target, tokens, states, texts, places, n_steps)):
        counts = same[:, step:] & (texts[:, step:-1] == texts[:, : texts.shape[1] - 1 - step])
        logits = kernels.linear(x[:, step:-1][counts], head.output, norm=head.norm.parameters_of())
        guess, token = kernels.full_precision(logits).log_softmax(-1), best[:, step:][counts]
        n = max(len(token), 1)  # a window may be all prompt
        kls.append((gained[:, step:][counts].sum() - (chances[:, step:][counts] * guess).sum()) / n)
        crosses.append(F.nll_loss(guess, token, reduction="sum") / n)
        agreements.append((guess.argmax(-1) == token).float().sum() / n)
    return kls + crosses + agreements


def new_draft_head(target: GPT, vocab, seed: int) -> DraftHead:
    """A head that begins as the target's last block, on features as they are and a little of the token."""
    torch.manual_seed(seed)
    head, width = DraftHead(target.config, vocab), target.config.n_embd
    head.block.load_state_dict(target.blocks[-1].state_dict())
    head.norm.load_state_dict(target.final_norm.state_dict())
    with torch.no_grad():
        head.fuse.weight.normal_(std=0.08)
        head.fuse.weight[:, width:].copy_(4 * torch.eye(width))
    head.requires_grad_(True).attach(target)
    return head


# ------------------------------------------------------------------------------------------------------- figures


def auroc(score: torch.Tensor, label: torch.Tensor) -> float:
    """Chance that a random true one of label (N,) bool scores above a random false one, ties half; 0.5 where all are alike."""
    _, ranks, counts = score.double().unique(return_inverse=True, return_counts=True)
    middle = counts.cumsum(0) - (counts - 1) / 2
    n_true, n_false = int(label.sum()), int((~label).sum())
    if n_true * n_false == 0:
        return 0.5
    return float((middle[ranks][label].sum() - n_true * (n_true + 1) / 2) / (n_true * n_false))


def calibration_error(confidence: torch.Tensor, agrees: torch.Tensor, n_bins: int = 15) -> float:
    """Expected calibration error: mean distance of confidence and agreement (N,) over n_bins equal intervals."""
    bins = (confidence * n_bins).long().clamp(max=n_bins - 1)
    gaps = torch.zeros(n_bins, dtype=torch.float64).index_add_(0, bins, confidence.double() - agrees.double())
    return float(gaps.abs().sum() / len(confidence))


def coverage(confidence: torch.Tensor, agrees: torch.Tensor, error: float) -> float:
    """Largest share of positions that a threshold lets out with at most `error` of them disagreeing: ties go out together."""
    confidence, order = confidence.sort(descending=True)
    wrong = (~agrees[order]).double().cumsum(0)
    n = torch.arange(1, len(wrong) + 1)
    possible = (wrong <= error * n) & (confidence.diff(append=confidence.new_tensor([-1.0])) != 0)
    return float((n * possible).max() / len(wrong))


@torch.no_grad()
def judge_exits(model: GPT, states: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    """states (N, depths, C) -> for each exit, per position: confidence (max_prob of adapter "exit", unscaled), whether its
    best token is the target's, KL of adapter "draft" to the target's law, and how much of the two laws overlaps."""
    found = {layer: [] for layer in model.config.exit_layers}
    for part in states.split(512):
        x = part.to(model.device, torch.float32)
        final = model.logits(x[:, -1]).float().log_softmax(-1)
        law = final.exp()
        for i, layer in enumerate(model.config.exit_layers):
            best, _, confidence = model.exit_confidence(x[:, i], layer, "max_prob")
            guess = model.logits(x[:, i], layer, "draft").float().softmax(-1)
            kl = (law * (final - guess.clamp(min=1e-10).log())).nan_to_num(0.0).sum(-1)
            overlap = torch.minimum(law, guess).sum(-1)
            found[layer].append(torch.stack((confidence, (best == final.argmax(-1)).float(), kl, overlap)).cpu())
    names = ("confidence", "agrees", "kl", "overlap")
    return {layer: dict(zip(names, torch.cat(parts, 1))) for layer, parts in found.items()}


def exit_figures(judged: dict[str, torch.Tensor], platt: tuple[float, float]) -> dict[str, float]:
    """Agreement, KL, expected acceptance sum(min(p, q)), and how good the scaled confidence is, of one exit on one text."""
    agrees = judged["agrees"].bool()
    sure = kernels.platt(judged["confidence"].double(), *platt)
    figures = {"positions": len(agrees), "agreement": agrees.double().mean(), "kl": judged["kl"].mean()}
    figures |= {"overlap": judged["overlap"].mean(), "auroc": auroc(sure, agrees)}
    figures |= {"calibration_error": calibration_error(sure, agrees)}
    figures |= {f"coverage_at_{error:g}": coverage(sure, agrees, error) for error in (0.01, 0.02, 0.05)}
    return {name: round(float(x), 4) for name, x in figures.items()}


def judge(model: GPT, recording: Recording, tokenizer: Tokenizer, n_positions: int = 8192):
    """Held-out texts, greedy and sampled, and a foreign one -> (slope, bias) for each exit, and figures by exit and source.

    The scaling is fitted on every other text, and the figures are those of the rest; prompts count in neither.
    """
    first, states = recording.held_out(), recording.states
    greedy = recording.temperatures[recording.texts[first:].long()] == 0
    even, written = recording.texts[first:] % 2 == 0, recording.written[first:]
    sources = {"greedy": states[first:][written & greedy & ~even], "sampled": states[first:][written & ~greedy & ~even]}
    sources["foreign"] = foreign_states(model, tokenizer, recording.layers, n_positions)
    sources = {name: x[:n_positions] for name, x in sources.items() if len(x)}
    fitted = judge_exits(model, states[first:][written & even][:n_positions])
    scales = [fit_platt(fitted[e]["confidence"], fitted[e]["agrees"]) for e in model.config.exit_layers]
    figures = {str(layer): {} for layer in model.config.exit_layers}
    for name, rows in sources.items():
        for (layer, judged), scale in zip(judge_exits(model, rows).items(), scales):
            figures[str(layer)][name] = exit_figures(judged, scale)
    return scales, figures


@torch.no_grad()
def foreign_states(model: GPT, tokenizer: Tokenizer, layers, n_positions: int) -> torch.Tensor:
    """States (N, depths, C) on prose that the model did not write: the language reference that comes with Python."""
    text = "\n".join(topics.values())
    length = min(256, model.config.block_size)
    ids = torch.tensor(tokenizer.encode(text[: 8 * n_positions])[: n_positions // length * length]).view(-1, length)
    step, found = RecordingStep(layers), []
    for part in ids.split(8):
        at = torch.arange(length).expand_as(part)
        found.append(step.run(model, part.to(model.device), at, None)[1].flatten(0, 1).cpu())
    return torch.cat(found)
