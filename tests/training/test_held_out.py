from __future__ import annotations

import torch

from diffusers_adaptive_ts.training.held_out import Part, chosen_rows, from_training, own_split, sampled
from diffusers_adaptive_ts.training.rows import ListSource


def test_rows_held_out_are_not_trained_on():
    train = Part(ListSource(list(range(200)), "numbers"), torch.arange(200), [(f"no. {n}",) for n in range(200)])
    notes: list[str] = []
    kept, held = from_training(train, 15, notes)
    assert (len(kept.source), len(held.source)) == (185, 15)
    assert kept.source.read(range(185)) == kept.labels.tolist()
    assert held.source.read(range(15)) == held.labels.tolist()
    assert sorted(kept.labels.tolist() + held.labels.tolist()) == list(range(200))
    for part in (kept, held):
        assert part.captions == [(f"no. {label}",) for label in part.labels.tolist()]
    assert notes == ["15 training images held out for validation, the same in every run."]


def test_at_most_a_tenth_is_held_out():
    train = Part(ListSource(list(range(50)), "numbers"), None)
    assert len(from_training(train, 1000, [])[1].source) == 5
    few, notes = Part(ListSource([1] * 9, "numbers"), None), []
    assert from_training(few, 10, notes) == (few, None)
    assert "No images held out" in notes[0]


def test_some_of_the_training_images_by_seed():
    train = Part(ListSource(list(range(50)), "numbers"), None, [(str(n),) for n in range(50)])
    notes = []
    chosen = {}
    for seed in (None, 0, 1):
        part = sampled(train, 20, seed, notes)
        chosen[seed] = part.source.read(range(20))
        assert chosen[seed] == sorted(set(chosen[seed]))
        assert part.captions == [(str(number),) for number in chosen[seed]]
    assert chosen[None] == chosen[0] != chosen[1]
    assert chosen[0] != list(range(20))
    assert notes == ["20 of 50 training images are used, chosen by the seed."] * 3
    assert sampled(train, None, 0, notes) is train
    assert len(notes) == 3
    assert sampled(train, 50, 0, notes) is sampled(train, 60, 0, notes) is train
    assert notes[-1] == "--max_train_samples 60: all 50 images are used, there are no more."
    assert len(notes) == 4


def test_the_choice_is_fixed_and_spread():
    assert chosen_rows(1000, 50).tolist() == chosen_rows(1000, 50).tolist()
    assert chosen_rows(1000, 50).max() > 800
    # Written down once: another choice would make new validation losses incomparable with old ones.
    assert chosen_rows(100, 4).tolist() == [3, 36, 58, 99]


def test_own_splits_by_their_usual_names():
    assert own_split({"train": 0, "test": 0, "validation": 0}) == "validation"
    assert own_split({"train": 0, "test": 0}) == "test"
    assert own_split({"train": 0}) is None
