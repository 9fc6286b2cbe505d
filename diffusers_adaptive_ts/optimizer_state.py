"""Adam whose state exists from the start, so that it can be stored and loaded as plain named tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def adam_with_state(parameters: Iterable[torch.Tensor], learning_rate: float) -> torch.optim.Adam:
    """`torch.optim.Adam` with its moments created now instead of at the first step."""
    optimizer = torch.optim.Adam(list(parameters), lr=learning_rate)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Adam) -> dict[str, torch.Tensor]:
    """The optimizer's own tensors by name, in the order of its parameters; copying into them loads a state."""
    return {
        f"optimizer.{index}.{key}": value
        for index, parameter in enumerate(optimizer.param_groups[0]["params"])
        for key, value in optimizer.state[parameter].items()
    }
