"""The kernels compiled for GPUs that are not here: what they use, against what they may and against the stored table."""

import json

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

from aot import TARGETS, compile_cases, drift, events, hot_loop, stored_path, table

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
    assert [x.split()[0] for x in faults["greedy"]] == ["registers", "code_bytes"]
    assert faults["another kernel"] == ["_dot_kernel is not launched"]
    assert faults["raises"][0].startswith("RuntimeError") and "70000" in faults["wide grid"][0]
    if target == "sm_90":
        assert [x.split()[0] for x in faults["spilling"]] == ["stack", "spill"] and faults["wrong order"] == [
            "complaint"
        ]
        assert "large" not in faults
    else:  # the same launch, on a target with less shared memory than the 144 KB that it takes
        assert faults["large"] == [f"shared {144 << 10}, at most {TARGETS[target].shared}"]


@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
def test_figures_describe_the_machine_code(sample, target):
    dot = sample[target]["figures"]["dot / _dot_kernel"]
    assert dot["tensor"] > 0 and dot["load_128"] > 0 and dot["barrier"] > 0 and dot["shared"] > 0
    assert 16 < dot["hot_loop"] < dot["instructions"] and dot["warps"] == 4 and dot["stages"] == 3
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
    assert [x.split(":")[0] for x in drift(now, stored)] == [
        "dot / _dot_kernel",
        "large / _dot_kernel",
        "new",
        "scale / _scale_kernel",
    ]


def test_the_hot_loop_is_the_largest_that_holds_no_other_but_waits_count():
    wait = [".L_x_9:", "SYNCS", "BRA `(.L_x_9)"]
    inner = [".L_x_1:", *["FFMA"] * 20, *wait, "BRA `(.L_x_1)"]
    outer = [".L_x_0:", *["IADD"] * 50, *inner, "BRA `(.L_x_0)"]
    assert hot_loop([*outer, "EXIT", ".L_x_2:", "BRA `(.L_x_2)"]).count("FFMA") == 20
    assert hot_loop(outer).count("IADD") == 0
    assert hot_loop(["FADD", ".L_x_2:", "BRA `(.L_x_2)"]) == []
    assert events("st.global\nbar.sync\n\natom.global", S="st.global", B="bar.sync", T="atom") == "SBT"
