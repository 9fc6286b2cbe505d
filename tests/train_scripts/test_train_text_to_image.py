"""The text-to-image script as users meet it: upstream's command line; what whole, LoRA and new networks leave."""

import io
import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, PNDMScheduler, StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import BertModel, CLIPTokenizer

from diffusers_adaptive_ts import TimestepSampler
from diffusers_adaptive_ts.training.lora import FILE_NAME as LORA_NAME
from diffusers_adaptive_ts.training.outputs import sample_grid
from diffusers_adaptive_ts.training.randomness import generator
from tests.loopback_hub import TOKEN, USER, LoopbackHub
from tests.training.test_text import bert_pipeline
from tests.training.tiny_stable_diffusion import tiny_unet_config

from .conftest import TextToImage
from .test_resume import kill_in_the_middle, same_run

# Every option of diffusers' examples/text_to_image/train_text_to_image.py with its default there.
UPSTREAM = {
    "input_perturbation": 0,
    "pretrained_model_name_or_path": None,
    "revision": None,
    "variant": None,
    "dataset_name": None,
    "dataset_config_name": None,
    "train_data_dir": None,
    "caption_column": "text",
    "max_train_samples": None,
    "validation_prompts": None,
    "output_dir": "sd-model-finetuned",
    "cache_dir": None,
    "seed": None,
    "resolution": 512,
    "center_crop": False,
    "random_flip": False,
    "train_batch_size": 16,
    "num_train_epochs": 100,
    "max_train_steps": None,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "learning_rate": 1e-4,
    "scale_lr": False,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 500,
    "snr_gamma": None,
    "dream_training": False,
    "dream_detail_preservation": 1.0,
    "use_8bit_adam": False,
    "allow_tf32": False,
    "use_ema": False,
    "offload_ema": False,
    "foreach_ema": False,
    "non_ema_revision": None,
    "dataloader_num_workers": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_weight_decay": 1e-2,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "push_to_hub": False,
    "hub_token": None,
    "prediction_type": None,
    "hub_model_id": None,
    "logging_dir": "logs",
    "mixed_precision": None,
    "report_to": "tensorboard",
    "local_rank": -1,
    "checkpointing_steps": 500,
    "checkpoints_total_limit": None,
    "resume_from_checkpoint": None,
    "enable_xformers_memory_efficient_attention": False,
    "noise_offset": 0,
    "validation_epochs": 5,
    "tracker_project_name": "text2image-fine-tune",
    "image_interpolation_mode": "lanczos",
}
PROMPTS = ["red square", "blue bar"]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def test_every_option_of_the_upstream_script_is_there_with_its_default():
    defaults = vars(TextToImage.load().make_parser().parse_args([]))
    assert {name: defaults[name] for name in UPSTREAM} == UPSTREAM
    # Unset takes a column named image, which is the default upstream, before it looks for others.
    assert defaults["image_column"] is None


def pushed(script: TextToImage, name: str, **options) -> dict[str, bytes]:
    """Run the script with an upload to a Hub on the loopback device; returns the files there."""
    words = script.words(name, **options, push_to_hub=True, hub_model_id=f"{USER}/{name}", hub_token=TOKEN)
    with LoopbackHub() as hub:
        environment = {**script.environment(), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        command = script.command(words)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        files = dict(hub.repos[f"{USER}/{name}"].at("main").files)
    script.said = done.stdout + done.stderr
    script.output = script.folder / name
    assert "Pushed to" in script.said
    assert TOKEN not in script.said
    kept = [path for path in script.output.rglob("*") if path.is_file()]
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
    assert not [path for path in files if path.startswith(("checkpoint", "latents", "text_embeddings", "logs"))]
    return files


def picture_of(pipeline: StableDiffusionPipeline, prompts: list[str], steps: int = 20) -> list[Image.Image]:
    pipeline.set_progress_bar_config(disable=True)
    generators = [generator(0, "image", index) for index in range(len(prompts))]
    return pipeline(prompts, num_inference_steps=steps, generator=generators).images


def same_tensors(first: Path, second: Path) -> bool:
    one, two = load_file(first), load_file(second)
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and one[name].equal(two[name]) for name in one
    )


WHOLE = {
    "timestep_sampler": "adaptive",
    "sampler_options": ["update_every=3"],
    "snr_gamma": 4,
    "use_ema": True,
    "offload_ema": True,
    "foreach_ema": True,
    "caption_dropout": 0.2,
    "random_flip": True,
    # Below an epoch, and long enough to be killed in the middle by a machine that is busy.
    "max_train_steps": 20,
    "checkpointing_steps": 4,
    "validation_steps": 4,
    "validation_images": 4,
    "validation_prompts": PROMPTS,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, given_parts) -> TextToImage:
    """A UNet fine-tuned whole, with most things switched on; the tests below look at what it left."""
    script = TextToImage(tmp_path_factory.mktemp("whole"), given_parts)
    script.files = pushed(script, "whole", report_to="tensorboard", **WHOLE)
    return script


