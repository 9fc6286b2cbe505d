"""Command-line options that the training scripts share: the words of diffusers' scripts, and ours in addition."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import yaml
from diffusers.optimization import SchedulerType

from ..key_values import parse_key_values
from ..registry import did_you_mean
from ..samplers import list_samplers
from ..weightings import list_weightings


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(int(text), 1)


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    return _at_least(int(text), 0)


def positive_float(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


# Those of diffusers but for the one that needs rules, which no option gives.
LR_SCHEDULERS = [kind.value for kind in SchedulerType if kind != SchedulerType.PIECEWISE_CONSTANT]
_WANTED = {
    int: "a whole number",
    float: "a number",
    positive_int: "a whole number of at least 1",
    whole_number: "a whole number of at least 0",
    positive_float: "a number above 0",
}


def _at_least(value: int, least: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is below {least}")
    return value


def add_sampler_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("timestep sampler")
    group.add_argument(
        "--timestep_sampler", default="uniform", metavar="NAME", help=f"One of {', '.join(list_samplers())}."
    )
    group.add_argument(
        "--loss_weighting",
        default=None,
        metavar="NAME",
        help=f"One of {', '.join(list_weightings())}; unset is the sampler's own, mostly uniform.",
    )
    group.add_argument(
        "--sampler_options",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="Options of the sampler; see adaptive-ts list.",
    )
    group.add_argument(
        "--weighting_options", nargs="*", default=[], metavar="KEY=VALUE", help="Options of the weighting."
    )


def add_optimizer_options(group: Any, *, lr_scheduler: str, adam_beta1: float, adam_weight_decay: float) -> None:
    """The optimizer's options under the names of both of diffusers' scripts, whose defaults differ."""
    group.add_argument("--gradient_accumulation_steps", type=positive_int, default=1)
    group.add_argument("--learning_rate", type=positive_float, default=1e-4)
    group.add_argument("--lr_scheduler", default=lr_scheduler, choices=LR_SCHEDULERS)
    group.add_argument("--lr_warmup_steps", type=whole_number, default=500)
    group.add_argument("--adam_beta1", type=float, default=adam_beta1)
    group.add_argument("--adam_beta2", type=float, default=0.999)
    group.add_argument("--adam_weight_decay", type=float, default=adam_weight_decay)
    group.add_argument("--adam_epsilon", type=float, default=1e-8)
    group.add_argument("--use_ema", action="store_true", help="Average the weights, and save the average.")
    group.add_argument("--local_rank", type=int, default=-1, help="Set by the launcher.")


def add_checkpoint_and_hub_options(group: Any) -> None:
    group.add_argument("--overwrite_output_dir", action="store_true", help="Replace a run that is in output_dir.")
    group.add_argument("--checkpointing_steps", type=positive_int, default=500)
    group.add_argument("--checkpoints_total_limit", type=positive_int)
    group.add_argument("--resume_from_checkpoint", help="`latest`, or a checkpoint folder.")
    group.add_argument("--logging_dir", default="logs", help="Of the tracker, inside output_dir.")
    group.add_argument("--push_to_hub", action="store_true", help="Upload the result to the Hub.")
    group.add_argument("--hub_token", help="Token for the upload; stored nowhere.")
    group.add_argument("--hub_model_id", help="Name of the repository; unset: the name of output_dir.")
    group.add_argument("--hub_private_repo", action="store_true", help="Create the repository private.")


def add_image_options(group: Any) -> None:
    group.add_argument("--center_crop", action="store_true", help="Crop at the centre instead of at random.")
    group.add_argument("--random_flip", action="store_true", help="Mirror images at random.")
    group.add_argument(
        "--train_batch_size", type=positive_int, default=16, help="Samples per process and forward pass."
    )
    group.add_argument("--dataloader_num_workers", type=whole_number, default=0, help="Processes that decode images.")
    group.add_argument("--cache_dir", help="Where downloaded models and data sets are kept.")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--seed",
        type=whole_number,
        default=None,
        help="Makes the run repeatable; unset takes a random one, which is logged.",
    )
    group.add_argument(
        "--max_train_steps", type=positive_int, default=None, help="Optimizer steps; overrides the number of epochs."
    )
    group.add_argument("--max_grad_norm", type=positive_float, default=1.0, help="Gradients are clipped to this norm.")
    group.add_argument(
        "--gradient_checkpointing", action="store_true", help="Trade compute for memory in the backward pass."
    )
    group.add_argument(
        "--validation_steps",
        type=whole_number,
        default=500,
        help="Steps between two stable validation losses; 0: none, and no images are held out.",
    )
    group.add_argument(
        "--validation_images", type=whole_number, default=256, help="Images held out for the validation loss."
    )
    group.add_argument(
        "--logging_steps", type=positive_int, default=10, help="Steps between two rows of the training log."
    )
    group.add_argument(
        "--keep_in_memory_bytes",
        type=whole_number,
        default=2 << 30,
        help="Images are decoded once and kept when they take no more than this; otherwise for every batch.",
    )
    group.add_argument("--streaming", action="store_true", help="Read the data set as a stream instead of loading it.")
    group.add_argument(
        "--config",
        default=None,
        metavar="FILE.yaml",
        help="Options from a file, the same words as the flags; flags win.",
    )
    group.add_argument("--dry_run", action="store_true", help="Print the resolved configuration and stop.")


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse flags over the values of `--config`; an unknown key in the file is an error."""
    known, _ = _only_config().parse_known_args(argv)
    if known.config is not None:
        parser.set_defaults(**_read_config(parser, known.config))
    args = parser.parse_args(argv)
    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    if local_rank != -1:
        args.local_rank = local_rank
    try:
        for name in ("sampler_options", "weighting_options"):
            given = getattr(args, name)  # a mapping when it comes from the file
            setattr(args, name, given if isinstance(given, dict) else parse_key_values(given))
    except ValueError as error:
        parser.error(str(error))
    return args


def _only_config() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=None)
    return parser


def _read_config(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config {path} cannot be read: {error}")
    if not isinstance(values, dict):
        parser.error(f"--config {path} must hold `option: value` lines.")
    actions = {action.dest: action for action in parser._actions}
    for key, value in list(values.items()):
        if key not in actions or key in ("config", "help"):
            parser.error(f"--config {path}: unknown option {key!r}.{did_you_mean(key, actions)}")
        action = actions[key]
        if action.nargs == "*":
            if not isinstance(value, dict):
                parser.error(f"--config {path}: {key} must be a mapping of options to values, got {value!r}.")
        elif action.nargs == "+":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                parser.error(f"--config {path}: {key} must be a list of texts, got {value!r}.")
        elif isinstance(action.const, bool) or isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                parser.error(f"--config {path}: {key} must be true or false, got {value!r}.")
        elif action.type is not None and value is not None:
            try:
                values[key] = action.type(value)
            except (TypeError, ValueError, argparse.ArgumentTypeError):
                wanted = _WANTED.get(action.type, action.type.__name__)
                parser.error(f"--config {path}: {key} must be {wanted}, got {value!r}.")
        if action.choices is not None and value not in (*action.choices, action.default):
            parser.error(
                f"--config {path}: {key} must be one of {', '.join(map(str, action.choices))}, got {value!r}."
            )
    return values
