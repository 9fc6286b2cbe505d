"""Killed and resumed equals straight for latent models, and for a sampler that learns from the losses of two ranks."""

import json

import pytest

from tests.training.tiny_models import DIT, UNET, small_autoencoder

from .test_resume import files_of, kill_in_the_middle, log_of, same_run

STEPS, FIRST_CHECKPOINT = 24, "checkpoint-6"
OPTIONS = {"use_ema": True, "random_flip": True, "max_train_steps": STEPS, "checkpointing_steps": 6}


def straight_and_killed(script, processes: int = 1, **options) -> list[dict]:
    """Train without a stop and with one, compare, and give the log."""
    options = {**OPTIONS, **options}
    script.run(script.words("straight", **options), processes)
    killed = script.words("killed", **options)
    command = script.command(killed, processes)
    kill_in_the_middle(command, script.environment(), script.folder / "killed", FIRST_CHECKPOINT)
    script.run([*killed, "--resume_from_checkpoint", "latest"], processes)
    same_run(script.folder / "straight", script.folder / "killed", STEPS)
    return log_of(script.folder / "killed")


def densities(log: list[dict]) -> dict[int, list[float]]:
    return {row["step"]: row["density"] for row in log if row["kind"] == "density"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "network", "labels"), [("ldm", UNET, None), ("dit", DIT, "label")], ids=["ldm", "dit"]
)
def test_latent_models(script, family, network, labels):
    small_autoencoder("kl").save_pretrained(script.folder / "autoencoder")
    script.config.write_text(json.dumps({**network, "dropout": 0.1}))
    log = straight_and_killed(
        script,
        model_family=family,
        autoencoder=script.folder / "autoencoder",
        class_labels=labels,
        timestep_sampler="adaptive",
        sampler_options=["update_every=2"],
    )
    # What was compared is what this test is about.
    names = " ".join(files_of(script.folder / "killed" / f"checkpoint-{STEPS}"))
    assert all(part in names for part in ("_ema/", "optimizer.safetensors", "sampler.safetensors"))
    assert list((script.folder / "killed" / "latents").rglob("*.safetensors"))
    assert densities(log)[0] != densities(log)[6] != densities(log)[STEPS]


@pytest.mark.slow
def test_two_ranks_and_a_sampler_that_learns_from_the_losses(script):
    """Few timesteps, so that it is past its warm-up when the run is killed."""
    log = straight_and_killed(
        script,
        processes=2,
        timestep_sampler="loss_second_moment",
        sampler_options=["history_per_timestep=1"],
        ddpm_num_steps=10,
    )
    assert densities(log)[0] != densities(log)[6] != densities(log)[STEPS]
