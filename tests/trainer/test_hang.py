"""`hang_timeout`: a process that hangs ends the others within the time, and all say where they stood."""

import re
import threading
import time

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from tests.contracts import methods
from tests.ports import free_port
from tests.two_processes import Program, run
from trl import SFTConfig
from trl.trainer.callbacks.hang import EndsHangs


@pytest.mark.distributed
def test_a_process_that_hangs_ends_all_with_their_stacks(tmp_path):
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        Program("tests.trainer.hang_run", [str(tmp_path)], {**shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    statuses, _ = run(ranks, timeout=120)
    assert statuses == [124, 124]
    text = (tmp_path / "stacks.txt").read_text()
    parts = dict(
        re.findall(r"==== process (\d) of 2 on .*? after step 1: no progress for 2 s\n(.*?)(?=====|\Z)", text, re.S)
    )
    assert set(parts) == {"0", "1"}
    assert "time.sleep(600)" in parts["1"] and "time.sleep(600)" not in parts["0"]
    assert "-- thread MainThread" in parts["0"]


def test_progress_is_waited_for_and_nothing_after_the_training(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(EndsHangs, "_end", lambda self, path, rank: ended.append(path))
    args, watch = SFTConfig(str(tmp_path), report_to="none", use_cpu=True), EndsHangs(0.4)
    events = args, TrainerState(), TrainerControl()
    watch.on_train_begin(*events)
    for _ in range(6):
        time.sleep(0.1)
        watch.on_substep_end(*events)
    watch.on_train_end(*events)
    time.sleep(0.8)
    assert ended == []
    watch.on_train_begin(*events)
    time.sleep(0.8)
    assert ended and set(ended) == {tmp_path / "stacks.txt"}
    watch.on_train_end(*events)


def test_a_training_that_failed_is_not_watched(tmp_path, monkeypatch):
    """In a notebook the process lives on."""
    ended = []
    monkeypatch.setattr(EndsHangs, "_end", lambda self, path, rank: ended.append(path))

    class Fails(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            raise RuntimeError("the program's own")

    trainer = methods.sft(str(tmp_path), hang_timeout=0.4)
    trainer.add_callback(Fails())
    with pytest.raises(RuntimeError, match="the program's own"):
        trainer.train()
    time.sleep(0.8)
    assert ended == []


def test_an_error_while_the_process_ends_does_not_change_how(tmp_path, monkeypatch):
    """As that of a thread that waits for a process which ended a moment earlier."""
    statuses, ending = [], threading.Event()
    monkeypatch.setattr("trl.trainer.callbacks.hang.GRACE", 0.5)
    monkeypatch.setattr("os._exit", statuses.append)
    monkeypatch.setattr("socket.gethostname", lambda: ending.set() or "host")
    watch = EndsHangs(0.1)
    args = SFTConfig(str(tmp_path), report_to="none", use_cpu=True)
    watch.on_train_begin(args, TrainerState(), TrainerControl())
    assert ending.wait(30)
    watch.stop()
    assert statuses == [124]
