"""Run the scripts as a user does: a process of their own, a tiny network, the digits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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

    def words(self, output_dir: str, **options) -> list[str]:
        given = {
            "model_config_name_or_path": self.config,
            "output_dir": self.folder / output_dir,
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
            **options,
        }
        words = []
        for name, value in given.items():
            if value is True:
                words.append(f"--{name}")
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is not None and value is not False:
                words += [f"--{name}", str(value)]
        return words

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


@pytest.fixture
def script(tmp_path) -> Script:
    return Script(tmp_path)
