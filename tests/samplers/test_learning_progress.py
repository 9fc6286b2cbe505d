"""learning_progress: the density follows where the weighted loss falls, at a stated cost, on any number of ranks."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file
from torch import nn

from diffusers_adaptive_ts import TimestepSampler, make_sampler, make_weighting
from tests.conftest import assert_same_state, make_scheduler, train
from tests.fragile import make_fragile

ROOT = Path(__file__).parents[2]
QUICK = {"update_every": 1, "num_bins": 4, "probes_per_bin": 2}


class Levels(nn.Module):
    """On x0 = 0 its squared error in eps at timestep t is `levels[t]`, for every sample and noise."""

    def __init__(self, scheduler):
        super().__init__()
        self.levels = nn.Parameter(torch.ones(len(scheduler.betas)))
        self.register_buffer("spread", (1 - scheduler.alphas_cumprod).sqrt())

    def forward(self, x, timesteps):
        return x / self.spread[timesteps][:, None] + self.levels[timesteps].sqrt()[:, None]


def step(sampler, model, levels, x0=None, ema=None):
    """An optimizer step after which the model's errors are `levels`."""
    with sampler.observe(model, torch.zeros(16, 2) if x0 is None else x0, ema=ema), torch.no_grad():
        model.levels.copy_(levels)


def looks(sampler, falls, count, jitter, seed):
    """`count` looks at losses that fall by `(T,)` `falls` from one to the next, under noise of their own."""
    model, generator = Levels(sampler.scheduler), torch.Generator().manual_seed(seed)
    for number in range(count):
        noise = jitter * torch.randn(len(falls), generator=generator)
        step(sampler, model, (1 - number * falls + noise).clamp(min=0))


def toy(**options):
    options = {"objective": "uniform", "update_every": 1, "seed": 0, **options}
    sampler = make_sampler("learning_progress", make_scheduler(1000, "linear"), **options)
    # Gather at once, and look at every step: what a look costs is tested elsewhere.
    with sampler.observe(nn.Linear(1, 1), torch.zeros(200, 2)):
        pass
    return sampler


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("band", [(-9.0, -6.0), (-2.0, 1.0), (3.0, 6.0)])
def test_density_follows_a_fall_in_one_band_of_log_snr(band, seed):
    """A fall is a third of its noise from look to look; inside the band p is on average twice that outside or more."""
    sampler = toy()
    log_snr = sampler.objective.log_snr
    inside = (log_snr > band[0]) & (log_snr < band[1])
    outside = (log_snr < band[0] - 2) | (log_snr > band[1] + 2)  # smoothing reaches over the edge
    looks(sampler, 0.01 * inside.float(), 60, jitter=0.02, seed=seed)
    density = sampler.density()
    assert density[inside].mean() > 2 * density[outside].mean()
    assert inside[density.argmax()]
    assert density.min() >= 0.2 / 1000


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_without_progress_anywhere_it_stays_near_uniform(seed):
    """No timestep is drawn less than half or more than twice as often as under uniform.

    All probes of a timestep jitter together, as they do with the weights; in the cleanest bins all share a timestep.
    """
    sampler = toy()
    looks(sampler, torch.zeros(1000), 60, jitter=0.02, seed=seed)
    ratio = sampler.density() * 1000
    assert ratio.min() > 0.5
    assert ratio.max() < 2.0
    assert sampler.summary()["entropy"] > -0.02


def test_where_the_loss_rises_the_floor_is_left():
    sampler = toy(temperature=1.0)
    falls = torch.where(torch.arange(1000) < 300, 0.01, -0.01)
    looks(sampler, falls, 30, jitter=0.0, seed=0)
    assert sampler.density()[400:].mean() == pytest.approx(0.2 / 1000, rel=0.02)


def per_timestep(**options):
    """Ten timesteps, each a bin of its own, and no memory: what was learned is what the last look says."""
    options = {"temperature": 1.0, "floor": 0.0, "smoothing": 0.0, "window": 0.0, "update_every": 1, **options}
    return make_sampler("learning_progress", make_scheduler(10), probes_per_bin=2, num_bins=500, seed=0, **options)


@pytest.mark.parametrize(
    ("objective", "weighting"),
    [("quality", "p2"), ("likelihood", "vlb"), ("min_snr", "min_snr"), ("uniform", "uniform")],
)
def test_progress_is_measured_in_the_objective(objective, weighting):
    """Where all errors fall alike, the density is the weighting's."""
    sampler = per_timestep(objective=objective)
    looks(sampler, torch.full((10,), 0.1), 6, jitter=0.0, seed=0)
    weights = make_weighting(weighting, make_scheduler(10)).table()
    assert sampler.density().tolist() == pytest.approx((weights / weights.sum()).tolist(), rel=1e-4)


