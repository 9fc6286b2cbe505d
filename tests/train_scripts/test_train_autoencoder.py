"""train_autoencoder.py, as a user runs it: digits, few steps, a small network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, VQModel
from PIL import Image

from diffusers_adaptive_ts.training.autoencoders import LatentSpace
from diffusers_adaptive_ts.training.data import DataOptions, load_image_data
from diffusers_adaptive_ts.training.reconstruction import psnr, reconstruct

SCRIPT = Path(__file__).parents[2] / "train_scripts" / "train_autoencoder.py"
SMALL = ["--block_out_channels", "8", "16", "--validation_images", "32", "--learning_rate", "3e-3"]


@pytest.fixture(scope="module")
def main():
    specification = importlib.util.spec_from_file_location("train_autoencoder", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def digits():
    return load_image_data(DataOptions(validation_images=32))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A folder that a process of its own filled, and what it printed."""
    folder = tmp_path_factory.mktemp("kl") / "autoencoder"
    command = [sys.executable, str(SCRIPT), *SMALL, "--max_train_steps", "80", "--output_dir", str(folder)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def test_the_result_is_a_plain_autoencoder_with_latents_of_unit_variance(trained, digits):
    folder, _ = trained
    names = {"config.json", "diffusion_pytorch_model.safetensors", "reconstructions.png", "training.json"}
    assert {path.name for path in folder.iterdir()} == names
    autoencoder = AutoencoderKL.from_pretrained(folder).eval()
    images = digits.train.batch(list(range(0, len(digits.train), 3)))["images"]
    torch.manual_seed(0)
    with torch.no_grad():
        z = autoencoder.encode(images).latent_dist.sample() * autoencoder.config.scaling_factor
    # Measured on 256 of these 589 images; a few per cent is what they may differ.
    assert z.std().item() == pytest.approx(1, abs=0.05)
    assert z.shape[1:] == (4, 4, 4)


def test_the_printed_psnr_is_that_of_the_held_out_images(trained, digits):
    folder, printed = trained
    images = digits.validation.batch(list(range(32)))["images"]
    again = psnr(images, reconstruct(LatentSpace(AutoencoderKL.from_pretrained(folder)), images))
    facts = json.loads((folder / "training.json").read_text())
    assert facts["psnr"] == pytest.approx(again, abs=0.01)
    assert f"PSNR on 32 held-out images: {facts['psnr']:.2f} dB" in printed
    # The mean digit alone gives less: 80 steps must have learned something.
    mean = digits.train.batch(list(range(len(digits.train))))["images"].mean(0, keepdim=True)
    assert again > psnr(images, mean.expand_as(images)) + 1
    with Image.open(folder / "reconstructions.png") as picture:
        assert picture.size == (64, 64)


def test_psnr_is_the_mean_over_images_in_decibels():
    images = torch.zeros(2, 1, 4, 4)
    # Errors of 0.2 and 0.02 on a range of 2 are 20 and 40 dB.
    other = images + torch.tensor([0.2, 0.02])[:, None, None, None]
    assert psnr(images, other) == pytest.approx(30, abs=1e-4)
    assert psnr(images, images) == pytest.approx(100)


def test_the_same_seed_gives_the_same_autoencoder(main, tmp_path):
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        options = ["--max_train_steps", "2", "--seed", str(seed), "--output_dir", str(tmp_path / name)]
        torch.manual_seed(hash(name))
        main([*SMALL, *options])
    weights = [(tmp_path / name / "diffusion_pytorch_model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_a_vq_model_uses_its_codebook_and_learns(main, digits, tmp_path, capsys):
    sizes = ["--autoencoder_class", "vq", "--num_vq_embeddings", "64", "--latent_channels", "3"]
    main([*SMALL, *sizes, "--max_train_steps", "100", "--output_dir", str(tmp_path)])
    model = VQModel.from_pretrained(tmp_path).eval()
    images = digits.validation.batch(list(range(32)))["images"]
    with torch.no_grad():
        codes = model.encode(images).latents
        _, _, (_, _, chosen) = model.quantize(codes)
    assert codes.shape[1] == 3
    assert len(chosen.unique()) >= 16
    assert (codes * model.config.scaling_factor).std().item() == pytest.approx(1, abs=0.1)
    assert float(re.search(r"images: ([\d.]+) dB", capsys.readouterr().out)[1]) > 12


def test_a_configuration_can_be_given_instead_of_sizes(main, tmp_path, trained):
    options = ["--model_config_name_or_path", str(trained[0]), "--validation_images", "32", "--max_train_steps", "1"]
    main([*options, "--output_dir", str(tmp_path / "again")])
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "again", trained[0]))
    assert ours["block_out_channels"] == theirs["block_out_channels"] == [8, 16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model_config_name_or_path", "TRAINED", "--latent_channels", "3"], "exclude each other"),
        (
            ["--model_config_name_or_path", "TRAINED", "--autoencoder_class", "vq"],
            "is of class AutoencoderKL; accepted here",
        ),
        (["--model_config_name_or_path", "TRAINED", "--image_mode", "RGB"], "in_channels is 1, but the images have 3"),
        (["--num_vq_embeddings", "9"], "has no codebook"),
        (["--block_out_channels", *["8"] * 5], "multiples of 16; 8 is not. The nearest: 16"),
        (["--validation_images", "0"], "No images are held out"),
        (["--output_dir", "TRAINED"], "--overwrite_output_dir"),
        (["--train_data_dir", "/no/such/folder"], "there is no such folder"),
        (["--train_batch_size", "5000"], "fewer than one step takes"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(options, message, main, tmp_path, trained):
    words = [str(trained[0]) if word == "TRAINED" else word for word in options]
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        main(["--output_dir", str(tmp_path / "new"), *words])
    assert message in str(error.value)
