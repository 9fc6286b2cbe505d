"""On a CPU, keep the memory of one step for the next instead of handing it back to the system in between."""

from __future__ import annotations

import ctypes
import sys

import torch

# Parameters of glibc's mallopt, and the largest block it lets the heap serve.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_HEAP_BLOCK = 32 * 2**20
_NEVER = 2**31 - 1


def keep_freed_memory(device: torch.device) -> bool:
    """Spare a training step on the CPU the page faults of fresh memory; True where the C library takes the setting.

    A step frees its activations at its end, glibc returns them to the system, and the next step faults them in again.
    """
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
