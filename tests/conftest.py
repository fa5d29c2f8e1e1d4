import importlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
torch.set_num_threads(1)  # tiny operations: a second thread only waits
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children

# Triton decides when a function is decorated whether it is interpreted, so the kernels are imported under the variable.
# Then it goes: impl="auto" on CPU tensors is the reference again, and impl="triton" the interpreted kernel.
os.environ["TRITON_INTERPRET"] = "1"
import kernels  # noqa: F401

if importlib.util.find_spec("triton"):
    import interpreter

    interpreter.repair_bfloat16()
    interpreter.patch_language_once()
    importlib.import_module("triton.experimental.gluon")  # else at the first launch, where it looks for the variable
del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def no_kill_switch(monkeypatch):
    """What the reader's shell exports must not decide what the tests see."""
    monkeypatch.delenv("NANOSPEC_PLAIN", raising=False)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Checkpoints for the commands: a tiny target with a drafter, one with another tokenizer, one without; prompts."""
    from helpers import tiny_model, weaker

    from checkpoint import Tokenizer, save_checkpoint

    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, r"[\s\S]")
    target = tiny_model(dtype=torch.float32, poisoned=False, vocab_size=256)
    save_checkpoint(folder / "target", target, tokenizer)
    save_checkpoint(folder / "drafter", weaker(target), tokenizer)
    save_checkpoint(folder / "stranger", target, Tokenizer({bytes([255 - i]): i for i in range(256)}, r"[\s\S]"))
    save_checkpoint(folder / "mute", target)
    (folder / "keys.json").write_text(json.dumps({"texts": ["a", {"user": "b"}], "more": ["c"], "text": "abc"}))
    (folder / "prompts.json").write_text(json.dumps(["def f(x):", "import"]))
    return folder
