from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import convert_state_dict_to_diffusers
from peft import get_peft_model_state_dict
from safetensors import safe_open

from diffusers_adaptive_ts.training.lora import DEFAULT_TARGETS, FILE_NAME, add_lora, load_lora, save_lora, weights_of

from .tiny_stable_diffusion import tiny_pipeline

ATTENTION = ["attn2.to_q", "to_out.0"]
MANY = ["conv_in", "conv1", "conv_shortcut", "to_k", "to_out.0", "net.2", "proj", "time_emb_proj", "linear_1"]


def tiny_unet() -> UNet2DConditionModel:
    return tiny_pipeline().unet


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    sample, text = torch.randn(2, 4, 8, 8, dtype=dtype), torch.randn(2, 12, 16, dtype=dtype)
    return {"sample": sample, "timestep": torch.tensor([3, 40]), "encoder_hidden_states": text}


@torch.no_grad()
def output(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return model.eval()(**inputs(dtype)).sample


def trained(rank: int = 3, alpha: float | None = 7.5, targets: list[str] | None = None) -> UNet2DConditionModel:
    """An adapter after three steps of a real optimizer; gradients are large, so that it matters."""
    model = tiny_unet()
    torch.manual_seed(2)
    add_lora(model, rank, alpha, targets)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.05)
    for _ in range(3):
        model(**inputs()).sample.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class TestAdd:
    def test_the_base_is_frozen_and_the_output_is_still_its_own(self):
        model = tiny_unet()
        base = {name: parameter.clone() for name, parameter in model.named_parameters()}
        before = output(model)
        add_lora(model, 3, None, None)
        assert output(model).equal(before)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
            if "lora_" not in name:
                assert parameter.equal(base[name.replace(".base_layer", "")])

    def test_default_targets_are_all_attention_projections(self):
        model = tiny_unet()
        expected = [
            name for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and ".attn" in name
        ]  # fmt: skip
        add_lora(model, 2, None, None)
        adapted = {name.removeprefix("unet.").split(".lora.")[0] for name in weights_of(model)}
        assert adapted == set(expected)
        assert {re.split(r"attn\d\.", name)[1] for name in adapted} == set(DEFAULT_TARGETS)

    def test_a_start_of_gaussians_by_the_rank(self):
        torch.manual_seed(0)
        model = tiny_unet()
        add_lora(model, 8, None, ["to_q", "conv1"])
        down = torch.cat([w.flatten() for name, w in weights_of(model).items() if ".down." in name])
        assert down.std().item() == pytest.approx(1 / 8, rel=0.1)
        assert all((w == 0).all() for name, w in weights_of(model).items() if ".up." in name)

    @pytest.mark.parametrize(("alpha", "factor"), [(None, 1.0), (6.0, 2.0), (1.5, 0.5)])
    def test_the_layer_is_w_plus_alpha_over_rank_b_a(self, alpha: float | None, factor: float):
        model = trained(rank=3, alpha=alpha)
        layer = model.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
        weights = weights_of(model)
        name = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora"
        down, up = weights[f"{name}.down.weight"], weights[f"{name}.up.weight"]
        x = torch.randn(5, 16)
        expected = x @ (layer.base_layer.weight + factor * up @ down).T
        assert up.abs().max() > 0.01
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_adapters_of_a_half_base_are_float32(self, dtype: torch.dtype):
        model = tiny_unet().to(dtype)
        add_lora(model, 2, None, None)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.float32 if "lora_" in name else dtype)
        # A step far below half precision is not lost.
        weight = next(iter(weights_of(model).values()))
        before = weight.clone()
        weight.mul_(1 + 1e-6)
        assert not weight.equal(before)

    @pytest.mark.parametrize(
        ("targets", "said"),
        [
            (["to_qq"], r"to_qq: .*match nothing.* Did you mean 'to_q'\? .*conv1, conv2, .*net\.2, .*to_k, to_out\.0"),
            (["to_q", "nowhere"], "nowhere: .*match nothing"),
            (["to_out"], r"to_out: .*not linear or convolution.* Did you mean 'to_out\.0'\?"),
            (["attn1"], "attn1: .*not linear or convolution"),
            ([], "names no layer.*to_q"),
        ],
    )
    def test_targets_that_are_not_layers(self, targets: list[str], said: str):
        model = tiny_unet()
        with pytest.raises(ValueError, match=said):
            add_lora(model, 2, None, targets)
        assert all(parameter.requires_grad for parameter in model.parameters())

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"rank": 0}, "--lora_rank .*at least 1; got 0"),
            ({"rank": 2.5}, "--lora_rank .*got 2.5"),
            ({"rank": 2, "alpha": 0}, "--lora_alpha must be above 0; got 0"),
            ({"rank": 2, "alpha": float("nan")}, "got nan"),
        ],
    )
    def test_numbers_that_cannot_be(self, options: dict[str, Any], said: str):
        with pytest.raises(ValueError, match=said):
            add_lora(tiny_unet(), **options)


