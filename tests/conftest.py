import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
torch.set_num_threads(1)  # tiny operations: a second thread only waits

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
