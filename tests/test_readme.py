"""What the README says is what the repository does."""

import json
import re
import shlex
from pathlib import Path

import aot
import torch
from helpers import tiny_model

import bench
import sample
import train_exit_heads
from checkpoint import parse_flags
from decode import SamplingParams, generate
from speculative import speculative_generate

ROOT = Path(bench.__file__).parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_python_example_runs(capsys):
    exec(compile(blocks("python")[0], "README.md", "exec"), {})  # noqa: S102
    assert len(capsys.readouterr().out) > 40


def test_the_readers_own_drafter_keeps_the_text():
    names = {}
    exec(compile(blocks("python")[1], "README.md", "exec"), names)  # noqa: S102
    model, sampling = tiny_model(), SamplingParams(max_new_tokens=30, seed=5)
    prompts = [[1, 2, 3, 1, 2, 3, 1], [5]]
    outs = speculative_generate(model, names["EchoDrafter"](3), prompts, sampling, 4, "coupled")
    assert [out.tokens for out in outs] == [out.tokens for out in generate(model, prompts, sampling)]
    assert outs[0].stats.drafted > 0


def test_every_command_parses():
    """The flags of each command line exist and take the values that are shown."""
    parsers = {
        "sample.py": lambda argv: parse_flags(sample.Config, argv),
        "bench.py": lambda argv: argv[:1] and argv[0] in bench.SCRIPTS or bench.read_config(argv),
        "train_exit_heads.py": lambda argv: parse_flags(train_exit_heads.TrainConfig, argv),
    }
    n_seen = 0
    for line in "\n".join(blocks("")).splitlines():
        for command in line.partition(" #")[0].split("&&"):
            words = shlex.split(command) if "python " in command else []
            if words[:1] == ["python"] and words[1] in parsers:
                parsers[words[1]](words[2:])
                n_seen += 1
    assert n_seen >= 5


def test_the_kernel_table_is_that_of_the_stored_figures():
    assert aot.summary(json.loads((ROOT / "tests/data/aot-triton-3.9.json").read_text())) in README


def test_every_file_of_the_map_is_there():
    for name in re.findall(r"`([\w/.-]+(?:\.py|/))`", README):
        assert (ROOT / name).exists(), name
    scripts = {path.name for path in ROOT.glob("*.py")}
    assert scripts <= set(re.findall(r"`(\w+\.py)`", README)), "a script that the map does not show"


def test_bundled_weights_fit_the_budget():
    """Models 32 MB and heads 14 MB in all, and the drafter reads at most a tenth of what the target reads for a token."""
    for name, most in (("model", 32e6), ("heads", 14e6)):
        sizes = [path.stat().st_size for path in (ROOT / "checkpoints").rglob(f"{name}.safetensors")]
        assert len(sizes) == 2 and sum(sizes) <= most
    target, drafter = (sample.load_checkpoint(name)[0] for name in ("stdlib", "stdlib-draft"))
    assert target.config.n_layer >= 12
    read = [
        sum(p.numel() for p in [*model.blocks.parameters(), model.token_embedding.weight])
        for model in (target, drafter)
    ]
    assert read[1] <= read[0] / 10
    assert all(torch.isfinite(p).all() for p in target.parameters())
