"""What a checkpoint holds, so that a resumed run goes on bit for bit as if it had never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import save_file

from ..persistence import config_of, read_tensors
from .checkpoints import load_optimizer, save_optimizer
from .run import Run

STATE_NAME = "run_state.json"
# Options that a checkpoint would override or that would make another run of it. The length of a run may change.
_SAME_OPTIONS = (
    "train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler", "lr_warmup_steps",
    "adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon", "max_grad_norm", "mixed_precision",
    "use_ema", "ema_inv_gamma", "ema_power", "ema_max_decay", "label_dropout", "random_flip", "center_crop",
    "caption_dropout", "noise_offset", "input_perturbation", "dream_training", "dream_detail_preservation",
    "use_8bit_adam",
)  # fmt: skip


def identity(run: Run) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that resumes it."""
    config = {k: v for k, v in run.bare_model.config.items() if not k.startswith("_")}
    sampler = config_of(run.sampler)
    return {
        "model family": run.family.name,
        **run.family.identity(),
        "model configuration": json.loads(json.dumps(config, default=str)),
        "timestep sampler": sampler["sampler"],
        "sampler options": {k: v for k, v in sampler["options"].items() if k != "seed"},
        **{f"scheduler's {key}": value for key, value in sampler["scheduler"].items() if not key.startswith("_")},
        "processes": run.accelerator.num_processes,
        "data": run.family.data.fingerprint,
        "seed": run.seed,
        **{f"--{name}": getattr(run.args, name) for name in _SAME_OPTIONS if hasattr(run.args, name)},
    }


def save_run(run: Run, folder: Path, minutes: float, loss_window: torch.Tensor) -> None:
    """Write this rank's part into a checkpoint folder."""
    save_file(run.sampler.state_dict(), folder / f"sampler-rank-{run.accelerator.process_index}.safetensors")
    save_file({"loss_window": loss_window.cpu()}, folder / f"window-rank-{run.accelerator.process_index}.safetensors")
    if not run.accelerator.is_main_process:
        return
    run.family.save_model(run.bare_model, folder)
    if run.ema is not None:
        run.ema.save_pretrained(folder / f"{run.family.model_folder}_ema")
    run.sampler.save_pretrained(folder / "timestep_sampler")
    save_optimizer(run.optimizer, folder / "optimizer.safetensors")
    scaler = run.accelerator.scaler
    state = {
        "step": run.step,
        "seed": run.seed,
        "minutes": minutes,
        "log_position": run.log.position(),
        "lr_scheduler": {k: v for k, v in run.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
        "scaler": scaler.state_dict() if scaler is not None else None,
        "identity": identity(run),
    }
    (folder / STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")


def load_run(run: Run, folder: Path) -> torch.Tensor:
    """Put the checkpoint's state into a freshly built run; returns the loss window."""
    state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    check_identity(identity(run), state["identity"], folder)
    family = run.family
    family.load_model(run.bare_model, folder)
    if run.ema is not None:
        ema = EMAModel.from_pretrained(str(folder / f"{family.model_folder}_ema"), family.model_class)
        run.ema.load_state_dict(ema.state_dict())
        run.ema.to(run.ema_device)
    load_optimizer(run.optimizer, folder / "optimizer.safetensors")
    run.lr_scheduler.load_state_dict({**run.lr_scheduler.state_dict(), **state["lr_scheduler"]})
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    rank = run.accelerator.process_index
    run.sampler.load_state_dict(read_tensors(folder / f"sampler-rank-{rank}.safetensors"))
    run.step, run.minutes_before = state["step"], state["minutes"]
    if folder.resolve().parent == run.folder.resolve():  # a checkpoint from elsewhere has its log there
        run.log.cut_back(state["log_position"])
    return read_tensors(folder / f"window-rank-{rank}.safetensors")["loss_window"]


def saved_seed(folder: Path) -> int:
    return json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))["seed"]


def check_identity(now: dict[str, Any], then: dict[str, Any], folder: Path) -> None:
    different = [key for key in now if now[key] != then.get(key)]
    if different:
        lines = "; ".join(f"{key}: now {_short(now[key])}, checkpoint {_short(then.get(key))}" for key in different)
        raise ValueError(
            f"{folder} belongs to another run, so it cannot be resumed with these options. {lines}. "
            "Give the options it was started with, or start a new run in another --output_dir."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
