"""Other engines beside ours, each in a process of its own: the same weights, the same threads, their own loops.

    peers, skipped = start(["transformers", "floor"], model="stdlib", dtype="float32", threads=2, device="cpu")
    [run] = peers["transformers 5.24.0"].decode([ids], SamplingParams(128, temperature=0.0))
    for peer in peers.values(): peer.close()

Greedy, exactly max_new_tokens each, whatever the tokens are. Parent and child (python peers.py NAME OPTIONS) say:

    start      <- {"modes": [name, ..], "skipped": [line, ..]}, all warm, or {"missing": line}
    decode     -> {"mode": name, "prompts": [[id, ..], ..], "max_new_tokens": n}
               <- {"tokens": [[id, ..], ..], "token_seconds": [[s, ..], ..]}, or {"refused": line}
    close      the child is killed; it also ends when stdin closes, in the middle of a request too
"""

import contextlib
import importlib
import itertools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable

import torch

from checkpoint import QUANTISED, find_checkpoint, load_checkpoint
from decode import Generation, SamplingParams
from model import GPT

LOOKUP = 4  # drafts per round of the lookups, as many as ours by default

# --------------------------------------------------------------------------------------------------------- the parent


class Child:
    """A process that speaks the protocol; `close()` kills it, once or often, and so does the end of this process."""

    def __init__(self, command: list[str], name: str, limit: float, environment: dict[str, str] | None):
        self.name, self.limit = name, limit
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child
        # a session of its own: Ctrl-C is the parent's to handle, and what the child starts is killed with it
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment,
            start_new_session=True, encoding="utf-8",
        )  # fmt: skip
        self.close = weakref.finalize(self, end, self.process)

    def ask(self, request: dict | None = None) -> dict:
        """A line there (None: it speaks first), one back. OSError where it has ended or takes longer than the limit."""
        if not self.close.alive:
            raise OSError(f"{self.name}: its process was ended before")
        answer = None
        try:
            with contextlib.suppress(OSError):  # to a child that died: there is no answer either
                self.process.stdin.write(json.dumps(request) + "\n" if request else "")
                self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], self.limit)
            line = self.process.stdout.readline() if ready else ""
            answer = json.loads(line)
        except ValueError:
            why = f"{line[:80]!r} is no answer" if line else f"its process ended: {self.last_words()}"
            raise OSError(f"{self.name}: {why if ready else f'no answer in {self.limit:g} seconds'}") from None
        finally:  # interrupted too: the next request must not get this answer
            if answer is None:
                self.close()
        return answer

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "nothing on stderr"


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what could not be written is lost
            pipe.close()


class Peer:
    """One way of another engine to decode; modes of the same engine share its process."""

    def __init__(self, child: Child, mode: str):
        self.child, self.mode, self.close = child, mode, child.close

    def decode(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Generation]:
        """max_new_tokens greedy tokens per prompt, and when they came; all other statistics are unknown.

        ValueError where this mode cannot do it (the next request may follow); OSError where the process is no more.
        """
        n = sampling.max_new_tokens
        if n < 1 or sampling != SamplingParams(n, temperature=0.0, seed=sampling.seed):
            raise ValueError(f"sampling is {sampling}: peers take max_new_tokens >= 1 and temperature 0, nothing else")
        if not prompts or not all(map(len, prompts)):
            raise ValueError(f"prompts is {prompts}: a peer needs one, and at least a token in each")
        answer = self.child.ask({"mode": self.mode, "prompts": prompts, "max_new_tokens": n})
        lengths = [len(tokens) for tokens in answer.get("tokens", [])]
        if lengths != [n] * len(prompts):
            why = answer.get("refused", f"{lengths} tokens came where {len(prompts)} x {n} were asked for")
            raise ValueError(f"{self.mode}: {why}")
        return list(map(generation, answer["tokens"], answer["token_seconds"]))


