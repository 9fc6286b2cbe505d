"""Flags win over the config file, and nothing in either is silently ignored."""

import argparse

import pytest
import torch

from diffusers_adaptive_ts.training.arguments import add_optimizer_options, add_run_options, add_sampler_options, parse
from diffusers_adaptive_ts.training.setup import make_lr_scheduler


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--logger", choices=["none", "tensorboard"], default="none")
    parser.add_argument("--cache_latents", action=argparse.BooleanOptionalAction, default=None)
    add_run_options(parser)
    add_sampler_options(parser)
    return parser


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_the_file_gives_values_and_flags_win(parser, tmp_path):
    config = write(
        tmp_path,
        "use_ema: true\nlearning_rate: 1e-3\nseed: 3\ncache_latents: false\n"
        "timestep_sampler: beta\nsampler_options: {a: 0.5, stratified: true}\n",
    )
    args = parse(parser, ["--config", config, "--seed", "4"])
    assert (args.use_ema, args.learning_rate, args.seed, args.cache_latents) == (True, 1e-3, 4, False)
    assert args.timestep_sampler == "beta"
    assert args.sampler_options == {"a": 0.5, "stratified": True}


def test_values_in_the_file_keep_their_type(parser, tmp_path):
    text = "sampler_options: {update_every: 1, floor: 0, stratified: true, estimator_options: {noise: fresh}}\n"
    given = parse(parser, ["--config", write(tmp_path, text)]).sampler_options
    assert given == {"update_every": 1, "floor": 0, "stratified": True, "estimator_options": {"noise": "fresh"}}
    assert type(given["update_every"]) is int


def test_key_value_options_are_parsed(parser):
    args = parse(parser, ["--sampler_options", "version=v2", "k=3", "duals=false"])
    assert args.sampler_options == {"version": "v2", "k": 3, "duals": False}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat: 1\n", "Did you mean 'learning_rate'"),
        ("learning_rate: fast\n", "must be a number"),
        ("max_train_steps: 0\n", "must be a whole number of at least 1"),
        ("sampler_options: fast\n", "must be a mapping"),
        ("use_ema: 3\n", "must be true or false"),
        ("logger: paper\n", "must be one of none, tensorboard"),
        ("- a\n- b\n", "must hold"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_key(parser, tmp_path, capsys, text, said):
    with pytest.raises(SystemExit):
        parse(parser, ["--config", write(tmp_path, text)])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "missing.yaml"],
        ["--nonsense"],
        ["--sampler_options", "word"],
        ["--logging_steps", "0"],
        ["--max_grad_norm", "0"],
    ],
)
def test_bad_flags_are_errors(parser, argv):
    with pytest.raises(SystemExit):
        parse(parser, argv)


def test_schedules_of_the_learning_rate_are_those_that_can_be_built(capsys):
    parser = argparse.ArgumentParser()
    add_optimizer_options(parser, lr_scheduler="cosine", adam_beta1=0.9, adam_weight_decay=0.0)
    [schedules] = [action.choices for action in parser._actions if action.dest == "lr_scheduler"]
    for name in schedules:
        args = parser.parse_args(["--lr_scheduler", name, "--lr_warmup_steps", "2"])
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        assert 0 <= make_lr_scheduler(args, optimizer, 10).get_last_lr()[0] <= 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--lr_scheduler", "constnt"])
    assert "constant_with_warmup" in capsys.readouterr().err


def test_a_null_in_the_file_is_the_default_of_an_option_that_has_none(tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "bf16"])
    add_run_options(parser)
    add_sampler_options(parser)
    (tmp_path / "run.yaml").write_text("mixed_precision: null\n")
    assert parse(parser, ["--config", str(tmp_path / "run.yaml")]).mixed_precision is None
