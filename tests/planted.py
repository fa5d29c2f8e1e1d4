"""Bugs planted one at a time in a copy of the repository, each of which one named test has to catch.

python tests/planted.py                     # all; about a minute
python tests/planted.py --only fence        # those whose name contains this
python tests/planted.py --out results/planted.json
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


class Bug(NamedTuple):
    name: str
    file: str
    right: str  # stands once in the file
    wrong: str
    catcher: str  # arguments of pytest, or of tests/aot.py


ATTENTION, SAMPLING, LINEAR, ROUNDS = (
    f"tests/{name}.py::"
    for name in ("test_triton_attention", "test_triton_sampling", "test_triton_linear", "test_rounds")
)
BITS = "test_a_row_has_the_same_bits_whatever_rides_along"
FENCE = "tests/aot.py --target sm_90 --case"
BUGS = [
    Bug("wrong mask edge", "kernels.py", "n[None, :] <= limit[:, None]", "n[None, :] < limit[:, None]",
        ATTENTION + "test_output_and_caches_equal_the_reference_and_nothing_else_is_touched"),
    Bug("values behind the length are loaded", "kernels.py", "v = tl.load(v_cache + at[:, None] * D + d, mask=mask, other=0)",
        "v = tl.load(v_cache + at[:, None] * D + d, mask=d < D, other=0)",
        ATTENTION + "test_output_and_caches_equal_the_reference_and_nothing_else_is_touched"),
    Bug("length-derived split", "kernels.py", '"CHUNK": CHUNK,', '"CHUNK": 64 if n_chunks < 3 else CHUNK,', ATTENTION + BITS),
    Bug("int32 offset", "kernels.py", "return page.to(tl.int64) * PAGE + position % PAGE", "return page * PAGE + position % PAGE",
        ATTENTION + "test_pages_beyond_2_31_elements_are_read_and_written"),
    Bug("missing fence in the page walk", "kernels.py",
        "path as an old one, and a row's bits do not depend on whether its keys came in this launch\n        tl.debug_barrier()",
        "path as an old one, and a row's bits do not depend on whether its keys came in this launch", FENCE + " attention"),
    Bug("no wait for the kernel before", "kernels.py", "        tl.extra.cuda.gdc_wait()", "        pass", FENCE + " residual"),
    Bug("shared random stream", "kernels.py", "tl.where(fell, 3, 0)", "tl.where(fell, 1, 0)", SAMPLING + "test_twin_equals_kernel"),
    Bug("no residual", "kernels.py", "residual = tl.where(prob > other, prob - other, 0.0)", "residual = prob",
        SAMPLING + "test_kernel_equals_reference"),
    Bug("probability 0 accepted", "kernels.py", "* draft_prob < target_prob) & offered\n        n = tl.min", "* draft_prob <= target_prob) & offered\n        n = tl.min",
        SAMPLING + "test_extreme_uniforms_never_emit_a_token_of_probability_zero"),
    Bug("the bonus is drawn with the round's noise", "kernels.py", "tl.where(fell, 3, 0), tl.where(fell, round, 0)",
        "tl.where(fell, 3, 0), round", SAMPLING + "test_kernel_equals_reference"),
    Bug("tile from the number of rows", "kernels.py", "(32, 64, 3) if data.shape[0] >= 4096", "(32, 64, 3) if n_rows > 1",
        LINEAR + "test_all_numbers_of_rows_are_one_launch"),
    Bug("variance by cancellation", "kernels.py", "chunk = tl.where(inside, chunk - (mean + apart)[:, None], 0.0)",
        "chunk = tl.where(inside, chunk - mean[:, None], 0.0)", LINEAR + "test_linear_is_within_the_error_budget"),
    Bug("a stale token is drafted from", "rounds.py", "tokens[-1][:, None] if tokens else", "tokens[0][:, None] if tokens else",
        ROUNDS + "test_rounds_of_the_device_equal_the_steps_of_the_host"),
    Bug("drafts draw with the plain step's noise", "rounds.py", "else (kernels.DRAFT, self.state.rounds)",
        "else (kernels.SAMPLE, None)", ROUNDS + "test_rounds_of_the_device_equal_the_steps_of_the_host"),
    Bug("the host reads a round before it launches the next", "rounds.py", "if any(batch.room(row) > 1 for row in rows):", "if False:",
        ROUNDS + "test_the_host_launches_a_round_before_it_reads_the_one_before"),
]  # fmt: skip


def caught(bug: Bug) -> tuple[bool, str]:
    """Whether the catcher fails on a spoilt copy, and its last line; that it passes on the sound one, the suite shows."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(
                ".git", "__pycache__", "*.safetensors", ".pytest_cache", "*venv*", "triton36"
            ),
        )
        file = copy / bug.file
        file.write_text(file.read_text().replace(bug.right, bug.wrong))
        arguments = ["-m", "pytest", "-qx", "-p", "no:cacheprovider", bug.catcher]
        if "aot.py" in bug.catcher:
            arguments = bug.catcher.split()
        done = subprocess.run([sys.executable, *arguments], cwd=copy, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    return done.returncode == 1, lines[-1][:160]


def main() -> int:
    parser = argparse.ArgumentParser("planted.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--out", default="", help="file for the result")
    flags = parser.parse_args()
    from bench import environment
    from checkpoint import write_atomically

    if not any(flags.only in bug.name for bug in BUGS):
        parser.error(f"--only {flags.only}: no bug of that name")
    rows = []
    for bug in BUGS:
        if flags.only not in bug.name:
            continue
        began = time.perf_counter()
        ok, line = caught(bug)
        rows.append({"bug": bug.name, "caught": ok, "by": bug.catcher, "says": line})
        print(
            f"{'caught' if ok else 'MISSED':7} {bug.name:55} {time.perf_counter() - began:4.0f} s  {bug.catcher}",
            f"\n        {line}",
            flush=True,
        )
    if flags.out:
        result = json.dumps(environment() | {"rows": rows}, indent=1) + "\n"
        write_atomically(flags.out, lambda p: p.write_text(result))
    return 0 if all(row["caught"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
