"""The text-to-image family without a run: captions, noise process, what is saved and what checkpoints agree with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DDIMScheduler, PNDMScheduler, StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPImageProcessorPil

from diffusers_adaptive_ts.training.data import load_image_data
from diffusers_adaptive_ts.training.family_stable_diffusion import StableDiffusionFamily
from diffusers_adaptive_ts.training.lora import weights_of
from diffusers_adaptive_ts.training.run import Run
from diffusers_adaptive_ts.training.run_state import check_identity
from diffusers_adaptive_ts.training.setup import make_ema

from .tiny_stable_diffusion import tiny_pipeline, tiny_unet_config, write_captioned, write_pipeline

CPU = torch.device("cpu")
# Without these StableDiffusionPipeline warns, and sets them itself.
LATENT = {"clip_sample": False, "steps_offset": 1}
# All that StableDiffusionPipeline names as its own, with two that are older.
SCHEDULERS = (
    "DDIMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler", "DDPMScheduler", "UniPCMultistepScheduler",
    "HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "DEISMultistepScheduler",
)  # fmt: skip


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """A pipeline and pictures, to read only."""
    folder = tmp_path_factory.mktemp("parts")
    write_pipeline(folder / "pipeline")
    write_captioned(folder / "pictures", count=16)
    return folder


def make(folder: Path, **changes: Any) -> StableDiffusionFamily:
    values = {
        "pretrained_model_name_or_path": str(folder / "pipeline"), "revision": None, "variant": None,
        "non_ema_revision": None, "model_config_name_or_path": None, "autoencoder": None, "text_encoder": None,
        "lora_rank": None, "lora_alpha": None, "lora_targets": None, "prediction_type": None, "ddpm_num_steps": None,
        "ddpm_beta_schedule": None, "rescale_betas_zero_snr": False, "use_ema": False, "mixed_precision": None,
        "train_data_dir": str(folder / "pictures"), "caption_column": "text", "caption_dropout": 0.0, "resolution": 16,
        "cache_dir": str(folder / "cache"), "cache_latents": False, "cache_text_embeddings": False,
        "random_flip": False, "validation_images": 4, "validation_prompts": ["red bar", "blue"], "dry_run": False,
        "output_dir": str(folder / "out"), "keep_in_memory_bytes": 1 << 20, "model_channels": 3,
    }  # fmt: skip
    args = argparse.Namespace(**values | changes)
    return StableDiffusionFamily(args, load_image_data(args))


class TestConditioning:
    CAPTIONS = [("red bar",), ("red bar", "blue bar"), ("white",)] * 400

    def conditioned(self, parts: Path, accelerator: Accelerator, seed: int | None = 0, **changes: Any) -> torch.Tensor:
        """`(B, L, D)` of CAPTIONS."""
        family = make(parts, **changes)
        family.prepare_data(family.data, accelerator)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        [(name, tensor)] = family.conditioning({"captions": self.CAPTIONS}, generator, CPU).items()
        assert name == "encoder_hidden_states"
        return tensor

    def counts(self, parts: Path, embeddings: torch.Tensor) -> list[dict[str, int]]:
        """How often each text stands for each of the three kinds of caption."""
        texts = ["", "red bar", "blue bar", "white"]
        known = torch.cat([tiny_pipeline().encode_prompt(text, CPU, 1, False)[0] for text in texts])
        distance = (embeddings[:, None] - known).abs().amax((2, 3))
        assert distance.amin(1).max() < 1e-5
        found = distance.argmin(1).reshape(-1, 3)
        return [{text: int((column == n).sum()) for n, text in enumerate(texts)} for column in found.T]

    def test_one_of_several_is_picked_and_some_are_dropped(self, parts, accelerator):
        one, two, three = self.counts(parts, self.conditioned(parts, accelerator, caption_dropout=0.25))
        # Five standard deviations of a share of 400 are at most 50.
        assert one == {"": pytest.approx(100, abs=45), "red bar": 400 - one[""], "blue bar": 0, "white": 0}
        assert three[""] == pytest.approx(100, abs=45)
        assert two["red bar"] == pytest.approx(150, abs=50)
        assert two["blue bar"] == pytest.approx(150, abs=50)

    def test_without_dropout_none_is_dropped_and_the_same_are_picked(self, parts, accelerator):
        kept = self.conditioned(parts, accelerator)
        dropped = self.conditioned(parts, accelerator, caption_dropout=0.25)
        assert [row[""] for row in self.counts(parts, kept)] == [0, 0, 0]
        same = (kept == dropped).all(2).all(1)
        assert 0.65 < same.float().mean() < 0.85

    def test_validation_takes_the_first_and_drops_none(self, parts, accelerator):
        one, two, three = self.counts(parts, self.conditioned(parts, accelerator, None, caption_dropout=0.9))
        assert (one["red bar"], two["red bar"], three["white"]) == (400, 400, 400)

    def test_cached_embeddings_are_the_same(self, parts, accelerator, tmp_path):
        live = self.conditioned(parts, accelerator, caption_dropout=0.25)
        cached = self.conditioned(
            parts, accelerator, caption_dropout=0.25, cache_text_embeddings=True, output_dir=str(tmp_path)
        )
        assert list(tmp_path.glob("text_embeddings/*/index.json"))
        torch.testing.assert_close(live, cached, atol=1e-6, rtol=1e-5)


class TestScheduler:
    def test_training_is_the_pipelines_own_noise_process(self, parts):
        own = PNDMScheduler.from_pretrained(parts / "pipeline" / "scheduler")
        scheduler = make(parts).build_scheduler()
        assert scheduler.alphas_cumprod.equal(own.alphas_cumprod)
        assert scheduler.config.prediction_type == "epsilon"

    def test_what_the_pipeline_predicts_is_kept_unless_told_otherwise(self, parts, tmp_path):
        write_pipeline(tmp_path / "v", prediction_type="v_prediction")
        asked = {"pretrained_model_name_or_path": str(tmp_path / "v")}
        assert make(parts, **asked).build_scheduler().config.prediction_type == "v_prediction"
        assert make(parts, **asked, prediction_type="epsilon").build_scheduler().config.prediction_type == "epsilon"

    @pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # diffusers' schedulers with numpy 2
    @pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_every_scheduler_of_a_pipeline_generates_what_was_trained(self, name, prediction_type, parts, tmp_path):
        """Its own where it can, DDIM where not: one that takes the word and fails at the first step is no use."""
        pipeline = tiny_pipeline()
        # As in older files, nothing is said about what is predicted.
        own = getattr(diffusers, name).from_config({**pipeline.scheduler.config, **LATENT})
        assert "prediction_type" in own.config["_use_default_values"]
        family = make(parts, prediction_type=prediction_type)
        family.parts.scheduler = own
        scheduler, model = family.build_scheduler(), pipeline.unet
        used = family.pipeline(model, scheduler).scheduler
        cannot = ("PNDMScheduler", "EulerAncestralDiscreteScheduler", "KDPM2DiscreteScheduler")
        replaced = prediction_type == "sample" and name in cannot
        assert type(used) is (DDIMScheduler if replaced else type(own))
        assert used.config.prediction_type == prediction_type
        arrays = family.generate_arrays(model, scheduler, 2, seed=0, num_inference_steps=3, batch_size=2)
        assert arrays.shape == (2, 16, 16, 3)
        assert np.isfinite(arrays).all()
        assert np.abs(arrays[0] - arrays[1]).max() > 0

    def test_zero_terminal_snr_for_a_scheduler_whose_file_does_not_know_it(self, parts):
        family = make(parts, prediction_type="v_prediction", rescale_betas_zero_snr=True)
        family.parts.scheduler = DDIMScheduler.from_config({"num_train_timesteps": 50, **LATENT})
        scheduler = family.build_scheduler()
        used = family.pipeline(tiny_pipeline().unet, scheduler).scheduler
        for one in (scheduler, used):
            assert one.alphas_cumprod[-1] == 0
            assert one.config.timestep_spacing == "trailing"

    def test_looking_whether_a_scheduler_steps_draws_nothing(self, parts):
        family = make(parts)
        family.parts.scheduler = diffusers.DDPMScheduler(num_train_timesteps=50, **LATENT)
        scheduler, model = family.build_scheduler(), tiny_pipeline().unet
        state = torch.get_rng_state()
        assert type(family.pipeline(model, scheduler).scheduler) is diffusers.DDPMScheduler
        assert torch.get_rng_state().equal(state)

    def test_a_scheduler_without_such_a_process_is_refused(self, parts):
        family = make(parts)
        family.parts.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler, which has no DDPM noise process"):
            family.build_scheduler()

    def test_from_scratch_it_is_stable_diffusions_own(self, parts, tmp_path):
        (tmp_path / "unet.json").write_text(json.dumps(tiny_unet_config(_class_name="UNet2DConditionModel")))
        family = make(
            parts,
            pretrained_model_name_or_path=None,
            model_config_name_or_path=str(tmp_path / "unet.json"),
            autoencoder=str(parts / "pipeline"),
            text_encoder=str(parts / "pipeline"),
        )
        scheduler = family.build_scheduler()
        # sd-v1: 1000 steps from sqrt(0.00085) to sqrt(0.012), squared.
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        torch.testing.assert_close(scheduler.alphas_cumprod, torch.cumprod(1 - betas, 0))
        assert type(family.pipeline(family.build_model(), scheduler).scheduler) is DDIMScheduler


class TestSaving:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_frozen_parts_keep_the_precision_they_came_in_and_compute_in_float32(self, dtype, parts, tmp_path):
        write_pipeline(tmp_path / "given", dtype)
        family = make(parts, pretrained_model_name_or_path=str(tmp_path / "given"))
        model = family.build_model()
        family.save_pipeline(model, family.build_scheduler(), tmp_path / "saved")
        for name in ("vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
            given, saved = load_file(tmp_path / "given" / name), load_file(tmp_path / "saved" / name)
            assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} == {dtype}
            assert all(tensor.equal(saved[key]) for key, tensor in given.items())
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        for module in (family.parts.autoencoder, family.parts.text_encoder):
            assert {weight.dtype for weight in module.parameters()} == {torch.float32}
            assert not any(weight.requires_grad for weight in module.parameters())

    def test_what_else_the_pipeline_held_is_kept(self, parts, tmp_path):
        family = make(parts)
        family.save_pipeline(family.build_model(), family.build_scheduler(), tmp_path)
        index = json.loads((tmp_path / "model_index.json").read_text())
        assert index["_class_name"] == "StableDiffusionPipeline"
        assert index["requires_safety_checker"] is False
        assert StableDiffusionPipeline.from_pretrained(tmp_path).safety_checker is None


class TestLora:
    @pytest.mark.parametrize(("precision", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16)])
    def test_the_base_is_kept_in_the_precision_it_computes_in(self, precision, dtype, parts):
        model = make(parts, lora_rank=2, mixed_precision=precision).build_model()
        for name, weight in model.named_parameters():
            assert weight.dtype == (torch.float32 if "lora_" in name else dtype)
            assert weight.requires_grad == ("lora_" in name)

    def test_a_checkpoint_holds_the_adapter_alone_and_gives_it_back(self, parts, tmp_path):
        family = make(parts, lora_rank=2)
        model = family.build_model()
        for weight in weights_of(model).values():
            weight.add_(torch.randn_like(weight))
        family.save_model(model, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["pytorch_lora_weights.safetensors"]
        other = family.build_model()
        family.load_model(other, tmp_path)
        assert all(weight.equal(weights_of(other)[name]) for name, weight in weights_of(model).items())

    def test_its_identity_changes_with_its_options_and_with_the_network_under_it(self, parts, tmp_path):
        pipeline = tiny_pipeline()
        pipeline.unet.conv_in.weight.data += 1e-3
        pipeline.save_pretrained(tmp_path / "pipeline")
        changes = [
            {}, {"lora_alpha": 3}, {"lora_targets": ["to_q"]}, {"lora_rank": 3},
            {"pretrained_model_name_or_path": str(tmp_path / "pipeline")},
        ]  # fmt: skip
        seen = []
        for change in changes:
            family = make(parts, **{"lora_rank": 2, **change})
            family.build_model()
            assert json.loads(json.dumps(family.identity())) == family.identity()
            seen.append(family.identity())
        assert len({json.dumps(one) for one in seen}) == len(changes)
        # Halving the precision it computes in is another option of the run, not another network.
        family = make(parts, lora_rank=2, mixed_precision="bf16")
        family.build_model()
        assert family.identity() == seen[0]


def test_whole_networks_and_lora_do_not_resume_each_other(parts, tmp_path):
    whole, lora = make(parts).identity(), make(parts, lora_rank=2).identity()
    check_identity(whole, json.loads(json.dumps(whole)), tmp_path)
    for now, then in ((whole, lora), (lora, whole)):
        with pytest.raises(ValueError, match=r"belongs to another run.*--lora_rank: now"):
            check_identity(now, then, tmp_path)


def test_averaged_weights_are_kept_where_and_as_the_options_say(parts):
    """Here every device is a CPU, so this asks where they would be."""
    gpu = SimpleNamespace(device=torch.device("cuda", 1))
    for offload, device in ((True, CPU), (False, gpu.device)):
        run = SimpleNamespace(args=argparse.Namespace(offload_ema=offload), accelerator=gpu)
        assert Run.ema_device.fget(run) == device
    family = make(parts)
    for foreach in (True, False):
        args = argparse.Namespace(use_ema=True, foreach_ema=foreach)
        assert make_ema(args, family.build_model(), family).foreach is foreach


def test_the_average_starts_from_the_variant_where_it_is_kept_apart(parts, tmp_path):
    """As in diffusers' script, what is trained is of no variant where there is such a file."""
    pipeline = tiny_pipeline()
    pipeline.save_pretrained(tmp_path)
    with torch.no_grad():
        pipeline.unet.conv_in.bias.add_(1)
    pipeline.save_pretrained(tmp_path, variant="averaged")
    family = make(parts, pretrained_model_name_or_path=str(tmp_path), variant="averaged")
    model = family.build_model()
    average = family.average_start(model)
    torch.testing.assert_close(average.conv_in.bias, model.conv_in.bias + 1)
    assert make(parts).average_start(model) is model


