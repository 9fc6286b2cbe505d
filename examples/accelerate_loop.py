"""The same loop with accelerate: several processes, gradient accumulation, mixed precision.

accelerate launch examples/accelerate_loop.py --gradient_accumulation_steps 2 --mixed_precision bf16
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler
from plain_pytorch import BATCH_SIZE, digits, small_unet
from torch.utils.data import DataLoader, RandomSampler

from diffusers_adaptive_ts import AdaptiveTimestepSampler


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: 150)")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2, help="batches per step (default: 2)")
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"), default="no", help="default: no")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        cpu=args.cpu,
    )
    torch.set_num_threads(1)  # so small a model is not worth sharing between cores
    set_seed(0, device_specific=True)  # every process its own noise

    images = digits()
    num_batches = args.steps * args.gradient_accumulation_steps * accelerator.num_processes
    batches = RandomSampler(images, replacement=True, num_samples=num_batches * BATCH_SIZE)
    loader = DataLoader(images, batch_size=BATCH_SIZE, sampler=batches)
    model = small_unet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    # Not prepared: the sampler keeps its policy the same on all processes by itself.
    sampler = AdaptiveTimestepSampler(noise_scheduler, in_channels=1, seed=0)

    average = None
    for x0 in loader:
        with accelerator.accumulate(model):
            noise = torch.randn_like(x0)
            timesteps = sampler.sample(x0)
            pred = model(noise_scheduler.add_noise(x0, noise, timesteps), timesteps).sample
            loss = sampler.loss(pred, x0, noise, timesteps)

            with sampler.observe(model, x0):  # counts real steps only, so accumulating batches pass through
                accelerator.backward(loss)
                optimizer.step()
            optimizer.zero_grad()

        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        step = int(sampler.steps)
        if accelerator.sync_gradients and (step % 25 == 0 or step == args.steps):
            accelerator.print(f"step {step:4d}  loss {average:.4f}")

    shares = [f"{part.sum():.1%}" for part in sampler.density().chunk(5)]
    accelerator.print(f"drawn from each fifth of the timesteps, clean to noisy: {', '.join(shares)}")
    events = int(sampler.events)
    forwards = events * sampler.forwards_per_event(BATCH_SIZE)
    accelerator.print(f"the sampler measured {events} of {step} steps and spent {forwards} forward passes on them")


if __name__ == "__main__":
    main()
