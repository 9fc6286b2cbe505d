"""The queue Q: a ring whose tensors are its whole state."""

import pytest
import torch

from diffusers_adaptive_ts.probes import DeltaQueue


def filled(size, pushes, total=4):
    queue = DeltaQueue(size, total)
    for push in range(pushes):
        queue.push(torch.full((total,), float(push)))
    return queue


@pytest.mark.parametrize("pushes", range(12))
def test_holds_the_last_rows_oldest_first(pushes):
    queue = filled(5, pushes)
    assert len(queue) == min(pushes, 5)
    assert queue.rows().shape == (len(queue), 4)
    assert queue.rows()[:, 0].tolist() == [float(row) for row in range(max(0, pushes - 5), pushes)]
    assert queue.rows().dtype == torch.float64


def test_copying_into_the_state_restores_it():
    source, target = filled(5, 7), filled(5, 2)
    for key, tensor in target.state_tensors().items():
        tensor.copy_(source.state_tensors()[key])
    assert torch.equal(target.rows(), source.rows())
    for queue in (source, target):
        queue.push(torch.full((4,), -1.0))
    assert torch.equal(target.rows(), source.rows())


def test_refuses_a_row_of_another_length():
    with pytest.raises(RuntimeError):
        DeltaQueue(3, 4).push(torch.zeros(5))
