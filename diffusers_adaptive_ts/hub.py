"""Publish a finished run: the pipeline, the sampler and what explains them; never checkpoints, caches or logs."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

# A pipeline's parts are folders with a config or scheduler file; of the rest only these are published.
PUBLISHED_FILES = ("model_index.json", "README.md", "samples.png", "training_log.jsonl", "report.html")
_NEVER = ("checkpoint-*/*", ".*", "*/.*", "latents/*", "logs/*", "samples/*")


def publish(
    folder: Path, repo_id: str | None = None, *, token: str | None = None, private: bool = False, message: str = ""
) -> str:
    """Upload a run's folder in one commit; returns the address of the commit.

    Args:
        folder: an output folder with a saved pipeline.
        repo_id: name of the repository; `None` takes the folder's name.
        token: used for every call and stored nowhere.
        private: create the repository private.
        message: of the commit.
    """
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"{folder} holds no pipeline (no model_index.json), so there is nothing to publish.")
    parts = [path.name for path in folder.iterdir() if path.is_dir() and _is_part(path)]
    api = HfApi(token=token)
    repository = api.create_repo(repo_id or folder.resolve().name, private=private, exist_ok=True).repo_id
    return str(
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[*PUBLISHED_FILES, *(f"{part}/*" for part in parts)],
            ignore_patterns=list(_NEVER),
            commit_message=message or "Upload pipeline and timestep sampler",
        )
    )


def _is_part(path: Path) -> bool:
    if path.name.startswith((".", "checkpoint-")):
        return False
    return any((path / name).is_file() for name in ("config.json", "scheduler_config.json"))
