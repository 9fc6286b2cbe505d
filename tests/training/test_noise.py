from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_dream_and_update_latents
from torch.nn.parallel import DistributedDataParallel

from diffusers_adaptive_ts.objective import DiffusionObjective
from diffusers_adaptive_ts.training.noise import NoiseOptions

from .tiny_stable_diffusion import tiny_unet_config

T = 50


def make_model(**config: Any) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(**tiny_unet_config(**config))


def make_scheduler(prediction_type: str = "epsilon", **config: Any) -> DDPMScheduler:
    return DDPMScheduler(T, beta_schedule="scaled_linear", prediction_type=prediction_type, **config)


@pytest.fixture
def step() -> dict[str, Any]:
    """What a step of four samples holds, at timesteps from first to last."""
    torch.manual_seed(1)
    options, x0 = NoiseOptions(offset=0.1, perturbation=0.2), torch.randn(4, 4, 8, 8)
    noise, added = options.draw(x0)
    conditioning = {"encoder_hidden_states": torch.randn(4, 12, 16)}
    return {
        "x0": x0, "noise": noise, "added": added, "timesteps": torch.tensor([0, 7, 31, T - 1]),
        "conditioning": conditioning,
    }  # fmt: skip


def rectified(step: dict[str, Any], model: torch.nn.Module, scheduler: Any, power: float = 1.0, **changes: Any):
    objective = DiffusionObjective.from_scheduler(scheduler)
    return NoiseOptions(dream=power).rectified(model, objective, **step | changes)


class Exact(torch.nn.Module):
    """Knows the clean samples: returns what the objective asks for."""

    def __init__(self, scheduler: DDPMScheduler, x0: torch.Tensor, shift: float = 0.0) -> None:
        super().__init__()
        self.scheduler, self.x0, self.shift = scheduler, x0, shift

    def forward(self, noisy: torch.Tensor, timesteps: torch.Tensor, **conditioning: Any) -> torch.Tensor:
        abar = self.scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        eps = (noisy - abar**0.5 * self.x0) / (1 - abar) ** 0.5 + self.shift
        clean = (noisy - (1 - abar) ** 0.5 * eps) / abar**0.5
        kind = self.scheduler.config.prediction_type
        return {"epsilon": eps, "sample": clean, "v_prediction": abar**0.5 * eps - (1 - abar) ** 0.5 * clean}[kind]


class TestDraw:
    def test_without_options_it_is_one_draw_that_is_both(self):
        x0 = torch.zeros(3, 4, 8, 8)
        torch.manual_seed(5)
        noise, added = NoiseOptions().draw(x0)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        assert noise is added
        assert noise.equal(torch.randn_like(x0))
        assert state.equal(torch.get_rng_state())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_draws_and_order_are_those_of_diffusers_script(self, dtype: torch.dtype):
        x0 = torch.zeros(3, 4, 8, 8, dtype=dtype)
        torch.manual_seed(5)
        noise, added = NoiseOptions(offset=0.3, perturbation=0.1).draw(x0)
        torch.manual_seed(5)
        plain, shift = torch.randn(3, 4, 8, 8, dtype=dtype), torch.randn(3, 4, 1, 1, dtype=dtype)
        assert noise.equal(plain + 0.3 * shift)
        assert added.equal(noise + 0.1 * torch.randn(3, 4, 8, 8, dtype=dtype))
        assert noise.dtype == added.dtype == dtype

    def test_the_offset_is_one_number_for_each_channel_with_the_variance_asked_for(self):
        torch.manual_seed(0)
        noise, added = NoiseOptions(offset=0.5).draw(torch.zeros(500, 4, 16, 16))
        assert noise is added
        # The mean of a channel has the variance of the offset and that of the mean of 256 numbers.
        assert noise.mean((2, 3)).var().item() == pytest.approx(0.25 + 1 / 256, rel=0.1)
        assert noise.var((2, 3)).mean().item() == pytest.approx(1.0, rel=0.02)

    def test_the_perturbation_is_added_and_not_predicted(self):
        torch.manual_seed(0)
        noise, added = NoiseOptions(perturbation=0.1).draw(torch.zeros(50, 4, 16, 16))
        assert noise.var().item() == pytest.approx(1.0, rel=0.03)
        assert (added - noise).std().item() == pytest.approx(0.1, rel=0.03)


