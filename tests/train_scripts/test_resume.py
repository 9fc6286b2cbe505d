"""A run that was stopped and resumed is the run that was not: weights, EMA, optimizer, sampler, log, bit for bit."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from diffusers_adaptive_ts import list_samplers

TIMES = ("minutes", "steps_per_second", "sampler_overhead", "started", "command")
RESUME_ALL = Path(__file__).parent / "resume_every_sampler.py"


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Contents of a checkpoint but for what tells the time."""
    contents = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        name = path.relative_to(checkpoint).as_posix()
        if name == "run_state.json":
            state = json.loads(path.read_text())
            del state["minutes"], state["log_position"]
            contents[name] = json.dumps(state).encode()
        elif name.endswith(".safetensors"):
            contents[name] = without_order(path.read_bytes())
        elif name != "manifest.json":
            contents[name] = path.read_bytes()
    return contents


def without_order(data: bytes) -> bytes:
    """Safetensors writes the metadata of one and the same file in any order."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]


def log_of(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows if row["kind"] != "run"]


def same_run(first: Path, second: Path, step: int) -> None:
    one, two = files_of(first / f"checkpoint-{step}"), files_of(second / f"checkpoint-{step}")
    assert one.keys() == two.keys()
    different = [name for name in one if one[name] != two[name]]
    assert not different, different
    assert log_of(first) == log_of(second)


def kill_in_the_middle(command: list[str], environment: dict[str, str], folder: Path, after: str) -> None:
    """SIGKILL all processes of the run as soon as checkpoint `after` stands, and before it has ended."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / after).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, "the run ended before it could be killed"
    # The launcher puts every rank into a session of its own: killing its group would leave them training.
    ranks = psutil.Process(process.pid).children(recursive=True)
    for one in [process, *ranks]:
        one.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive, alive
    assert not list(folder.glob("samples.png")), "the run was at its end when it was killed"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed_equals_straight(script, processes):
    options = {
        "timestep_sampler": "adaptive",
        "sampler_options": ["update_every=2"],
        "use_ema": True,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 40,
        "checkpointing_steps": 5,
        "random_flip": True,
    }
    straight = script.words("straight", **options)
    script.run(straight, processes)
    killed = script.words("killed", **options)
    kill_in_the_middle(
        script.command(killed, processes), script.environment(), script.folder / "killed", "checkpoint-10"
    )
    script.run([*killed, "--resume_from_checkpoint", "latest"], processes)
    same_run(script.folder / "straight", script.folder / "killed", 40)


@pytest.mark.slow
def test_every_sampler_resumes_exactly(script):
    """One process runs all of them; a copy of the run without its last checkpoint is resumed from the first."""
    words = script.words("OUTPUT", use_ema=True, train_batch_size=8)
    done = subprocess.run(
        [sys.executable, str(RESUME_ALL), str(script.folder), *words],
        env=script.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in list_samplers():
        same_run(script.folder / f"{name}-straight", script.folder / f"{name}-resumed", 6)


@pytest.mark.slow
def test_a_stream_goes_on_where_it_was(script):
    """Streamed images, two workers, stopped in the middle of an epoch."""
    pictures = script.folder / "pictures"
    pictures.mkdir()
    for index in range(20):
        Image.new("L", (8, 8), 12 * index).save(pictures / f"{index:02d}.png")
    options = {"train_data_dir": pictures, "streaming": True, "resolution": 8, "validation_images": 4}
    script.run(script.words("run", **options, dataloader_num_workers=2))
    shutil.copytree(script.folder / "run", script.folder / "resumed")
    shutil.rmtree(script.folder / "resumed" / "checkpoint-6")
    script.run([*script.words("resumed", **options, dataloader_num_workers=2), "--resume_from_checkpoint", "latest"])
    same_run(script.folder / "run", script.folder / "resumed", 6)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_is_used(script):
    words = script.words("run")
    script.run(words)
    shutil.copytree(script.folder / "run", script.folder / "harmed")
    victim = script.folder / "harmed" / "checkpoint-6" / "optimizer.safetensors"
    victim.write_bytes(victim.read_bytes()[:-10])
    done = script.run([*script.words("harmed"), "--resume_from_checkpoint", "latest"])
    assert "optimizer.safetensors" in done.stderr
    same_run(script.folder / "run", script.folder / "harmed", 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"timestep_sampler": "beta"}, "timestep sampler"),
        ({"learning_rate": 5e-4}, "--learning_rate"),
        ({"ddpm_num_steps": 60}, "num_train_timesteps"),
        ({"prediction_type": "v_prediction"}, "prediction_type"),
    ],
)
def test_resuming_another_run_is_an_error_that_says_what_differs(script, changed, said):
    script.run(script.words("run", max_train_steps=3))
    done = script.run([*script.words("run", **changed), "--resume_from_checkpoint", "latest"], check=False)
    assert done.returncode != 0
    assert "belongs to another run" in done.stderr
    assert said in done.stderr
