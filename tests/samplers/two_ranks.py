"""What two ranks do, each in a process of its own; `test_adaptive_ranks.py` starts them and compares their notes."""

import sys
import warnings

import torch
import torch.distributed as dist
from diffusers import DDPMScheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diffusers_adaptive_ts import AdaptiveTimestepSampler, make_sampler
from tests.fragile import TOTAL, make_fragile

BATCH = 4


class OneTimestep(nn.Module):
    """Exact everywhere, with x0 = 0, except at one timestep, where a trainable offset is wrong."""

    def __init__(self, scheduler, timestep):
        super().__init__()
        self.offset = nn.Parameter(torch.ones(2))
        self.timestep = timestep
        self.register_buffer("spread", (1 - scheduler.alphas_cumprod).sqrt())

    def forward(self, x, timesteps):
        wrong = (timesteps == self.timestep).float()[:, None]
        return x / self.spread[timesteps][:, None] + wrong * self.offset


def train(model, sampler, x0, steps, optimizer=None, **conditioning):
    """The README's loop; returns the timesteps drawn."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = []
    for _ in range(steps):
        noise, timesteps = torch.randn_like(x0), sampler.sample(x0)
        pred = model(sampler.scheduler.add_noise(x0, noise, timesteps), timesteps, **conditioning)
        loss = sampler.loss(pred, x0, noise, timesteps)
        optimizer.zero_grad()
        with sampler.observe(model, x0, **conditioning):
            loss.backward()
            optimizer.step()
        drawn.append(timesteps)
    return torch.cat(drawn)


def probed_timesteps(model):
    """Filled with the timesteps of every call in eval mode: those of the probes."""
    seen = []
    model.register_forward_pre_hook(lambda module, args: None if module.training else seen.append(args[1].clone()))
    return seen


def main(folder: str) -> None:
    scheduler = DDPMScheduler(num_train_timesteps=TOTAL, beta_end=0.5)
    odd_scheduler = DDPMScheduler(num_train_timesteps=13, beta_end=0.5)
    torch.manual_seed(0)  # as the upstream scripts do: the same on all ranks
    # One built before torch.distributed is and without a seed, one with a seed that differs on every rank.
    early = AdaptiveTimestepSampler(scheduler, in_channels=2, update_every=1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seeded = AdaptiveTimestepSampler(scheduler, in_channels=2, update_every=2, seed=rank, uniform_floor=0.1)
    notes = {}

    data = torch.Generator().manual_seed(100 + rank)
    x0 = torch.randn(BATCH, 2, 4, 4, generator=data)
    shift = torch.randn(BATCH, generator=data)
    for name, sampler in (("early", early), ("seeded", seeded)):
        network = make_fragile()
        seen = probed_timesteps(network)
        model = DistributedDataParallel(network)
        drawn = train(model, sampler, x0, 8, shift=shift)
        sampler.sample(x0)  # after the last event, too, the ranks must agree
        notes[name] = {
            "drawn": drawn,
            "forwards": len(seen),
            "stated": sampler.forwards_per_event(BATCH),
            "state": sampler.state_dict(),
            "density": sampler.density(),
            "weights": nn.utils.parameters_to_vector(network.parameters()).detach(),
            "modes": [module.training for module in model.modules()],
        }

    # Thirteen timesteps do not divide by two; only one of them changes.
    sampler = AdaptiveTimestepSampler(odd_scheduler, update_every=1, seed=0)
    network = OneTimestep(odd_scheduler, 9)
    seen = probed_timesteps(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network.offset.grad = torch.ones(2)
    sampler.sample(torch.zeros(BATCH, 2))
    with sampler.observe(network, torch.zeros(BATCH, 2)):
        optimizer.step()
    notes["sweep"] = {"row": sampler.estimator.queue.rows()[0], "first_looked_at": torch.cat(seen[:2])}

    # Buckets of other sizes on each rank, and one rank with a bad sample.
    sampler = AdaptiveTimestepSampler(scheduler, update_every=1, seed=0)
    bucket = torch.randn(BATCH, 2, 4 + 2 * rank, 6 - 2 * rank, generator=data)
    model = DistributedDataParallel(make_fragile())
    train(model, sampler, bucket, 2)
    bad = bucket.clone()
    if rank == 1:
        bad[0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler.sample(bad)
        with sampler.observe(model, bad):
            torch.optim.SGD(model.parameters(), lr=0.05).step()
    train(model, sampler, bucket, 1)
    notes["buckets"] = {
        "events": int(sampler.events),
        "dropped": int(sampler.dropped),
        "steps": int(sampler.steps),
        "warned": [str(warning.message) for warning in caught],
        "state": sampler.state_dict(),
        "density": sampler.density(),
    }

    stratified = AdaptiveTimestepSampler(
        DDPMScheduler(num_train_timesteps=2 * BATCH), policy="histogram", stratified=True, seed=0
    )
    notes["stratified"] = torch.stack([stratified.sample(x0) for _ in range(3)])

    variance = make_sampler("gradient_variance", scheduler, measure_every=1, num_bins=4, microbatch_size=2, seed=0)
    notes["variance"] = {
        "drawn": train(DistributedDataParallel(make_fragile()), variance, x0, 6),
        "density": variance.density(),
    }

    torch.save(notes, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
