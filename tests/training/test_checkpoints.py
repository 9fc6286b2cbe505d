"""A checkpoint is whole or not there, and a damaged one is found out and passed over."""

import json
from types import SimpleNamespace

import pytest
import torch

from diffusers_adaptive_ts.training import checkpoints

ALONE = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)


def write(folder, step, text="weights"):
    def content(partial):
        (partial / "unet").mkdir()
        (partial / "unet" / "a.txt").write_text(text)
        (partial / "b.txt").write_text("state")

    return checkpoints.write_checkpoint(folder, step, ALONE, content)


def test_a_written_checkpoint_is_whole_and_found(tmp_path):
    write(tmp_path, 5)
    path = write(tmp_path, 10)
    assert checkpoints.damage(path) is None
    assert checkpoints.find_checkpoint(tmp_path, "latest") == path
    assert checkpoints.find_checkpoint(tmp_path, "checkpoint-5").name == "checkpoint-5"
    assert [p.name for p in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-10"]


def test_a_crash_while_writing_leaves_nothing_behind_that_could_be_resumed(tmp_path):
    old = write(tmp_path, 5)

    def crash(partial):
        (partial / "half.txt").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write_checkpoint(tmp_path, 10, ALONE, crash)
    assert checkpoints.find_checkpoint(tmp_path, "latest") == old
    checkpoints.remove_oldest(tmp_path, None)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: (p / "b.txt").unlink(), "b.txt is missing"),
        (lambda p: (p / "b.txt").write_text("sta"), "b.txt has 3 bytes instead of 5"),
        (lambda p: (p / "b.txt").write_text("STATE"), "b.txt has other contents"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_the_file(tmp_path, harm, said):
    good = write(tmp_path, 5)
    bad = write(tmp_path, 10)
    harm(bad)
    with pytest.warns(UserWarning, match="checkpoint-10 is passed over") as caught:
        assert checkpoints.find_checkpoint(tmp_path, "latest") == good
    assert said in str(caught[0].message)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoints.find_checkpoint(tmp_path, "checkpoint-10")


def test_a_checkpoint_that_is_not_there_names_those_that_are(tmp_path):
    write(tmp_path, 5)
    with pytest.raises(FileNotFoundError, match="there are: checkpoint-5"):
        checkpoints.find_checkpoint(tmp_path, "checkpoint-7")
    assert checkpoints.find_checkpoint(tmp_path / "empty", "latest") is None


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 9):
        write(tmp_path, step)
    checkpoints.remove_oldest(tmp_path, 2)
    assert [p.name for p in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_an_optimizer_goes_on_bit_for_bit(tmp_path, make):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, make(model.parameters())

    def step(model, optimizer, seed):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()
        optimizer.step()

    model, optimizer = build()
    for seed in range(4):
        step(model, optimizer, seed)
        if seed == 1:
            checkpoints.save_optimizer(optimizer, tmp_path / "o.safetensors")
            weights = {k: v.clone() for k, v in model.state_dict().items()}
    resumed, other = build()
    resumed.load_state_dict(weights)
    checkpoints.load_optimizer(other, tmp_path / "o.safetensors")
    for seed in (2, 3):
        step(resumed, other, seed)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])


def test_the_manifest_lists_every_file(tmp_path):
    path = write(tmp_path, 1)
    assert set(json.loads((path / "manifest.json").read_text())) == {"b.txt", "unet/a.txt"}


def test_when_no_checkpoint_is_whole_nothing_is_started_over(tmp_path):
    (write(tmp_path, 5) / "b.txt").unlink()
    with (
        pytest.warns(UserWarning, match="checkpoint-5 is passed over"),
        pytest.raises(ValueError, match=r"None of the checkpoints .* b.txt is missing"),
    ):
        checkpoints.find_checkpoint(tmp_path, "latest")


def test_checkpoints_of_steps_done_again_are_set_aside_not_removed(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step)
    checkpoints.set_aside_newer(tmp_path, 5)
    assert [p.name for p in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-5"]
    assert (tmp_path / "superseded-checkpoint-15" / "b.txt").is_file()
