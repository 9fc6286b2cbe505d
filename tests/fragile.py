"""A network with all that a measurement could disturb."""

import torch
from torch import nn

TOTAL = 12


class Fragile(nn.Module):
    """Batch norm, dropout, a timestep embedding, optional conditioning of each sample.

    It also takes a random number in every call, in eval mode too, as models with stochastic layers do.
    """

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.time = nn.Embedding(TOTAL, 6)
        self.last = nn.Conv2d(6, channels, 1)

    def forward(self, x, timesteps, shift=None):
        hidden = self.norm(self.first(x)) + self.time(timesteps)[:, :, None, None] + 0 * torch.rand(())
        if shift is not None:
            hidden = hidden + shift[:, None, None, None]
        return self.last(self.drop(hidden).tanh())


def make_fragile(seed: int = 0) -> Fragile:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Fragile()
