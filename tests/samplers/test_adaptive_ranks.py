"""Two real gloo processes: different draws, one policy, shared work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffusers_adaptive_ts import AdaptiveTimestepSampler

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(ROOT / "tests/samplers/two_ranks.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def different(first, second):
    assert first.keys() == second.keys()
    return [key for key in first if not torch.equal(first[key], second[key])]


built = pytest.mark.parametrize("built", ["early", "seeded"])


@built
def test_ranks_draw_different_timesteps(ranks, built):
    first, second = (notes[built]["drawn"] for notes in ranks)
    assert len(first) == len(second) == 32
    assert (first != second).float().mean() > 0.5


@built
def test_state_is_the_same_bit_for_bit(ranks, built):
    """Policy, its optimizer, queue, selected set, counts, remembered rows: all but the generator of each rank."""
    first, second = (notes[built]["state"] for notes in ranks)
    assert {"estimator.queue.rows", "estimator.selected", "policy.head.weight", "recent"} <= first.keys()
    assert different(first, second) == ["generator"]
    assert int(first["events"]) == (8 if built == "early" else 4)
    assert int(first["steps"]) == 8
    assert first["policy.head.weight"].abs().max() > 0  # it has learned, and looks at x0


@built
def test_density_is_the_same_bit_for_bit(ranks, built):
    first, second = (notes[built]["density"] for notes in ranks)
    assert torch.equal(first, second)
    assert first.sum() == pytest.approx(1)
    assert first.std() > 0


@built
def test_weights_stay_in_step(ranks, built):
    assert torch.equal(ranks[0][built]["weights"], ranks[1][built]["weights"])
    assert all(all(notes[built]["modes"]) for notes in ranks)


@built
def test_the_sweep_is_divided(ranks, built, short_scheduler):
    """Twelve timesteps in chunks of four: two chunks for each rank instead of three for one, and |S| for each."""
    alone = AdaptiveTimestepSampler(short_scheduler).forwards_per_event(4)
    assert alone == 2 * (3 + 3)
    for notes in ranks:
        assert notes[built]["stated"] == 2 * (2 + 3)
        assert notes[built]["forwards"] == notes[built]["stated"] * int(notes[built]["state"]["events"])


def test_each_rank_sweeps_its_own_part_in_order(ranks):
    parts = [notes["sweep"]["first_looked_at"].tolist() for notes in ranks]
    assert parts == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 12]]
    for notes in ranks:
        row = notes["sweep"]["row"]
        assert row.shape == (13,)
        assert torch.nonzero(row.abs() > 1e-6).flatten().tolist() == [9]


def test_sizes_may_differ_and_a_bad_sample_drops_the_event_everywhere(ranks):
    for notes in ranks:
        bucket = notes["buckets"]
        assert (bucket["events"], bucket["dropped"], bucket["steps"]) == (3, 1, 4)
        assert len(bucket["warned"]) == 1
        assert "x0 has NaN or infinite values" in bucket["warned"][0]
    assert different(ranks[0]["buckets"]["state"], ranks[1]["buckets"]["state"]) == ["generator"]
    assert torch.equal(ranks[0]["buckets"]["density"], ranks[1]["buckets"]["density"])


def test_stratified_over_the_global_batch(ranks):
    """Eight timesteps, two ranks of four samples, a uniform policy: together each timestep once."""
    for first, second in zip(*(notes["stratified"] for notes in ranks), strict=True):
        assert sorted([*first.tolist(), *second.tolist()]) == list(range(8))


def test_gradient_variance_agrees(ranks):
    first, second = (notes["variance"] for notes in ranks)
    assert torch.equal(first["density"], second["density"])
    assert first["density"].std() > 0
    assert not torch.equal(first["drawn"], second["drawn"])