def generation(tokens: list[int], token_seconds: list[float]) -> Generation:
    """A row of a peer. token_seconds: of each token since the one before (the call); 0.0 where it came with that."""
    out = Generation(tokens=tokens, finish_reason="length")
    stats, first = out.stats, token_seconds[0]
    stats.plain, stats.token_seconds = len(tokens), token_seconds
    stats.first_token_seconds, stats.seconds = first, sum(token_seconds)
    # a peer reads the prompt and takes the first step in one pass, ours in two: that step is charged like the others
    n_first = 1 + sum(1 for _ in itertools.takewhile(lambda seconds: seconds == 0.0, token_seconds[1:]))
    if len(tokens) > n_first:
        step = (stats.seconds - first) / (len(tokens) - n_first)
        stats.prefill_seconds = max(first - step * n_first, 0.0)
    return out


def launch(
    command: list[str], name: str, limit: float, environment: dict[str, str] | None = None
) -> tuple[dict[str, Peer], list[str]]:
    """The modes of one program, and a line for each that is missing; none leaves no process."""
    child = Child(command, name, limit, environment)
    try:
        answer = child.ask()
    except OSError as error:
        return {}, [str(error)]
    peers = {mode: Peer(child, mode) for mode in answer.get("modes", [])}
    if not peers:
        child.close()
    return peers, answer.get("skipped") or ([f"{name}: {answer['missing']}"] if "missing" in answer else [])


def start(
    names, *, model: str, draft: str | None = None, dtype: str, threads: int, device: str, limit: float = 900.0
) -> tuple[dict[str, Peer], list[str]]:
    """Start engines of ENGINES, one after another: (mode -> Peer, one line for each engine or mode that is missing).

    model, draft: what load_checkpoint takes; draft a small model or None. dtype: of DTYPES, int8, int4 or auto.
    threads: of each. limit: seconds that loading, or an answer, may take. ValueError for names that are unknown.
    """
    strange = [name for name in names if name not in ENGINES]
    if strange:
        raise ValueError(f"peers holds {strange[0]!r}: choose {', '.join(ENGINES)}")
    if threads < 1:
        raise ValueError(f"threads is {threads}: give at least 1, such as torch.get_num_threads()")
    options = json.dumps({"model": str(model), "draft": draft, "dtype": dtype, "threads": threads, "device": device})
    # GNU's threads wait busily for some milliseconds, then sleep: less would slow the peer, more burn a core while
    # others are measured. Intel's wait for 200 unless told otherwise.
    environment = {name: x for name, x in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment |= {"OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "1"}
    peers, skipped = {}, []
    try:
        for name in names:
            found, lines = launch([sys.executable, __file__, name, options], name, limit, environment)
            peers, skipped = peers | found, skipped + lines
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return peers, skipped


# ---------------------------------------------------------------------------------------------------------- the child

Decode = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]]]]  # prompts, n -> tokens, seconds


class Clock:
    """Seconds of each token since the one before it. To transformers it is a streamer."""

    def __init__(self):
        self.seconds, self.prompt_seen, self.last = [], False, time.perf_counter()

    def tick(self, n_tokens: int = 1) -> None:
        """n_tokens have just come at once."""
        now = time.perf_counter()
        self.seconds += ([now - self.last] + [0.0] * (n_tokens - 1))[:n_tokens]
        self.last = now

    def put(self, tokens: torch.Tensor) -> None:
        """The prompt (B, T) to begin with; then (B,) of a step, or (1, n) of a round."""
        if self.prompt_seen:
            self.tick(tokens.shape[1] if tokens.dim() == 2 else 1)
        self.prompt_seen = True

    def end(self) -> None:
        pass


def loaded(options: dict, name: str, device: str | None = None) -> GPT:
    """A model for engines that know no quantisation of ours."""
    if QUANTISED.get(options["dtype"]):
        raise ValueError(f"it cannot have {options['dtype']} weights: give a dtype")
    return load_checkpoint(name, device or options["device"], options["dtype"])[0]


