"""The kernels compiled ahead of time through their real launchers, on any machine, for GPUs that it does not have.

    python tests/aot.py                                the table of all cases on all targets
    python tests/aot.py --target sm_90 --case linear   some of them (part of a name)
    python tests/aot.py --write                        all, stored for this Triton version; test_aot.py compares with it

A stand-in driver reports the target, so that a launcher that is called with CPU tensors runs whole: its checks and grids,
Triton's specialisation of the arguments, the compiler and the assembler. Only the launch itself is left out. Then the
machine code is read. The cases are in aot_cases.py.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

HERE = Path(__file__).parent


class Target(NamedTuple):
    backend: str
    arch: int | str
    warp_size: int
    shared: int  # bytes that one program can have; the compiler does not ask


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10),  # A100
    "sm_90": Target("cuda", 90, 32, 227 << 10),  # H100, H200
    "sm_100": Target("cuda", 100, 32, 227 << 10),  # B200
    "sm_120": Target("cuda", 120, 32, 99 << 10),  # RTX 5090
    "gfx942": Target("hip", "gfx942", 64, 64 << 10),  # MI300X
}
NVIDIA = tuple(name for name, target in TARGETS.items() if target.backend == "cuda")


class Need(NamedTuple):
    """What a kernel has to show, beside no stack, no spills and the target's shared memory."""

    registers: int = 255  # per thread, at most
    code_kb: int = 64  # at most
    wide_loads: bool = False  # some of 16 bytes per thread
    tensor_cores: bool = False
    ops_per_weight: float = 0  # at most, on NVIDIA; of the hot loop, where tensor cores multiply 16 rows by weights
    weights: int = 0  # that one turn of the hot loop takes: only where tensor cores have other work too


class Case:
    """A call of a launcher, and what its kernels need: Case(call, _some_kernel=Need(...)).

    check(launches) runs where the case is compiled and returns complaints; a launch has .kernel, .ptx (AMD: the assembly),
    .grid, .signature, .constants and .figures; see events().
    """

    def __init__(self, call: Callable[[], None], targets=tuple(TARGETS), check=lambda launches: [], **needs: Need):
        self.call, self.targets, self.check, self.needs = call, targets, check, needs


def events(text: str, **patterns: str) -> str:
    """The order of things in a text, a letter per line: events(ptx, S="st.global", B="bar.sync") -> "SSBS"."""
    letters = []
    for line in text.splitlines():
        letters += [letter for letter, pattern in patterns.items() if re.search(pattern, line)][:1]
    return "".join(letters)


# ----------------------------------------------------------------------------------------------------------------------
# Reading machine code

SASS = {
    "load_128": r"^LDG(STS)?\S*\.(128|256)",
    "load_64": r"^LDG(STS)?\S*\.64",
    "load_32": r"^LDG(STS)?(?!\S*\.(256|128|64|[US](8|16))\b)",
    "load_narrow": r"^LDG\S*\.[US](8|16)\b",
    "tensor": r"^(HMMA|IMMA|QMMA|OMMA|HGMMA|IGMMA|QGMMA|UTC\wMMA)",
    "barrier": r"^BAR\b",
    "spill": r"^(LDL|STL)\b",
}
GCN = {
    "load_128": r"^(global|buffer)_load_\w*x4\b",
    "load_64": r"^(global|buffer)_load_\w*x[23]\b",
    "load_32": r"^(global|buffer)_load_\w*(dword|b32)\b",
    "load_narrow": r"^(global|buffer)_load_\w*(byte|short|[iu]8|[iu]16)",
    "tensor": r"^v_s?mfma",
    "barrier": r"^s_barrier",
    "spill": r"^scratch_(load|store)",
}


def nvidia_lines(sass: str) -> list[str]:
    """Instructions without addresses and predicates, and labels (`name:`), in order."""
    lines = []
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", line)
        if label:
            lines.append(label[1] + ":")
        elif instruction and not instruction[1].startswith("NOP"):
            lines.append(instruction[1])
    return lines


