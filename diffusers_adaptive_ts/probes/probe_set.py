"""A few samples with fixed noise and timesteps, looked at again and again: what changes is the model."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import ranks
from ..objective import DiffusionObjective
from .forward import ProbeBatch, noise_like, squared_errors, undisturbed


class ProbeSet:
    """Gathers its samples from the first batches of training; each has one timestep and one noise for good.

    On several ranks every rank keeps and evaluates its own share, and all see all losses.

    Args:
        objective: of the scheduler trained with.
        timesteps: `(P,)` one for each probe.
        seed: of the noise.
    """

    def __init__(self, objective: DiffusionObjective, timesteps: torch.Tensor, seed: int = 0) -> None:
        self._objective, self.timesteps, self._seed = objective, timesteps, seed
        self._batch: ProbeBatch | None = None
        # Conditioning that is no tensor, such as a flag: the same in every batch, and in no checkpoint.
        self._constants: dict[str, Any] | None = None

    @property
    def share(self) -> int:
        """Probes of each rank; the last ones are padding where they do not divide evenly."""
        return math.ceil(len(self.timesteps) / ranks.world_size())

    @property
    def is_full(self) -> bool:
        return self._batch is not None and len(self._batch) == self.share

    def gather(self, batch: ProbeBatch) -> None:
        """Keep copies of as many samples of a training batch as are still missing; free when none are."""
        if self._constants is None:
            self._constants = _without_tensors(batch.conditioning)
        if self.is_full:
            return
        missing = self.share - (0 if self._batch is None else len(self._batch))
        index = torch.arange(min(missing, len(batch)))
        taken = batch.select(index)
        taken = ProbeBatch(taken.x0.detach().clone(), _copied(taken.conditioning))
        self._batch = taken if self._batch is None else _joined(self._batch, taken)

    @property
    def samples(self) -> dict[str, torch.Tensor]:
        """What was gathered, by name, for a checkpoint; empty before the first batch."""
        if self._batch is None:
            return {}
        return {"x0": self._batch.x0, **_flat(self._batch.conditioning)}

    def restore(self, samples: dict[str, torch.Tensor]) -> None:
        """Take back what `samples` gave."""
        samples = dict(samples)
        x0 = samples.pop("x0", None)
        self._batch = None if x0 is None else ProbeBatch(x0, _nested(samples))

    def losses(self, model: torch.nn.Module, chunk_size: int) -> torch.Tensor:
        """`(P,)` float64 squared errors of all probes, the same on all ranks; `ceil(share / chunk)` forwards."""
        batch, device = self._batch, next(model.parameters()).device
        conditioning = ranks.map_tensors(lambda tensor: tensor.to(device), batch.conditioning)
        batch = ProbeBatch(batch.x0.to(device), _merged(conditioning, self._constants or {}))
        mine = (torch.arange(self.share) + ranks.rank() * self.share).clamp(max=len(self.timesteps) - 1)
        with undisturbed(model, device) as network:
            errors = squared_errors(
                network,
                self._objective,
                batch,
                noise_like(batch.x0, self._seed + ranks.rank()),
                torch.arange(self.share),
                self.timesteps[mine],
                chunk_size,
            )
        gathered = ranks.gather(errors.to(device, torch.float32) if ranks.world_size() > 1 else errors)
        return gathered.double().cpu()[: len(self.timesteps)]


def _without_tensors(conditioning: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in conditioning.items():
        if isinstance(value, dict):
            kept[key] = _without_tensors(value)
        elif not isinstance(value, torch.Tensor):
            kept[key] = value
    return kept


def _merged(tensors: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any]:
    merged = dict(constants)
    for key, value in tensors.items():
        merged[key] = _merged(value, constants.get(key, {})) if isinstance(value, dict) else value
    return merged


def _copied(conditioning: dict[str, Any]) -> dict[str, Any]:
    return ranks.map_tensors(lambda tensor: tensor.detach().clone(), conditioning)


def _joined(first: ProbeBatch, second: ProbeBatch) -> ProbeBatch:
    """Both batches' samples; a tensor without a batch dimension is the same in every batch."""
    sizes = len(first), len(second)

    def join(one: Any, other: Any) -> Any:
        if isinstance(one, dict):
            return {key: join(one[key], other[key]) for key in one}
        per_sample = isinstance(one, torch.Tensor) and one.ndim > 0 and (len(one), len(other)) == sizes
        return torch.cat([one, other]) if per_sample else one

    return ProbeBatch(torch.cat([first.x0, second.x0]), join(first.conditioning, second.conditioning))


def _flat(conditioning: dict[str, Any], before: str = "conditioning") -> dict[str, torch.Tensor]:
    flat = {}
    for key, value in conditioning.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}.{key}")
        elif isinstance(value, torch.Tensor):
            flat[f"{before}.{key}"] = value
    return flat


def _nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    conditioning: dict[str, Any] = {}
    for name, tensor in flat.items():
        *folders, key = name.split(".")[1:]
        place = conditioning
        for folder in folders:
            place = place.setdefault(folder, {})
        place[key] = tensor
    return conditioning
