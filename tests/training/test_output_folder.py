"""Room on the disk is asked for what a run writes: states of trained weights, not frozen ones."""

from collections import namedtuple

import pytest
import torch

from diffusers_adaptive_ts.training import output_folder

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("frozen", "refused"), [(False, True), (True, False)])
def test_frozen_weights_need_no_room(tmp_path, monkeypatch, frozen, refused):
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(2, 2))
    model[0].requires_grad_(not frozen)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: Usage(0, 0, 1 << 20))
    if refused:
        with pytest.raises(ValueError, match="1 MiB are free"):
            output_folder.check_space(tmp_path, model, use_ema=True)
    else:
        output_folder.check_space(tmp_path, model, use_ema=True)
