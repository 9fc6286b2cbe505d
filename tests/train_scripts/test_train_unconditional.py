"""The script as a user meets it: upstream's command line, what a run leaves behind, and what bad input gets."""

import io
import json
import math
import subprocess

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diffusers_adaptive_ts import TimestepSampler
from diffusers_adaptive_ts.training import output_folder
from diffusers_adaptive_ts.training.density_map import density_map
from tests.loopback_hub import TOKEN, USER, LoopbackHub

from .conftest import Script

# Every option of diffusers' examples/unconditional_image_generation/train_unconditional.py with its default there.
UPSTREAM = {
    "dataset_name": None,
    "dataset_config_name": None,
    "model_config_name_or_path": None,
    "train_data_dir": None,
    "output_dir": "ddpm-model-64",
    "overwrite_output_dir": False,
    "cache_dir": None,
    "center_crop": False,
    "random_flip": False,
    "train_batch_size": 16,
    "eval_batch_size": 16,
    "dataloader_num_workers": 0,
    "num_epochs": 100,
    "save_images_epochs": 10,
    "save_model_epochs": 10,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 500,
    "adam_beta1": 0.95,
    "adam_beta2": 0.999,
    "adam_weight_decay": 1e-6,
    "adam_epsilon": 1e-8,
    "use_ema": False,
    "ema_inv_gamma": 1.0,
    "ema_power": 0.75,
    "ema_max_decay": 0.9999,
    "push_to_hub": False,
    "hub_token": None,
    "hub_model_id": None,
    "hub_private_repo": False,
    "logger": "tensorboard",
    "logging_dir": "logs",
    "local_rank": -1,
    "mixed_precision": "no",
    "prediction_type": "epsilon",
    "ddpm_num_steps": 1000,
    "ddpm_num_inference_steps": 1000,
    "ddpm_beta_schedule": "linear",
    "checkpointing_steps": 500,
    "checkpoints_total_limit": None,
    "resume_from_checkpoint": None,
    "enable_xformers_memory_efficient_attention": False,
    "preserve_input_precision": False,
}