def test_temperature_and_floor():
    falls = 0.01 * torch.arange(1, 11)
    for temperature, floor in ((1.0, 0.0), (0.5, 0.0), (0.5, 0.25), (0.0, 0.0)):
        sampler = per_timestep(objective="uniform", temperature=temperature, floor=floor)
        looks(sampler, falls, 6, jitter=0.0, seed=0)
        powers = falls.double() ** temperature
        expected = (1 - floor) * powers / powers.sum() + floor / 10
        assert sampler.density().tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_the_loss_that_is_trained_stays_as_it_is():
    sampler = per_timestep(objective="likelihood")
    assert sampler.weights(torch.arange(10)).tolist() == [1.0] * 10


def test_expected_positive_part_is_that_of_monte_carlo():
    sampler = per_timestep()
    mean = torch.tensor([-3.0, -1.0, -0.1, 0.0, 0.1, 0.5, 1.0, 3.0, -2.0, 2.0]).double()
    spread = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.01, 2.0, 1.0, 0.5, 0.1, 5.0]).double()
    sampler._progress.copy_(mean)
    sampler._variance.copy_(spread**2)
    normal = np.random.default_rng(0).standard_normal((400_000, 1))
    draws = np.maximum(mean.numpy() + spread.numpy() * normal, 0)
    error = draws.std(0) / math.sqrt(len(draws))
    found = sampler._expected().numpy()
    assert (np.abs(found - draws.mean(0)) <= 5 * error + 1e-6).all()
    assert (found > 0).all()


def test_neighbours_count_by_nearness_and_certainty():
    """The smoothed mean and its error against sums written out."""
    sampler = per_timestep(smoothing=1.0)
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(10, generator=generator).double()
    variance = torch.rand(10, generator=generator).double() + 0.5
    sampler._progress.copy_(mean)
    sampler._variance.copy_(variance)
    for k, (found, error) in enumerate(zip(*sampler._smoothed(), strict=True)):
        share = [math.exp(-((k - j) ** 2) / 2) / float(variance[j]) for j in range(10)]
        share = [value / sum(share) for value in share]
        assert float(found) == pytest.approx(sum(w * float(m) for w, m in zip(share, mean, strict=True)))
        assert float(error) ** 2 == pytest.approx(sum(w * w * float(v) for w, v in zip(share, variance, strict=True)))


@pytest.mark.parametrize(("window", "forgotten"), [(0.3, True), (1.0, False)])
def test_looks_of_the_first_part_of_a_run_are_forgotten(window, forgotten):
    """30 looks with progress in one band, then 90 in another: of the first is left (30 / 120)^(1 / 0.3), 1 %."""
    sampler, model = toy(window=window), Levels(make_scheduler(1000, "linear"))
    log_snr = sampler.objective.log_snr
    first, second = ((log_snr > low) & (log_snr < low + 3) for low in (-9.0, 3.0))
    elsewhere = (log_snr > -3) & (log_snr < 0)
    generator, levels = torch.Generator().manual_seed(0), torch.ones(1000)
    for number in range(120):
        levels = levels - 0.005 * (first if number < 30 else second).float()
        step(sampler, model, levels + 0.01 * torch.randn(1000, generator=generator))
    density = sampler.density()
    assert density[second].mean() > 2 * density[elsewhere].mean()
    assert (density[first].mean() < 1.3 * density[elsewhere].mean()) == forgotten


@pytest.mark.parametrize("kept", [torch.float32, torch.float64])
def test_the_average_is_what_is_looked_at_where_there_is_one(kept):
    falls = 0.02 * (torch.arange(10) < 5)
    densities = {}
    for given in (True, False):
        sampler, model = per_timestep(objective="uniform"), Levels(make_scheduler(10))
        ema = EMAModel(model.parameters())
        ema.to(dtype=kept)
        for number in range(5):
            ema.shadow_params[0].copy_(1 - number * falls)
            own = 1 - number * (0.02 - falls)
            step(sampler, model, own, ema=ema if given else None)
            assert torch.equal(model.levels.detach(), own)
            assert torch.equal(ema.shadow_params[0], (1 - number * falls).to(kept))
        densities[given] = sampler.density()
    assert densities[True][:5].sum() > 0.99
    assert densities[False][5:].sum() > 0.99


