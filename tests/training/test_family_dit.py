"""The traps of class-conditional DiTs: labels dropped once, the null class, guidance, first weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from diffusers.models.modeling_utils import ModelMixin

from diffusers_adaptive_ts.training.data import load_image_data
from diffusers_adaptive_ts.training.families import Family
from diffusers_adaptive_ts.training.family_dit import NULL_CLASS
from diffusers_adaptive_ts.training.randomness import generator

from .tiny_models import CPU, build, make, write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def dit(folder) -> tuple[Family, ModelMixin, DDPMScheduler]:
    """With classes that make a clear difference."""
    family = make(folder, "dit", prediction_type="v_prediction")
    model = build(family)
    for block in model.transformer_blocks:
        torch.nn.init.normal_(block.norm1.emb.class_embedder.embedding_table.weight)
    return family, model, family.build_scheduler()


def test_labels_are_dropped_once_and_at_the_asked_rate(dit):
    family, model, _ = dit
    labels = torch.randint(0, 10, (20_000,), generator=generator(0))
    given = family.conditioning({"labels": labels}, generator(1), CPU)["class_labels"]
    dropped = given == NULL_CLASS
    # Four standard deviations of a binomial with p = 0.1.
    assert dropped.double().mean().item() == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 20_000) ** 0.5)
    assert torch.equal(given[~dropped], labels[~dropped])
    assert labels.max() < 10
    assert torch.equal(given, family.conditioning({"labels": labels}, generator(1), CPU)["class_labels"])
    assert torch.equal(family.conditioning({"labels": labels}, None, CPU)["class_labels"], labels)

    model.train()
    embedders = [block.norm1.emb.class_embedder for block in model.transformer_blocks]
    assert [embedder.dropout_prob for embedder in embedders] == [0.0, 0.0]
    before = torch.get_rng_state()
    x, t = torch.zeros(500, 4, 4, 4), torch.zeros(500, dtype=torch.long)
    outputs = [model(x, t, class_labels=torch.full((500,), 3)).sample for _ in range(2)]
    # With a dropout of 10 % in each of two blocks and the output, some of 500 equal samples would differ.
    assert (outputs[0] - outputs[0][:1]).abs().max() < 1e-5
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_guidance_moves_away_from_the_null_class(dit):
    """The pipeline's own guidance, computed by hand with class 1000 as the null class."""
    family, model, scheduler = dit
    model.eval()
    ddim = DDIMScheduler.from_config(scheduler.config)
    ddim.set_timesteps(2)
    x = torch.randn(1, 4, 4, 4, generator=generator(5, "image", 0))
    with torch.no_grad():
        for t in ddim.timesteps:
            asked, null = (model(x, t[None], class_labels=torch.tensor([label])).sample for label in (0, 1000))
            assert (asked - null).abs().max() > 1e-3
            x = ddim.step(null + 4.0 * (asked - null), t, x).prev_sample
        expected = family.space.autoencoder.decode(x / family.space.scaling_factor).sample / 2 + 0.5
    image = family.generate_arrays(model, scheduler, 1, 5, 2, batch_size=1)
    assert np.abs(image - expected.clamp(0, 1).permute(0, 2, 3, 1).numpy()).max() < 1e-4
    unguided = family.generate_arrays(model, scheduler, 1, 5, 2, batch_size=1, guidance_scale=1.0)
    assert np.abs(image - unguided).max() > 1e-2


def test_classes_come_in_turn_and_nothing_is_guided_without_dropped_labels(dit, folder):
    family = dit[0]
    arguments = family.generation_arguments(range(8, 12))
    assert arguments == {"class_labels": [8, 9, 0, 1], "guidance_scale": 4.0}
    undropped = make(folder, "dit", data=load_image_data(family.args), label_dropout=0.0)
    assert undropped.generation_arguments([0])["guidance_scale"] == 1.0
    assert "guidance_scale=1.0" in undropped.how_to_generate("x")


def test_a_fresh_dit_predicts_zero_and_learns_from_there(folder):
    model = make(folder, "dit").build_model()
    x, t = torch.randn(2, 4, 4, 4), torch.tensor([3, 9])
    output = model(x, t, class_labels=torch.tensor([1, NULL_CLASS])).sample
    assert output.abs().max() == 0
    (output - 1).pow(2).mean().backward()
    assert model.proj_out_2.weight.grad.abs().sum() > 0
    assert model.config.out_channels == 4  # DiTPipeline halves it, None would crash there
