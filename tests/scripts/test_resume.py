import pytest

from trl.scripts.resume import checkpoint_to_resume, latest_checkpoint


@pytest.fixture
def output_dir(tmp_path):
    for name, complete in (("checkpoint-9", True), ("checkpoint-10", True), ("checkpoint-20", False)):
        (tmp_path / name).mkdir()
        if complete:
            (tmp_path / name / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-30.partial").mkdir()
    (tmp_path / "checkpoint-30.partial" / "trainer_state.json").write_text("{}")
    return tmp_path


def test_the_newest_complete_checkpoint(output_dir):
    assert latest_checkpoint(output_dir) == output_dir / "checkpoint-10"
    assert latest_checkpoint(output_dir / "nowhere") is None


@pytest.mark.parametrize("wanted", ["true", "True", True, "yes"])
def test_true_means_the_newest(output_dir, wanted):
    assert checkpoint_to_resume(wanted, output_dir) == str(output_dir / "checkpoint-10")


@pytest.mark.parametrize("wanted", [None, False, "false", "no", ""])
def test_nothing_asked_for(output_dir, wanted):
    assert checkpoint_to_resume(wanted, output_dir) is None


def test_a_path_is_taken_as_it_is(output_dir):
    path = str(output_dir / "checkpoint-9")
    assert checkpoint_to_resume(path, output_dir) == path
    with pytest.raises(FileNotFoundError, match="Use true for the newest"):
        checkpoint_to_resume("nowhere", output_dir)


def test_no_checkpoint_yet_starts_afresh_and_says_so(tmp_path, capsys):
    assert checkpoint_to_resume("true", tmp_path) is None
    assert "starting from the beginning" in capsys.readouterr().out
