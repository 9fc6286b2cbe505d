"""Samplers as files: JSON and safetensors only, written whole, checked on loading, shared on the Hub."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDPMScheduler
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .registry import accepted_options, did_you_mean
from .weightings import list_weightings

if TYPE_CHECKING:
    from .samplers.base import TimestepSampler

CONFIG_NAME = "config.json"
# Not a standard weight name: DiffusionPipeline.download would fetch that for everybody who only generates.
WEIGHTS_NAME = "sampler.safetensors"
FORMAT = 1
_CONFIG_KEYS = {"_class_name", "format", "sampler", "options", "scheduler"}


def config_of(sampler: TimestepSampler) -> dict[str, Any]:
    """What rebuilds the sampler, its scheduler included."""
    return {
        "_class_name": type(sampler).__name__,
        "format": FORMAT,
        "sampler": sampler.name,
        "options": sampler.options,
        "scheduler": json.loads(sampler.scheduler.to_json_string()),
    }


def save(sampler: TimestepSampler, save_directory: str | os.PathLike) -> None:
    folder = Path(save_directory)
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a directory to save the sampler in.")
    if not sampler.name:
        raise ValueError(f"{type(sampler).__name__} is not registered; decorate it with @register_sampler('name').")
    if sampler.weighting.name not in list_weightings():
        raise ValueError(
            f"The weighting {sampler.weighting.name!r} is not registered, so it could not be loaded again; "
            "make it with @register_weighting('name')."
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_of(sampler), indent=2, sort_keys=True, default=_plain) + "\n"
    # Both are written before either takes its place.
    with replacing(folder / CONFIG_NAME) as config_path, replacing(folder / WEIGHTS_NAME) as weights_path:
        config_path.write_text(text, encoding="utf-8")
        save_file(sampler.published_state(), weights_path, metadata={"format": "pt"})


def _plain(value: Any) -> Any:
    """NumPy's and torch's numbers as JSON writes them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"The option {value!r} cannot be written as JSON.")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place only when the block ends well."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load(
    cls: type[TimestepSampler], source: str | os.PathLike, scheduler: Any = None, **download: Any
) -> TimestepSampler:
    from .samplers.base import sampler_class, sampler_options

    accepted = [option for option in accepted_options(hf_hub_download) if option not in ("repo_id", "filename")]
    for option in download:
        if option not in accepted:
            raise ValueError(
                f"from_pretrained has no option {option!r}.{did_you_mean(option, ['scheduler', *accepted])} "
                f"It takes scheduler and what hf_hub_download takes: {', '.join(accepted)}."
            )
    config_path = _locate(source, CONFIG_NAME, download)
    config = _read_config(config_path)
    saved_class = sampler_class(config["sampler"])
    if not issubclass(saved_class, cls):
        raise ValueError(
            f"{config_path} holds a {config['sampler']!r} sampler ({saved_class.__name__}), not a {cls.__name__}. "
            f"Load it with {saved_class.__name__}.from_pretrained or TimestepSampler.from_pretrained."
        )
    unknown = set(config["options"]) - set(sampler_options(config["sampler"]))
    if unknown:
        raise ValueError(
            f"{config_path}: the sampler {config['sampler']!r} has no option {', '.join(sorted(unknown))}. "
            "It was written by another version or edited."
        )
    saved_scheduler = DDPMScheduler.from_config(
        {key: value for key, value in config["scheduler"].items() if not key.startswith("_")}
    )
    if scheduler is not None:
        check_same_process(scheduler, saved_scheduler, str(config_path))
    sampler = saved_class(scheduler if scheduler is not None else saved_scheduler, **config["options"])
    weights_path = _locate(source, WEIGHTS_NAME, download)
    sampler.load_state_dict(read_tensors(weights_path))
    sampler.draws.diverge_by_rank()
    return sampler


def push(
    sampler: TimestepSampler,
    repo_id: str,
    *,
    subfolder: str | None = None,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as folder:
        save(sampler, folder)
        return str(
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                path_in_repo=subfolder,
                commit_message=commit_message or f"Upload timestep sampler ({sampler.name})",
                revision=revision,
                create_pr=create_pr,
            )
        )


