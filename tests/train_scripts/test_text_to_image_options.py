"""Options of the text-to-image script that change what is trained, each in a short run of the script's own `main`."""

import contextlib
import json
import logging
import math
import shutil
from types import SimpleNamespace

import datasets
import pytest
import torch
from diffusers import DDIMScheduler, PNDMScheduler, StableDiffusionPipeline
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diffusers_adaptive_ts.training.family_stable_diffusion import StableDiffusionFamily
from tests.training.tiny_stable_diffusion import tiny_pipeline, tiny_unet_config, write_captioned

from .conftest import TextToImage
from .test_resume import same_run
from .test_train_text_to_image import WEIGHTS, picture_of, same_tensors


@contextlib.contextmanager
def watched(monkeypatch):
    """Every call of the network that the script builds: what goes in, in which mode, with gradients or without."""
    calls, build = [], StableDiffusionFamily.build_model

    def note(module, inputs, named):
        calls.append(
            SimpleNamespace(
                noisy=inputs[0].clone(),
                timesteps=inputs[1].clone(),
                text=named["encoder_hidden_states"].clone(),
                training=module.training,
                gradients=torch.is_grad_enabled(),
            )
        )

    def build_watched(family):
        model = build(family)
        model.register_forward_pre_hook(note, with_kwargs=True)
        return model

    monkeypatch.setattr(StableDiffusionFamily, "build_model", build_watched)
    yield calls
    monkeypatch.setattr(StableDiffusionFamily, "build_model", build)


def losses(script: TextToImage, name: str) -> list[float]:
    return [row["loss"] for row in script.log(name) if row["kind"] == "train"]


def saved(script: TextToImage, name: str) -> StableDiffusionPipeline:
    """The pipeline of a run, which generates."""
    pipeline = StableDiffusionPipeline.from_pretrained(script.folder / name)
    [image] = picture_of(pipeline, ["red bar"], steps=2)
    assert image.size == (16, 16)
    return pipeline


