"""Publish a finished run: the pipeline, the sampler and what explains them; never checkpoints or caches."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from .training.lora import FILE_NAME as LORA_NAME
from .training.output_folder import pipeline_parts

PUBLISHED_FILES = ("model_index.json", LORA_NAME, "README.md", "samples.png", "training_log.jsonl", "report.html")


def ensure_repository(name: str, *, token: str | None = None, private: bool = False) -> str:
    """Create the repository if need be, before training; a refusal is an error that says what to look at."""
    try:
        return HfApi(token=token).create_repo(name, private=private, exist_ok=True).repo_id
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The repository {name!r} cannot be used on the Hub ({type(error).__name__}: {reason}). "
            "Look at --hub_model_id and --hub_token, or leave --push_to_hub out."
        ) from None


def publish(folder: Path, repo_id: str, *, token: str | None = None, message: str = "") -> str:
    """Upload a run's folder in one commit; returns the address of the commit.

    Args:
        folder: an output folder with a saved pipeline.
        repo_id: name of a repository that exists.
        token: used for every call and stored nowhere.
        message: of the commit.
    """
    if not any((folder / name).is_file() for name in ("model_index.json", LORA_NAME)):
        raise ValueError(
            f"{folder} holds no pipeline (no model_index.json) and no {LORA_NAME}, so there is nothing to publish."
        )
    # A LoRA that was trained on another noise process than its pipeline's brings the scheduler with it.
    parts = [*(pipeline_parts(folder) or ["scheduler"]), "timestep_sampler"]
    return str(
        HfApi(token=token).upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=[*PUBLISHED_FILES, *(f"{part}/*" for part in parts)],
            commit_message=message or "Upload pipeline and timestep sampler",
        )
    )
