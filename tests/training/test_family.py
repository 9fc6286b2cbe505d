"""What every family checks before the first step, and its noise schedules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffusers_adaptive_ts.training.data import ImageData
from diffusers_adaptive_ts.training.families import FAMILIES, UNCONDITIONAL

from .tiny_models import DIT, UNET, make, write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def test_sample_size_follows_the_data_and_the_log_is_told(folder, tmp_path):
    (tmp_path / "unet.json").write_text(json.dumps(UNET | {"sample_size": 256}))
    family = make(folder, "unet2d", model_config_name_or_path=str(tmp_path / "unet.json"))
    assert family.build_model().config.sample_size == 8
    assert family.notes == ["sample_size of the model set from 256 to 8"]


def test_the_families_are_those_of_the_command_lines():
    """The unconditional script offers all but the last, which has a script of its own."""
    assert list(UNCONDITIONAL) == ["unet2d", "ldm", "dit"]
    assert {name: cls.model_folder for name, cls in FAMILIES.items()} == {
        "unet2d": "unet", "ldm": "unet", "dit": "transformer", "stable_diffusion": "unet",
    }  # fmt: skip


def data_of(resolution: int = 8, channels: int = 1, classes: int | None = None) -> ImageData:
    id2label = {number: str(number) for number in range(classes)} if classes else None
    return ImageData(None, None, channels, resolution, id2label, "some data", "f")


REFUSED = {
    "labels for pixels": ("unet2d", {"class_labels": "label"}, None, "Use --model_family dit"),
    "labels for ldm": ("ldm-kl", {"class_labels": "label"}, None, "Use --model_family dit"),
    "autoencoder for pixels": ("unet2d", {"autoencoder": "x"}, None, "use --model_family ldm or dit"),
    "cache for pixels": ("unet2d", {"cache_latents": True}, None, "use --model_family ldm or dit"),
    "unknown family": ("unet2d", {"model_family": "lmd"}, None, "Did you mean 'ldm'"),
    "resolution": ("unet2d", {}, data_of(9), "multiples of 2; 9 is not. The nearest: 8 and 10"),
    "default resolution": ("unet2d", {"model_config_name_or_path": None}, data_of(100), "The nearest: 96 and 128"),
    "channels": ("unet2d", {"config": {"in_channels": 3}}, None, "in_channels is 3, but digits has 1 channel"),
    "variance": ("unet2d", {"config": {"out_channels": 2}}, None, "out_channels is 2"),
    "class embeddings": ("unet2d", {"config": {"num_class_embeds": 10}}, None, "cannot pass on"),
    "other class": ("unet2d", {"config": {"_class_name": "UNet2DConditionModel"}}, None, "accepted here: UNet2DModel"),
    "no such config": ("unet2d", {"model_config_name_or_path": "/no/such/path"}, None, "neither a file, a folder nor"),
    "empty folder": ("unet2d", {"model_config_name_or_path": "EMPTY"}, None, "holds none of config.json, unet/"),
    "no json": ("unet2d", {"model_config_name_or_path": __file__}, None, "not a readable JSON file"),
    "no autoencoder": ("ldm-kl", {"autoencoder": None}, None, "train_scripts/train_autoencoder.py makes one"),
    "autoencoder path": ("ldm-kl", {"autoencoder": "/no/such/path"}, None, "--autoencoder /no/such/path is neither"),
    "autoencoder without weights": ("ldm-kl", {"autoencoder": "WEIGHTLESS"}, None, "the weights cannot be read"),
    "autoencoder channels": ("ldm-kl", {}, data_of(channels=3), "but some data gives 3: pass --image_mode L"),
    "autoencoder size": ("ldm-kl", {}, data_of(9), "multiples of 2; 9 is not"),
    "latent size": ("ldm-kl", {}, data_of(10), "gives latents of size 5"),
    "latent channels": ("ldm-kl", {"config": {"in_channels": 3}}, None, "the latent of the autoencoder has 4"),
    "dit without labels": ("dit", {"class_labels": None}, None, "give --class_labels"),
    "dit with vq": ("dit", {"autoencoder": "VQ"}, None, "is of class VQModel; accepted here: AutoencoderKL"),
    "dit classes": ("dit", {}, data_of(classes=1001), "has 1001 classes"),
    "dit dropout": ("dit", {"label_dropout": 1.5}, None, "--label_dropout must be at least 0 and below 1"),
    "dit embeddings": ("dit", {"config": {"num_embeds_ada_norm": 10}}, None, "num_embeds_ada_norm is 10"),
    "dit patches": ("dit", {"config": {"patch_size": 3}}, None, "patch_size 3"),
    "dit variance": ("dit", {"config": {"out_channels": 8}}, None, "out_channels is 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_the_first_step(case, folder, tmp_path):
    kind, changes, data, message = REFUSED[case]
    changes = dict(changes)
    if "config" in changes:
        config = (DIT if kind == "dit" else UNET) | changes.pop("config")
        (tmp_path / "changed.json").write_text(json.dumps(config))
        changes["model_config_name_or_path"] = str(tmp_path / "changed.json")
    if changes.get("model_config_name_or_path") == "EMPTY":
        changes["model_config_name_or_path"] = str(tmp_path)
    if changes.get("autoencoder") == "WEIGHTLESS":
        (tmp_path / "config.json").write_text((folder / "kl" / "config.json").read_text())
        changes["autoencoder"] = str(tmp_path)
    if changes.get("autoencoder") == "VQ":
        changes["autoencoder"] = str(folder / "vq")
    with pytest.raises(ValueError, match=r"\w") as error:
        make(folder, kind, data=data, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rescale_betas_zero_snr": True}, "Use --prediction_type v_prediction or sample"),
        ({"ddpm_beta_schedule": "quadratic"}, "Unknown --ddpm_beta_schedule 'quadratic'"),
    ],
)
def test_schedules_that_cannot_be_trained_are_refused(changes, message, folder):
    with pytest.raises(ValueError, match=message):
        make(folder, "unet2d", **changes).build_scheduler()
