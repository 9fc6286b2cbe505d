"""The documentation runs: the examples, and every command and line of Python in the README."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from diffusers_adaptive_ts import cli, list_samplers, list_weightings
from diffusers_adaptive_ts.samplers import sampler_class
from diffusers_adaptive_ts.weightings import weighting_entry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def table(heading):
    """First cells of the table under a heading, without their backticks."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", README, flags=re.MULTILINE | re.DOTALL).group(1)
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_loop_runs_and_reports(tmp_path):
    out = run(ROOT / "examples/plain_pytorch.py", "--steps", 40, cwd=tmp_path)
    loss = re.search(r"^step   40  loss (\d+\.\d+)$", out, flags=re.MULTILINE)
    assert float(loss.group(1)) < 1
    shares = re.search(r"clean to noisy: (.*)$", out, flags=re.MULTILINE).group(1).split(", ")
    assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.3)
    # T = 1000 and S = 3 in batches of 64, before and after: 2 (16 + 3).
    assert "measured 1 of 40 steps and spent 38 forward passes" in out


def test_the_accelerate_loop_counts_real_steps_only(tmp_path):
    options = ["--gradient_accumulation_steps", 2, "--mixed_precision", "bf16", "--cpu"]
    out = run(ROOT / "examples/accelerate_loop.py", "--steps", 41, *options, cwd=tmp_path)
    assert "measured 1 of 41 steps and spent 38 forward passes" in out


BEFORE_THE_DIFF = """
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers_adaptive_ts import AdaptiveTimestepSampler

accelerator = Accelerator(cpu=True)
model = UNet2DModel(8, block_out_channels=(8,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
                    layers_per_block=1, norm_num_groups=4, add_attention=False)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
x0 = torch.randn(64, 3, 8, 8)
loader = [x0] * 40
"""


def test_the_diff_works_as_printed(tmp_path):
    (diff,) = blocks("diff")
    after = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    before = [line[2:] for line in diff.splitlines() if not line.startswith("+")]
    compile("\n".join(before), "before", "exec")
    program = tmp_path / "after.py"
    finish = "print(int(sampler.steps), int(sampler.events))"
    program.write_text("\n".join([BEFORE_THE_DIFF, *after, finish]), encoding="utf-8")
    assert run(program, cwd=tmp_path) == "40 1\n"


NO_NETWORK = """
import inspect
from diffusers_adaptive_ts import TimestepSampler, persistence


def push_to_hub(sampler, repo_id, **upload):
    inspect.signature(persistence.push).bind(sampler, repo_id, **upload)
    print("pushed to", repo_id)


TimestepSampler.push_to_hub = push_to_hub
"""


def test_the_python_of_the_readme_runs_from_top_to_bottom(tmp_path):
    program = tmp_path / "readme.py"
    program.write_text("\n".join([NO_NETWORK, *blocks("python")]), encoding="utf-8")
    out = run(program, cwd=tmp_path)
    assert "pushed to you/my-model" in out
    assert (tmp_path / "samplers.png").is_file()
    assert {path.name for path in (tmp_path / "my-model/timestep_sampler").iterdir()} == {
        "config.json",
        "sampler.safetensors",
    }


def test_the_commands_of_the_readme_run_and_print_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("adaptive-ts ")]
    assert len(commands) >= 4
    for command in commands:
        assert cli.main(shlex.split(command)[1:]) == 0, command
    assert {path.name for path in tmp_path.iterdir()} == {"density.png", "three.png"}
    capsys.readouterr()
    (shown,) = blocks("text")
    command, _, printed = shown.partition("\n")
    assert cli.main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out == printed


def test_the_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", "".join(blocks("bash")), flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def ours(entry):
    """Whether an entry is the package's own; other tests register some of theirs."""
    return inspect.getmodule(entry).__name__.startswith("diffusers_adaptive_ts.")


def test_the_tables_of_the_readme_name_every_sampler_and_weighting():
    assert sorted(table("Samplers")) == [name for name in list_samplers() if ours(sampler_class(name))]
    assert sorted(table("Weightings")) == [name for name in list_weightings() if ours(weighting_entry(name))]


def test_the_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README)
    for link in links:
        if link.startswith("https://arxiv.org/abs/"):
            assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", link)
        elif not link.startswith("https://"):
            assert (ROOT / link).exists(), link


def test_papers_are_the_ones_the_code_names():
    """An arXiv id in a docstring of a registered class or function stands in its row, too."""
    entries = {name: sampler_class(name) for name in table("Samplers")}
    entries |= {f"{name}": weighting_entry(name) for name in table("Weightings") if name != "uniform"}
    for name, entry in entries.items():
        for paper in re.findall(r"arXiv (\d{4}\.\d{5})", inspect.getdoc(entry).partition("\n")[0]):
            rows = re.findall(rf"^\| `{name}` \|.*$", README, flags=re.MULTILINE)
            assert any(paper in row for row in rows), (name, paper)