def amd_lines(assembly: str) -> list[str]:
    body = assembly[: assembly.find(".section", assembly.find("s_endpgm"))]
    lines = [re.sub(r"\s*;.*", "", line).strip() for line in body.splitlines()]
    return [line for line in lines if re.match(r"\.LBB\w+:$|[a-z]+_\w+", line)]


def hot_loop(lines: list[str]) -> list[str]:
    """Of the loops that hold no other of 16 instructions or more (small ones wait for memory): the one with most
    tensor-core instructions, or the largest."""
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    jumps = ((re.match(r"(?:BRA|s_cbranch|s_branch).*?(\.L\w+)", line), at) for at, line in enumerate(lines))
    loops = [(labels.get(jump[1], at), at) for jump, at in jumps if jump]
    loops = [(first, last) for first, last in loops if last - first > 1]  # not the jump to itself behind a kernel's end

    def holds_another(first, last):
        return any(first <= f and l <= last and 16 <= l - f < last - first for f, l in loops)

    bodies = [[x for x in lines[f:l] if not x.endswith(":")] for f, l in loops if not holds_another(f, l)]
    return max(bodies, default=[], key=lambda body: (sum(map(is_tensor, body)), len(body)))


def is_tensor(instruction: str) -> bool:
    return any(re.match(patterns["tensor"], instruction) for patterns in (SASS, GCN))


def read_nvidia(asm, tools: Path) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        commands = [tools / "cuobjdump", "-res-usage", file.name], [tools / "nvdisasm", "-c", file.name]
        usage, sass = (subprocess.run(x, capture_output=True, text=True, check=True).stdout for x in commands)
    registers, stack = map(int, re.search(r"REG:(\d+).*?STACK:(\d+)", usage).groups())
    return {"registers": registers, "stack": stack} | count(nvidia_lines(sass), SASS, 32)


def read_amd(asm, tools: Path) -> dict:
    def value(name: str) -> int:
        return int(re.search(rf"{name}\W+(\d+)", asm["amdgcn"])[1])

    figures = {"registers": value(r"\.vgpr_count"), "stack": value(r"\.private_segment_fixed_size")}
    figures |= count(amd_lines(asm["amdgcn"]), GCN, 64) | {"code_bytes": value("codeLenInByte")}
    figures["spill"] += value(r"\.vgpr_spill_count") + value(r"\.sgpr_spill_count")
    return figures


def weights(instruction: str) -> int:
    """Elements of the second operand, columns x depth, that a warp's tensor-core instruction takes."""
    if m := re.match(r"HMMA\.168(8|16)\b", instruction):
        return 8 * int(m[1])
    m = re.match(r"HGMMA\.\d+x(\d+)x(\d+)|v_mfma\w*_\d+x(\d+)x(\d+)", instruction)
    return 0 if m is None else int(m[1]) * int(m[2]) // 4 if m[1] else int(m[3]) * int(m[4])  # HGMMA: four warps


def count(lines: list[str], patterns: dict[str, str], lanes: int) -> dict:
    instructions, loop = [line for line in lines if not line.endswith(":")], hot_loop(lines)
    figures = {name: sum(bool(re.match(pattern, x)) for x in instructions) for name, pattern in patterns.items()}
    body = loop if any(map(is_tensor, loop)) else instructions  # else the compiler has unrolled the whole loop
    figures["ops_per_weight"] = round(lanes * len(body) / max(sum(map(weights, body)), 1), 2)
    n = len(instructions)
    return figures | {"instructions": n, "hot_loop": len(loop), "code_bytes": 16 * n}  # 16: NVIDIA's


# ----------------------------------------------------------------------------------------------------------------------
# Compiling, in a process of its own for each target: Triton decides at import between interpreter and compiler


