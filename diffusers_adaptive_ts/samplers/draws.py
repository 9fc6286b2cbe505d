"""Random numbers of a sampler: its own generators, different on every rank, stratified over the global batch."""

from __future__ import annotations

import torch

from .. import ranks

# Far apart, so that neighbouring seeds on neighbouring ranks do not meet.
_RANK_STRIDE = 1_000_003
# Beyond every rank, so that no rank's own numbers are the shared ones.
_SHARED_STRIDE = _RANK_STRIDE * 2**24


class Draws:
    """Two generators on the CPU: one of this rank, one that all ranks keep in step.

    A sampler never touches torch's global generator after it is built, so adding one changes no other random number.

    Args:
        seed: where both start; `None` takes a number from torch's global generator, so `set_seed` is honoured.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise ValueError(f"seed must be a whole number of at least 0, or None; got {seed!r}.")
        self._seed = int(torch.randint(2**31, ())) if seed is None else seed
        self._own: torch.Generator | None = None
        self._shared: torch.Generator | None = None

    @property
    def own(self) -> torch.Generator:
        """The generator of this rank."""
        self._start()
        return self._own

    @property
    def shared(self) -> torch.Generator:
        """The generator that gives the same numbers on every rank; all ranks must use it alike."""
        self._start()
        return self._shared

    def _start(self) -> None:
        # Not in __init__: a sampler may be built before torch.distributed is.
        if self._own is None:
            seed = int(ranks.from_first(torch.tensor(self._seed)))
            self._own = torch.Generator().manual_seed(seed + _RANK_STRIDE * ranks.rank())
            self._shared = torch.Generator().manual_seed(seed + _SHARED_STRIDE)

    def uniforms(self, count: int, stratified: bool = False) -> torch.Tensor:
        """`(count,)` float64 numbers in [0, 1); stratified: one in each of `count * ranks` equal cells, shuffled."""
        uniforms = torch.rand(count, dtype=torch.float64, generator=self.own)
        if not stratified:
            return uniforms
        cells = count * ranks.world_size()
        mine = torch.randperm(cells, generator=self.shared)[ranks.rank() * count :][:count]
        return (mine + uniforms) / cells

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The states of both generators as bytes (copies)."""
        return {"generator": self.own.get_state(), "shared_generator": self.shared.get_state()}

    def load(self, generator: torch.Tensor, shared_generator: torch.Tensor) -> None:
        """Go on from two states; on a broken one nothing is changed."""
        own, shared = torch.Generator(), torch.Generator()
        try:
            own.set_state(generator)
            shared.set_state(shared_generator)
        except RuntimeError as error:
            raise ValueError(f"The state of a generator is not one of torch's ({error}).") from None
        self._own, self._shared = own, shared

    def diverge_by_rank(self) -> None:
        """Give every rank but the first numbers of its own, after all have loaded one file."""
        if ranks.rank() > 0:
            base = int(torch.randint(2**31, (), generator=self.own))
            self.own.manual_seed(base + _RANK_STRIDE * ranks.rank())


def draw_from_table(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """`(B,)` indices by the inverse CDF of a `(T,)` table; an index of probability 0 is never drawn.

    Example:
        >>> draw_from_table(torch.tensor([0.5, 0.0, 0.5]), torch.tensor([0.1, 0.49, 0.5, 0.99]))
        tensor([0, 0, 2, 2])
    """
    cumulative = probabilities.double().cumsum(0)
    # Stratified uniforms may round up to 1, beyond the last index that has a probability.
    return torch.searchsorted(cumulative / cumulative[-1], uniforms.double().clamp(max=1 - 2**-53), right=True)