def fit(prompts: list[list[int]], n: int, context: int, one: bool) -> None:
    """ValueError where a mode cannot decode n tokens for each prompt; one: at a time."""
    longest = max(map(len, prompts))
    if longest + n > context:
        raise ValueError(f"{longest} tokens and {n} more do not fit into its context of {context}")
    if one and len(prompts) > 1:
        raise ValueError(f"it decodes one prompt at a time, not {len(prompts)}")


THEIR_NAMES = {
    "gpt2": {"token_embedding": ["wte"], "position_embedding": ["wpe"], "final_norm": ["ln_f"],
             "attn_norm": ["ln_1"], "qkv": ["attn.c_attn"], "attn_out": ["attn.c_proj"],
             "mlp_norm": ["ln_2"], "up": ["mlp.c_fc"], "down": ["mlp.c_proj"]},
    "llama": {"token_embedding": ["embed_tokens"], "final_norm": ["norm"],
              "attn_norm": ["input_layernorm"], "qkv": [f"self_attn.{x}_proj" for x in "qkv"],
              "attn_out": ["self_attn.o_proj"], "mlp_norm": ["post_attention_layernorm"],
              "up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]},
}  # fmt: skip


def to_transformers(model: GPT):
    """The same decoder as a GPT2LMHeadModel, LlamaForCausalLM or Qwen2ForCausalLM (a Llama with biases), without exits.

    Weights are shared where the layout is the same; vocabulary padding is left out. ValueError where it has none.
    """
    transformers = importlib.import_module("transformers")
    shape, n_used, gpt2 = model.config, model.config.n_vocab_used, model.config.arch == "gpt2"
    common = {
        "vocab_size": n_used, "hidden_size": shape.n_embd, "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head, "max_position_embeddings": shape.block_size,
        "tie_word_embeddings": shape.tie_weights,
        "bos_token_id": None, "eos_token_id": None,  # a stop token would be masked, or end the text
    }  # fmt: skip
    if gpt2:
        if shape.n_kv_head != shape.n_head or shape.head_dim * shape.n_head != shape.n_embd or not shape.qkv_bias:
            raise ValueError("it has no GPT-2 with heads or biases like these")
        theirs = transformers.GPT2Config(n_inner=shape.n_hidden, layer_norm_epsilon=shape.norm_eps, **common)
        kind, trunk, layers, sizes = transformers.GPT2LMHeadModel, "transformer.", "h", {}
    else:
        scaling, n_kv = shape.rope_scaling or {}, shape.n_kv_head * shape.head_dim
        family = "Qwen2" if shape.qkv_bias else "Llama"
        theirs = getattr(transformers, f"{family}Config")(
            intermediate_size=shape.n_hidden, num_key_value_heads=shape.n_kv_head, head_dim=shape.head_dim,
            rms_norm_eps=shape.norm_eps, **common,
            rope_parameters={"rope_type": scaling.get("type", "default"), "rope_theta": shape.rope_theta, **scaling},
        )  # fmt: skip
        kind, trunk, layers = getattr(transformers, f"{family}ForCausalLM"), "model.", "layers"
        sizes = {"qkv": (shape.n_head * shape.head_dim, n_kv, n_kv), "up": (shape.n_hidden, shape.n_hidden)}
    state = {"lm_head.weight": (model.token_embedding if model.output is None else model.output).weight[:n_used]}
    for name, weight in model.named_parameters():  # "blocks.3.qkv.weight", "final_norm.weight"
        *block, part, leaf = name.split(".")
        if block[:1] == ["exits"] or part == "output":
            continue
        weight = weight[:n_used] if part == "token_embedding" else weight
        weight = weight.T.contiguous() if gpt2 and block and weight.dim() == 2 else weight  # its Conv1D has (in, out)
        at = f"{trunk}{layers}.{block[1]}." if block else trunk
        parts = weight.split(sizes.get(part, weight.shape[0]))
        state |= {f"{at}{x}.{leaf}": own for x, own in zip(THEIR_NAMES[shape.arch][part], parts)}
    with torch.device("meta"):
        peer = kind(theirs)
    peer.load_state_dict({name: x.detach() for name, x in state.items()}, assign=True)
    peer.tie_weights()
    if not gpt2:
        peer.model.rotary_emb = type(peer.model.rotary_emb)(theirs).to(model.device)  # its buffers are no weights
    return peer.eval().requires_grad_(False)


def transformers_modes(options: dict) -> dict[str, Decode]:
    """Hugging Face's generate: plain, and drafts by lookup, by a small model, and by the first exit's layers.

    How many a model drafts is left to its defaults; an exit's layers draft with the final norm, not the exit's own.
    """
    transformers = importlib.import_module("transformers")
    model = loaded(options, options["model"])
    shape, device, peer = model.config, model.device, to_transformers(model)

    def mode(**drafting) -> Decode:
        def decode(prompts, n):
            fit(prompts, n, shape.block_size, one=bool(drafting))
            width, clock = max(map(len, prompts)), Clock()
            ids = torch.tensor([[0] * (width - len(x)) + x for x in prompts], device=device)
            mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts], device=device)
            out = peer.generate(
                ids, attention_mask=mask, do_sample=False, use_cache=True, min_new_tokens=n, max_new_tokens=n,
                pad_token_id=0, streamer=clock, **drafting,
            )  # fmt: skip
            return out[:, width:].tolist(), [clock.seconds] * len(prompts)

        return decode

    name = f"transformers {transformers.__version__}"
    modes = {name: mode(), f"{name}, lookup k={LOOKUP}": mode(prompt_lookup_num_tokens=LOOKUP)}
    if options["draft"]:
        modes[f"{name}, assistant"] = mode(assistant_model=to_transformers(loaded(options, options["draft"])))
    if shape.exit_layers and shape.arch == "llama":  # its GPT-2 runs all layers, whatever it is asked
        modes[f"{name}, exit {shape.exit_layers[0]} drafts"] = mode(assistant_early_exit=shape.exit_layers[0])
    return modes


