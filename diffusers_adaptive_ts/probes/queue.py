"""The last looks at the whole bound: a ring of per-timestep loss changes (the paper's queue Q)."""

from __future__ import annotations

import torch


class DeltaQueue:
    """At most `size` rows of `(T,)` loss changes, oldest first out.

    Example:
        >>> queue = DeltaQueue(size=2, num_train_timesteps=3)
        >>> for value in (1.0, 2.0, 3.0):
        ...     queue.push(torch.full((3,), value))
        >>> queue.rows()[:, 0].tolist()
        [2.0, 3.0]
    """

    def __init__(self, size: int, num_train_timesteps: int) -> None:
        self._rows = torch.zeros(size, num_train_timesteps, dtype=torch.float64)
        self._pushed = torch.zeros((), dtype=torch.int64)

    def __len__(self) -> int:
        return min(int(self._pushed), len(self._rows))

    def push(self, row: torch.Tensor) -> None:
        self._rows[int(self._pushed) % len(self._rows)] = row
        self._pushed += 1

    def rows(self) -> torch.Tensor:
        """`(n, T)`, oldest first."""
        if self._pushed <= len(self._rows):
            return self._rows[: len(self)]
        return self._rows.roll(-int(self._pushed) % len(self._rows), dims=0)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"rows": self._rows, "pushed": self._pushed}
