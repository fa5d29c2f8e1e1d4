"""Heads for a frozen model: what they learn is what they later do, and their figures are what they say they are."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from helpers import speculating, tiny_model, true_states

import distill
import kernels
from checkpoint import load_draft_head, save_draft_head
from decode import SamplingParams, generate
from distill import RecordingStep, auroc, calibration_error, coverage, fit_platt, frequent_tokens
from model import DraftHead
from speculative import HeadDrafter, speculative_generate
from tokenizer import Tokenizer


def random_head(model, vocab=range(24), seed=5) -> DraftHead:
    """A head with a mind of its own: the target's last block and random fusion."""
    head = distill.new_draft_head(model, tuple(vocab), seed).to(model.dtype)
    head.fuse.weight.data.normal_(0, 0.3)
    head.attach(model)
    return head.requires_grad_(False)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_what_a_draft_head_learns_is_what_it_drafts(arch):
    """Three drafts in a row at each place: the outputs of training equal those of HeadDrafter, cache and all."""
    model = tiny_model(arch, seed=4)
    head, text = random_head(model), torch.randint(24, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    states = true_states(model, text)[0][-1]
    ids = torch.tensor([text])
    taught = distill.unrolled(head, model, ids[:, 1:], states[None, :-1], torch.zeros(1, 12), torch.arange(12)[None], 3)
    drafter = HeadDrafter(model, head)
    for place in range(9):
        batch = SimpleNamespace(prompt_hidden=[[states[: place // 2], states[place // 2 : place + 1]]], capacity=16)
        drafter.attach(batch)
        drafter.reset([text[: place + 2]])
        x = drafter.read([0])
        assert torch.allclose(x, taught[0][:, place], rtol=0, atol=1e-10)
        for step in (1, 2):
            told, at = ids[:, place + 1 + step, None], torch.tensor([[place + step]])
            x = head(told, x[:, None], drafter.cache, at)[:, 0]
            assert torch.allclose(x, taught[step][:, place + step], rtol=0, atol=1e-10), (place, step)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_the_laws_that_a_draft_head_proposes_are_those_it_learnt(arch):
    """propose, on drafts that are the text's own, and again behind a commit: verification would repair a wrong place in silence."""
    model = tiny_model(arch, seed=4)
    head, text = random_head(model), torch.randint(24, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    states, ids = true_states(model, text)[0][-1], torch.tensor([text])
    places = torch.arange(12)[None]
    taught = distill.unrolled(head, model, ids[:, 1:], states[None, :-1], places >= 0, places, 3)
    drafter = HeadDrafter(model, head)
    for place in range(9):

        def draft(rows, logits, drafted, behind=place + 2):
            return ids[:, behind + drafted.shape[1]], logits

        sampler = SimpleNamespace(device=model.device, draft=draft, more=lambda rows: True)
        drafter.attach(SimpleNamespace(prompt_hidden=[[states[: place + 1]]], capacity=16))
        drafter.reset([text[: place + 2]])
        tokens, laws, n = drafter.propose([0], 3, sampler)
        assert tokens.tolist() == [text[place + 2 : place + 5]] and n.tolist() == [3]
        for step in range(3):
            assert torch.allclose(laws[:, step], head.logits(taught[step][:, place + step]), rtol=0, atol=1e-10)
        drafter.commit([0], [text[place + 2 : place + 4]], [states[place + 1 : place + 3]])
        laws = drafter.propose([0], 1, sampler)[1]
        assert torch.allclose(laws[:, 0], head.logits(taught[0][:, place + 2]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_texts_that_share_a_window_do_not_see_each_other(arch):
    """Losses of two texts in one window are those of each alone, weighted by their places."""
    model = tiny_model(arch, seed=4)
    head, n_steps = random_head(model), 2
    texts = [torch.randint(24, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 12)]
    parts = []
    for number, text in enumerate(texts):
        states = true_states(model, text)[0][-1][None, :-1]
        owner, places = torch.full((1, len(text) - 1), number), torch.arange(len(text) - 1)[None]
        parts.append((torch.tensor([text[1:]]), owner, places, places >= 0, states))
    alone = [torch.stack(distill.draft_head_losses(head, model, *part, n_steps)) for part in parts]
    both = torch.stack(distill.draft_head_losses(head, model, *(torch.cat(x, 1) for x in zip(*parts)), n_steps))
    nothing = distill.draft_head_losses(head, model, *parts[0][:3], parts[0][3] & False, parts[0][4], n_steps)
    assert torch.stack(nothing).eq(0).all()  # all prompt: nothing to learn, and no NaN
    for i in range(len(both)):
        weights = [len(text) - 2 - i % n_steps for text in texts]
        mean = sum(w * x[i] for w, x in zip(weights, alone)) / sum(weights)
        assert both[i].item() == pytest.approx(mean.item(), abs=1e-6)


def test_a_drafter_is_told_the_targets_hidden_states():
    """Hidden states come with every committed token, prompt included, and are those of a forward over the text."""

    class Watcher:
        wants_hidden = True

        def attach(self, batch):
            self.batch = batch

        def reset(self, prompts):
            self.seen = [torch.cat(x) for x in self.batch.prompt_hidden]
            self.tokens = [list(p) for p in prompts]

        def propose(self, rows, max_k, sampler):
            for row in rows:
                states = true_states(model, self.tokens[row])[0][-1]
                assert torch.allclose(self.seen[row], states[:-1], rtol=0, atol=1e-9)
            return torch.zeros(len(rows), max_k, dtype=torch.int64), None, torch.full((len(rows),), max_k)

        def commit(self, rows, tokens, hidden):
            for row, new, x in zip(rows, tokens, hidden):
                assert len(new) == len(x)
                self.seen[row] = torch.cat((self.seen[row], x))
                self.tokens[row] += new

    model = tiny_model(seed=4, poisoned=False)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1]]
    speculative_generate(model, Watcher(), prompts, SamplingParams(12, temperature=0), 3)


def test_drafting_begins_where_the_first_pair_is_known():
    """A prompt of one token has no hidden state before it: its first round is plain, beside rows that draft."""
    model = tiny_model(seed=4)
    outs = speculating(model, HeadDrafter(model, random_head(model)), 3)([[7], [1, 2, 3]], SamplingParams(9, 0))
    assert outs[0].sources[0] == "plain" and outs[1].sources[0] != "plain"
    assert [out.stats.drafted_histogram[0] for out in outs] == [2, 1]  # the last token of each has no room for a draft


def test_a_draft_head_survives_its_file_and_refuses_another_target(tmp_path):
    model, other = tiny_model(seed=4), tiny_model(seed=5)
    head = random_head(model, range(3, 20)).bfloat16().double()  # what a file holds
    head.attach(model)
    save_draft_head(tmp_path, head, model, {"note": 1})
    again = load_draft_head(model, tmp_path)
    again.attach(model)
    x = torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(again.logits(x), head.logits(x)) and (again.logits(x)[:, 3:20] > -torch.inf).all()
    assert (again.logits(x)[:, [0, 1, 2, 20]] == -torch.inf).all()
    with pytest.raises(ValueError, match="trained for another model"):
        load_draft_head(other, tmp_path)
    with pytest.raises(ValueError, match="give both the same model"):
        speculative_generate(other, HeadDrafter(model, tmp_path), [[1, 2]], SamplingParams(3))
    with pytest.raises(ValueError, match="quantize is 'int8': a DraftHead is taken as it is"):
        HeadDrafter(model, random_head(model), "int8")
    (tmp_path / "config.json").write_text(json.dumps({"format": "nanospec"}))
    with pytest.raises(ValueError, match="format is 'nanospec'"):
        load_draft_head(model, tmp_path)


def test_a_recording_holds_the_states_of_a_forward(tmp_path):
    """Tokens, texts and states of every position, whatever was prompt; the texts are plain decoding's."""
    model = tiny_model(seed=4)
    distill.record(model, lambda seed: iter([[1, 2, 3]] * 300), (2, 4), tmp_path, 600, 1e9, (0,), seed=3)
    recording = distill.open_recording(tmp_path, model, (2, 4))
    assert len(recording.tokens) >= 600 and recording.states.shape == (len(recording.tokens), 2, 16)
    greedy = generate(model, [[1, 2, 3]], SamplingParams(200, 0, stop_tokens=(0,)))[0].tokens
    for temperature in distill.TEMPERATURES:
        text = int((recording.temperatures == temperature).nonzero()[0])
        at = (recording.texts == text).nonzero()[:, 0]
        assert torch.equal(at, torch.arange(at[0], at[-1] + 1))
        assert recording.written[at].tolist() == [i >= 2 for i in range(len(at))]
        assert torch.equal(recording.places()[at], torch.arange(len(at)))
        tokens = [1, *recording.tokens[at].tolist()]
        assert tokens[:3] == [1, 2, 3] and (tokens[3:] == greedy[: len(tokens) - 3]) == (temperature == 0)
        states = true_states(model, tokens)[0]
        for layer in (2, 4):
            expected = states[layer, :-1].bfloat16()
            assert torch.allclose(
                recording.states[at, (2, 4).index(layer)].float(), expected.float(), rtol=0, atol=2e-2
            )
    late = recording.temperatures[recording.texts[recording.held_out() :].unique().long()]
    assert len(late.unique()) > 1
    assert 0 < recording.held_out() < len(recording.tokens)
    assert torch.equal(distill.open_recording(tmp_path, model, (4,)).states, recording.states[:, 1:])
    with pytest.raises(ValueError, match="another model"):
        distill.open_recording(tmp_path, tiny_model(seed=5), (2, 4))
    with pytest.raises(ValueError, match="behind layers"):
        distill.open_recording(tmp_path, model, (1, 4))
    for name in ("states.bin", "recording.pt"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:100])
        with pytest.raises(ValueError, match="truncated"):
            distill.open_recording(tmp_path, model, (2, 4))


def test_a_recording_keeps_within_its_budget(tmp_path):
    model = tiny_model(seed=4)
    distill.record(model, lambda seed: iter([[1, 2]] * 5000), (2, 4), tmp_path, 10**6, 2 * 16 * 2 * 2000, (), seed=3)
    n = len(distill.open_recording(tmp_path, model, (2, 4)).tokens)
    assert 2000 <= n < 2000 + 128 * distill.LONGEST  # the last group is kept whole


def test_a_recording_goes_on_where_it_was_cut_off(tmp_path):
    """What was whole stays as it is, what was not is written anew, and other prompts are asked for."""
    model, seeds = tiny_model(seed=4), []

    def prompts(seed):
        seeds.append(seed)
        return iter([[1, 2, 3]] * 300)

    distill.record(model, prompts, (2, 4), tmp_path, 600, 1e9, (), seed=3)
    first = distill.open_recording(tmp_path, model, (2, 4))
    n, states = len(first.tokens), first.states.clone()
    with (tmp_path / "states.bin").open("ab") as file:
        file.write(b"cut off")
    distill.record(model, prompts, (2, 4), tmp_path, n, 1e9, (), seed=3)
    assert len(distill.open_recording(tmp_path, model, (2, 4)).tokens) == n
    distill.record(model, prompts, (2, 4), tmp_path, n + 1, 1e9, (), seed=3)
    longer = distill.open_recording(tmp_path, model, (2, 4))
    assert len(longer.tokens) > n and torch.equal(longer.tokens[:n], first.tokens) and len(set(seeds)) == 2
    assert torch.equal(longer.states[:n], states) and int(longer.texts[n]) == int(first.texts[-1]) + 1
    distill.record(
        model, prompts, (4,), tmp_path, len(longer.tokens) + 1, 1e9, (), seed=3
    )  # all its layers are kept up
    assert torch.equal(distill.open_recording(tmp_path, model, (2, 4)).states[: len(longer.tokens)], longer.states)
    text = longer.texts == longer.texts[-1]
    expected = true_states(model, [1, *longer.tokens[text].tolist()])[0][4, :-1]
    assert torch.allclose(longer.states[text, 1].float(), expected.float(), rtol=1e-2, atol=2e-2)


def test_a_chat_model_asks_itself():
    """Questions of its own come between the marks of the template, and begin with an opening or with nothing."""
    marks = {"<user>": 256, "<model>": 257, "<end>": 258}
    template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<model>"
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, ".", marks, eos_ids=(258,), chat_template=template)
    model = tiny_model(seed=4, vocab_size=259)
    prompts = [ids for ids, _ in zip(distill.own_prompts(model, tokenizer, 0), range(300))]
    chats = [ids for ids in prompts if ids[0] == 256]
    assert 200 < len(chats) < 290 and all(ids[-1] == 257 and 258 not in ids for ids in chats)
    stock = json.loads(distill.PROMPTS.read_text())
    known = {text for kind in distill.KINDS if kind != "asked" for text in stock[kind]}
    questions = [tokenizer.decode(ids[1:-1]) for ids in chats]
    assert len(set(questions)) > 150 and sum(q not in known for q in questions) > 100


def test_recording_is_plain_decoding():
    model, sampling = tiny_model(seed=4), SamplingParams(20, 0.8, seed=1)
    from decode import run_loop

    outs = run_loop(model, [[1, 2, 3], [5]], sampling, RecordingStep((1, 4)))
    assert [out.tokens for out in outs] == [out.tokens for out in generate(model, [[1, 2, 3], [5]], sampling)]


def test_prompts_are_of_many_kinds_and_leave_no_blank():
    stock, rng = json.loads(distill.PROMPTS.read_text()), random.Random(0)
    for kind in set(distill.KINDS) - {"asked"}:
        drawn = [distill.draw_prompt(rng, stock, kind) for _ in range(300)]
        for name in ("topic", "Topic", "other", "Other", "task", "item", "text", "a", "b", "c"):
            assert not any(f"{{{name}}}" in prompt for prompt in drawn), (kind, name)
        assert len(set(drawn)) > 40, kind


def test_frequent_tokens_are_the_most_frequent_and_the_special_ones():
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, ".", {"<end>": 256}, eos_ids=(256,))
    counted = torch.tensor([7] * 5 + [3] * 4 + [200] * 4 + [9])
    assert frequent_tokens(counted, 4, tokenizer) == (3, 7, 200, 256)
    assert frequent_tokens(counted, 6, tokenizer) == (0, 3, 7, 9, 200, 256)


def test_figures_of_confidence_by_hand():
    label = torch.tensor([True, True, False, True, False])
    score = torch.tensor([0.9, 0.8, 0.8, 0.4, 0.1])
    assert auroc(score, label) == pytest.approx((2 + 1.5 + 1) / 6)
    assert auroc(label.double(), label) == 1.0 and auroc(score, torch.ones_like(label)) == 0.5
    assert coverage(score, label, 0.0) == pytest.approx(0.2)  # the second and the third tie: no threshold parts them
    assert coverage(score.flip(0), label.flip(0), 0.0) == pytest.approx(0.2)
    assert coverage(score, label, 0.25) == pytest.approx(0.8)
    assert calibration_error(torch.tensor([0.95, 0.95, 0.05, 0.05]), torch.tensor([True, False, False, False])) == (
        pytest.approx((0.45 + 0.05) / 2)
    )


def test_platt_scaling_finds_the_chance_of_agreeing():
    generator = torch.Generator().manual_seed(0)
    raw = torch.rand(40_000, generator=generator).double() * 0.98 + 0.01
    chance = torch.sigmoid(0.6 * torch.logit(raw) + 1.1)
    agrees = torch.rand(len(raw), generator=generator).double() < chance
    slope, bias = fit_platt(raw, agrees)
    assert slope == pytest.approx(0.6, abs=0.03) and bias == pytest.approx(1.1, abs=0.05)
    assert calibration_error(kernels.platt(raw, slope, bias), agrees) < 0.01 < calibration_error(raw, agrees)
    assert fit_platt(torch.full((10,), 0.5), torch.ones(10, dtype=torch.bool))[1] < 10  # all agree: no infinity


def test_the_scaled_confidence_decides_exits():
    """A scaling that makes every exit sure lets all tokens out at the first; one that makes none sure, none."""
    from early_exit import early_exit_generate

    model = tiny_model(seed=4)
    for bias, layers in ((50.0, {1}), (-50.0, {4})):
        model.config.exit_platt = {"max_prob": [(1.0, bias)] * 3}
        out = early_exit_generate(model, [[1, 2, 3]], SamplingParams(10, 0), 0.5, max_parked=32)[0]
        assert set(out.layers_run) == layers
        out = early_exit_generate(model, [[1, 2, 3]], SamplingParams(10, 0), 0.5, "margin")[0]
        assert set(out.layers_run) != layers or len(layers) > 1


def test_judged_exits_are_what_the_heads_say():
    model = tiny_model(seed=4, exit_vocab=(1, 2, 3, 5, 8, 13, 21))
    states = torch.randn(40, 4, 16, dtype=torch.float64)
    judged = distill.judge_exits(model.float(), states)
    final = model.logits(states[:, -1].float()).softmax(-1)
    for i, layer in enumerate((1, 2, 3)):
        guess = model.logits(states[:, i].float(), layer, "exit").softmax(-1)
        assert torch.equal(judged[layer]["agrees"].bool(), guess.argmax(-1) == final.argmax(-1))
        assert torch.allclose(judged[layer]["confidence"], guess.amax(-1), atol=1e-5)
        draft = model.logits(states[:, i].float(), layer, "draft").softmax(-1)
        assert torch.allclose(judged[layer]["overlap"], torch.minimum(draft, final).sum(-1), atol=1e-5)
