from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoints.made import make_checkpoint
from trl.checkpoints import wholeness
from trl.checkpoints.wholeness import CheckpointError
from trl.scripts.loading import checkpoint_to_resume
from trl.scripts.messages import resume_hint


@pytest.fixture
def output_dir(tmp_path):
    for step in (9, 10, 20):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-20" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-30.partial").mkdir()
    (tmp_path / "checkpoint-30.partial" / "trainer_state.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("wanted", ["true", "True", True, "yes"])
def test_true_means_the_newest(output_dir, wanted):
    assert checkpoint_to_resume(wanted, output_dir) is True


@pytest.mark.parametrize("wanted", [None, False, "false", "no", ""])
def test_nothing_asked_for(output_dir, wanted):
    assert checkpoint_to_resume(wanted, output_dir) is None


def test_a_path_is_taken_as_it_is(output_dir):
    path = str(output_dir / "checkpoint-9")
    assert checkpoint_to_resume(path, output_dir) == path
    with pytest.raises(FileNotFoundError, match="is no folder"):
        checkpoint_to_resume("nowhere", output_dir)


def test_no_checkpoint_yet_starts_afresh_and_says_so(tmp_path, capsys):
    assert checkpoint_to_resume("true", tmp_path) is None
    assert "starting from the beginning" in capsys.readouterr().out


def test_a_run_without_a_whole_checkpoint_does_not_start_afresh(output_dir):
    for step in (9, 10):
        (output_dir / f"checkpoint-{step}" / "optimizer.pt").unlink()
    (output_dir / "checkpoint-20" / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-20 is not whole: model.safetensors or adapter_model.safetensors is missing; trainer_state",
    ):
        checkpoint_to_resume("true", output_dir)
    assert checkpoint_to_resume("true", output_dir, without=["optimizer"]) is True


def test_the_checksums_are_left_to_the_trainer(output_dir, monkeypatch):
    """Which reads all files of a checkpoint once; each process of a command would do so again."""
    monkeypatch.setattr(wholeness, "_sum", lambda file: pytest.fail(f"{file} was read"))
    assert checkpoint_to_resume("true", output_dir) is True
    path = str(output_dir / "checkpoint-10")
    assert checkpoint_to_resume(path, output_dir) == path
    assert "--resume_from_checkpoint true" in resume_hint(
        Path(path),
        SimpleNamespace(output_dir=output_dir, max_steps=1, save_only_model=False),
        command="sft",
        finished=True,
    )
