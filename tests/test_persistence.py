"""Samplers as files: what comes back, what is refused, and that a broken save destroys nothing."""

import json
import pickle
import resource
import struct
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from diffusers_adaptive_ts import LogitNormalSampler, TimestepSampler, UniformSampler, Weighting, make_sampler
from diffusers_adaptive_ts.persistence import CONFIG_NAME, WEIGHTS_NAME, replacing
from tests.conftest import assert_same_state, make, make_quick, make_scheduler, train


@pytest.fixture
def saved(tmp_path, scheduler):
    """A folder with a logit-normal sampler."""
    make("logit_normal", scheduler, mean=0.5, seed=0).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_holds_json_and_safetensors_and_nothing_else(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "sampler.safetensors"]
    config = json.loads((saved / CONFIG_NAME).read_text())
    assert config["sampler"] == "logit_normal"
    assert config["options"]["mean"] == 0.5
    assert config["scheduler"]["num_train_timesteps"] == 50
    assert set(load_file(saved / WEIGHTS_NAME)) == {"steps", "dropped", "generator", "shared_generator"}


def test_saving_makes_the_folders_and_replaces_what_was_there(tmp_path, scheduler):
    folder = tmp_path / "deep" / "down"
    make("uniform", scheduler, seed=0).save_pretrained(folder)
    make("beta", scheduler, seed=0).save_pretrained(str(folder))
    assert TimestepSampler.from_pretrained(folder).name == "beta"


def test_a_subfolder_is_found_beside_a_pipeline(tmp_path, scheduler):
    make("mode", scheduler, seed=0).save_pretrained(tmp_path / "timestep_sampler")
    assert TimestepSampler.from_pretrained(tmp_path, subfolder="timestep_sampler").name == "mode"
    with pytest.raises(FileNotFoundError, match=r"no config.json in .*; a saved sampler has one"):
        TimestepSampler.from_pretrained(tmp_path)


def test_the_config_of_a_pipeline_part_is_refused_with_the_way_to_ours(tmp_path):
    DDPMScheduler().save_config(tmp_path)
    (tmp_path / "scheduler_config.json").rename(tmp_path / CONFIG_NAME)
    with pytest.raises(ValueError, match=r"not the config of a timestep sampler.*subfolder='timestep_sampler'"):
        TimestepSampler.from_pretrained(tmp_path)


@pytest.mark.parametrize("given", [{}, {"seed": 3}, {"weighting": "p2", "weighting_options": {"k": 2.0}}])
def test_options_come_back(given, tmp_path, scheduler):
    sampler = make("speed", scheduler, version="v2", **given)
    sampler.save_pretrained(tmp_path)
    loaded = TimestepSampler.from_pretrained(tmp_path)
    assert loaded.options == sampler.options
    assert torch.equal(loaded.weighting.table(), sampler.weighting.table())


def test_numpy_and_torch_numbers_are_written_as_numbers(tmp_path, scheduler):
    make("logit_normal", scheduler, mean=np.float32(0.5), std=torch.tensor(2.0)).save_pretrained(tmp_path)
    options = TimestepSampler.from_pretrained(tmp_path).options
    assert (options["mean"], options["std"]) == (0.5, 2.0)