@pytest.mark.slow
class TestWhole:
    def test_checkpoints_have_upstreams_layout(self, whole):
        names = {path.name for path in whole.output.glob("checkpoint-*")}
        assert names == {f"checkpoint-{step}" for step in (4, 8, 12, 16, 20)}
        for part in ("unet", "unet_ema"):
            assert (whole.output / "checkpoint-20" / part / WEIGHTS).is_file()

    def test_the_network_is_trained_and_its_average_is_what_is_saved(self, whole):
        last = whole.output / "checkpoint-20"
        assert not same_tensors(last / "unet" / WEIGHTS, whole.pipeline / "unet" / WEIGHTS)
        assert not same_tensors(last / "unet_ema" / WEIGHTS, last / "unet" / WEIGHTS)
        assert same_tensors(whole.output / "unet" / WEIGHTS, last / "unet_ema" / WEIGHTS)

    def test_frozen_parts_are_those_that_came_to_the_bit(self, whole):
        for name in (f"vae/{WEIGHTS}", "text_encoder/model.safetensors"):
            assert same_tensors(whole.output / name, whole.pipeline / name)
        first, second = (CLIPTokenizer.from_pretrained(path / "tokenizer") for path in (whole.pipeline, whole.output))
        assert first(PROMPTS) == second(PROMPTS)
        assert first.model_max_length == second.model_max_length

    def test_plain_diffusers_makes_the_pictures_that_validation_showed(self, whole):
        pipeline = StableDiffusionPipeline.from_pretrained(whole.output)
        assert type(pipeline.scheduler) is PNDMScheduler
        assert pipeline.scheduler.config == PNDMScheduler.from_pretrained(whole.pipeline / "scheduler").config
        grid = sample_grid(picture_of(pipeline, PROMPTS))
        with Image.open(whole.output / "samples.png") as written:
            np.testing.assert_array_equal(grid, written)

    def test_report_log_and_tracker_have_the_pictures_too(self, whole):
        assert [row["step"] for row in whole.log("whole") if row["kind"] == "samples"] == [20]
        assert '"samples":[{' in (whole.output / "report.html").read_text().replace(" ", "")
        [events] = (whole.output / "logs" / "text2image-fine-tune").glob("events.out.tfevents*")
        [shown] = EventAccumulator(str(events.parent)).Reload().Images("samples")
        with Image.open(whole.output / "samples.png") as written:
            np.testing.assert_array_equal(Image.open(io.BytesIO(shown.encoded_image_string)), written)

    def test_snr_gamma_is_min_snr_with_that_gamma(self, whole):
        sampler = TimestepSampler.from_pretrained(whole.output, subfolder="timestep_sampler")
        assert (sampler.weighting.name, sampler.weighting.options) == ("min_snr", {"gamma": 4.0})
        assert whole.log("whole")[0]["weighting"] == "min_snr"

    def test_the_log_says_what_was_cached_and_what_was_cut(self, whole):
        assert "latents encoded once into" in whole.said
        assert "text embeddings encoded once into" in whole.said
        # "white square" has one letter more than fits.
        assert "13 of 100 captions are longer than the 12 tokens" in whole.said
        assert whole.said.count("are longer than") == 1

    def test_the_upload_is_the_pipeline_the_sampler_and_the_pictures(self, whole):
        parts = ("unet", "vae", "text_encoder", "tokenizer", "scheduler", "timestep_sampler")
        assert {path.split("/")[0] for path in whole.files if "/" in path} == set(parts)
        for path in (f"unet/{WEIGHTS}", "samples.png", "report.html", "model_index.json"):
            assert whole.files[path] == (whole.output / path).read_bytes()

    def test_killed_and_resumed_it_is_the_same_run(self, whole):
        words = whole.words("killed", **WHOLE)
        kill_in_the_middle(whole.command(words), whole.environment(), whole.folder / "killed", "checkpoint-4")
        done = whole.run([*words, "--resume_from_checkpoint", "latest"])
        same_run(whole.output, whole.folder / "killed", 20)
        assert "latents reused from" in done.stderr
        assert "text embeddings reused from" in done.stderr


@pytest.fixture(scope="module")
def lora(tmp_path_factory, given_parts) -> TextToImage:
    script = TextToImage(tmp_path_factory.mktemp("lora"), given_parts)
    script.files = pushed(
        script,
        "lora",
        lora_rank=3,
        lora_alpha=6,
        lora_targets=["to_q", "to_v"],
        timestep_sampler="adaptive",
        sampler_options=["update_every=1"],
        mixed_precision="bf16",
        gradient_checkpointing=True,
        validation_steps=1,
        validation_images=4,
        learning_rate=0.05,
        validation_prompts=PROMPTS,
    )
    return script


