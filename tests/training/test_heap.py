"""Memory of one step serves the next; elsewhere than on a CPU nothing is touched."""

import platform
import sys

import pytest
import torch

from diffusers_adaptive_ts.training.heap import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_glibc_takes_the_setting():
    assert keep_freed_memory(torch.device("cpu"))


def test_other_devices_and_systems_are_left_alone(monkeypatch):
    assert not keep_freed_memory(torch.device("meta"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory(torch.device("cpu"))
