"""Whose run folder is whose: live, killed, reused, on another host, and not to be decided."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from trl.checkpoints import ownership
from trl.checkpoints.ownership import STALE_SECONDS, clear, liveness, owned, run_folder_name
from trl.checkpoints.wholeness import CheckpointError

HOLD = """
import sys, pathlib, time
from trl.checkpoints.ownership import owned, run_folder_name
with owned(pathlib.Path(sys.argv[1]) / run_folder_name()) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that owns a run folder in `tmp_path`, and that folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, tmp_path / process.stdout.readline().strip().rpartition("/")[2]
    process.kill()
    process.wait()


def rewrite(folder, **changes):
    file = folder / "owner.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_live_process_keeps_its_folder_and_a_killed_one_loses_it(holder, tmp_path, caplog):
    process, folder = holder
    with pytest.raises(CheckpointError, match=r"Another run is active in .*Choose another output_dir"):
        clear(tmp_path)
    clear(tmp_path, alone=False)
    assert folder.is_dir() and not caplog.records
    process.send_signal(signal.SIGKILL)
    process.wait()
    clear(tmp_path)
    assert not folder.exists() and "was stopped before it ended" in caplog.text


def test_a_process_id_that_was_reused_owns_nothing(holder, tmp_path):
    _, folder = holder
    started = json.loads((folder / "owner.json").read_text())["started"]
    rewrite(folder, started=started - 100)
    assert liveness(folder) == "dead"
    clear(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("age", "state"),
    [(0, "alive"), (STALE_SECONDS - 30, "alive"), (STALE_SECONDS + 30, "dead"), (-STALE_SECONDS - 30, "unknown"), (None, "unknown")],
)  # fmt: skip
def test_on_another_host_the_heartbeat_decides(age, state, holder, tmp_path, monkeypatch, caplog):
    _, folder = holder
    monkeypatch.setattr(ownership.socket, "gethostname", lambda: "elsewhere")
    if age is None:
        (folder / "heartbeat").unlink()
    else:
        os.utime(folder / "heartbeat", (time.time() - age,) * 2)
    assert liveness(folder) == state
    if state == "alive":
        with pytest.raises(CheckpointError, match="Another run is active"):
            clear(tmp_path)
    else:
        clear(tmp_path)
    assert folder.is_dir() == (state != "dead")
    assert ("cannot be decided" in caplog.text) == (state == "unknown")


def test_a_folder_without_an_owner_is_never_removed(tmp_path, caplog):
    folder = tmp_path / run_folder_name()
    folder.mkdir()
    clear(tmp_path)
    (folder / "owner.json").write_text("{")
    clear(tmp_path)
    assert folder.is_dir() and caplog.text.count("cannot be decided") == 2


def test_the_heartbeat_is_touched_while_the_folder_is_owned(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.01)
    with owned(tmp_path / run_folder_name()) as folder:
        os.utime(folder / "heartbeat", (0, 0))
        for _ in range(500):
            if (folder / "heartbeat").stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert (folder / "heartbeat").stat().st_mtime > time.time() - 60
    assert not folder.exists()


def test_ownership_ends_within_a_process(tmp_path):
    left = tmp_path / run_folder_name()
    with owned(tmp_path / run_folder_name()) as folder:
        clear(tmp_path, folder.name)
        with pytest.raises(CheckpointError, match="Another run is active"):
            clear(tmp_path, "another")
    with owned(tmp_path / run_folder_name(), exclusive=False) as folder:
        clear(tmp_path, "another")
        left.mkdir()
        (left / "owner.json").write_text(
            (folder / "owner.json").read_text()
        )  # this process's, of a run that ended
        clear(tmp_path, "another")
        assert folder.is_dir() and not left.exists()
