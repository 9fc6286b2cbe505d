"""The log survives being killed and is cut back to the checkpoint that is resumed."""

import pytest

from diffusers_adaptive_ts.training.log import TrainingLog, read_log


def test_rows_come_back_as_written(tmp_path):
    log = TrainingLog(tmp_path)
    log.write("train", step=1, loss=0.5)
    log.write("validation", step=1, simple=float("nan"))
    assert [row["kind"] for row in read_log(log.path)] == ["train", "validation"]
    log.close()


def test_cutting_back_forgets_what_came_after_the_checkpoint(tmp_path):
    log = TrainingLog(tmp_path)
    log.write("train", step=1)
    position = log.position()
    log.write("train", step=2)
    log.close()
    resumed = TrainingLog(tmp_path)
    resumed.cut_back(position)
    resumed.write("train", step=3)
    assert [row["step"] for row in read_log(resumed.path)] == [1, 3]
    resumed.close()


def test_a_line_cut_off_by_a_kill_is_passed_over_but_a_broken_one_is_an_error(tmp_path):
    path = tmp_path / "training_log.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    assert len(read_log(path)) == 1
    path.write_text('nonsense\n{"kind": "train"}\n')
    with pytest.raises(ValueError, match="not JSON"):
        read_log(path)


def test_a_log_shorter_than_the_checkpoint_says_is_an_error(tmp_path):
    log = TrainingLog(tmp_path)
    with pytest.raises(ValueError, match="shorter than"):
        log.cut_back(100)
    log.close()


def test_other_ranks_write_nothing(tmp_path):
    log = TrainingLog(tmp_path, enabled=False)
    log.write("train", step=1)
    assert log.position() == 0
    assert not (tmp_path / "training_log.jsonl").exists()