def llama_cpp_modes(options: dict) -> dict[str, Decode]:
    """llama.cpp through llama-cpp-python on the same GGUF file, in its own precision: plain, and prompt lookup."""
    llama_cpp, drafting = map(importlib.import_module, ("llama_cpp", "llama_cpp.llama_speculative"))
    file, threads = find_checkpoint(options["model"]), options["threads"]
    if file.suffix != ".gguf":
        raise ValueError(f"{options['model']} is no GGUF file")
    on_cpu = options["device"] == "cpu" or not torch.cuda.is_available()

    def mode(draft=None) -> Decode:
        peer = llama_cpp.Llama(
            str(file), n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0 if on_cpu else -1,
            draft_model=draft, logits_all=draft is not None, verbose=False,
        )  # fmt: skip

        def decode(prompts, n):
            fit(prompts, n, 2048, one=True)
            peer.reset()  # or it would not read again what the request before had in common
            tokens, clock = [], Clock()
            for token in itertools.islice(peer.generate(prompts[0], temp=0.0, top_k=1, repeat_penalty=1.0), n):
                clock.tick()
                tokens.append(token)
            return [tokens], [clock.seconds]

        return decode

    name, lookup = f"llama.cpp {llama_cpp.__version__}", drafting.LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP)
    return {name: mode(), f"{name}, lookup k={LOOKUP}": mode(lookup)}


