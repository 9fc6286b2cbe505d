"""What a sampler costs: step time over uniform sampling, interleaved in one process, and forward passes counted.

    python benchmarks/overhead.py                       # all models, batch sizes and samplers not measured yet
    python benchmarks/overhead.py --models unet --batches 64 --samplers learning_progress

Samplers take turns of 40 steps (small batches: 120) on copies of one model, so noise is unfair to none; a result is
the median of the turns' ratios with their spread. Forward-equivalents are exact and know no noise: samples that went
through the network without gradients, over the batch size, in 40 steps. Each cell is written as soon as it is measured
and not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from typing import Any

import torch
from accelerate.utils import tqdm
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from diffusers.training_utils import EMAModel
from record import RESULTS, facts, save, spread

from diffusers_adaptive_ts import make_sampler

NAME = "overhead"
# Steps of a turn: every turn must hold as many measured steps, and small batches are measured every 120 steps.
TURN, TURN_OF_SMALL_BATCHES = 40, 120
_SMALL = 46
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "learning_progress": {},
    "adaptive (paper)": {"name": "adaptive", "estimator": "paper", "in_channels": 3},
    "entropy_rate": {},
    "loss_second_moment": {},
    "gradient_variance": {},
}


def unet() -> torch.nn.Module:
    return UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip


def dit() -> torch.nn.Module:
    return DiTTransformer2DModel(
        sample_size=32, in_channels=3, out_channels=3, num_layers=4, num_attention_heads=4, attention_head_dim=32,
        patch_size=4, num_embeds_ada_norm=10,
    )  # fmt: skip


MODELS = {"unet": unet, "dit": dit}


class Trainee:
    """One copy of the model that trains with one sampler."""

    def __init__(self, model: torch.nn.Module, sampler: str, batch: int) -> None:
        self.model = copy.deepcopy(model).train()
        self.scheduler = DDPMScheduler(num_train_timesteps=1000)
        options = dict(SAMPLERS[sampler])
        self.sampler = make_sampler(options.pop("name", sampler), self.scheduler, seed=0, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ema = EMAModel(self.model.parameters(), decay=0.999)
        self.conditioned = isinstance(model, DiTTransformer2DModel)
        self.x0 = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(batch) % 10
        self.probed = 0
        self.steps = TURN_OF_SMALL_BATCHES if batch < _SMALL else TURN
        self.model.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not torch.is_grad_enabled():
            self.probed += len(inputs[0])

    def turn(self) -> float:
        """Seconds of a step, over one turn."""
        conditioning = {"class_labels": self.labels} if self.conditioned else {}
        start = time.perf_counter()
        for _ in range(self.steps):
            noise, timesteps = torch.randn_like(self.x0), self.sampler.sample(self.x0)
            noisy = self.scheduler.add_noise(self.x0, noise, timesteps)
            pred = self.model(noisy, timesteps, **conditioning).sample
            loss = self.sampler.loss(pred, self.x0, noise, timesteps)
            with self.sampler.observe(self.model, self.x0, ema=self.ema, **conditioning):
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.ema.step(self.model.parameters())
        return (time.perf_counter() - start) / self.steps


def measure(model: str, batch: int, samplers: list[str], turns: int) -> dict[str, Any]:
    """Ratios of every sampler's turns over uniform's, one turn each in rotation; the first is for warming up."""
    torch.manual_seed(0)
    base = MODELS[model]()
    trainees = {name: Trainee(base, name, batch) for name in dict.fromkeys(["uniform", *samplers])}
    seconds: dict[str, list[float]] = {name: [] for name in trainees}
    for number in tqdm(range(turns + 1), desc=f"{model}, batch {batch}"):
        for name, trainee in trainees.items():
            if number == 1:
                trainee.probed = 0
            took = trainee.turn()
            if number > 0:
                seconds[name].append(took)
    return {
        name: {
            "seconds_per_step": spread(seconds[name]),
            "ratio": spread([mine / theirs for mine, theirs in zip(seconds[name], seconds["uniform"], strict=True)]),
            "forward_equivalents_per_40_steps": trainees[name].probed / batch / turns * 40 / trainees[name].steps,
        }
        for name in trainees
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--turns", type=int, default=6, help="turns of 40 steps that are measured")
    args = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    result = json.loads(path.read_text()) if path.is_file() else {"cells": {}}
    for model in args.models:
        for batch in args.batches:
            cell = result["cells"].setdefault(f"{model}, batch {batch}", {})
            missing = [name for name in args.samplers if name not in cell]
            if not missing:
                continue
            for name, measured in measure(model, batch, missing, args.turns).items():
                cell.setdefault(name, measured | facts(seed=0))
            save(NAME, result)
            for name in missing:
                told = cell[name]
                print(
                    f"{model}, batch {batch}, {name}: {told['ratio']['median']:.3f} ({told['ratio']['lowest']:.3f} to "
                    f"{told['ratio']['highest']:.3f}), {told['forward_equivalents_per_40_steps']:.2f} forwards"
                )


if __name__ == "__main__":
    main()
