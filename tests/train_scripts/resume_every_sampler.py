"""Run by test_resume.py: train with every sampler, then resume a copy from its first checkpoint, in one process."""

import importlib.util
import shutil
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from diffusers_adaptive_ts import list_samplers

OPTIONS = {
    "adaptive": ["update_every=2"],
    "histogram": ["histogram=1,2,3"],
    "curriculum": ["switch_step=4"],
    "gradient_variance": ["measure_every=1", "num_bins=3"],
    "learning_progress": ["update_every=1", "num_bins=3", "probes_per_bin=2"],
    "loss_second_moment": ["history_per_timestep=1"],
    "entropy_rate": ["update_every=2", "num_bins=3", "min_count=1"],
    "speed": ["version=v2"],
}


def main(folder: Path, words: list[str]) -> None:
    path = Path(__file__).parents[2] / "train_scripts" / "train_unconditional.py"
    spec = importlib.util.spec_from_file_location("train_unconditional", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def train(output: Path, *more: str) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        given = [str(output) if word.endswith("OUTPUT") else word for word in words]
        script.main([*given, *more])

    for name in list_samplers():
        sampler = ["--timestep_sampler", name, "--sampler_options", *OPTIONS.get(name, [])]
        straight, resumed = folder / f"{name}-straight", folder / f"{name}-resumed"
        train(straight, *sampler)
        shutil.copytree(straight, resumed)
        shutil.rmtree(resumed / "checkpoint-6")
        train(resumed, *sampler, "--resume_from_checkpoint", "latest")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