def check_same_process(given: Any, saved: Any, where: str) -> None:
    """Refuse a scheduler whose timesteps do not mean what they meant when the sampler learned."""
    from .objective import DiffusionObjective

    now, then = DiffusionObjective.from_scheduler(given), DiffusionObjective.from_scheduler(saved)
    differences = []
    if now.num_train_timesteps != then.num_train_timesteps:
        differences.append(
            f"num_train_timesteps is {now.num_train_timesteps}, the sampler was saved with {then.num_train_timesteps}"
        )
    elif not torch.allclose(now.betas, then.betas, rtol=1e-5, atol=1e-9):
        keys = ("beta_schedule", "beta_start", "beta_end", "rescale_betas_zero_snr", "trained_betas")
        there = [(key, given.config.get(key), saved.config.get(key)) for key in keys]
        changed = [f"{key} is {mine!r}, saved {its!r}" for key, mine, its in there if str(mine) != str(its)]
        differences.append(f"the betas differ ({', '.join(changed) or 'with one configuration'})")
    if now.prediction_type != then.prediction_type:
        differences.append(f"prediction_type is {now.prediction_type!r}, saved {then.prediction_type!r}")
    if differences:
        raise ValueError(
            f"The sampler in {where} does not fit this scheduler: {'; '.join(differences)}. "
            "Build the scheduler with the saved values, or start a new sampler for this one."
        )


def check_state(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], owner: str) -> None:
    """Every expected tensor, in shape and dtype, and nothing else."""
    missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"This is not a state of this {owner}: missing {missing or 'nothing'}, "
            f"unexpected {unexpected or 'nothing'}. Was it saved by another sampler, or with other options?"
        )
    for key, tensor in expected.items():
        if not isinstance(state[key], torch.Tensor):
            raise ValueError(f"{owner}: {key} is a {type(state[key]).__name__} in the state, not a tensor.")
        if state[key].shape != tensor.shape or state[key].dtype != tensor.dtype:
            raise ValueError(
                f"{owner}: {key} is {state[key].dtype} {tuple(state[key].shape)} in the state, "
                f"but {tensor.dtype} {tuple(tensor.shape)} is needed. Was it saved with other options or another T?"
            )


def read_tensors(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; anything else, a pickle too, is refused unread."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}). It may be cut off or of another kind; "
            "save or download it again."
        ) from None


def _read_config(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable JSON file ({error}).") from None
    if not isinstance(config, dict) or not isinstance(config.get("sampler"), str):
        raise ValueError(
            f"{path} is not the config of a timestep sampler. Inside a pipeline the sampler lies in "
            "subfolder='timestep_sampler'."
        )
    if set(config) != _CONFIG_KEYS or config["format"] != FORMAT:
        raise ValueError(
            f"{path} has the keys {sorted(config)} and format {config.get('format')!r}; this version reads format "
            f"{FORMAT} with {sorted(_CONFIG_KEYS)}."
        )
    if not isinstance(config["options"], dict) or not isinstance(config["scheduler"], dict):
        raise ValueError(f"{path}: 'options' and 'scheduler' must be JSON objects.")
    return config


def _locate(source: str | os.PathLike, filename: str, download: dict[str, Any]) -> str:
    """The file in a local folder, or fetched from the Hub."""
    subfolder = download.get("subfolder") or ""
    if os.path.isdir(source):
        path = Path(source) / subfolder / filename
        if not path.is_file():
            raise FileNotFoundError(f"There is no {filename} in {path.parent}; a saved sampler has one.")
        return str(path)
    try:
        return hf_hub_download(str(source), filename, **download)
    except HFValidationError:
        raise FileNotFoundError(f"{source} is neither a folder nor the name of a Hub repository.") from None
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{source} is not a folder here, and as a Hub repository it could not be asked for {filename}: {error}"
        ) from None
    except EntryNotFoundError:
        raise FileNotFoundError(
            f"The Hub repository {source} has no {filename} in {subfolder or 'its root'}."
        ) from None
