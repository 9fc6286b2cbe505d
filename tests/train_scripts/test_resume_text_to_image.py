"""Resuming text-to-image runs: on two processes, and past the end as upstream does."""

import shutil
from types import SimpleNamespace

import pytest
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file

from .conftest import TextToImage
from .test_resume import same_run
from .test_train_text_to_image import WHOLE


@pytest.mark.slow
def test_two_processes_share_the_work_and_resume_exactly(text_to_image):
    """Stopped between its two checkpoints: a copy of the run without the last one goes on."""
    options = WHOLE | {"max_train_steps": 6, "checkpointing_steps": 3, "validation_prompts": None}
    text_to_image.run(text_to_image.words("straight", **options), processes=2)
    [first, *_] = text_to_image.log("straight")
    assert first["effective_batch"] == 8
    folder = text_to_image.folder / "straight"
    ranks = [load_file(folder / "checkpoint-6" / f"sampler-rank-{rank}.safetensors") for rank in (0, 1)]
    assert any(not ranks[0][name].equal(ranks[1][name]) for name in ranks[0]), "both drew the same timesteps"
    # A checkpoint's folder alone is what it takes.
    resumed = text_to_image.folder / "resumed"
    resumed.mkdir()
    (folder / "checkpoint-3").rename(resumed / "checkpoint-3")
    lines = (folder / "training_log.jsonl").read_text()
    (resumed / "training_log.jsonl").write_text(lines)
    words = text_to_image.words("resumed", **options)
    text_to_image.run([*words, "--resume_from_checkpoint", "latest"], processes=2)
    same_run(folder, resumed, 6)
    assert StableDiffusionPipeline.from_pretrained(resumed).unet.config.cross_attention_dim == 16


@pytest.mark.parametrize(
    ("step", "asked", "in_epoch", "until"),
    [(4, 2, 20, 5), (20, 20, 20, 20), (20, 21, 20, 21), (21, 21, 20, 22), (41, 21, 20, 21), (4, 4, None, 4)],
)
def test_which_resumed_runs_take_one_more_step(step, asked, in_epoch, until):
    """Upstream looks whether it is at the end after a step, in the epochs from the checkpoint's to the last."""
    run = SimpleNamespace(step=step, max_train_steps=asked, steps_in_epoch=in_epoch)
    TextToImage.load().one_more_step(run)
    assert run.max_train_steps == until


def test_resuming_past_the_end_takes_one_more_step_as_upstream(text_to_image):
    """The steps of diffusers' own test of its script, test_text_to_image_checkpointing_use_ema and its neighbours."""
    assert text_to_image.here(text_to_image.words("run", train_batch_size=1, max_train_steps=4)) == 0
    folder = text_to_image.folder / "run"
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    shutil.rmtree(folder / "checkpoint-2")
    words = text_to_image.words(
        "run", train_batch_size=1, max_train_steps=2, checkpointing_steps=1, resume_from_checkpoint="checkpoint-4"
    )
    assert text_to_image.here(words) == 0
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-5"}
    assert StableDiffusionPipeline.from_pretrained(folder).unet is not None