class TestPipeline:
    @pytest.mark.parametrize("targets", [None, ATTENTION, MANY], ids=["default", "attention", "many"])
    @pytest.mark.parametrize("alpha", [None, 7.5, 1])
    def test_it_gives_the_trained_output_to_the_bit(self, tmp_path: Path, alpha: float | None, targets: Any):
        model = trained(3, alpha, targets)
        save_lora(model, tmp_path)
        pipeline = tiny_pipeline()
        before = output(pipeline.unet)
        pipeline.load_lora_weights(tmp_path)
        assert output(pipeline.unet).equal(output(model))
        assert (output(model) - before).abs().max() > 0.01

    def test_of_a_half_pipeline_it_is_the_adapter_in_half(self, tmp_path: Path):
        model = trained()
        save_lora(model, tmp_path)
        pipeline = tiny_pipeline().to(torch.bfloat16)
        pipeline.load_lora_weights(tmp_path)
        assert output(pipeline.unet, torch.bfloat16).equal(output(model.to(torch.bfloat16), torch.bfloat16))

    def test_the_file_has_the_names_of_diffusers_script_and_little_metadata(self, tmp_path: Path):
        model = trained(3, 7.5, ["to_q", "to_k"])
        save_lora(model, tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]
        with safe_open(tmp_path / FILE_NAME, framework="pt") as reader:
            facts = json.loads(reader.metadata()["lora_adapter_metadata"])
            names = set(reader.keys())
        assert facts == {"unet.r": 3, "unet.lora_alpha": 7.5, "unet.target_modules": ["to_k", "to_q"]}
        assert "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora.down.weight" in names

    def test_pictures_of_the_pipeline_change(self, tmp_path: Path):
        save_lora(trained(), tmp_path)

        def picture(pipeline: StableDiffusionPipeline) -> Any:
            pipeline.set_progress_bar_config(disable=True)
            seed = torch.Generator().manual_seed(0)
            return pipeline("red bar", num_inference_steps=2, output_type="np", generator=seed).images

        plain, adapted = tiny_pipeline(), tiny_pipeline()
        adapted.load_lora_weights(tmp_path)
        assert (picture(plain) != picture(adapted)).any()


class TestLoad:
    @pytest.mark.parametrize("targets", [None, MANY], ids=["default", "many"])
    def test_weights_come_back_to_the_bit_and_in_place(self, tmp_path: Path, targets: Any):
        model, other = trained(targets=targets), tiny_unet()
        save_lora(model, tmp_path)
        add_lora(other, 3, 7.5, targets)
        parameters = list(other.parameters())
        load_lora(other, tmp_path)
        assert all(a is b for a, b in zip(other.parameters(), parameters, strict=True))
        for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert a.equal(b), name
        assert output(model).equal(output(other))
        assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in other.named_parameters())

    def test_training_goes_on_exactly(self, tmp_path: Path):
        def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for _ in range(2):
                model(**inputs()).sample.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        def adapted() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            model = tiny_unet()
            add_lora(model, 2, 5, None)
            return model, torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=0.05)

        model, optimizer = adapted()
        steps(model, optimizer)
        save_lora(model, tmp_path)
        state = copy.deepcopy(optimizer.state_dict())
        resumed, second = adapted()
        load_lora(resumed, tmp_path)
        second.load_state_dict(
            {**state, "state": {k: {n: t.clone() for n, t in v.items()} for k, v in state["state"].items()}}
        )
        steps(model, optimizer)
        steps(resumed, second)
        for name, weight in weights_of(model).items():
            assert weight.equal(weights_of(resumed)[name]), name

    def test_a_file_of_diffusers_script_has_no_metadata_and_alpha_equal_to_rank(self, tmp_path: Path):
        source = trained(3, None)
        layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(source))
        StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers)
        weights = weights_of(source)
        model = tiny_unet()
        add_lora(model, 3, None, None)
        load_lora(model, tmp_path)
        assert all(weight.equal(weights[name]) for name, weight in weights_of(model).items())
        model = tiny_unet()
        add_lora(model, 3, 6, None)
        with pytest.raises(ValueError, match=r"rank 3, alpha 3, 64 weights.*rank 3, alpha 6, 64"):
            load_lora(model, tmp_path)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"rank": 4, "alpha": 7.5}, "rank 3, alpha 7.5, .*this run's .*rank 4, alpha 7.5"),
            ({"rank": 3, "alpha": 3.0}, "alpha 7.5.*alpha 3"),
            (
                {"rank": 3, "alpha": 7.5, "targets": ["to_q"]},
                r"64 weights in to_k, to_out\.0, to_q, to_v\).*16 .*to_q",
            ),
        ],
    )
    def test_another_adapter_is_an_error_and_changes_nothing(self, tmp_path: Path, options: dict[str, Any], said: str):
        save_lora(trained(), tmp_path)
        model = tiny_unet()
        add_lora(model, **options)
        before = {name: weight.clone() for name, weight in weights_of(model).items()}
        with pytest.raises(ValueError, match=said):
            load_lora(model, tmp_path)
        assert all(weight.equal(before[name]) for name, weight in weights_of(model).items())

    def test_missing_and_damaged_files(self, tmp_path: Path):
        model = trained()
        with pytest.raises(ValueError, match=f"no {FILE_NAME} in"):
            load_lora(model, tmp_path)
        (tmp_path / FILE_NAME).write_bytes(b"not weights")
        with pytest.raises(ValueError, match="cannot be read"):
            load_lora(model, tmp_path)
        shutil.rmtree(tmp_path)
        with pytest.raises(ValueError, match=f"no {FILE_NAME} in"):
            load_lora(model, tmp_path)

    def test_a_model_without_an_adapter(self, tmp_path: Path):
        with pytest.raises(ValueError, match="no LoRA adapter; call add_lora"):
            save_lora(tiny_unet(), tmp_path)