@pytest.mark.parametrize("batch_size", [16, 24, 64, 128])
def test_at_most_four_forwards_of_the_batch_in_forty_steps(batch_size):
    """Counted in samples through a real network, with the default options, over 240 steps."""
    sampler = make_sampler("learning_progress", DDPMScheduler(), seed=0)
    model = UNet2DModel(8, 1, 1, block_out_channels=(4,), norm_num_groups=1, layers_per_block=1, add_attention=False,
                        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",))  # fmt: skip
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    x0 = torch.randn(batch_size, 1, 8, 8)
    for _ in range(240):
        with sampler.observe(model, x0), torch.no_grad():
            model.conv_out.bias.add_(0.01)
    assert sampler.steps_between_looks(batch_size) == {16: 120, 24: 80, 64: 40, 128: 40}[batch_size]
    assert max(seen) <= batch_size
    forwards = sum(seen) / batch_size / 6
    assert 1 <= forwards <= 4
    assert sampler.expected_overhead(batch_size) == pytest.approx(forwards / 120)
    assert int(sampler._looks) == 240 // sampler.steps_between_looks(batch_size) - 1


def test_a_small_last_batch_changes_neither_when_nor_how_it_looks():
    sampler = make_sampler("learning_progress", make_scheduler(10), update_every=2, num_bins=4, seed=0)
    model, seen = Levels(make_scheduler(10)), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for number in range(12):
        step(sampler, model, torch.rand(10), x0=torch.zeros(1 if number % 3 == 2 else 16, 2))
    assert seen == [16] * 6


@pytest.mark.parametrize("batch_size", [3, 8])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_resuming_is_bit_equal_to_going_on(steps, batch_size):
    """At step 1 or 2 batches of 3 have not filled the probes yet."""
    first, second = (make_sampler("learning_progress", make_scheduler(50), seed=seed, **QUICK) for seed in (5, 6))
    train(first, steps=steps, batch_size=batch_size)
    assert (len(first._probes) < 8) == (steps * batch_size < 8)
    second.load_state_dict(first.state_dict())
    assert_same_state(first, second)
    assert (
        train(first, steps=9, batch_size=batch_size, seed=1)[0]
        == (train(second, steps=9, batch_size=batch_size, seed=1)[0])
    )
    assert_same_state(first, second)
    assert first.density().std() > 0


def test_what_is_published_has_no_training_samples_and_goes_on(tmp_path):
    sampler = make_sampler("learning_progress", make_scheduler(50), seed=5, **QUICK)
    train(sampler, steps=9)
    assert any(name.startswith("probe.") for name in sampler.state_dict())
    sampler.save_pretrained(tmp_path)
    published = load_file(tmp_path / "sampler.safetensors")
    assert not [name for name in published if name.startswith("probe")]
    assert sum(tensor.numel() for name, tensor in published.items() if "generator" not in name) < 100
    loaded = TimestepSampler.from_pretrained(tmp_path)
    assert torch.equal(loaded.density(), sampler.density())
    x0 = torch.zeros(20, 1, 4, 4)
    assert torch.equal(loaded.sample(x0), sampler.sample(x0))
    before, looks_before = loaded.density(), int(loaded._looks)
    train(loaded, steps=1, seed=1)
    assert torch.equal(loaded.density(), before)  # new probes: the first look has nothing to compare with
    train(loaded, steps=3, seed=1)
    assert int(loaded._looks) == looks_before + 3
    assert not torch.equal(loaded.density(), before)


def test_a_state_that_is_refused_leaves_the_probes():
    first, second = (make_sampler("learning_progress", make_scheduler(50), seed=seed, **QUICK) for seed in (5, 6))
    train(first, steps=4, seed=0)
    train(second, steps=2, seed=1)
    before = second.state_dict()
    good = first.state_dict()
    for broken in (
        {**good, "steps": torch.zeros(2)},
        {**good, "probe.x0": 7},
        {name: value for name, value in good.items() if name != "probe.gathered_by"},
    ):
        with pytest.raises(ValueError, match="state"):
            second.load_state_dict(broken)
        assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())
    train(second, steps=2, seed=1)


def test_a_nan_loss_drops_the_look_and_the_next_one_goes_on():
    sampler, model = per_timestep(objective="uniform"), Levels(make_scheduler(10))
    for _ in range(3):  # gather, look, learn
        step(sampler, model, torch.full((10,), 2.0))
    with pytest.warns(UserWarning, match="a probe loss is NaN or infinite; the measurement is dropped"):
        step(sampler, model, torch.full((10,), torch.nan))
    assert sampler.density().tolist() == pytest.approx([0.1] * 10)
    step(sampler, model, torch.where(torch.arange(10) < 5, 1.0, 2.0))
    assert sampler.density()[:5].sum() > 0.99
    assert (int(sampler.dropped), int(sampler._looks)) == (1, 2)


