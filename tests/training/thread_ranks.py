"""Ranks of a run as threads of one process, for code that an accelerator's ranks share out between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Rank:
    """What caches use of an accelerator."""

    device = torch.device("cpu")

    def __init__(self, index: int, barrier: threading.Barrier, shared: dict[int, torch.Tensor]) -> None:
        self.process_index, self.num_processes, self.is_main_process = index, barrier.parties, index == 0
        self.wait_for_everyone, self._shared = barrier.wait, shared

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._shared[self.process_index] = tensor
        self.wait_for_everyone()
        return torch.cat([self._shared[index] for index in range(self.num_processes)])


def on_ranks(work: Callable[[Rank], Result], count: int = 2) -> list[Result]:
    """What `work` returns on each rank."""
    barrier, shared, results = threading.Barrier(count, timeout=30), {}, {}

    def run(index: int) -> None:
        results[index] = work(Rank(index, barrier, shared))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(count)]
