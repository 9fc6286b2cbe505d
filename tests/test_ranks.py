"""What ranks agree on: identities on one rank, and two real gloo processes."""

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from diffusers_adaptive_ts import ranks

WORKER = """
import sys
import torch
import torch.distributed as dist
from diffusers_adaptive_ts import ranks

dist.init_process_group("gloo")
mine = float(ranks.rank())
result = {
    "world_size": ranks.world_size(),
    "rank": ranks.rank(),
    "gather": ranks.gather(torch.tensor([[mine, 1.0], [mine, 2.0]])),
    "gather_view": ranks.gather(torch.arange(6.0).reshape(2, 3).T + mine),
    "mean": ranks.mean(torch.tensor([mine, 0.1 + mine])),
    "mean_scalar": ranks.mean(torch.tensor(mine, dtype=torch.float64)),
    "from_first": ranks.from_first(
        {
            "labels": torch.tensor([5, 6]) + ranks.rank(),
            "text": [torch.full((1, 3 + 4 * ranks.rank()), mine), "name"],  # other sizes on other ranks
            "scalar": torch.tensor(mine),
            "empty": torch.zeros(0),
            "flag": torch.tensor([ranks.rank() == 0]),
        }
    ),
}
torch.save(result, f"{sys.argv[1]}/{ranks.rank()}.pt")
dist.destroy_process_group()
"""


def test_one_rank_needs_no_talk():
    values = torch.randn(3)
    assert (ranks.world_size(), ranks.rank()) == (1, 0)
    assert ranks.gather(values) is values
    assert ranks.mean(values) is values
    nest = {"a": [values]}
    assert ranks.from_first(nest) is nest


def test_map_tensors_keeps_the_nest():
    Pair = namedtuple("Pair", "left right")
    nest = {"a": torch.ones(2), "b": [torch.ones(1), ("text", None)], "c": Pair(torch.ones(1), 3)}
    doubled = ranks.map_tensors(lambda tensor: tensor * 2, nest)
    assert doubled["a"].tolist() == [2, 2]
    assert doubled["b"][0].tolist() == [2]
    assert doubled["b"][1] == ("text", None)
    assert isinstance(doubled["c"], Pair)
    assert (doubled["c"].left.item(), doubled["c"].right) == (2, 3)
    assert nest["a"].tolist() == [1, 1]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    script = folder / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*command, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_ranks_know_each_other(two_ranks):
    assert [result["rank"] for result in two_ranks] == [0, 1]
    assert [result["world_size"] for result in two_ranks] == [2, 2]


def test_gather_is_in_rank_order(two_ranks):
    for result in two_ranks:
        assert result["gather"].tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
        assert result["gather_view"].tolist() == [[0, 3], [1, 4], [2, 5], [1, 4], [2, 5], [3, 6]]


def test_mean_has_the_same_bits(two_ranks):
    first, second = (result["mean"] for result in two_ranks)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.tensor([0.5, 0.6]))
    assert all(result["mean_scalar"].item() == 0.5 for result in two_ranks)


def test_from_first_gives_rank_zeros_tensors_and_sizes(two_ranks):
    for result in two_ranks:
        received = result["from_first"]
        assert received["labels"].tolist() == [5, 6]
        assert received["text"][0].tolist() == [[0, 0, 0]]
        assert received["text"][1] == "name"
        assert received["scalar"].item() == 0
        assert received["empty"].shape == (0,)
        assert received["flag"].tolist() == [True]