def test_a_compiled_model_and_one_that_is_disturbed_easily():
    x0, shift = torch.randn(5, 2, 4, 4), torch.randn(5)
    states = []
    for compiled in (True, False):
        network = make_fragile()
        model = torch.compile(network, backend="eager") if compiled else network
        sampler = make_sampler("learning_progress", make_scheduler(12), seed=0, **QUICK)
        before = torch.get_rng_state()
        for _ in range(4):
            with sampler.observe(model, x0, shift=shift), torch.no_grad():
                network.last.bias.add_(0.1)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training for module in network.modules())
        assert int(network.norm.num_batches_tracked) == 0
        states.append(sampler)
    assert_same_state(*states)
    assert int(states[0]._looks) == 2


@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("total", [1, 2, 3, 10])
def test_few_timesteps_and_zero_terminal_snr(schedule, total):
    zero_snr = total > 2
    scheduler = make_scheduler(total, schedule, rescale_betas_zero_snr=zero_snr, prediction_type="v_prediction")
    for objective in ("quality", "likelihood"):
        sampler = make_sampler("learning_progress", scheduler, objective=objective, update_every=1, seed=0)
        train(sampler, steps=12, batch_size=64)
        assert int(sampler._looks) > 2
        assert float(sampler.density().sum()) == pytest.approx(1)
        assert (sampler.density() >= 0.2 / total).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floor": 1.5}, r"floor must lie in 0\.\.1, got 1.5"),
        ({"window": -0.1}, r"window must lie in 0\.\.1, got -0.1"),
        ({"temperature": -1.0}, "temperature and smoothing must be at least 0.*got -1.0"),
        ({"temperature": math.nan}, "temperature and smoothing must be at least 0.*got nan"),
        ({"smoothing": math.nan}, "temperature and smoothing must be at least 0.*nan"),
        ({"num_bins": 1}, "num_bins and probes_per_bin at least 2.*1, 4"),
        ({"probes_per_bin": 1}, "num_bins and probes_per_bin at least 2.*40, 1"),
        ({"update_every": 0}, "update_every at least 1.* 0"),
        ({"objective": "qualty"}, "objective must be one of quality, likelihood, .*min_snr.*; got 'qualty'"),
        ({"objective": "learned_uncertainty"}, "'learned_uncertainty' changes as it learns"),
        ({"update_every": "often"}, "cannot be built with update_every=often"),
        ({"bins": 3}, "has no option 'bins'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampler("learning_progress", make_scheduler(50), **options)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning_progress_ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*command, str(ROOT / "tests/samplers/learning_progress_ranks.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


cases = pytest.mark.parametrize("case", ["even", "uneven", "ema", "resumed", "from_rank_0", "published"])


@cases
def test_ranks_have_one_density_bit_for_bit(ranks, case):
    first, second = (notes[case]["state"] for notes in ranks)
    assert torch.equal(first["density"], second["density"])
    different = [
        name for name in first if not name.startswith("probe.") and not torch.equal(first[name], second[name])
    ]
    assert different == ["generator"]
    assert first["density"].std() > 0
    assert int(first["looks"]) > 2


@cases
def test_each_rank_evaluates_its_share_in_as_many_forwards(ranks, case):
    """Nine probes: five on each rank, the last of them padding."""
    for notes in ranks:
        assert notes[case]["share"] == 5
        assert len(notes[case]["state"]["probe.x0"]) == 5
        assert (
            notes[case]["timesteps"]
            == ranks[0]["all"][notes["rank"] * 5 :][:5] + [ranks[0]["all"][-1]] * notes["rank"]
        )
    assert ranks[0][case]["forwards"] == ranks[1][case]["forwards"]
    assert not torch.equal(*(notes[case]["state"]["probe.x0"] for notes in ranks))


def test_resuming_on_two_ranks_is_bit_equal_to_going_on(ranks):
    for notes in ranks:
        assert all(
            torch.equal(value, notes["even"]["state"][name]) for name, value in notes["resumed"]["state"].items()
        )


def test_weights_of_the_ranks_stay_in_step(ranks):
    assert torch.equal(*(notes["even"]["weights"] for notes in ranks))