@pytest.mark.slow
class TestLora:
    def test_the_pipeline_loads_it_and_makes_other_pictures(self, lora):
        pipeline = StableDiffusionPipeline.from_pretrained(lora.pipeline)
        before = np.array(picture_of(pipeline, PROMPTS, 2)[0], dtype=int)
        pipeline.load_lora_weights(lora.output)
        assert np.abs(np.array(picture_of(pipeline, PROMPTS, 2)[0]) - before).max() > 2
        config = pipeline.unet.peft_config["default_0"]
        assert (config.r, config.lora_alpha, set(config.target_modules)) == (3, 6, {"to_q", "to_v"})

    def test_what_is_kept_and_uploaded_holds_the_adapter_and_nothing_of_the_base(self, lora):
        found = {path.relative_to(lora.output).as_posix() for path in lora.output.rglob("*.safetensors")}
        cached = {path for path in found if path.startswith(("latents/", "text_embeddings/"))}
        assert {path for path in found - cached if "sampler" not in path and "window" not in path} == {
            LORA_NAME, f"checkpoint-2/{LORA_NAME}", "checkpoint-2/optimizer.safetensors",
        }  # fmt: skip
        assert all(".lora." in name for name in load_file(lora.output / LORA_NAME))
        assert not (lora.output / "model_index.json").exists()
        assert {path.split("/")[0] for path in lora.files} >= {LORA_NAME, "timestep_sampler", "samples.png"}
        assert not {"unet", "vae", "model_index.json"} & {path.split("/")[0] for path in lora.files}

    def test_its_weights_are_float32_though_it_was_trained_in_bfloat16(self, lora):
        weights = load_file(lora.output / LORA_NAME)
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        row = lora.log("lora")[0]
        assert row["trained_parameters"] == sum(weight.numel() for weight in weights.values()) < row["parameters"]

    def test_the_adaptive_sampler_learns_with_it(self, lora):
        assert int(TimestepSampler.from_pretrained(lora.output, subfolder="timestep_sampler").events) == 2
        validated = [row["simple"] for row in lora.log("lora") if row["kind"] == "validation"]
        assert len(set(validated)) == 3
        assert all(map(math.isfinite, validated))

    def test_the_end_message_says_how_to_load_it(self, lora):
        assert f"The LoRA is in {lora.output}" in lora.said
        assert f"pipeline.load_lora_weights({str(lora.output)!r})" in lora.said
        assert f"DiffusionPipeline.from_pretrained({str(lora.pipeline)!r})" in lora.said


@pytest.fixture(scope="module")
def scratch(tmp_path_factory, given_parts) -> TextToImage:
    """No pipeline: a configuration, the folder of an autoencoder, and a BERT with its tokenizer; no prompts either."""
    script = TextToImage(tmp_path_factory.mktemp("scratch"), given_parts)
    bert = bert_pipeline(use_attention_mask=None)
    bert.text_encoder.save_pretrained(script.folder / "bert")
    bert.tokenizer.save_pretrained(script.folder / "bert")
    (script.folder / "unet.json").write_text(json.dumps(tiny_unet_config(_class_name="UNet2DConditionModel")))
    script.files = pushed(
        script,
        "scratch",
        pretrained_model_name_or_path=None,
        model_config_name_or_path=script.folder / "unet.json",
        autoencoder=given_parts / "pipeline" / "vae",
        text_encoder=script.folder / "bert",
        ddpm_num_steps=40,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_gamma=5,
        max_train_steps=4,
        validation_steps=2,
        validation_images=4,
    )
    return script


@pytest.mark.slow
class TestFromScratch:
    def test_losses_are_finite_at_zero_terminal_snr(self, scratch):
        losses = [row["loss"] for row in scratch.log("scratch") if row["kind"] == "train"]
        assert len(losses) == 4
        assert all(math.isfinite(loss) and loss > 0 for loss in losses)

    def test_the_saved_scheduler_is_the_noise_process_it_was_trained_with(self, scratch):
        scheduler = StableDiffusionPipeline.from_pretrained(scratch.output).scheduler
        assert type(scheduler) is DDIMScheduler
        wanted = {
            "num_train_timesteps": 40, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
            "prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing",
            "clip_sample": False,
        }  # fmt: skip
        assert {key: scheduler.config[key] for key in wanted} == wanted

    def test_plain_diffusers_generates_with_the_encoder_that_was_given(self, scratch):
        pipeline = StableDiffusionPipeline.from_pretrained(scratch.output)
        assert type(pipeline.text_encoder) is BertModel
        assert pipeline.text_encoder.config.use_attention_mask
        [image] = picture_of(pipeline, ["a red square of more letters than fit"], 3)
        assert image.size == (16, 16)
        assert same_tensors(
            scratch.output / "text_encoder" / "model.safetensors", scratch.folder / "bert" / "model.safetensors"
        )
        assert same_tensors(scratch.output / "vae" / WEIGHTS, scratch.pipeline / "vae" / WEIGHTS)

    def test_the_upload_needs_no_pictures(self, scratch):
        assert f"unet/{WEIGHTS}" in scratch.files
        assert "samples.png" not in scratch.files
        assert f"Look at {scratch.output / 'report.html'}." in scratch.said
