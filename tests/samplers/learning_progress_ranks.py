"""What two ranks do with learning_progress; `test_learning_progress.py` starts them and compares their notes."""

import sys

import torch
import torch.distributed as dist
from diffusers.training_utils import EMAModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diffusers_adaptive_ts import TimestepSampler, make_sampler
from tests.conftest import make_scheduler
from tests.fragile import TOTAL, make_fragile

BATCH = 4


def make():
    return make_sampler(
        "learning_progress", make_scheduler(TOTAL, "linear"), update_every=1, num_bins=3, probes_per_bin=3, seed=0
    )


class Training:
    """A model, and the random numbers of this rank."""

    def __init__(self, with_ema: bool = False) -> None:
        self.network = make_fragile()
        self.model = DistributedDataParallel(self.network)
        self.ema = EMAModel(self.network.parameters()) if with_ema else None
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05)
        self.random = torch.Generator().manual_seed(100 + dist.get_rank())
        self.probed = []
        self.network.register_forward_pre_hook(
            lambda module, args: None if module.training else self.probed.append(args[1].tolist())
        )

    def run(self, sampler, steps, sizes=(BATCH,)):
        for number in range(steps):
            size = sizes[number % len(sizes)]
            x0 = torch.randn(size, 2, 4, 4, generator=self.random)
            shift, noise = torch.randn(size, generator=self.random), torch.randn(x0.shape, generator=self.random)
            timesteps = sampler.sample(x0)
            torch.manual_seed(number)  # of the dropout, so that a copy of a run is one
            pred = self.model(sampler.scheduler.add_noise(x0, noise, timesteps), timesteps, shift=shift)
            self.optimizer.zero_grad()
            loss = sampler.loss(pred, x0, noise, timesteps)
            with sampler.observe(self.model, x0, ema=self.ema, shift=shift):
                loss.backward()
                self.optimizer.step()
            if self.ema is not None:
                self.ema.step(self.network.parameters())

    def notes(self, sampler):
        chunks, share = self.probed, []
        while len(share) < sampler._probes.share:
            share = chunks[-1] + share
            chunks = chunks[:-1]
        return {
            "state": sampler.state_dict(),
            "share": sampler._probes.share,
            "timesteps": share,
            "forwards": len(self.probed),
            "weights": nn.utils.parameters_to_vector(self.network.parameters()).detach(),
        }


def main(folder: str) -> None:
    even = make()  # before torch.distributed is there
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    notes = {"rank": rank, "all": even._probes.timesteps.tolist()}

    training, copy = Training(), Training()
    training.run(even, 1)
    copy.run(make(), 1)
    middle = even.state_dict()  # 4 of 5 probes are gathered
    training.run(even, 7)
    notes["even"] = training.notes(even)
    resumed = make()
    resumed.load_state_dict(middle)
    copy.run(resumed, 7)
    notes["resumed"] = copy.notes(resumed)

    # Batches of other sizes on the other rank, so that one has its probes long before the other.
    training, uneven = Training(), make()
    training.run(uneven, 12, sizes=(BATCH,) if rank == 0 else (1, 1, 3))
    notes["uneven"] = training.notes(uneven)

    training, averaged = Training(with_ema=True), make()
    training.run(averaged, 8)
    notes["ema"] = training.notes(averaged)

    # One file for all ranks: the others' probes are not their own.
    state = [even.state_dict()]
    dist.broadcast_object_list(state)
    training, shared = Training(), make()
    shared.load_state_dict(state[0])
    shared.draws.diverge_by_rank()
    training.run(shared, 6)
    notes["from_rank_0"] = training.notes(shared)

    if rank == 0:
        even.save_pretrained(f"{folder}/sampler")
    dist.barrier()
    training, published = Training(), TimestepSampler.from_pretrained(f"{folder}/sampler")
    training.run(published, 6)
    notes["published"] = training.notes(published)

    torch.save(notes, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