def vllm_modes(options: dict) -> dict[str, Decode]:
    """vLLM: plain, and n-gram speculation. Minimal, and never run so far: it needs a GPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine in this process, beside our clock
    vllm = importlib.import_module("vllm")
    if not torch.cuda.is_available():
        raise ValueError("it needs a GPU; there is none")
    model = loaded(options, options["model"], "cpu")

    def mode(folder: str, speculation: dict | None = None) -> Decode:
        engine = vllm.LLM(
            folder, skip_tokenizer_init=True, speculative_config=speculation, enable_prefix_caching=False,
            gpu_memory_utilization=0.3,
        ).llm_engine  # fmt: skip

        def decode(prompts, n):
            fit(prompts, n, model.config.block_size, one=speculation is not None)
            asked = vllm.SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            tokens, clocks = [[] for _ in prompts], [Clock() for _ in prompts]
            for row, ids in enumerate(prompts):
                engine.add_request(str(row), {"prompt_token_ids": ids}, asked)
            while engine.has_unfinished_requests():
                for out in engine.step():
                    row, ids = int(out.request_id), list(out.outputs[0].token_ids)
                    clocks[row].tick(len(ids) - len(tokens[row]))
                    tokens[row] = ids
            return tokens, [clock.seconds for clock in clocks]

        return decode

    name = f"vllm {vllm.__version__}"
    lookup = {"method": "ngram", "num_speculative_tokens": LOOKUP, "prompt_lookup_max": 4}
    with tempfile.TemporaryDirectory() as folder:
        to_transformers(model).save_pretrained(folder)
        return {name: mode(folder), f"{name}, lookup k={LOOKUP}": mode(folder, lookup)}


def floor_modes(options: dict) -> dict[str, Decode]:
    """No decoder: memory of the size of the weights that a token needs, read once a step. No loop can be faster."""
    bits = options["dtype"] if QUANTISED.get(options["dtype"]) else None
    model, _ = load_checkpoint(options["model"], options["device"], "bfloat16" if bits else options["dtype"], bits)
    model.set_exits(())
    model.position_embedding = None
    if model.output is not None:
        model.token_embedding = None
    words = torch.ones(model.weight_bytes() // 8, dtype=torch.int64, device=model.device)

    def decode(prompts, n):
        tokens, clock = [], Clock()
        for _ in range(n):
            tokens.append(int(words.sum() < 0))
            clock.tick()
        return [tokens] * len(prompts), [clock.seconds] * len(prompts)

    return {"floor: weights read once a token": decode}


ENGINES = {  # name -> its modes, and how to install it
    "transformers": (
        transformers_modes,
        "pip install --no-deps transformers huggingface_hub tokenizers regex pyyaml packaging requests",
    ),
    "llama.cpp": (llama_cpp_modes, "pip install llama-cpp-python, which compiles for some minutes"),
    "vllm": (vllm_modes, "pip install vllm, on a machine with a GPU"),
    "floor": (floor_modes, ""),
}


def listen(requests: queue.SimpleQueue) -> None:
    with open(0, encoding="utf-8", closefd=False) as stdin:
        for line in stdin:
            requests.put(json.loads(line))
    os._exit(0)  # whatever the main thread does: nobody waits for its answer


def warm(modes: dict[str, Decode]) -> list[str]:
    """Run each mode once; those that fail go, with a line for each."""
    skipped = []
    for name, decode in list(modes.items()):
        try:
            decode([[0] * 8], 4)
        except Exception as error:  # noqa: BLE001 - of somebody else's library
            del modes[name]
            skipped.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return skipped


def main(argv: list[str]) -> None:
    """Load, warm up, and answer until stdin closes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print, from C too, must not stand between the answers

    def answer(**fields) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    name, options, requests = argv[0], json.loads(argv[1]), queue.SimpleQueue()
    threading.Thread(target=listen, args=(requests,), daemon=True).start()
    torch.set_num_threads(options["threads"])
    modes_of, remedy = ENGINES[name]
    try:
        modes = modes_of(options)
        skipped = warm(modes)
        answer(modes=list(modes), skipped=skipped)
    except ImportError as error:
        answer(missing=f"{remedy} ({error})")
    except ValueError as error:
        answer(missing=str(error))
    while True:
        request = requests.get()
        try:
            tokens, seconds = modes[request["mode"]](request["prompts"], request["max_new_tokens"])
            answer(tokens=tokens, token_seconds=seconds)
        except ValueError as error:
            answer(refused=str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
