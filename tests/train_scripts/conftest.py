"""Run the scripts as a user does: a process of their own, a tiny network, the digits or captioned pictures."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from accelerate.state import AcceleratorState, GradientState

from diffusers_adaptive_ts.training.entry import said_in_one_line
from tests.training.tiny_stable_diffusion import write_captioned, write_pipeline

ROOT = Path(__file__).parents[2]
TINY_UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "dropout": 0.1,
}


class Script:
    """Builds command lines for `train_unconditional.py` and runs them."""

    path = ROOT / "train_scripts" / "train_unconditional.py"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "tiny_unet.json"
        self.config.write_text(json.dumps(TINY_UNET))

    def defaults(self) -> dict:
        """Options of every command line here, unless others are given."""
        return {
            "model_config_name_or_path": self.config,
            "train_batch_size": 8,
            "max_train_steps": 6,
            "checkpointing_steps": 3,
            "validation_steps": 3,
            "validation_images": 16,
            "logging_steps": 2,
            "ddpm_num_steps": 50,
            "ddpm_num_inference_steps": 2,
            "eval_batch_size": 4,
            "seed": 0,
            "logger": "none",
            "lr_warmup_steps": 2,
        }

    def words(self, output_dir: str, **options) -> list[str]:
        words = []
        for name, value in {**self.defaults(), "output_dir": self.folder / output_dir, **options}.items():
            if value is True:
                words.append(f"--{name}")
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is not None and value is not False:
                words += [f"--{name}", str(value)]
        return words

    @classmethod
    def load(cls) -> ModuleType:
        """The script as a module."""
        spec = importlib.util.spec_from_file_location(cls.path.stem, cls.path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def here(self, words: list[str]) -> int | str:
        """Run it in this process, which saves the seconds of importing; returns what it gives to `sys.exit`."""
        _forget_accelerator()
        try:
            return said_in_one_line(lambda: self.load().main(words))
        finally:
            _forget_accelerator()

    def log(self, output_dir: str) -> list[dict]:
        lines = (self.folder / output_dir / "training_log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def command(self, words: list[str], processes: int = 1) -> list[str]:
        if processes == 1:
            return [sys.executable, str(self.path), *words]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        return [sys.executable, *launcher, str(self.path), *words]

    def run(self, words: list[str], processes: int = 1, check: bool = True) -> subprocess.CompletedProcess:
        done = subprocess.run(
            self.command(words, processes), env=self.environment(), capture_output=True, text=True, timeout=300
        )
        assert not check or done.returncode == 0, done.stderr[-3000:]
        return done


class TextToImage(Script):
    """The same for `train_text_to_image.py`: a tiny Stable Diffusion, and pictures with captions."""

    path = ROOT / "train_scripts" / "train_text_to_image.py"

    def __init__(self, folder: Path, given: Path) -> None:
        self.folder, self.pipeline, self.pictures = folder, given / "pipeline", given / "pictures"

    def defaults(self) -> dict:
        return {
            "pretrained_model_name_or_path": self.pipeline,
            "train_data_dir": self.pictures,
            "cache_dir": self.folder / "cache",
            "resolution": 16,
            "train_batch_size": 4,
            "max_train_steps": 2,
            "checkpointing_steps": 2,
            "validation_steps": 0,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "lr_warmup_steps": 0,
            "seed": 0,
            "report_to": "none",
        }


def _forget_accelerator() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture
def script(tmp_path) -> Script:
    return Script(tmp_path)


@pytest.fixture(scope="session")
def given_parts(tmp_path_factory) -> Path:
    """A tiny Stable Diffusion in `pipeline` and 100 captioned pictures in `pictures`; to read only."""
    folder = tmp_path_factory.mktemp("given")
    write_pipeline(folder / "pipeline")
    write_captioned(folder / "pictures", count=100)
    return folder


@pytest.fixture
def text_to_image(tmp_path, given_parts) -> TextToImage:
    return TextToImage(tmp_path, given_parts)
