"""The command `adaptive-ts`: look at samplers and weightings before training with them."""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .key_values import parse_key_values
from .objective import PREDICTION_TYPES
from .registry import did_you_mean
from .samplers import TimestepSampler, list_samplers, make_sampler, sampler_class, sampler_options
from .weightings import list_weightings, weighting_entry

_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace")
_PAPER_NAMES = {"cosine": "squaredcos_cap_v2", "quadratic": "scaled_linear"}
_PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg")
_DEFAULT_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; bad input is one line on stderr and exit code 2."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: _say("warning", message)
        try:
            args = _parser().parse_args(argv)
            code = args.run(args)
            sys.stdout.flush()
            return code
        except SystemExit as stop:  # --help and --version
            return int(stop.code or 0)
        except BrokenPipeError:  # `adaptive-ts list | head`: nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (ValueError, OSError) as error:
            _say("error", error)
            return 2


def _say(kind: str, message: Any) -> None:
    print(f"adaptive-ts: {kind}: {' '.join(str(message).split())}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Bad arguments are errors like any other, without a page of usage around them."""

    def error(self, message: str) -> None:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="adaptive-ts", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"adaptive-ts {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for register in _SUBCOMMANDS:
        register(commands)
    return parser


def _register_list(commands: Any) -> None:
    parser = commands.add_parser("list", help="samplers and weightings, with their options", allow_abbrev=False)
    parser.set_defaults(run=_list)


def _list(args: argparse.Namespace) -> int:
    common = _options(TimestepSampler, hidden=("scheduler", "options"))
    print("Samplers\n")
    for name in list_samplers():
        own = _options(sampler_class(name), hidden=("scheduler",))
        print(_entry(name, sampler_class(name), (item for item in own if item not in common)))
    print()
    print(_wrapped(f"Every sampler also takes: {', '.join(common)}.", indent=2))
    print("\nWeightings\n")
    for name in list_weightings():
        print(_entry(name, weighting_entry(name), _options(weighting_entry(name), hidden=("objective",))))
    return 0


def _options(entry: Any, hidden: tuple[str, ...]) -> list[str]:
    """`name=default` of what a registered class or function takes."""
    parameters = inspect.signature(entry).parameters.values()
    return [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in hidden
    ]


def _entry(name: str, documented: Any, options: Iterable[str]) -> str:
    first_line = (inspect.getdoc(documented) or "").partition("\n")[0]
    lines = [_wrapped(f"  {name:<20}{first_line}", indent=22)]
    options = ", ".join(options)
    if options:
        lines.append(_wrapped(f"{'':22}{options}", indent=24))
    return "\n".join(lines)


def _wrapped(text: str, indent: int) -> str:
    width = max(60, _terminal_width())
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def _terminal_width() -> int:
    return shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns


def _register_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="density and effective weight of samplers, as a picture or in the terminal",
        description="The density and the effective weight (density x weight, normalised) of samplers over timesteps "
        "and log-SNR, as they are before training.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--sampler", nargs="+", required=True, metavar="NAME", help="one or more of `adaptive-ts list`")
    add("--schedule", default="linear", help=f"noise schedule: {', '.join(_SCHEDULES)} (default: linear)")
    add("--weighting", metavar="NAME", help="one of `adaptive-ts list` (default: each sampler's own)")
    add("--num_train_timesteps", type=int, default=1000, metavar="T", help="default: 1000")
    add("--prediction_type", default="epsilon", help=f"{', '.join(PREDICTION_TYPES)} (default: epsilon)")
    add("--rescale_betas_zero_snr", action="store_true", help="end the schedule at zero SNR")
    add("--sampler_options", nargs="+", default=[], metavar="KEY=VALUE", help="options that all the samplers take")
    add("--weighting_options", nargs="+", default=[], metavar="KEY=VALUE", help="options of the weighting")
    add("--out", type=Path, metavar="FILE", help=f"picture to write ({', '.join(_PICTURES)}); default: a text chart")
    parser.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    if args.out is not None:
        _check_picture(args.out)
    samplers = {_label(sampler): sampler for sampler in _build_samplers(args)}

    from .analysis.densities import density_chart, density_figure  # matplotlib, which the other commands do not need

    if args.out is None:
        print(density_chart(samplers, width=_terminal_width(), ascii_only=not _draws_blocks(sys.stdout)))
        print("\nPercent of the draws, and of the loss weight (density x weight). Bars are scaled for each sampler.")
        return 0
    density_figure(samplers).savefig(args.out)
    print(f"wrote {args.out}")
    return 0