def test_an_option_that_json_cannot_hold_is_named(tmp_path, scheduler):
    sampler = make("uniform", scheduler)
    sampler.options["seed"] = object()
    with pytest.raises(TypeError, match=r"option <object object .*cannot be written as JSON"):
        sampler.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "scheduler",
    [
        make_scheduler(50, "linear", rescale_betas_zero_snr=True, prediction_type="v_prediction"),
        make_scheduler(50, "sigmoid", beta_start=1e-3),
        DDPMScheduler(num_train_timesteps=3, trained_betas=[0.1, 0.2, 0.3]),
        DDIMScheduler(num_train_timesteps=50, beta_schedule="scaled_linear"),
    ],
    ids=["zero_snr", "sigmoid", "trained_betas", "ddim"],
)
def test_without_a_scheduler_the_saved_ones_betas_are_rebuilt(scheduler, tmp_path):
    sampler = make("uniform", scheduler, seed=0)
    sampler.save_pretrained(tmp_path)
    loaded = TimestepSampler.from_pretrained(tmp_path)
    assert torch.equal(loaded.objective.betas, sampler.objective.betas)
    assert loaded.objective.prediction_type == sampler.objective.prediction_type
    assert TimestepSampler.from_pretrained(tmp_path, scheduler).scheduler is scheduler


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (make_scheduler(60), "num_train_timesteps is 60, the sampler was saved with 50"),
        (make_scheduler(50, "linear"), "beta_schedule is 'linear', saved 'squaredcos_cap_v2'"),
        (make_scheduler(rescale_betas_zero_snr=True), "rescale_betas_zero_snr is True, saved False"),
        (make_scheduler(prediction_type="v_prediction"), "prediction_type is 'v_prediction', saved 'epsilon'"),
    ],
    ids=["T", "schedule", "zero_snr", "prediction_type"],
)
def test_a_scheduler_with_another_meaning_of_t_is_refused(other, complaint, saved):
    with pytest.raises(ValueError, match=f"does not fit this scheduler: .*{complaint}"):
        TimestepSampler.from_pretrained(saved, other)


def test_betas_of_another_range_are_told_apart(tmp_path):
    make("uniform", make_scheduler(50, "linear")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the betas differ \(beta_end is 0.03, saved 0.02\)"):
        TimestepSampler.from_pretrained(tmp_path, make_scheduler(50, "linear", beta_end=0.03))


def test_another_class_is_refused_with_the_right_one(saved):
    with pytest.raises(ValueError, match=r"'logit_normal' sampler \(LogitNormalSampler\), not a UniformSampler"):
        UniformSampler.from_pretrained(saved)
    assert type(LogitNormalSampler.from_pretrained(saved)) is LogitNormalSampler


def test_an_option_of_from_pretrained_that_does_not_exist_is_refused(saved):
    with pytest.raises(ValueError, match=r"no option 'sheduler'. Did you mean 'scheduler'\?"):
        TimestepSampler.from_pretrained(saved, sheduler=make_scheduler())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"surprise": 1}, r"has the keys .*'surprise'.*reads format 1"),
        ({"format": 2}, "format 2; this version reads format 1"),
        ({"sampler": "logit_norml"}, "Unknown sampler 'logit_norml'. Did you mean 'logit_normal'"),
        ({"sampler": ["logit_normal"]}, "not the config of a timestep sampler"),
        ({"options": {"mean": 0.5, "surprise": 1}}, "'logit_normal' has no option surprise"),
        ({"options": [1, 2]}, "'options' and 'scheduler' must be JSON objects"),
        ({"scheduler": None}, "'options' and 'scheduler' must be JSON objects"),
        ({"options": {"std": -1.0}}, "std must be above 0 and finite, got -1.0"),
    ],
)
def test_a_config_that_we_did_not_write_is_refused(changes, complaint, saved):
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=complaint):
        TimestepSampler.from_pretrained(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff"])
def test_a_config_that_is_no_json_object_is_refused(text, saved):
    (saved / CONFIG_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config.json is not (a readable JSON file|the config of a timestep)"):
        TimestepSampler.from_pretrained(saved)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_safetensors_are_refused(kept, saved):
    path = saved / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"not a readable safetensors file .*may be cut off"):
        TimestepSampler.from_pretrained(saved)


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_named_safetensors_is_refused_unread(saved):
    trap = saved / "sprung"
    (saved / WEIGHTS_NAME).write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(ValueError, match=r"not a readable safetensors file"):
        TimestepSampler.from_pretrained(saved)
    assert not trap.exists()


def test_a_torch_checkpoint_named_safetensors_is_refused(saved):
    torch.save({"steps": torch.zeros(())}, saved / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"not a readable safetensors file"):
        TimestepSampler.from_pretrained(saved)


def test_a_header_that_claims_to_be_huge_is_refused(saved):
    (saved / WEIGHTS_NAME).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ValueError, match=r"not a readable safetensors file"):
        TimestepSampler.from_pretrained(saved)


