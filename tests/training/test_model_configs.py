"""Default networks, and configurations from files, folders and the Hub."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel, UNet2DModel
from diffusers.models.modeling_utils import ModelMixin

from diffusers_adaptive_ts.training import model_configs
from diffusers_adaptive_ts.training.model_configs import find_config


def meta_model(config: dict[str, Any], cls: type[ModelMixin]) -> tuple[ModelMixin, int]:
    with torch.device("meta"):
        model = cls(**config)
    return model, sum(parameter.numel() for parameter in model.parameters())


def test_default_unets_fit_their_resolution():
    upstream = model_configs.pixel_unet(64, 3)
    assert upstream["block_out_channels"] == (128, 128, 256, 256, 512, 512)
    assert upstream["down_block_types"] == ("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D")
    assert upstream["up_block_types"] == ("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4
    assert upstream["layers_per_block"] == 2
    for config, millions in [
        (upstream, 113.7),
        (model_configs.pixel_unet(8, 1), 1.0),
        (model_configs.pixel_unet(28, 1), 25.8),
        (model_configs.pixel_unet(32, 3), 35.7),
        (model_configs.pixel_unet(50, 3), 15.9),
        (model_configs.latent_unet(8, 4), 9.0),
    ]:
        model, parameters = meta_model(config, UNet2DModel)
        assert parameters / 1e6 == pytest.approx(millions, abs=0.1)
        size, channels = config["sample_size"], config["in_channels"]
        x = torch.zeros(1, channels, size, size, device="meta")
        assert model(x, torch.zeros(1, device="meta")).sample.shape == x.shape
    for size in (4, 8, 16, 32, 64):
        model, _ = meta_model(model_configs.small_dit(size, 4), DiTTransformer2DModel)
        assert size % model.config.patch_size == 0


def test_configurations_come_from_files_folders_and_the_hub(tmp_path, monkeypatch):
    (tmp_path / "unet").mkdir()
    file = tmp_path / "unet" / "config.json"
    file.write_text(json.dumps({"sample_size": 7}))
    for source, subfolder in [(file, ""), (file.parent, ""), (tmp_path, "unet")]:
        assert find_config(str(source), ("", "unet"), "--flag") == ({"sample_size": 7}, subfolder)

    def download(repo: str, name: str, subfolder: str | None = None, cache_dir: str | None = None) -> str:
        assert (repo, cache_dir) == ("someone/model", "here")
        if subfolder is None:
            raise model_configs.EntryNotFoundError("none")
        return str(tmp_path / subfolder / name)

    monkeypatch.setattr(model_configs, "hf_hub_download", download)
    assert find_config("someone/model", ("", "unet"), "--flag", "here") == ({"sample_size": 7}, "unet")
    with pytest.raises(ValueError, match="--flag someone/model holds none of config"):
        find_config("someone/model", ("",), "--flag", "here")


def test_a_hub_that_does_not_answer_is_said_in_one_line(monkeypatch):
    def download(*_: Any, **__: Any) -> str:
        raise model_configs.OfflineModeIsEnabled("Cannot reach https://huggingface.co:\noffline mode is enabled.")

    monkeypatch.setattr(model_configs, "hf_hub_download", download)
    with pytest.raises(ValueError, match="the Hub did not answer") as error:
        find_config("someone/model", ("",), "--flag")
    assert "\n" not in str(error.value)