class StandInDriver:
    """What Triton asks a driver before it launches; the launch does nothing."""

    def __init__(self, target: Target):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(target.backend, target.arch, target.warp_size)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 30, "multiprocessor_count": 132},
            load_binary=lambda *args: (None, None, 0, 0, 1024),  # module, function, registers, spills, threads
            unload_module=lambda module: None,
        )

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device) -> int:
        return 0

    def launcher_cls(self, source, metadata):
        return lambda *args: None


def compile_launch(target: str, call: Callable[[], None]) -> list[SimpleNamespace]:
    """Run call() for the target and read what its launches compiled to: one entry per kernel and specialisation."""
    import triton
    from triton.runtime.jit import JITFunction

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    launches, run = {}, JITFunction.run

    def recorded(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=warmup, **kwargs)
        assert not callable(grid) and all(n <= 65535 for n in grid[1:]), f"grid {grid} of {kernel.name}"
        read = read_nvidia if "cubin" in kernel.asm else read_amd
        if kernel.hash not in launches:
            metadata, source = kernel.metadata, kernel.src
            figures = read(kernel.asm, tools) | {"shared": metadata.shared}
            launches[kernel.hash] = SimpleNamespace(
                kernel=kernel.name,
                grid=tuple(grid),
                signature=source.signature,
                constants=source.constants,
                figures=figures | {"warps": metadata.num_warps, "stages": metadata.num_stages},
                ptx=kernel.asm.get("ptx") or kernel.asm["amdgcn"],
            )
        return kernel

    triton.runtime.driver.set_active(StandInDriver(TARGETS[target]))
    with mock.patch.object(JITFunction, "run", recorded):
        call()
    return list(launches.values())


def faults(target: str, figures: dict, need: Need) -> list[str]:
    most = {"stack": 0, "spill": 0, "shared": TARGETS[target].shared, "registers": need.registers}
    most |= {"code_bytes": need.code_kb << 10, "ops_per_weight": need.ops_per_weight if target in NVIDIA else math.inf}
    found = [f"{name} {figures[name]}, at most {limit}" for name, limit in most.items() if figures[name] > limit]
    found += ["no 16-byte load"] * (need.wide_loads and not figures["load_128"])
    return found + ["no tensor-core instruction"] * (need.tensor_cores and not figures["tensor"])


def work(target: str, module: str, part: str) -> dict:
    """Figures and faults of every case, {"case / kernel": figures}, {"case / kernel": [fault]}: what a worker prints."""
    figures, complaints = {}, {}
    for name, case in importlib.import_module(module).CASES.items():
        if part not in name or target not in case.targets:
            continue
        try:
            launches = compile_launch(target, case.call)
            complaints[name] = list(case.check(launches))
        except Exception as error:  # noqa: BLE001 (the other cases still have something to say)
            complaints[name] = [f"{type(error).__name__}: " + " ".join(str(error).split("\n")[-3:])]
            continue
        missing = case.needs.keys() - {launch.kernel for launch in launches}
        missing |= set() if launches else {"any kernel"}  # the launcher has taken its reference
        complaints[name] += [f"{kernel} is not launched" for kernel in sorted(missing)]
        for launch in launches:
            key, need = f"{name} / {launch.kernel}", case.needs.get(launch.kernel, Need())
            same = sum(k.split(" #")[0] == key for k in figures)
            key += f" #{same + 1}" if same else ""  # another specialisation
            figures[key] = f = launch.figures
            if not need.ops_per_weight:
                f["ops_per_weight"] = 0
            elif need.weights:
                f["ops_per_weight"] = round(TARGETS[target].warp_size * f["warps"] * f["hot_loop"] / need.weights, 2)
            complaints[key] = faults(target, f, need)
    return {"figures": figures, "faults": {key: found for key, found in complaints.items() if found}}