def test_foreign_safetensors_are_refused_with_the_keys_that_do_not_belong(saved):
    save_file({"unet.weight": torch.zeros(3)}, saved / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"missing \['dropped', .*unexpected \['unet.weight'\]"):
        TimestepSampler.from_pretrained(saved)


def test_tensors_of_another_number_of_timesteps_are_refused(tmp_path):
    make("loss_second_moment", make_scheduler(60)).save_pretrained(tmp_path / "other")
    make("loss_second_moment", make_scheduler(50)).save_pretrained(tmp_path / "mine")
    (tmp_path / "other" / WEIGHTS_NAME).replace(tmp_path / "mine" / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"is torch.float64 \(60, 10\) in the state.*\(50, 10\) is needed.*another T"):
        TimestepSampler.from_pretrained(tmp_path / "mine")


def test_missing_weights_are_said_to_be_missing(saved):
    (saved / WEIGHTS_NAME).unlink()
    with pytest.raises(FileNotFoundError, match=r"no sampler.safetensors in"):
        TimestepSampler.from_pretrained(saved)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing is neither a folder nor the name of a Hub repository"):
        TimestepSampler.from_pretrained(tmp_path / "nothing")


def test_a_repository_that_cannot_be_reached_is_not_called_empty(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nobody/nothing is not a folder here, and .*could not be asked"):
        TimestepSampler.from_pretrained("nobody/nothing", local_files_only=True, cache_dir=tmp_path)


def test_saving_to_a_file_is_refused_and_leaves_it(tmp_path, scheduler):
    path = tmp_path / "model.bin"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"model.bin is a file; give a directory"):
        make("uniform", scheduler).save_pretrained(path)
    assert path.read_text() == "mine"


def test_a_class_that_is_not_registered_cannot_be_saved(tmp_path, scheduler):
    class Mine(TimestepSampler):
        pass

    with pytest.raises(ValueError, match="Mine is not registered; decorate it with @register_sampler"):
        Mine(scheduler).save_pretrained(tmp_path)


def test_a_weighting_that_is_not_registered_cannot_be_saved(tmp_path, scheduler):
    sampler = make_sampler("uniform", scheduler, weighting=Weighting("mine", torch.ones(50)))
    with pytest.raises(ValueError, match="The weighting 'mine' is not registered"):
        sampler.save_pretrained(tmp_path)


@contextmanager
def files_at_most(size):
    """The kernel refuses to let any file grow beyond `size` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("bins", "limit"), [(3, 6_000), (1000, 12_000)], ids=["while writing the tensors", "while writing the config"]
)
def test_a_save_that_breaks_off_leaves_the_old_files_whole(bins, limit, tmp_path):
    old = make("uniform", make_scheduler(1000), seed=1)
    old.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    new = make("histogram", make_scheduler(1000), histogram=[1.125] * bins, seed=2)
    with pytest.raises((OSError, SafetensorError)), files_at_most(limit):
        new.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_same_state(TimestepSampler.from_pretrained(tmp_path), old)
    new.save_pretrained(tmp_path)
    assert TimestepSampler.from_pretrained(tmp_path).name == "histogram"


def test_an_interrupt_between_writing_and_replacing_keeps_the_old_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def interrupted():
        with replacing(target) as path:
            path.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_text() == "old"


@pytest.mark.parametrize("name", ["adaptive", "gradient_variance", "entropy_rate", "loss_second_moment"])
def test_a_learned_sampler_learns_on_from_its_files(name, tmp_path, scheduler):
    sampler = make_quick(name, scheduler, weighting="learned_uncertainty", seed=0)
    train(sampler, steps=5)
    sampler.save_pretrained(tmp_path)
    loaded = TimestepSampler.from_pretrained(tmp_path, scheduler)
    assert train(loaded, steps=5, seed=1)[0] == train(sampler, steps=5, seed=1)[0]
    assert_same_state(loaded, sampler)


def test_a_state_dict_is_a_copy(scheduler):
    sampler = make("loss_second_moment", scheduler, seed=0)
    sampler.state_dict()["density"].zero_()
    assert float(sampler.density().sum()) == pytest.approx(1)
