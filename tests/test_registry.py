"""Names and options: one line registers, and a wrong word says what to do."""

import pytest
import torch

from diffusers_adaptive_ts import (
    TimestepSampler,
    UniformSampler,
    list_samplers,
    make_sampler,
    register_sampler,
    sampler_options,
)
from diffusers_adaptive_ts.registry import Registry, accepted_options, did_you_mean
from diffusers_adaptive_ts.samplers.base import _SAMPLERS, sampler_class

PROMISED_SAMPLERS = {
    "uniform",
    "stratified",
    "logit_normal",
    "edm_lognormal",
    "laplace",
    "beta",
    "mode",
    "speed",
    "timestep_bias",
    "histogram",
    "learning_progress",
    "loss_second_moment",
    "gradient_variance",
    "entropy_rate",
    "curriculum",
    "adaptive",
}


def test_all_promised_samplers_are_registered_and_sorted():
    assert set(list_samplers()) >= PROMISED_SAMPLERS
    assert list_samplers() == sorted(list_samplers())


def test_an_unknown_sampler_is_refused_with_a_suggestion_and_the_list(scheduler):
    with pytest.raises(
        ValueError, match=r"Unknown sampler 'adaptve'. Did you mean 'adaptive'\? Available: adaptive, "
    ):
        make_sampler("adaptve", scheduler)


def test_a_name_like_no_other_gets_no_suggestion(scheduler):
    with pytest.raises(ValueError, match=r"Unknown sampler 'zzzz'\. Available: adaptive, "):
        make_sampler("zzzz", scheduler)


def test_an_unknown_option_is_refused_with_a_suggestion_and_the_list(scheduler):
    with pytest.raises(ValueError, match=r"no option 'men'. Did you mean 'mean'\? It takes: mean, std, weighting"):
        make_sampler("logit_normal", scheduler, men=0.5)


@pytest.mark.parametrize("internal", ["scheduler", "options", "common"])
def test_what_the_constructors_pass_among_themselves_is_no_option(internal):
    assert all(internal not in sampler_options(name) for name in list_samplers())


def test_options_of_all_samplers_are_options_too():
    common = {"weighting", "weighting_options", "stratified", "importance_weighting", "seed"}
    assert all(common <= set(sampler_options(name)) for name in list_samplers())


def test_a_duplicate_name_is_refused_and_the_first_stays():
    class Second(TimestepSampler):
        pass

    with pytest.raises(ValueError, match=r"A sampler named 'uniform' is registered already \(UniformSampler\)"):
        register_sampler("uniform")(Second)
    assert sampler_class("uniform") is UniformSampler
    assert Second.name == ""


def test_what_is_no_sampler_cannot_be_registered():
    for thing in (dict, lambda scheduler: None):
        with pytest.raises(TypeError, match="takes a subclass of TimestepSampler, got"):
            register_sampler("mine")(thing)
    assert "mine" not in list_samplers()


@pytest.fixture
def registered_last_only():
    @register_sampler("last_only")
    class LastOnly(TimestepSampler):
        def density(self):
            return torch.eye(self.num_train_timesteps, dtype=torch.float64)[-1]

    yield LastOnly
    del _SAMPLERS._entries["last_only"]


def test_one_decorator_makes_a_sampler_with_all_verbs(registered_last_only, tmp_path, scheduler):
    sampler = make_sampler("last_only", scheduler, weighting="min_snr", seed=0)
    assert sampler.sample(torch.zeros(3, 1, 2, 2)).tolist() == [49, 49, 49]
    sampler.save_pretrained(tmp_path)
    assert type(TimestepSampler.from_pretrained(tmp_path)) is registered_last_only


def test_a_registry_holds_what_it_was_given():
    registry = Registry("colour")
    registry.register("red")(len)
    assert registry["red"] is len
    assert "red" in registry
    assert "blue" not in registry
    assert registry.items() == [("red", len)]


def test_an_entry_without_options_says_so():
    with pytest.raises(ValueError, match=r"The colour 'red' has no option 'shade'\. It takes no options\."):
        Registry("colour").check_options("red", {"shade": 1}, [])


def test_accepted_options_are_the_keyword_names():
    assert accepted_options(lambda a, b=1, **rest: None) == ["a", "b", "rest"]


def test_suggestions_survive_words_that_are_no_strings():
    assert did_you_mean(3, ["min_snr"]) == ""
    assert did_you_mean("minsnr", ["min_snr"]) == " Did you mean 'min_snr'?"


@pytest.mark.parametrize(
    ("options", "given"), [({"shade": "dark", "hue": 1}, "shade=dark, hue=1"), ({}, "no options")]
)
def test_a_type_error_while_building_says_what_was_given(options, given):
    with pytest.raises(ValueError, match=f"The colour 'red' cannot be built with {given}: no such thing."):
        with Registry("colour").building("red", options):
            raise TypeError("no such thing")
