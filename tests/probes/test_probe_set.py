"""Probes: their losses against a computation of our own, fixed from look to look, whole after a checkpoint."""

import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_adaptive_ts import DiffusionObjective
from diffusers_adaptive_ts.probes import ProbeBatch
from diffusers_adaptive_ts.probes.probe_set import ProbeSet
from tests.fragile import TOTAL

TIMESTEPS = torch.tensor([0, 0, 3, 5, 8, 11, 11])


def batches_of(*sizes, shape=(2, 4, 4)):
    generator = torch.Generator().manual_seed(3)
    for size in sizes:
        x0 = torch.randn(size, *shape, generator=generator)
        yield ProbeBatch(x0, {"shift": torch.randn(size, generator=generator)})


def gathered(objective, *sizes):
    probes = ProbeSet(objective, TIMESTEPS)
    for batch in batches_of(*sizes):
        probes.gather(batch)
    return probes


def test_losses_are_those_of_the_formula_sample_by_sample(model, any_scheduler):
    probes = gathered(DiffusionObjective.from_scheduler(any_scheduler), 7)
    (batch,) = batches_of(7)
    noise = torch.randn(7, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    model.eval()
    expected = []
    for i, t in enumerate(TIMESTEPS.tolist()):
        x0, eps, abar = (
            batch.x0[i : i + 1].double(),
            noise[i : i + 1].double(),
            any_scheduler.alphas_cumprod[t].double(),
        )
        noisy = abar.sqrt() * x0 + (1 - abar).sqrt() * eps
        target = {
            "epsilon": eps,
            "sample": x0,
            "v_prediction": abar.sqrt() * eps - (1 - abar).sqrt() * x0,
        }[any_scheduler.config.prediction_type]
        with torch.no_grad():
            pred = model(noisy.float(), TIMESTEPS[i : i + 1], shift=batch.conditioning["shift"][i : i + 1])
        expected.append(float((pred.double() - target).pow(2).mean()))
    found = probes.losses(model.train(), 3)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_looks_repeat_leave_no_trace_and_do_not_depend_on_the_chunk(model, objective):
    probes, before = gathered(objective, 7), torch.get_rng_state()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = probes.losses(model.train(), 7)
    assert torch.equal(probes.losses(model, 7), first)
    for chunk in (1, 2, 3, 100):
        assert torch.allclose(probes.losses(model, chunk), first, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_small_batches_fill_it_in_order_and_more_change_nothing(model, objective):
    probes, parts = ProbeSet(objective, TIMESTEPS), list(batches_of(3, 3, 3, 3))
    for number, batch in enumerate(parts):
        assert probes.is_full == (number == 3)
        probes.gather(batch)
    all_x0 = torch.cat([batch.x0 for batch in parts])
    assert torch.equal(probes.samples["x0"], all_x0[:7])
    assert torch.equal(probes.samples["each.shift"], torch.cat([b.conditioning["shift"] for b in parts])[:7])
    whole = ProbeSet(objective, TIMESTEPS)
    whole.gather(ProbeBatch(all_x0, {"shift": torch.cat([b.conditioning["shift"] for b in parts])}))
    assert torch.equal(whole.losses(model, 7), probes.losses(model, 7))


def test_it_keeps_copies(model, objective):
    probes = ProbeSet(objective, TIMESTEPS)
    (batch,) = batches_of(9)
    probes.gather(batch)
    before = probes.losses(model, 7)
    batch.x0.zero_()
    batch.conditioning["shift"].zero_()
    assert torch.equal(probes.losses(model, 7), before)


def test_nan_samples_and_batches_of_other_shapes_are_passed_over(objective):
    probes = ProbeSet(objective, TIMESTEPS)
    first, bad, last = batches_of(2, 4, 4)
    bad.x0[1, 0, 0, 0], bad.x0[3] = torch.nan, torch.inf
    wide = next(batches_of(4, shape=(2, 6, 4)))
    longer = ProbeBatch(last.x0, {"shift": torch.randn(4, 2)})
    without = ProbeBatch(last.x0, {"shift": None})
    half = ProbeBatch(last.x0.bfloat16(), last.conditioning)
    for batch in (first, wide, bad, longer, without, half, last):
        probes.gather(batch)
    assert torch.equal(probes.samples["x0"], torch.cat([first.x0, bad.x0[[0, 2]], last.x0[:3]]))
    assert probes.is_full


class Nested(nn.Module):
    """Wants everything in its place: dicts in dicts, tuples, tables that all samples share, plain words."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, timesteps, labels, added, residuals, mode):
        assert mode == "half"
        assert added["flag"] is True
        assert isinstance(residuals, tuple)
        assert added["table"].shape == (7, 2)
        per_sample = labels + added["inner"]["size"].sum(1) + residuals[0] + residuals[1]
        return self.scale * x / 2 + per_sample.reshape(-1, *[1] * (x.ndim - 1)) + added["table"].mean()


def nested_batch(size, shift=0.0):
    each = torch.arange(size).float() + shift
    return ProbeBatch(
        torch.arange(size).float().reshape(size, 1).repeat(1, 3) + shift,
        {
            "labels": torch.arange(size) + int(shift),
            "added": {"inner": {"size": each[:, None].repeat(1, 2)}, "flag": True, "table": torch.ones(7, 2)},
            "residuals": (each * 2, each * 3),
            "mode": "half",
        },
    )


def test_nested_conditioning_constants_and_shared_tables_survive_a_checkpoint(objective, tmp_path):
    """The shared table has as many rows as there are probes, and is still nobody's own."""
    model, probes = Nested(), ProbeSet(objective, TIMESTEPS)
    probes.gather(nested_batch(4))
    save_file(probes.samples, tmp_path / "half.safetensors")
    probes.gather(nested_batch(4, shift=4.0))
    expected = probes.losses(model, 4)
    whole = ProbeSet(objective, TIMESTEPS)
    whole.gather(nested_batch(8))
    assert torch.equal(whole.losses(model, 4), expected)

    resumed = ProbeSet(objective, TIMESTEPS)
    resumed.restore(load_file(tmp_path / "half.safetensors"))
    assert not resumed.is_full
    resumed.gather(nested_batch(4, shift=4.0))
    assert torch.equal(resumed.losses(model, 4), expected)

    save_file(resumed.samples, tmp_path / "full.safetensors")
    again = ProbeSet(objective, TIMESTEPS)
    again.restore(load_file(tmp_path / "full.safetensors"))
    assert not again.is_full  # how the conditioning is nested is seen with the next batch
    again.gather(nested_batch(5, shift=100.0))
    assert torch.equal(again.losses(model, 4), expected)


@pytest.mark.parametrize("shape", [(5,), (3, 6), (2, 4, 4), (2, 3, 4, 4)])
def test_x0_of_any_rank_and_precision(shape, objective):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x, timesteps):
            return self.scale.to(x) * x

    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        probes = ProbeSet(objective, TIMESTEPS)
        x0 = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
        probes.gather(ProbeBatch(x0.to(dtype)))
        losses.append(probes.losses(Scaled(), 4))
    assert torch.allclose(*losses, rtol=0.1)
    assert losses[1].isfinite().all()


def test_channels_last_batches_can_be_saved(objective, tmp_path):
    probes = ProbeSet(objective, TIMESTEPS)
    for batch in batches_of(4, 4):
        probes.gather(ProbeBatch(batch.x0.to(memory_format=torch.channels_last), {}))
    save_file(probes.samples, tmp_path / "probes.safetensors")
    assert torch.equal(load_file(tmp_path / "probes.safetensors")["x0"], probes.samples["x0"])


def test_zero_terminal_schedules_have_finite_losses(model):
    scheduler = DDPMScheduler(TOTAL, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    assert gathered(DiffusionObjective.from_scheduler(scheduler), 7).losses(model, 7).isfinite().all()