def compile_cases(targets, module: str = "aot_cases", part: str = "", n_workers: int = 2) -> dict[str, dict]:
    """{target: {"figures": ..., "faults": ...}}, a process per target."""

    def worker(target: str) -> dict:
        command = [sys.executable, __file__, "--worker", "--target", target, "--module", module, "--case", part]
        with tempfile.TemporaryDirectory() as cache:  # what is measured is compiled now
            environment = os.environ | {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            environment.pop("TRITON_INTERPRET", None)
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{target}: {done.stderr[-3000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(n_workers) as pool:
        return dict(zip(targets, pool.map(worker, targets)))


# ----------------------------------------------------------------------------------------------------------------------
# The table and its file


def stored_path() -> Path:
    minor = ".".join(importlib.metadata.version("triton").split(".")[:2])  # another assembler, other figures
    return HERE / "data" / f"aot-triton-{minor}.json"


def drift(now: dict, stored: dict) -> list[str]:
    """Figures of one target that moved by more than 10%, and kernels that came or went."""
    found = [f"{key}: not in the stored table" for key in now if key not in stored]
    found += [f"{key}: only in the stored table" for key in stored if key not in now]
    for key in now.keys() & stored.keys():
        for name in ("registers", "hot_loop", "load_128", "shared", "ops_per_weight"):
            new, old = now[key][name], stored[key][name]
            if abs(new - old) > 0.1 * old:
                found.append(f"{key}: {name} {old} -> {new}")
    return sorted(found)


def table(results: dict[str, dict]) -> str:
    head = ["case / kernel", "registers", "stack", "spills", "shared KB", "warps", "stages", "instructions", "code KB"]
    head += ["hot loop", "loads 16/8/4/less", "tensor", "ops/weight", "barriers"]
    lines = []
    for target, result in results.items():
        lines += [f"### {target}", "", "| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for key, f in result["figures"].items():
            cells = [key, *(f[name] for name in ("registers", "stack", "spill")), f"{f['shared'] / 1024:.1f}"]
            cells += [f["warps"], f["stages"], f["instructions"], f"{f['code_bytes'] / 1024:.1f}", f["hot_loop"]]
            cells += ["/".join(str(f[name]) for name in ("load_128", "load_64", "load_32", "load_narrow"))]
            cells += [f["tensor"], f["ops_per_weight"] or "", f["barrier"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    return "\n".join(lines)


def summary(results: dict[str, dict]) -> str:
    """{target: figures} as the README shows them: registers / shared KB of the kernels that do the work, each once."""
    lines = [
        "| case | kernel | ops/weight | " + " | ".join(results) + " |",
        "|---|---|---:" + "|---:" * len(results) + "|",
    ]
    seen = set()
    for key in next(iter(results.values())):
        case, kernel = key.split(" / ")
        cells = [result.get(key) for result in results.values()]
        ops = results["sm_90"][key]["ops_per_weight"] or ""
        cells = [f"{f['registers']} / {f['shared'] / 1024:.0f}" if f else "-" for f in cells]
        if (
            kernel in ("_linear_kernel", "_attention_kernel", "_accept_kernel", "_exit_kernel")
            and str(cells) not in seen
        ):
            lines.append(f"| {case} | `{kernel}` | {ops} | " + " | ".join(cells) + " |")
        seen.add(str(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append", help="one target, repeatable (default: all)")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--write", action="store_true", help=f"store the table as {stored_path().relative_to(HERE.parent)}"
    )
    parser.add_argument("--module", default="aot_cases", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write and (args.target or args.case):
        parser.error("--write stores the whole table: leave out --target and --case")
    if args.worker:
        sys.path.insert(0, str(HERE.parent))
        print(json.dumps(work(args.target[0], args.module, args.case)))
        return 0
    results = compile_cases(args.target or TARGETS, args.module, args.case)
    if not any(result["figures"] or result["faults"] for result in results.values()):
        parser.error(f"--case {args.case}: no such case on these targets; aot_cases.py names them")
    print(table(results))
    found = [f"{target}: {key}: {x}" for target, r in results.items() for key, xs in r["faults"].items() for x in xs]
    print("\n".join(found) or "no faults")
    if args.write:
        figures = {target: result["figures"] for target, result in results.items()}
        stored_path().write_text(json.dumps(figures, indent=1) + "\n")
        print(summary(figures))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