class TestDream:
    @pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
    def test_equals_diffusers_for_epsilon(self, step: dict[str, Any], power: float):
        model, scheduler = make_model(), make_scheduler()
        noise, added = rectified(step, model, scheduler, power)
        noisy, target = compute_dream_and_update_latents(
            model, scheduler, step["timesteps"], step["noise"],
            scheduler.add_noise(step["x0"], step["added"], step["timesteps"]), step["noise"],
            step["conditioning"]["encoder_hidden_states"], power,
        )  # fmt: skip
        torch.testing.assert_close(noise, target, rtol=1e-6, atol=1e-6)
        ours = scheduler.add_noise(step["x0"], added, step["timesteps"])
        torch.testing.assert_close(ours, noisy, rtol=1e-5, atol=1e-5)
        assert (noise - step["noise"]).abs().max() > 0.1

    @pytest.mark.parametrize("prediction_type", ["sample", "v_prediction"])
    def test_other_predictions_of_the_same_noise_give_the_same(self, step: dict[str, Any], prediction_type: str):
        wrong = [make_scheduler("epsilon"), make_scheduler(prediction_type)]
        by_eps, other = (rectified(step, Exact(s, step["x0"], shift=0.7), s, 2.0) for s in wrong)
        torch.testing.assert_close(other, by_eps, rtol=1e-3, atol=1e-3)
        abar = wrong[0].alphas_cumprod[step["timesteps"]].view(-1, 1, 1, 1)
        # The model returns `added + 0.7`, so delta is known.
        delta = (1 - abar) * (step["noise"] - step["added"] - 0.7)
        torch.testing.assert_close(other[0], step["noise"] + delta, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(other[1], step["added"] + delta, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
    def test_a_perfect_model_is_left_alone(self, step: dict[str, Any], prediction_type: str):
        scheduler = make_scheduler(prediction_type)
        noise, added = rectified(step, Exact(scheduler, step["x0"]), scheduler, added=step["noise"])
        assert noise is added
        torch.testing.assert_close(noise, step["noise"], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
    def test_a_zero_terminal_schedule_stays_finite(self, step: dict[str, Any], prediction_type: str):
        scheduler = make_scheduler(prediction_type, rescale_betas_zero_snr=True)
        noise, added = rectified(step, make_model(), scheduler)
        assert noise.isfinite().all()
        assert added.isfinite().all()

    def test_off_it_returns_what_came_in_and_calls_no_model(self, step: dict[str, Any]):
        objective = DiffusionObjective.from_scheduler(make_scheduler())
        noise, added = NoiseOptions(offset=0.1).rectified(None, objective, **step)
        assert noise is step["noise"]
        assert added is step["added"]

    def test_no_gradient_and_the_modes_of_training(self, step: dict[str, Any]):
        model = make_model(dropout=0.5).train()
        torch.manual_seed(9)
        first, _ = rectified(step, model, make_scheduler())
        second, _ = rectified(step, model, make_scheduler())
        assert model.training
        assert not first.requires_grad
        assert not first.equal(second)  # dropout is on, as in diffusers' script
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_inside_an_autocast_the_training_forward_keeps_its_gradients(self, step: dict[str, Any]):
        model, scheduler = make_model(), make_scheduler()
        with torch.autocast("cpu", torch.bfloat16):
            noise, added = rectified(step, model, scheduler)
            noisy = scheduler.add_noise(step["x0"], added, step["timesteps"])
            pred = model(noisy, step["timesteps"], **step["conditioning"]).sample
        assert noise.dtype == torch.float32
        (pred.float() - noise).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        plain, _ = rectified(step, model, scheduler)
        assert not noise.equal(plain)  # the forward was a bfloat16 one
        torch.testing.assert_close(noise, plain, rtol=0.1, atol=0.05)

    def test_it_calls_the_module_inside_ddp(self, step: dict[str, Any], tmp_path: Path):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
        try:
            model, scheduler = make_model(), make_scheduler()
            plain, _ = rectified(step, model, scheduler)
            parallel = DistributedDataParallel(model)
            parallel.register_forward_pre_hook(lambda *_: pytest.fail("the forward of DDP was called"))
            noise, _ = rectified(step, parallel, scheduler)
        finally:
            torch.distributed.destroy_process_group()
        assert noise.equal(plain)

    def test_half_samples_give_half_noise(self, step: dict[str, Any]):
        half = {name: step[name].bfloat16() for name in ("x0", "noise", "added")}
        half["conditioning"] = {"encoder_hidden_states": step["conditioning"]["encoder_hidden_states"].bfloat16()}
        noise, added = rectified(step, make_model().to(torch.bfloat16), make_scheduler(), **half)
        assert noise.dtype == added.dtype == torch.bfloat16


class TestFromArgs:
    def test_a_script_without_the_flags_trains_on_plain_noise(self):
        assert NoiseOptions.from_args(Namespace()) == NoiseOptions()

    def test_the_flags(self):
        flags = {"noise_offset": 0.1, "input_perturbation": 0.2, "dream_detail_preservation": 2.0}
        assert NoiseOptions.from_args(Namespace(dream_training=True, **flags)) == NoiseOptions(0.1, 0.2, 2.0)
        off = Namespace(dream_training=False, dream_detail_preservation=1.0, noise_offset=0, input_perturbation=0)
        assert NoiseOptions.from_args(off) == NoiseOptions()

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"noise_offset": -0.1}, "--noise_offset .*0 .* or above; got -0.1"),
            ({"input_perturbation": float("nan")}, "--input_perturbation .*got nan"),
            ({"dream_training": True, "dream_detail_preservation": 0.0}, "--dream_detail_preservation .*above 0"),
            ({"dream_training": True, "dream_detail_preservation": float("inf")}, "got inf"),
            ({"dream_detail_preservation": 2.0}, "without --dream_training"),
        ],
    )
    def test_what_cannot_be_is_an_error(self, flags: dict[str, Any], said: str):
        with pytest.raises(ValueError, match=said):
            NoiseOptions.from_args(Namespace(**flags))