def test_the_adaptive_sampler_sees_the_same_captions_before_and_after_the_step(text_to_image, monkeypatch):
    words = text_to_image.words(
        "run", timestep_sampler="adaptive", sampler_options=["update_every=1"], caption_dropout=0.5, max_train_steps=3
    )
    with watched(monkeypatch) as calls:
        assert text_to_image.here(words) == 0
    empty = tiny_pipeline().encode_prompt("", torch.device("cpu"), 1, False)[0][0]
    steps = [number for number, call in enumerate(calls) if call.training]
    assert len(steps) == 3
    dropped = []
    for number, end in zip(steps, [*steps[1:], len(calls)], strict=True):
        trained, probes = calls[number], calls[number + 1 : end]
        before, after = probes[: len(probes) // 2], probes[len(probes) // 2 :]
        # 50 timesteps of one sample and 3 of all four, in calls of four.
        assert len(before) == len(after) == 13 + 3
        for one, two in zip(before, after, strict=True):
            assert one.text.equal(two.text)
            assert one.noisy.equal(two.noisy)
            assert one.timesteps.equal(two.timesteps)
        # The whole batch has the embeddings of the training forward, of which some were dropped.
        assert all(one.text.equal(trained.text) for one in before[13:])
        assert all(any(row.equal(given) for given in trained.text) for one in before[:13] for row in one.text)
        dropped += [torch.allclose(row, empty, atol=1e-6) for row in trained.text]
    assert True in dropped
    assert False in dropped


def test_dream_noise_offset_and_input_perturbation(text_to_image, monkeypatch):
    """Against a run without them, of the same images, timesteps and first noise: what they add is the difference."""
    noise = {"noise_offset": 0.3, "input_perturbation": 0.2, "dream_training": True, "dream_detail_preservation": 2}
    with watched(monkeypatch) as plain:
        assert text_to_image.here(text_to_image.words("plain", max_train_steps=1)) == 0
    with watched(monkeypatch) as calls:
        assert text_to_image.here(text_to_image.words("run", max_train_steps=1, **noise, use_ema=True)) == 0
    [before] = plain
    rectifying, trained = calls
    assert (rectifying.gradients, trained.gradients) == (False, True)
    assert rectifying.training
    for call in calls:
        assert call.timesteps.equal(before.timesteps)
        assert call.text.equal(before.text)
    scheduler = PNDMScheduler.from_pretrained(text_to_image.pipeline / "scheduler")
    scale = (1 - scheduler.alphas_cumprod[before.timesteps]).sqrt().view(-1, 1, 1, 1)
    added = (rectifying.noisy - before.noisy) / scale
    # 256 numbers per sample of variance 0.2^2 around a mean for each channel, itself of variance 0.3^2.
    assert added.std((2, 3)).mean().item() == pytest.approx(0.2, rel=0.15)
    assert 0.1 < added.mean((2, 3)).std().item() < 0.6
    assert not trained.noisy.equal(rectifying.noisy)
    assert losses(text_to_image, "run") != losses(text_to_image, "plain")
    assert all(map(math.isfinite, losses(text_to_image, "run")))


def test_v_prediction_stands_in_the_saved_scheduler(text_to_image):
    """Where the learning rate is scaled too: by 4 images in each of 2 parts of a step."""
    options = {"snr_gamma": 5, "scale_lr": True, "gradient_accumulation_steps": 2}
    assert text_to_image.here(text_to_image.words("run", prediction_type="v_prediction", **options)) == 0
    assert [row["lr"] for row in text_to_image.log("run") if row["kind"] == "train"] == pytest.approx([8e-3] * 2)
    scheduler = saved(text_to_image, "run").scheduler
    assert type(scheduler) is PNDMScheduler
    assert scheduler.config.prediction_type == "v_prediction"
    assert scheduler.config.num_train_timesteps == 50


def test_a_configuration_with_a_pipeline_trains_a_new_network_between_its_parts(text_to_image):
    """Predicting x0, which PNDM cannot, so that DDIM comes in its place; from the middle of three epochs on."""
    config = tiny_unet_config(_class_name="UNet2DConditionModel", block_out_channels=[8, 8], sample_size=64)
    (text_to_image.folder / "config.json").write_text(json.dumps(config))
    words = text_to_image.words(
        "run",
        model_config_name_or_path=text_to_image.folder / "config.json",
        prediction_type="sample",
        max_train_steps=None,
        num_train_epochs=3,
        validation_epochs=2,
        train_batch_size=34,
        validation_prompts=["red bar"],
    )
    assert text_to_image.here(words) == 0
    pipeline = saved(text_to_image, "run")
    assert type(pipeline.scheduler) is DDIMScheduler
    assert pipeline.scheduler.config.prediction_type == "sample"
    assert pipeline.scheduler.config.beta_end == 0.012
    assert pipeline.unet.config.sample_size == 8
    assert list(pipeline.unet.config.block_out_channels) == [8, 8]
    # 100 images are 3 steps of 34; pictures come after the first epoch and every second one then.
    assert [row["step"] for row in text_to_image.log("run") if row["kind"] == "samples"] == [3, 9]


def test_zero_terminal_snr_replaces_a_scheduler_that_does_not_know_it(text_to_image):
    words = text_to_image.words("run", prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_gamma=5)
    assert text_to_image.here(words) == 0
    assert all(map(math.isfinite, losses(text_to_image, "run")))
    scheduler = saved(text_to_image, "run").scheduler
    assert type(scheduler) is DDIMScheduler
    assert scheduler.alphas_cumprod[-1] == 0
    assert scheduler.config.timestep_spacing == "trailing"


def test_averaged_weights_offloaded_and_in_fewer_operations(text_to_image):
    options = {"use_ema": True, "offload_ema": True, "foreach_ema": True, "checkpointing_steps": 1}
    assert text_to_image.here(text_to_image.words("run", **options)) == 0
    run = text_to_image.folder / "run"
    one, two = (load_file(run / f"checkpoint-{step}" / "unet" / WEIGHTS) for step in (1, 2))
    # EMAModel starts from the first step's weights, and its decay at the second is (1 + 1) / (10 + 1).
    average = load_file(run / "unet" / WEIGHTS)
    for name, weight in average.items():
        torch.testing.assert_close(weight, 2 / 11 * one[name] + 9 / 11 * two[name], rtol=1e-5, atol=1e-7)
    assert not all(weight.equal(average[name]) for name, weight in two.items())
    assert same_tensors(run / "unet" / WEIGHTS, run / "checkpoint-2" / "unet_ema" / WEIGHTS)


def test_a_half_pipeline_of_a_variant_keeps_its_precision_and_trains_in_float32(text_to_image):
    pipeline = tiny_pipeline().to(torch.float16)
    pipeline.save_pretrained(text_to_image.folder / "half", variant="fp16")
    words = text_to_image.words(
        "run",
        pretrained_model_name_or_path=text_to_image.folder / "half",
        variant="fp16",
        mixed_precision="bf16",
        use_ema=True,
        gradient_checkpointing=True,
        validation_prompts=["red bar"],
    )
    assert text_to_image.here(words) == 0
    half, run = text_to_image.folder / "half", text_to_image.folder / "run"
    assert same_tensors(half / "vae" / "diffusion_pytorch_model.fp16.safetensors", run / "vae" / WEIGHTS)
    assert same_tensors(half / "text_encoder" / "model.fp16.safetensors", run / "text_encoder" / "model.safetensors")
    assert load_file(run / "vae" / WEIGHTS)["encoder.conv_in.weight"].dtype == torch.float16
    before = load_file(half / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    after = load_file(run / "unet" / WEIGHTS)
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert not all(weight.equal(before[name].float()) for name, weight in after.items())


def test_captions_of_a_stream(text_to_image, caplog):
    """Lists of captions from parquet files, of which training takes the first 20 rows."""
    folder = text_to_image.folder / "rows"
    folder.mkdir()
    rows = datasets.load_dataset("imagefolder", data_dir=str(text_to_image.pictures), split="train")
    captions = [[caption, "a picture"] for caption in rows["text"]]
    rows = rows.remove_columns("text").add_column("words", captions)
    rows.to_parquet(folder / "train.parquet")
    words = text_to_image.words(
        "run",
        train_data_dir=None,
        dataset_name=folder,
        caption_column="words",
        streaming=True,
        max_train_samples=20,
        max_train_steps=6,
        validation_steps=3,
        validation_images=2,
    )
    with caplog.at_level(logging.INFO):
        assert text_to_image.here(words) == 0
    assert "Images are read as a stream" in caplog.text
    assert "text embeddings are not cached: captions of a stream" in caplog.text
    assert "latents are not cached: a stream" in caplog.text
    assert len(losses(text_to_image, "run")) == 6
    assert not (text_to_image.folder / "run" / "text_embeddings").exists()
    saved(text_to_image, "run")


def test_pictures_that_are_not_square_are_cropped_anew_and_not_cached(text_to_image, caplog):
    write_captioned(text_to_image.folder / "wide", count=12, size=(24, 16))
    words = text_to_image.words("run", train_data_dir=text_to_image.folder / "wide", max_train_samples=9)
    with caplog.at_level(logging.INFO):
        assert text_to_image.here(words) == 0
    assert "latents are not cached: images that are not square are cropped anew each time" in caplog.text
    assert text_to_image.log("run")[0]["images"] == 9
    assert not (text_to_image.folder / "run" / "latents").exists()
    assert (text_to_image.folder / "run" / "text_embeddings").is_dir()


def test_lora_is_clipped_and_resumes_exactly(text_to_image):
    """Adam hides the size of a gradient, so this looks at the gradients when the optimizer steps."""
    norms = []

    def note(optimizer, _, __):
        gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        norms.append(torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm().item())

    options = {
        "lora_rank": 2, "max_grad_norm": 1e-4, "max_train_steps": 4, "timestep_sampler": "loss_second_moment",
        "sampler_options": ["history_per_timestep=1"], "validation_steps": 2, "validation_images": 4,
    }  # fmt: skip
    hook = register_optimizer_step_pre_hook(note)
    try:
        assert text_to_image.here(text_to_image.words("straight", **options)) == 0
    finally:
        hook.remove()
    assert norms == pytest.approx([1e-4] * 4, rel=1e-2)
    shutil.copytree(text_to_image.folder / "straight", text_to_image.folder / "resumed")
    shutil.rmtree(text_to_image.folder / "resumed" / "checkpoint-4")
    words = text_to_image.words("resumed", **options, resume_from_checkpoint="latest")
    assert text_to_image.here(words) == 0
    same_run(text_to_image.folder / "straight", text_to_image.folder / "resumed", 4)


def test_a_dry_run_describes_the_run_and_writes_nothing(text_to_image, capsys):
    """Options from a file, of which lists are some."""
    config = text_to_image.folder / "config.yaml"
    config.write_text("validation_prompts: [red bar, blue]\nlora_targets: [to_q, to_v]\nlora_rank: 2\nsnr_gamma: 3\n")
    assert text_to_image.here(text_to_image.words("run", config=config, dry_run=True)) == 0
    said = capsys.readouterr().out
    assert "model: stable_diffusion, UNet2DConditionModel" in said
    assert "sampler: uniform, weighting min_snr" in said
    options = json.loads(said[: said.index("\nmodel:")])
    assert options["validation_prompts"] == ["red bar", "blue"]
    assert (options["lora_rank"], options["lora_targets"]) == (2, ["to_q", "to_v"])
    assert not (text_to_image.folder / "run").exists()