def _check_picture(path: Path) -> None:
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"--out {path}: cannot write this kind of file. Accepted are {', '.join(_PICTURES)}.")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}. Make it first, or name another.")
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder. Name a file in it.")


def _build_samplers(args: argparse.Namespace) -> list[TimestepSampler]:
    names = args.sampler
    for name in names:
        sampler_class(name)  # an unknown one says so, before any option is looked at
        if names.count(name) > 1:
            raise ValueError(f"--sampler: {name!r} is given twice. Give each sampler once.")
    options = _options_of_all(names, parse_key_values(args.sampler_options))
    weighting_options = parse_key_values(args.weighting_options)
    if args.weighting is not None:
        weighting_entry(args.weighting)  # likewise
    scheduler = _scheduler(args)
    built = []
    for name in names:
        # Before the first batch the density is the same for any number of channels.
        channels = {"in_channels": 1} if "in_channels" in sampler_options(name) else {}
        try:
            sampler = make_sampler(
                name,
                scheduler,
                **{**channels, **options},
                weighting=args.weighting,
                weighting_options=weighting_options or None,
            )
        except (TypeError, ArithmeticError) as error:
            given = " ".join([*args.sampler_options, *args.weighting_options])
            raise ValueError(f"The sampler {name!r} cannot be built with {given or 'no options'}: {error}.") from None
        built.append(sampler)
    return built


def _options_of_all(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """The options, once it is sure that every one of the samplers takes every one of them."""
    for option in options:
        if option in ("weighting", "weighting_options"):
            raise ValueError(f"--sampler_options: write --{option} ... instead of {option}=...")
        refusing = [name for name in names if option not in sampler_options(name)]
        if len(names) > 1 and refusing:
            shared = [other for other in sampler_options(names[0]) if all(other in sampler_options(n) for n in names)]
            raise ValueError(
                f"--sampler_options: {option!r} is not an option of {', '.join(refusing)}."
                f"{did_you_mean(option, shared)} All the given samplers must take it: leave it out, or show them "
                "one by one."
            )
    return options


def _scheduler(args: argparse.Namespace) -> Any:
    from diffusers import DDPMScheduler

    if args.schedule not in _SCHEDULES:
        paper_name = _PAPER_NAMES.get(args.schedule)
        hint = f" Did you mean {paper_name!r}?" if paper_name else did_you_mean(args.schedule, _SCHEDULES)
        raise ValueError(f"Unknown schedule {args.schedule!r}.{hint} Available: {', '.join(_SCHEDULES)}.")
    if args.prediction_type not in PREDICTION_TYPES:
        hint = did_you_mean(args.prediction_type, PREDICTION_TYPES)
        raise ValueError(
            f"Unknown prediction_type {args.prediction_type!r}.{hint} Available: {', '.join(PREDICTION_TYPES)}."
        )
    if args.num_train_timesteps < 2:
        raise ValueError(f"--num_train_timesteps must be at least 2, got {args.num_train_timesteps}.")
    return DDPMScheduler(
        num_train_timesteps=args.num_train_timesteps,
        beta_schedule=args.schedule,
        prediction_type=args.prediction_type,
        rescale_betas_zero_snr=args.rescale_betas_zero_snr,
    )


def _label(sampler: TimestepSampler) -> str:
    learns = any(
        getattr(type(sampler), seen) is not getattr(TimestepSampler, seen) for seen in ("_record", "_before_step")
    )
    moment = " (before training)" if learns or sampler.weighting.state_tensors() else ""
    return f"{sampler.name}, {sampler.weighting.name} weights{moment}"


def _draws_blocks(stream: Any) -> bool:
    try:
        "█▏".encode(getattr(stream, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


# Each adds its own parser and names the function that runs it.
_SUBCOMMANDS = (_register_list, _register_show)


if __name__ == "__main__":
    sys.exit(main())
