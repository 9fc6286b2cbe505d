"""Did an optimizer step happen inside `observe`? Answered without copying or reading a single weight."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState, GradientState


def gradients_are_synchronised() -> bool:
    """False on accelerate's accumulating micro-batches; True elsewhere, also without accelerate."""
    return bool(GradientState().sync_gradients)


class StepWatch:
    """Compares version counters of the parameters (in-place updates bump them), or an engine's own step count."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = self._progress()

    def _progress(self) -> int:
        # DeepSpeed writes weights through views that no version counter sees, but counts its steps.
        engine_steps = getattr(self._model, "global_steps", None)
        if isinstance(engine_steps, int):
            return engine_steps
        return sum(parameter._version for parameter in self._model.parameters() if parameter.requires_grad)

    def weights_moved(self) -> bool:
        return self._progress() != self._before

    def step_was_skipped(self) -> bool:
        """The weights stand still though a step was due (a scaler saw an overflow), so no step will follow.

        accelerate says when a step is due; in a plain loop the only sign is that the gradients are gone.
        """
        return bool(AcceleratorState._shared_state) or gradients_are_gone(self._model)


def gradients_are_gone(model: torch.nn.Module) -> bool:
    return all(parameter.grad is None for parameter in model.parameters())
