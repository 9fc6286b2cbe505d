"""Every family end to end: what plain diffusers makes of a saved pipeline, generation, the scale of the data."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.models.modeling_utils import ModelMixin

from diffusers_adaptive_ts.training.data import load_image_data
from diffusers_adaptive_ts.training.families import Family
from diffusers_adaptive_ts.training.randomness import derived_seed, generator

from .tiny_models import CPU, KINDS, T, build, make, write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def families(folder, accelerator) -> dict[str, tuple[Family, ModelMixin, DDPMScheduler]]:
    """Every kind, with data prepared as for training; v-prediction, so that a lost setting would show."""
    made = {}
    for kind in KINDS:
        family = make(folder, kind, prediction_type="v_prediction", random_flip=True)
        family.prepare_data(family.data, accelerator)
        made[kind] = (family, build(family), family.build_scheduler())
    return made


PLAIN = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "diffusers_adaptive_ts":
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
try:
    import diffusers_adaptive_ts
    raise SystemExit("the package was not blocked")
except ImportError:
    pass
import numpy as np, torch
from diffusers import DiffusionPipeline
root, seeds = sys.argv[1], json.loads(sys.argv[2])
facts = {}
for kind in json.loads(sys.argv[3]):
    pipeline = DiffusionPipeline.from_pretrained(f"{root}/{kind}")
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    call = {"class_labels": [0, 1, 2]} if kind == "dit" else {"batch_size": len(seeds)}
    images = pipeline(generator=generators, num_inference_steps=4, **call).images
    np.save(f"{root}/{kind}.npy", np.stack([np.asarray(image) for image in images]))
    facts[kind] = {
        "pipeline": type(pipeline).__name__,
        "scheduler": type(pipeline.scheduler).__name__,
        "prediction_type": pipeline.scheduler.config.prediction_type,
        "clip_sample": pipeline.scheduler.config.clip_sample,
        "labels": getattr(pipeline, "labels", None),
        "mode": images[0].mode,
        "size": images[0].size,
    }
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def plain(families, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """All pipelines saved, then loaded and used by a process that cannot import this package."""
    root = tmp_path_factory.mktemp("pipelines")
    for kind, (family, model, scheduler) in families.items():
        family.save_pipeline(model, scheduler, root / kind)
    seeds = [derived_seed(7, "image", index) for index in range(3)]
    command = [sys.executable, "-c", PLAIN, str(root), json.dumps(seeds), json.dumps(list(KINDS))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return root, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_plain_diffusers_generates_the_same_images_without_this_package(kind, families, plain):
    root, facts = plain
    family, model, scheduler = families[kind]
    ours = np.stack([np.asarray(image) for image in family.generate(model, scheduler, 3, 7, 4, batch_size=3)])
    theirs = np.load(root / f"{kind}.npy")
    assert ours.shape == theirs.shape == (3, 8, 8)
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1
    assert ours.std() > 1
    names = {"unet2d": "DDPMPipeline", "ldm": "LDMPipeline", "dit": "DiTPipeline"}
    assert facts[kind]["pipeline"] == names[family.name]
    assert (facts[kind]["mode"], facts[kind]["size"]) == ("L", [8, 8])


@pytest.mark.parametrize("kind", KINDS)
def test_the_scheduler_is_saved_as_it_was_trained_with(kind, plain):
    facts = plain[1][kind]
    assert facts["prediction_type"] == "v_prediction"
    # Clipping to [-1, 1] is right for pixels and ruins latents.
    assert facts["clip_sample"] is (kind == "unet2d")
    assert facts["scheduler"] == ("DDPMScheduler" if kind == "unet2d" else "DDIMScheduler")


def test_labels_survive_saving(families, plain):
    assert plain[1]["dit"]["labels"] == {str(digit): digit for digit in range(10)}
    index = json.loads((plain[0] / "dit" / "model_index.json").read_text())
    assert index["id2label"] == {str(digit): str(digit) for digit in range(10)}


@pytest.mark.parametrize("kind", KINDS)
def test_only_safetensors_and_json_are_saved(kind, plain):
    assert {path.suffix for path in (plain[0] / kind).rglob("*") if path.is_file()} == {".json", ".safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_depends_on_seed_and_number_only(kind, families):
    family, model, scheduler = families[kind]
    model.train()
    timesteps = scheduler.timesteps.clone()
    torch.manual_seed(0)
    five = family.generate_arrays(model, scheduler, 5, 3, 4, batch_size=5)
    torch.manual_seed(99)
    two_by_two = family.generate_arrays(model, scheduler, 5, 3, 4, batch_size=2)
    one = family.generate_arrays(model, scheduler, 1, 3, 4, batch_size=16)
    other = family.generate_arrays(model, scheduler, 5, 4, 4, batch_size=5)
    assert five.shape == (5, 8, 8, 1)
    assert np.abs(five - two_by_two).max() < 1e-4
    assert np.abs(five[:1] - one).max() < 1e-4
    assert np.abs(five - other).max() > 1e-2
    assert model.training
    assert torch.equal(scheduler.timesteps, timesteps)
    assert scheduler.num_inference_steps is None


def test_more_steps_than_the_model_was_trained_with_are_as_many_as_that(families):
    family, model, scheduler = families["unet2d"]
    all_steps = family.generate_arrays(model, scheduler, 1, 0, T, batch_size=1)
    assert np.array_equal(family.generate_arrays(model, scheduler, 1, 0, 1000, batch_size=1), all_steps)


@pytest.mark.parametrize("kind", KINDS)
def test_how_to_generate_is_code_that_runs(kind, families, plain, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = families[kind][0].how_to_generate(plain[0] / kind)
    assert f"num_inference_steps={T}" in code  # fewer than the pipelines' own 50 and 1000, which they would refuse
    exec(code, {"print": lambda *_: None})
    assert (tmp_path / "image.png").stat().st_size > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_runs_and_clean_samples_have_the_right_scale(kind, families):
    family, model, scheduler = families[kind]
    rows = family.data.train
    batch = rows.batch(list(range(0, len(rows), 4)), generator("crops"))
    x0 = family.clean_samples(batch, generator("latents"), CPU)
    if kind == "unet2d":
        assert x0.min() >= -1
        assert x0.max() <= 1
    else:
        # Measured on 256 other images than these 446; a few per cent is what they may differ.
        assert x0.std().item() == pytest.approx(1, abs=0.05)
    conditioning = family.conditioning(batch, generator("labels"), CPU)
    t = torch.randint(0, T, (8,))
    noisy = scheduler.add_noise(x0[:8], torch.randn_like(x0[:8]), t)
    prediction = model(noisy, t, **{key: value[:8] for key, value in conditioning.items()}).sample
    assert prediction.shape == x0[:8].shape


@pytest.mark.parametrize("kind", ["ldm-kl", "ldm-tiny", "ldm-vq", "dit"])
def test_the_pipeline_undoes_the_scaling_that_training_applied(kind, families, plain, monkeypatch):
    """A perfect model's latents decode to the autoencoder's own reconstruction of the image."""
    family, model, scheduler = families[kind]
    pipeline = family.pipeline(model, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    x0 = family.clean_samples(family.data.train.batch([5]), None, CPU)
    perfect = lambda output, t, sample, **_: argparse.Namespace(prev_sample=x0.expand_as(sample))  # noqa: E731
    monkeypatch.setattr(pipeline.scheduler, "step", perfect)
    call = {"class_labels": [0]} if kind == "dit" else {"batch_size": 1}
    image = pipeline(num_inference_steps=1, output_type="np", **call).images[0]
    autoencoder = family.space.autoencoder
    raw = load_image_data(family.args).train.batch([5])["images"]
    with torch.no_grad():
        code = autoencoder.encode(raw)
        code = code.latent_dist.mean if hasattr(code, "latent_dist") else code.latents
        expected = (autoencoder.decode(code).sample / 2 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).numpy()
    assert np.abs(image - expected).max() < 1e-4
    saved = json.loads((plain[0] / kind / ("vae" if kind == "dit" else "vqvae") / "config.json").read_text())
    assert saved["scaling_factor"] == family.space.scaling_factor


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_ddim_of_the_pipeline_has_the_noise_of_training(schedule, zero_snr, families):
    family, model, _ = families["ldm-kl"]
    args = argparse.Namespace(
        **vars(family.args) | {"ddpm_beta_schedule": schedule, "rescale_betas_zero_snr": zero_snr}
    )
    other = type(family).__new__(type(family))
    other.__dict__ = family.__dict__ | {"args": args}
    scheduler = other.build_scheduler()
    ddim = other.pipeline(model, scheduler).scheduler
    assert torch.allclose(ddim.alphas_cumprod, scheduler.alphas_cumprod, atol=1e-6)
    assert ddim.config.timestep_spacing == ("trailing" if zero_snr else "leading")
    if zero_snr:
        ddim.set_timesteps(3)
        assert ddim.timesteps[0] == T - 1
        assert np.isfinite(other.generate_arrays(model, scheduler, 1, 0, 3, 1)).all()
