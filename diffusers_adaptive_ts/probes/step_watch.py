"""Did an optimizer step happen inside `observe`? Answered without copying or reading a single weight."""

from __future__ import annotations

import weakref

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import register_optimizer_step_post_hook


def gradients_are_synchronised() -> bool:
    """False on accelerate's accumulating micro-batches; True elsewhere, also without accelerate."""
    return bool(GradientState().sync_gradients)


class StepWatch:
    """Asks the version counters of the parameters, the optimizers that stepped, or an engine's own step count.

    In-place updates bump the counters; fused optimizers and those that write to `.data` do not, but are seen stepping.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = self._progress()
        self._stepped: list[tuple[torch.optim.Optimizer, torch.Tensor | None]] = []
        note = self._stepped.append  # not a method: the hook must not keep the watch, with whom it goes, alive
        hook = register_optimizer_step_post_hook(
            # Fused optimizers are called on an overflow too; a scaler tells them, for this call only, what it found.
            lambda optimizer, args, kwargs: note((optimizer, getattr(optimizer, "found_inf", None)))
        )
        weakref.finalize(self, hook.remove)

    def _progress(self) -> int:
        # DeepSpeed writes weights through views that no version counter sees, but counts its steps.
        engine_steps = getattr(self._model, "global_steps", None)
        if isinstance(engine_steps, int):
            return engine_steps
        return sum(parameter._version for parameter in self._model.parameters() if parameter.requires_grad)

    def weights_moved(self) -> bool:
        return self._progress() != self._before or self._its_optimizer_stepped()

    def _its_optimizer_stepped(self) -> bool:
        if not self._stepped:
            return False
        mine = {id(parameter) for parameter in self._model.parameters()}
        return any(
            id(parameter) in mine
            for optimizer, overflow in self._stepped
            if overflow is None or not bool(overflow)
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def step_was_skipped(self) -> bool:
        """The weights stand still though a step was due (a scaler saw an overflow), so no step will follow.

        accelerate says when a step is due; in a plain loop the only sign is that the gradients are gone.
        """
        return bool(AcceleratorState._shared_state) or gradients_are_gone(self._model)


def gradients_are_gone(model: torch.nn.Module) -> bool:
    return all(parameter.grad is None for parameter in model.parameters())
