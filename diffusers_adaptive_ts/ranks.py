"""What several ranks must agree on: every collective the samplers use; nothing at all when there is one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def gather(values: torch.Tensor) -> torch.Tensor:
    """Concatenate equally shaped `values` of all ranks along dimension 0, in rank order."""
    if world_size() == 1:
        return values
    sent = _on_wire(values)
    parts = [torch.empty_like(sent) for _ in range(world_size())]
    dist.all_gather(parts, sent)
    return torch.cat(parts).to(values.device)


def _on_wire(values: torch.Tensor) -> torch.Tensor:
    """NCCL carries device tensors only."""
    return (values.cuda() if dist.get_backend() == "nccl" else values).contiguous()


def mean(values: torch.Tensor) -> torch.Tensor:
    """Average over ranks, summed in rank order so that every rank holds the same bits."""
    if world_size() == 1:
        return values
    return gather(values[None]).mean(0)


def from_first(value: Any) -> Any:
    """Rank 0's tensors (also inside dicts, lists and tuples) on every rank, whatever sizes the others hold."""
    return map_tensors(_broadcast, value) if world_size() > 1 else value


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    shape = _on_wire(torch.tensor(tensor.shape, dtype=torch.int64))
    if shape.numel():
        dist.broadcast(shape, src=0)
    sent = _on_wire(tensor.clone() if rank() == 0 else tensor.new_empty(shape.tolist()))
    dist.broadcast(sent, src=0)
    return sent.to(tensor.device)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in a nest of dicts, lists and tuples; the rest stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