def test_prompts_are_taken_in_turn(parts):
    assert make(parts).generation_arguments(range(1, 4)) == {"prompt": ["blue", "red bar", "blue"]}


def test_crops_that_differ_are_not_cached_unless_asked_for(parts, accelerator, tmp_path):
    write_captioned(tmp_path / "wide", count=8, size=(20, 16))
    asked = {"train_data_dir": str(tmp_path / "wide"), "output_dir": str(tmp_path / "out")}
    family = make(parts, **asked, cache_latents=None)
    family.prepare_data(family.data, accelerator)
    assert "latents are not cached: images that are not square are cropped anew each time" in family.notes
    family = make(parts, **asked, cache_latents=True)
    with pytest.raises(ValueError, match="Pass --center_crop, or --no-cache_latents"):
        family.prepare_data(family.data, accelerator)


class TestSafetyChecker:
    @pytest.fixture
    def guarded(self, tmp_path_factory) -> Path:
        """The parts, with a safety checker in the pipeline as Stable Diffusion 1 has one."""
        folder = tmp_path_factory.mktemp("guarded")
        vision = {"image_size": 32, "patch_size": 16}
        size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = CLIPConfig(text_config=size, vision_config=size | vision, projection_dim=8)
        torch.manual_seed(3)
        pipeline = tiny_pipeline()
        pipeline.register_modules(
            safety_checker=StableDiffusionSafetyChecker(config),
            feature_extractor=CLIPImageProcessorPil(size=32, crop_size=32),
        )
        pipeline.register_to_config(requires_safety_checker=True)
        pipeline.save_pretrained(folder / "pipeline")
        write_captioned(folder / "pictures", count=16)
        return folder

    def test_it_does_not_look_at_training_s_pictures_and_is_saved_as_it_came(self, guarded, tmp_path):
        family = make(guarded)
        model, scheduler = family.build_model(), family.build_scheduler()
        assert family.pipeline(model, scheduler).safety_checker is None
        family.save_pipeline(model, scheduler, tmp_path)
        saved = StableDiffusionPipeline.from_pretrained(tmp_path)
        before = StableDiffusionPipeline.from_pretrained(guarded / "pipeline").safety_checker.state_dict()
        after = saved.safety_checker.state_dict()
        assert saved.config.requires_safety_checker
        assert saved.feature_extractor is not None
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


class TestLoraProcess:
    @pytest.mark.parametrize("prediction_type", [None, "v_prediction", "sample"])
    def test_another_noise_process_goes_with_the_weights(self, parts, tmp_path, monkeypatch, prediction_type):
        family = make(parts, lora_rank=2, prediction_type=prediction_type)
        model, scheduler = family.build_model(), family.build_scheduler()
        family.save_pipeline(model, scheduler, tmp_path / "lora")
        config = tmp_path / "lora" / "scheduler" / "scheduler_config.json"
        assert config.is_file() == (prediction_type is not None)
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {}
        code = family.how_to_generate(tmp_path / "lora")
        exec(code.replace(").images", ", num_inference_steps=2).images"), names)  # of the 50 timesteps there are
        assert (tmp_path / "image.png").is_file()
        assert names["pipeline"].scheduler.config.prediction_type == (prediction_type or "epsilon")

    def test_defaults_that_are_written_out_are_the_same_run(self, parts):
        short = make(parts, lora_rank=4).identity()
        long = make(parts, lora_rank=4, lora_alpha=4.0, lora_targets=["to_q", "to_k", "to_out.0", "to_v"]).identity()
        assert short == long
