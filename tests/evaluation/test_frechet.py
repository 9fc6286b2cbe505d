"""The Frechet distance against scipy's matrix root, against closed forms, and over parts of a set."""

import pytest
import scipy.linalg
import torch

from diffusers_adaptive_ts.evaluation.frechet import FeatureMoments, frechet_distance


def features(seed: int, count: int = 400, width: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, width, generator=generator) @ torch.randn(width, width, generator=generator)
    return mixed + torch.randn(width, generator=generator)


def reference(one: torch.Tensor, other: torch.Tensor) -> float:
    """As the authors' code: numpy's covariance and scipy's root of the product."""
    first, second = (torch.cov(some.double().T).numpy() for some in (one, other))
    root = scipy.linalg.sqrtm(first @ second).real
    apart = (one.double().mean(0) - other.double().mean(0)).pow(2).sum().item()
    return apart + float((first + second - 2 * root).trace())


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_the_matrix_root_of_the_product(seed):
    one, other = features(seed), features(seed + 10)
    found = frechet_distance(FeatureMoments.of(one), FeatureMoments.of(other))
    assert found == pytest.approx(reference(one, other), rel=1e-8)


def test_one_dimension_has_a_closed_form():
    one, other = torch.randn(50, 1, dtype=torch.float64), 3 * torch.randn(70, 1, dtype=torch.float64) + 1
    expected = (one.mean() - other.mean()) ** 2 + (one.std() - other.std()) ** 2
    assert frechet_distance(FeatureMoments.of(one), FeatureMoments.of(other)) == pytest.approx(float(expected))


def test_a_set_is_at_no_distance_from_itself_also_with_fewer_samples_than_features():
    few = FeatureMoments.of(features(0, count=5))
    assert frechet_distance(few, few) == pytest.approx(0, abs=1e-4)


def test_it_is_symmetric():
    one, other = FeatureMoments.of(features(1)), FeatureMoments.of(features(2))
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one), rel=1e-8)


@pytest.mark.parametrize("sizes", [[1, 399], [100, 150, 150]])
def test_moments_of_parts_add_up_to_those_of_the_whole(sizes):
    whole = features(3)
    first, *rest = [FeatureMoments.of(part) for part in whole.split(sizes)]
    for part in rest:
        first = first + part
    assert first.count == 400
    torch.testing.assert_close(first.mean, whole.double().mean(0))
    torch.testing.assert_close(first.covariance, torch.cov(whole.double().T))


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        FeatureMoments.of(torch.zeros(3))
    with pytest.raises(ValueError, match="NaN"):
        FeatureMoments.of(torch.full((3, 2), float("nan")))
    with pytest.raises(ValueError, match="at least two"):
        _ = FeatureMoments.of(torch.zeros(1, 2)).covariance
    with pytest.raises(ValueError, match="12 and 3"):
        frechet_distance(FeatureMoments.of(features(0)), FeatureMoments.of(torch.randn(9, 3)))
