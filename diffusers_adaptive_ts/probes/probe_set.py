"""A few samples with fixed noise and timesteps, looked at again and again: what changes is the model."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import ranks
from ..objective import DiffusionObjective
from .forward import ProbeBatch, noise_like, squared_errors, undisturbed

_EACH, _ALL = "each", "all"


class ProbeSet:
    """Gathers its samples from the first batches of training; each has one timestep and one noise for good.

    On several ranks every rank keeps and evaluates its own share, and all see all losses. The samples wait on the
    CPU, so that they take no memory from the training.

    Args:
        objective: of the scheduler trained with.
        timesteps: `(P,)` one for each probe.
        seed: of the noise.
    """

    def __init__(self, objective: DiffusionObjective, timesteps: torch.Tensor, seed: int = 0) -> None:
        self._objective, self.timesteps, self._seed = objective, timesteps, seed
        # By name: `x0`, the conditioning of `each` sample, and tensors that are the same for `all` of them.
        self._kept: dict[str, torch.Tensor] = {}
        # The conditioning with empty tensors: how it is nested, and what is no tensor. In no checkpoint.
        self._form: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._kept.get("x0", ()))

    @property
    def share(self) -> int:
        """Probes of each rank; the last ones are padding where they do not divide evenly."""
        return math.ceil(len(self.timesteps) / ranks.world_size())

    @property
    def is_full(self) -> bool:
        return len(self) == self.share and self._form is not None

    def gather(self, batch: ProbeBatch) -> None:
        """Keep copies of as many finite samples of a training batch as are still missing; free when none are.

        Batches of other shapes, or with other conditioning, than the first are passed over.
        """
        if self.is_full:
            return
        given = {"x0": batch.x0}
        for name, tensor in _leaves(batch.conditioning).items():
            per_sample = tensor.ndim > 0 and len(tensor) == len(batch)
            given[f"{_EACH if per_sample else _ALL}{name}"] = tensor
        if self._kept and _shapes(given) != _shapes(self._kept):
            return
        self._form = ranks.map_tensors(lambda tensor: torch.empty(0), batch.conditioning)
        finite = batch.x0.detach().flatten(1).isfinite().all(1).nonzero().flatten()
        rows = finite[: self.share - len(self)]
        for name, tensor in given.items():
            if name.startswith(_ALL):
                self._kept.setdefault(name, _copied(tensor))
                continue
            taken = _copied(tensor[rows.to(tensor.device)])
            self._kept[name] = torch.cat([self._kept[name], taken]) if name in self._kept else taken

    @property
    def samples(self) -> dict[str, torch.Tensor]:
        """What was gathered, by name, for a checkpoint; empty before the first batch."""
        return dict(self._kept)

    def restore(self, samples: dict[str, torch.Tensor]) -> None:
        """Take back what `samples` gave; the next batch must be seen before it can be used."""
        self._kept, self._form = dict(samples), None

    def losses(self, model: torch.nn.Module, chunk_size: int) -> torch.Tensor:
        """`(P,)` float64 squared errors of all probes, the same on all ranks; `ceil(share / chunk)` forwards."""
        device = next(model.parameters()).device
        noise = noise_like(self._kept["x0"], self._seed + ranks.rank())
        places = (torch.arange(self.share) + ranks.rank() * self.share).clamp(max=len(self.timesteps) - 1)
        errors = []
        with undisturbed(model, device) as network:
            for rows in torch.arange(self.share).split(chunk_size):
                errors.append(
                    squared_errors(
                        network,
                        self._objective,
                        self._part(rows, device),
                        noise[rows].to(device),
                        torch.arange(len(rows)),
                        self.timesteps[places[rows]],
                        len(rows),
                    )
                )
        found = torch.cat(errors)
        gathered = ranks.gather(found.to(device, torch.float32) if ranks.world_size() > 1 else found)
        return gathered.double().cpu()[: len(self.timesteps)]

    def _part(self, rows: torch.Tensor, device: torch.device) -> ProbeBatch:
        """The probes at `rows` `(n,)`, on the device, their conditioning nested as the model takes it."""
        part = {name: (kept if name.startswith(_ALL) else kept[rows]).to(device) for name, kept in self._kept.items()}
        # Both walk through the conditioning in one order.
        names = iter(_leaves(self._form))

        def filled(_: torch.Tensor) -> torch.Tensor:
            name = next(names)
            return part.get(f"{_EACH}{name}", part.get(f"{_ALL}{name}"))

        return ProbeBatch(part["x0"], ranks.map_tensors(filled, self._form))


def _leaves(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in a nest of dicts, lists and tuples, by its place."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {place: leaf for key, item in items for place, leaf in _leaves(item, f"{name}.{key}").items()}


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What must agree for two batches to be joined."""
    return {name: name.startswith(_ALL) or (tensor.shape[1:], tensor.dtype) for name, tensor in tensors.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, laid out as safetensors takes it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