def test_every_option_of_the_upstream_script_is_there_with_its_default():
    defaults = vars(Script.load().make_parser().parse_args([]))
    assert {name: defaults[name] for name in UPSTREAM} == UPSTREAM
    # Unset means 64 as upstream, but for the 8x8 digits that upstream does not have.
    assert defaults["resolution"] is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run with most things switched on; the tests below look at what it left."""
    script = Script(tmp_path_factory.mktemp("finished"))
    words = script.words(
        "run",
        timestep_sampler="adaptive",
        sampler_options=["update_every=2"],
        loss_weighting="min_snr",
        weighting_options=["gamma=3"],
        prediction_type="v_prediction",
        use_ema=True,
        logger="tensorboard",
        checkpoints_total_limit=1,
        hub_token="hf_secret_of_the_user",
    )
    script.done = script.run(words)
    script.output = script.folder / "run"
    script.rows = [json.loads(line) for line in (script.output / "training_log.jsonl").read_text().splitlines()]
    return script


def tracked(output):
    [folder] = {path.parent for path in (output / "logs").rglob("events.out.tfevents*")}
    return EventAccumulator(str(folder)).Reload()


def named_scalars(row):
    """The numbers of a log row by the names a tracker has them under."""
    if row["kind"] == "train":
        return {key: value for key, value in row.items() if key not in ("kind", "step", "minutes")}
    if row["kind"] == "density":
        return {f"sampler/{key}": value for key, value in {"entropy": row["entropy"], **row["policy"]}.items()}
    if row["kind"] == "validation":
        losses = ("simple", "simple_relative", "vlb_bits", "vlb_relative")
        parts = {"": row, **{f" t={part['from']}..{part['to']}": part for part in row["ranges"]}}
        return {f"validation/{key}{where}": part[key] for where, part in parts.items() for key in losses}
    return {}


@pytest.mark.slow
class TestWhatARunLeaves:
    def test_the_pipeline_is_plain_diffusers_and_knows_what_it_predicts(self, finished):
        pipeline = DiffusionPipeline.from_pretrained(finished.output)
        assert pipeline.scheduler.config.prediction_type == "v_prediction"
        assert type(pipeline.scheduler).__module__.startswith("diffusers.")
        image = pipeline(num_inference_steps=2, generator=torch.Generator().manual_seed(0)).images[0]
        assert image.size == (8, 8)

    def test_the_sampler_is_beside_it(self, finished):
        sampler = TimestepSampler.from_pretrained(finished.output, subfolder="timestep_sampler")
        assert sampler.name == "adaptive"
        assert int(sampler.events) == 3
        assert sampler.weighting.options == {"gamma": 3}

    def test_checkpoints_have_upstreams_layout_and_are_limited(self, finished):
        assert [path.name for path in finished.output.glob("checkpoint-*")] == ["checkpoint-6"]
        for part in ("unet", "unet_ema"):
            assert (finished.output / "checkpoint-6" / part / "diffusion_pytorch_model.safetensors").is_file()

    def test_the_log_has_every_kind_of_row(self, finished):
        kinds = {row["kind"] for row in finished.rows}
        assert kinds == {"run", "train", "validation", "density", "samples"}
        steps = [row["step"] for row in finished.rows if row["kind"] == "validation"]
        assert steps == [0, 3, 6]
        first = next(row for row in finished.rows if row["kind"] == "validation")
        assert first["simple_relative"] == 1.0
        assert all(math.isclose(sum(row["density"]), 1) for row in finished.rows if row["kind"] == "density")

    def test_report_and_samples_are_written(self, finished):
        assert "<script" in (finished.output / "report.html").read_text()
        with Image.open(finished.output / "samples.png") as grid:
            assert grid.size[0] > 8

    def test_the_log_has_each_range_relative_to_its_start(self, finished):
        first, *_, last = (row for row in finished.rows if row["kind"] == "validation")
        assert len(last["ranges"]) == 5
        for part, start in zip(last["ranges"], first["ranges"], strict=True):
            assert part["simple_relative"] == part["simple"] / start["simple"]
            assert part["vlb_relative"] == part["vlb_bits"] / start["vlb_bits"]

    def test_the_tracker_has_every_scalar_of_the_log(self, finished):
        events = tracked(finished.output)
        for row in finished.rows:
            for name, value in named_scalars(row).items():
                found = {event.step: event.value for event in events.Scalars(name)}
                assert found[row["step"]] == pytest.approx(value, rel=1e-6), name

    def test_the_tracker_has_the_grid_and_the_density_map(self, finished):
        events = tracked(finished.output)
        assert set(events.Tags()["images"]) == {"samples", "sampler/density"}
        [grid], [density] = events.Images("samples"), events.Images("sampler/density")
        assert grid.step == density.step == 6
        with Image.open(finished.output / "samples.png") as written:
            np.testing.assert_array_equal(Image.open(io.BytesIO(grid.encoded_image_string)), written.convert("RGB"))
        rows = [row for row in finished.rows if row["kind"] == "density"]
        shown = Image.open(io.BytesIO(density.encoded_image_string))
        np.testing.assert_array_equal(shown, density_map(rows, 50))

    def test_nothing_that_was_written_or_said_holds_the_token(self, finished):
        for path in finished.output.rglob("*"):
            if path.is_file():
                assert b"hf_secret_of_the_user" not in path.read_bytes(), path
        assert "hf_secret_of_the_user" not in finished.done.stdout + finished.done.stderr

    def test_the_end_message_says_where_everything_is_and_how_to_generate(self, finished):
        assert "report.html" in finished.done.stdout
        assert "DiffusionPipeline.from_pretrained" in finished.done.stdout

    def test_nothing_half_written_is_left(self, finished):
        assert not [path for path in finished.output.rglob("*") if "partial" in path.name or ".pipeline" in path.name]

    def test_another_run_in_the_folder_is_an_error_and_nothing_is_lost(self, finished):
        before = (finished.output / "training_log.jsonl").read_bytes()
        done = finished.run(finished.words("run"), check=False)
        assert done.returncode != 0
        assert "--overwrite_output_dir" in done.stderr
        assert (finished.output / "training_log.jsonl").read_bytes() == before


@pytest.mark.slow
def test_validation_numbers_do_not_depend_on_the_sampler(script):
    """The same first weights: step 0's losses of two samplers are equal to the last bit."""
    losses = []
    for name in ("uniform", "laplace"):
        script.run(script.words(name, timestep_sampler=name, max_train_steps=1))
        rows = map(json.loads, (script.folder / name / "training_log.jsonl").read_text().splitlines())
        row = next(row for row in rows if row["kind"] == "validation")
        losses.append({key: value for key, value in row.items() if key != "minutes"})
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_folder_of_colour_images_in_epochs_with_overwrite(script):
    folder = script.folder / "pictures"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for index in range(12):
        Image.fromarray(noise.integers(0, 255, (10, 12, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    config = json.loads(script.config.read_text())
    script.config.write_text(json.dumps({**config, "in_channels": 3, "out_channels": 3}))
    words = script.words(
        "run",
        train_data_dir=folder,
        resolution=8,
        train_batch_size=4,
        max_train_steps=None,
        num_epochs=2,
        validation_steps=0,
        mixed_precision="bf16",
        gradient_checkpointing=True,
    )
    script.run(words)
    done = script.run([*words, "--overwrite_output_dir"])
    assert done.returncode == 0
    rows = [json.loads(line) for line in (script.folder / "run" / "training_log.jsonl").read_text().splitlines()]
    assert rows[0]["max_train_steps"] == 6
    assert rows[0]["images"] == 12
    assert not [row for row in rows if row["kind"] == "validation"]


def test_a_dry_run_describes_the_run_and_writes_nothing(script):
    done = script.run([*script.words("run", timestep_sampler="adaptive"), "--dry_run"])
    assert "parameters" in done.stdout
    assert "expected overhead of the sampler" in done.stdout
    assert not (script.folder / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train_data_dir": "no/such/folder"}, "no/such/folder"),
        ({"timestep_sampler": "adaptiv"}, "Did you mean 'adaptive'"),
        ({"loss_weighting": "minsnr"}, "Did you mean 'min_snr'"),
        ({"sampler_options": ["seed=3"]}, "--seed"),
        ({"sampler_options": ["weighting=min_snr"]}, "--loss_weighting"),
        ({"label_dropout": 0.2}, "--label_dropout"),
        ({"overwrite_output_dir": True, "resume_from_checkpoint": "latest"}, "--overwrite_output_dir"),
        ({"sampler_options": ["speed=3"]}, "has no option 'speed'"),
        ({"weighting_options": ["gamma=3"]}, "--loss_weighting"),
        ({"resolution": 9}, "9"),
        ({"train_batch_size": 5000}, "--train_batch_size"),
        ({"class_labels": "label"}, "--model_family dit"),
        ({"model_family": "ldm"}, "--autoencoder"),
        ({"streaming": True}, "--streaming needs a data set"),
        ({"resume_from_checkpoint": "checkpoint-7"}, "There is no checkpoint"),
        ({"logger": "trackio"}, "--logger trackio is not installed"),
        ({"enable_xformers_memory_efficient_attention": True}, "xformers"),
        ({"ddpm_beta_schedule": "linnear"}, "Unknown --ddpm_beta_schedule"),
    ],
)
def test_bad_input_is_found_before_the_first_step(script, options, said):
    """In this process, for speed; the next test shows what a user sees."""
    message = script.here(script.words("run", **options))
    assert isinstance(message, str)
    assert said in message
    assert not list((script.folder / "run").glob("checkpoint-*"))


def test_a_user_sees_one_clear_line(script):
    done = script.run(script.words("run", timestep_sampler="adaptiv"), check=False)
    assert done.returncode != 0
    assert "error: Unknown sampler 'adaptiv'. Did you mean 'adaptive'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_space_is_said_before_the_first_step(script, tmp_path):
    model = torch.nn.Linear(2**24, 2**24, device="meta")  # a petabyte that takes no memory
    with pytest.raises(ValueError, match="MiB are free"):
        output_folder.check_space(tmp_path / "not" / "there", model, use_ema=True)


@pytest.mark.slow
def test_push_puts_the_pipeline_on_the_hub_privately_and_nothing_else(script):
    with LoopbackHub() as hub:
        words = script.words(
            "run", max_train_steps=3, push_to_hub=True, hub_model_id=f"{USER}/digits", hub_private_repo=True
        )
        environment = {**script.environment(), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        command = script.command([*words, "--hub_token", TOKEN])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        repository = hub.repos[f"{USER}/digits"]
        assert repository.private
        files = set(repository.at("main").files)
    assert {"model_index.json", "unet/config.json", "timestep_sampler/sampler.safetensors", "samples.png"} <= files
    assert not [name for name in files if name.startswith(("checkpoint", "logs", "latents", "samples/"))]
    assert "Pushed to" in done.stdout
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_token_that_is_refused_is_found_before_the_first_step(script):
    with LoopbackHub() as hub:
        words = script.words("run", max_train_steps=3, push_to_hub=True, hub_model_id=f"{USER}/digits")
        environment = {**script.environment(), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        command = script.command([*words, "--hub_token", "hf_wrong"])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "cannot be used on the Hub" in done.stderr
    assert "hf_wrong" not in done.stdout + done.stderr
    assert not (script.folder / "run" / "training_log.jsonl").exists()


@pytest.mark.slow
def test_overwriting_removes_nothing_when_an_option_is_wrong(script):
    script.run(script.words("run", max_train_steps=3))
    wrong = script.words("run", timestep_sampler="adaptiv", overwrite_output_dir=True)
    assert script.run(wrong, check=False).returncode != 0
    assert (script.folder / "run" / "checkpoint-3" / "manifest.json").is_file()
    assert (script.folder / "run" / "unet").is_dir()
