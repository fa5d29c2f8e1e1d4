"""The kernels compiled for GPUs that are not here: what they use, against what they may and against the stored table."""

import json
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

import aot
import gpu_check
import planted
from aot import TARGETS, compile_cases, drift, events, hot_loop, stored_path, table, weights

REMAKE = "if the change is meant: python tests/aot.py --write"


@pytest.fixture(scope="module")
def results():
    return compile_cases(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_their_targets(results, target):
    """No stack, no spills, shared memory and registers within their limits, wide loads and tensor cores where meant."""
    assert not results[target]["faults"]


@pytest.mark.parametrize("target", TARGETS)
def test_figures_are_those_of_the_stored_table(results, target):
    assert stored_path().exists(), f"no table for this version of Triton: {REMAKE}"
    stored = json.loads(stored_path().read_text())
    changes = drift(results[target]["figures"], stored.get(target, {}))
    assert not changes, "\n".join([*changes, REMAKE])


# ----------------------------------------------------------------------------------------------------------------------
# The instruments, on kernels whose faults are known


@pytest.fixture(scope="module")
def sample():
    return compile_cases(("sm_90", "sm_120", "gfx942"), "aot_sample")


def found(sample, target) -> dict[str, list[str]]:
    """Faults by case, the figures left out."""
    by_case = {}
    for key, faults in sample[target]["faults"].items():
        by_case.setdefault(key.split(" / ")[0], []).extend(faults)
    return by_case


@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
def test_planted_faults_are_found_and_sound_kernels_pass(sample, target):
    faults = found(sample, target)
    assert not {"scale", "dot", "ticket"} & faults.keys()
    assert faults["unaligned"] == ["no 16-byte load"]
    assert faults["no tensor cores"] == ["no tensor-core instruction"]
    over = ["registers", "code_bytes"] + ["ops_per_weight"] * (target != "gfx942")
    assert [x.split()[0] for x in faults["greedy"]] == over
    assert faults["another kernel"] == ["_dot_kernel is not launched"]
    assert faults["the reference"] == ["any kernel is not launched"]
    assert faults["raises"][0].startswith("RuntimeError") and "70000" in faults["wide grid"][0]
    if target == "sm_90":
        assert [x.split()[0] for x in faults["spilling"]] == ["stack", "spill"]
        assert faults["wrong order"] == ["complaint"]
        assert "large" not in faults
    else:  # the same launch, on a target with less shared memory than the 144 KB that it takes
        assert faults["large"] == [f"shared {144 << 10}, at most {TARGETS[target].shared}"]


@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
def test_figures_describe_the_machine_code(sample, target):
    dot = sample[target]["figures"]["dot / _dot_kernel"]
    assert dot["tensor"] > 0 and dot["load_128"] > 0 and dot["barrier"] > 0 and dot["shared"] > 0
    assert 1 < dot["ops_per_weight"] < 5 and 16 < dot["hot_loop"] < dot["instructions"]
    assert (dot["warps"], dot["stages"]) == (4, 3)
    scale = sample[target]["figures"]["scale / _scale_kernel"]
    assert scale["hot_loop"] == scale["tensor"] == scale["shared"] == scale["load_32"] == 0  # no loop, one wide stream
    narrow = sample[target]["figures"]["unaligned / _scale_kernel"]
    assert narrow["load_32"] == 8 * scale["load_128"]  # twice the block, four times the loads
    lines = table(sample).splitlines()
    assert sum(line.startswith("| dot / _dot_kernel |") for line in lines) == 3


def test_drift_beyond_a_tenth_and_missing_cases_are_found(sample):
    stored = sample["sm_90"]["figures"]
    assert not drift(stored, stored)
    now = json.loads(json.dumps(stored))
    now["dot / _dot_kernel"]["registers"] *= 1.09
    assert not drift(now, stored)
    now["dot / _dot_kernel"]["registers"] *= 1.1
    now["scale / _scale_kernel"]["load_128"] = 0
    now["new"] = now.pop("large / _dot_kernel")
    moved = ["dot / _dot_kernel", "large / _dot_kernel", "new", "scale / _scale_kernel"]
    assert [x.split(":")[0] for x in drift(now, stored)] == moved


def test_the_hot_loop_is_the_largest_without_another_inside_or_the_one_with_tensor_cores():
    wait = [".L_x_9:", "SYNCS", "BRA `(.L_x_9)"]
    inner = [".L_x_1:", *["FFMA"] * 20, *wait, "BRA `(.L_x_1)"]
    outer = [".L_x_0:", *["IADD"] * 50, *inner, "BRA `(.L_x_0)"]
    assert hot_loop(outer).count("FFMA") == 20 and "IADD" not in hot_loop(outer)
    small = [".L_x_3:", "HMMA.16816.F32", "HMMA.16816.F32", "BRA `(.L_x_3)"]
    assert hot_loop([*outer, *small]) == ["HMMA.16816.F32"] * 2
    assert hot_loop(["FADD", ".L_x_2:", "BRA `(.L_x_2)"]) == []  # behind the end of every kernel


def test_events_are_letters_in_order():
    assert events("st.global\nbar.sync\n\natom.global", S="st.global", B="bar.sync", T="atom") == "SBT"


def test_weights_of_tensor_core_instructions():
    shapes = {"HMMA.16816.F32.BF16 R4": 128, "HMMA.1688.F32.TF32 R4": 64, "HGMMA.64x32x16.F32 R4": 128, "FFMA R4": 0}
    shapes |= {"v_mfma_f32_16x16x16_bf16 a[0:3]": 256, "v_mfma_f32_32x32x8_f16 v[0:15]": 256}
    assert {name: weights(name) for name in shapes} == shapes


@pytest.mark.parametrize(
    "command, arguments, said",
    [
        (aot, "--case nosuch --target sm_90", "nosuch"),
        (aot, "--write --case linear", "--write"),
        (gpu_check, "--only nosuch", "nosuch"),
        (planted, "--only nosuch", "nosuch"),
        (gpu_check, "--record", "TRITON_INTERPRET=1"),
    ],
)
def test_commands_refuse_what_they_cannot_do(monkeypatch, capsys, command, arguments, said):
    monkeypatch.setattr(sys, "argv", [command.__name__, *arguments.split()])
    monkeypatch.setattr(aot, "compile_cases", lambda targets, *_: {t: {"figures": {}, "faults": {}} for t in targets})
    with pytest.raises(SystemExit) as ended:
        command.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and said in err.splitlines()[-1]
