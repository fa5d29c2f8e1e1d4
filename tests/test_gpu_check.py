"""The script for a machine with a GPU, as far as a machine without one can run it: nothing in it should fail there first."""

import subprocess
import sys

import gpu_check
import pytest
import torch
from gpu_check import small_calls

pytest.importorskip("triton", reason="the kernels need Triton")


@torch.inference_mode()
def test_numbers_are_the_recorded_ones_and_within_their_limits_and_a_wrong_kernel_is_not(monkeypatch):
    """A card is compared with the record: gpu_check.py --record re-makes it when a kernel was changed on purpose."""
    monkeypatch.setattr(gpu_check, "LIMITS", {torch.float32: 1e-6})
    rows = gpu_check.check_numbers("cpu")
    assert len(rows) == len(small_calls()) and all(row["ok"] and "from_interpreter" in row for row in rows.values())
    products = {name: run for name, run in small_calls().items() if name.startswith("linear")}
    linear = gpu_check.kernels.linear
    monkeypatch.setattr(gpu_check, "small_calls", lambda: products)
    monkeypatch.setattr(gpu_check.kernels, "linear", lambda *args, **named: linear(*args, **named).mul(1 + 1e-5))
    wrong = gpu_check.check_numbers("cpu")
    assert len(wrong) == 6 and not any(row["ok"] for row in wrong.values())


@torch.inference_mode()
def test_the_law_is_kept_and_the_control_is_not():
    rows = gpu_check.check_law("cpu", n_draws=40_000, per_launch=20_000, impl="torch", shift=0.5)
    assert [row["ok"] for row in rows.values()] == [True, True]


@torch.inference_mode()
def test_every_section_runs(monkeypatch):
    """On the references, with a clock that stands: the code around the measurements."""
    shapes = {
        "one": {"arch": "gpt2", "vocab_size": 64, "n_vocab_used": 60, "block_size": 128, "n_layer": 2, "n_head": 2, "n_embd": 32},
        "two": {
            "arch": "llama", "vocab_size": 64, "block_size": 128, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64,
            "n_hidden": 96, "tie_weights": False,
        },
    }  # fmt: skip
    shapes = {name: fields | {"exit_layers": (1,)} for name, fields in shapes.items()}
    monkeypatch.setattr(gpu_check, "SHAPES", shapes)
    monkeypatch.setattr(gpu_check, "replay_seconds", lambda calls: [call() for call in calls] and 1e-6)
    monkeypatch.setattr(gpu_check, "rotations", lambda n_bytes: 2)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = gpu_check.check_kernels("cpu", contexts=(96,), copied=1024)
    assert sum("attention" in name for name in rows) == 6 and sum("head" in name for name in rows) == 2 * (6 + 1)
    steps = gpu_check.check_steps("cpu", context=64, copied=1024)
    assert sum("loop" in name for name in steps) == 4
    assert all("torch.compile" in row["others_us"] for name, row in steps.items() if "plain step" in name)
    assert len(gpu_check.table("kernels", rows)) == len(rows) + 1


@torch.inference_mode()
def test_rounds_and_rows_are_compared(monkeypatch):
    tiny = {name: config for name, config in gpu_check.tiny_configs().items() if name == "llama"}
    monkeypatch.setattr(gpu_check, "tiny_configs", lambda: tiny)
    rows = gpu_check.check_rounds("cpu", impl="torch", n_new=6)
    assert len(rows) == 2 + 2 * 2 * 2 * 2 and all(row["ok"] for row in rows.values())


def test_without_a_gpu_it_is_one_line():
    done = subprocess.run([sys.executable, gpu_check.__file__], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "") or torch.cuda.is_available()
    wrong = subprocess.run(
        [sys.executable, gpu_check.__file__, "--only", "x"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2 and "'x'" in wrong.stderr


def test_a_section_that_breaks_is_reported_and_ends_nothing_else():
    assert gpu_check.apart("law", 60) == {"the section broke off": {"ok": False}} or torch.cuda.is_available()
    assert gpu_check.apart("law", 0) == {"the time was up": {"ok": None}}
