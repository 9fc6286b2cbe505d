"""An adaptive timestep sampler in a plain PyTorch loop: a small UNet learns scikit-learn's handwritten digits.

python examples/plain_pytorch.py --steps 300
"""

import argparse

import torch
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, RandomSampler

from diffusers_adaptive_ts import AdaptiveTimestepSampler

BATCH_SIZE = 64


def digits() -> torch.Tensor:
    """`(1797, 1, 8, 8)` grey images in [-1, 1]."""
    return torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1


def small_unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    steps = parser.parse_args().steps

    torch.set_num_threads(1)  # so small a model is not worth sharing between cores
    torch.manual_seed(0)
    images = digits()
    batches = RandomSampler(images, replacement=True, num_samples=steps * BATCH_SIZE)
    loader = DataLoader(images, batch_size=BATCH_SIZE, sampler=batches)
    model = small_unet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    sampler = AdaptiveTimestepSampler(noise_scheduler, in_channels=1, seed=0)

    average = None
    for step, x0 in enumerate(loader, start=1):
        noise = torch.randn_like(x0)
        timesteps = sampler.sample(x0)
        pred = model(noise_scheduler.add_noise(x0, noise, timesteps), timesteps).sample
        loss = sampler.loss(pred, x0, noise, timesteps)

        with sampler.observe(model, x0):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()

        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        if step % 50 == 0 or step == steps:
            print(f"step {step:4d}  loss {average:.4f}")

    shares = [f"{part.sum():.1%}" for part in sampler.density().chunk(5)]
    print(f"drawn from each fifth of the timesteps, clean to noisy: {', '.join(shares)}")
    forwards = int(sampler.events) * sampler.forwards_per_event(BATCH_SIZE)
    print(f"the sampler measured {int(sampler.events)} of {steps} steps and spent {forwards} forward passes on them")


if __name__ == "__main__":
    main()
