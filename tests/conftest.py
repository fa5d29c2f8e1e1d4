import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
torch.set_num_threads(1)  # tiny operations: a second thread only waits


@pytest.fixture(autouse=True)
def no_kill_switch(monkeypatch):
    """What the reader's shell exports must not decide what the tests see."""
    monkeypatch.delenv("NANOSPEC_PLAIN", raising=False)
