"""Latent spaces: found where they are kept, known before data is loaded, scaled to unit variance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from diffusers_adaptive_ts.training.autoencoders import CHUNK, CLASSES, LatentSpace
from diffusers_adaptive_ts.training.families import image_channels

from .tiny_models import CPU, UNET, make, make_args, small_autoencoder, write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.mark.parametrize("kind", ["kl", "tiny", "vq"])
def test_an_autoencoder_is_found_in_its_folder_and_inside_a_pipeline(kind, tmp_path):
    autoencoder = small_autoencoder(kind)
    for place in ("", "vae", "vqvae"):
        autoencoder.save_pretrained(tmp_path / f"in{place}" / place)
        space = LatentSpace.load(str(tmp_path / f"in{place}"), tuple(CLASSES))
        assert type(space.autoencoder) is type(autoencoder)
        assert (space.channels, space.downscale, space.size(8)) == (4, 2, 4)
        assert not space.autoencoder.training


@pytest.mark.parametrize("kind", ["kl", "tiny", "vq"])
def test_latents_have_the_announced_shape_and_large_batches_are_split(kind):
    space = LatentSpace(small_autoencoder(kind))
    images = torch.rand(CHUNK + 3, 1, 8, 8) * 2 - 1
    mean, std = space.encode(images, CPU)
    assert mean.shape == std.shape == (CHUNK + 3, space.channels, space.size(8), space.size(8))
    assert torch.equal(mean[CHUNK:], space.encode(images[CHUNK:], CPU)[0])
    assert space.has_posterior == (kind == "kl") == bool(std.max() > 0)


def test_the_codes_of_a_vq_model_may_be_narrower_than_its_latents():
    space = LatentSpace(small_autoencoder("vq", vq_embed_dim=2))
    assert space.channels == 2
    assert space.encode(torch.zeros(1, 1, 8, 8), CPU)[0].shape == (1, 2, 4, 4)


def test_a_fitting_scaling_factor_is_kept_and_a_wrong_one_is_replaced(folder, tmp_path, accelerator):
    family = make(folder, "ldm-kl", output_dir=str(tmp_path))
    note = family.prepare_data(family.data, accelerator).notes[-2]
    measured = family.space.scaling_factor
    assert measured == pytest.approx(float(f"{measured:.5g}"), rel=1e-12)
    assert f"set to {measured:g}" in note
    assert "0.18215 gave latents of standard deviation" in note
    for stated, kept in [(1.3 * measured, True), (10 * measured, False), (1.0, False)]:
        small_autoencoder("kl", scaling_factor=stated).save_pretrained(tmp_path / "ae")
        family = make(folder, "ldm-kl", autoencoder=str(tmp_path / "ae"), output_dir=str(tmp_path))
        notes = family.prepare_data(family.data, accelerator).notes
        assert family.space.scaling_factor == (stated if kept else measured)
        assert any(note.startswith("scaling_factor of") for note in notes) is not kept
    config = json.loads((tmp_path / "ae" / "config.json").read_text())
    del config["scaling_factor"]
    (tmp_path / "ae" / "config.json").write_text(json.dumps(config))
    family = make(folder, "ldm-kl", autoencoder=str(tmp_path / "ae"), output_dir=str(tmp_path))
    assert "none stated" in family.prepare_data(family.data, accelerator).notes[-2]
    assert family.space.scaling_factor == measured


def test_channels_are_known_before_data_is_loaded(folder, tmp_path):
    (tmp_path / "rgb.json").write_text(json.dumps(UNET | {"in_channels": 3, "out_channels": 3}))
    small_autoencoder("kl", channels=3).save_pretrained(tmp_path / "rgb")
    assert image_channels(make_args(folder)) is None
    assert image_channels(make_args(folder, model_config_name_or_path=str(tmp_path / "rgb.json"))) == 3
    for family in ("ldm", "dit"):
        assert image_channels(make_args(folder, model_family=family, autoencoder=str(folder / "kl"))) == 1
        assert image_channels(make_args(folder, model_family=family, autoencoder=str(tmp_path / "rgb"))) == 3
