import logging
import sys
from dataclasses import dataclass

import pytest
from tqdm import tqdm

from trl.scripts.parser import TrlParser
from trl.scripts.running import notes_shown, reporting_input_errors, run_script


@dataclass
class Options:
    size: int = 1

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(f"size must be >= 0, got {self.size}")


def run(main, *line):
    return run_script(TrlParser(Options, prog="toy"), main, line)


def test_main_gets_the_dataclasses():
    seen = []
    assert run(seen.append, "--size", "3") == 0
    assert seen == [Options(3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--size", "-1"], "toy: error: size must be >= 0, got -1"),
        (["--sise", "1"], "toy: error: Unknown option --sise. Did you mean --size?"),
        (["--config", "nowhere.yaml"], "toy: error: The config file nowhere.yaml does not exist"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, line, message):
    assert run(lambda options: None, *line) == 2
    assert capsys.readouterr().err.startswith(message)


def test_input_errors_before_training_are_reported_and_others_are_not(capsys):
    def before(options):
        with reporting_input_errors():
            raise FileNotFoundError("no such model")

    def during(options):
        raise ValueError("a bug")

    assert run(before) == 2
    assert capsys.readouterr().err == "toy: error: no such model\n"
    with pytest.raises(ValueError, match="a bug"):
        run(during)


def test_a_note_gets_a_line_of_its_own_under_a_progress_bar(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with notes_shown(), tqdm(total=2, file=sys.stderr, mininterval=0) as bar:
        bar.update()
        capsys.readouterr()
        logging.getLogger("trl.data").warning("1 row is empty")
        before, note, after = capsys.readouterr().err.partition("1 row is empty\n")
    assert note and not before.rpartition("\r")[2].strip() and "50%" in after


def test_notes_of_the_library_reach_the_terminal_while_a_command_runs(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with notes_shown():
        logging.getLogger("trl.data").info("train dataset: 3 rows")
        logging.getLogger("trl.data").warning("1 row is empty")
    logging.getLogger("trl.data").info("not any more")
    assert capsys.readouterr().err == "train dataset: 3 rows\n1 row is empty\n"
