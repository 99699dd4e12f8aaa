"""Whose run folder is whose: live, killed, forked, and not to be decided."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from trl.checkpoints.ownership import LOCK, clear, liveness, owned, run_folder_name
from trl.checkpoints.wholeness import CheckpointError

HOLD = """
import sys, pathlib, time
from trl.checkpoints.ownership import owned, run_folder_name
with owned(pathlib.Path(sys.argv[1]) / run_folder_name()) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


FORK = """    import os
    reader, writer = os.pipe()
    if os.fork() == 0:  # as a data loader's worker, which outlives its parent for a while
        os.write(writer, b".")
        time.sleep(600)
    os.read(reader, 1)  # it has run what a fork runs
"""


@pytest.fixture
def holder(tmp_path):
    """A process that owns a run folder in `tmp_path`, and that folder."""
    command = [sys.executable, "-c", HOLD.replace("    print", f"{FORK}    print"), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    yield process, tmp_path / process.stdout.readline().strip().rpartition("/")[2]
    os.killpg(process.pid, signal.SIGKILL)  # its child too
    process.wait()


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


def test_a_folder_without_a_lock_is_never_removed(tmp_path, caplog):
    folder = tmp_path / run_folder_name()
    folder.mkdir()
    clear(tmp_path)
    assert folder.is_dir() and "may be active" in caplog.text


def test_ownership_ends_within_a_process(tmp_path):
    left = tmp_path / run_folder_name()
    with owned(tmp_path / run_folder_name()) as folder:
        clear(tmp_path, folder.name)
        with pytest.raises(CheckpointError, match="Another run is active"):
            clear(tmp_path, "another")
    with owned(tmp_path / run_folder_name(), exclusive=False) as folder:
        clear(tmp_path, "another")
        left.mkdir()
        (left / LOCK).touch()  # of a run that ended
        assert liveness(left) == "dead"
        clear(tmp_path, "another")
        assert folder.is_dir() and not left.exists()
    assert not folder.exists()


def test_without_locks_folders_are_left_alone(tmp_path, monkeypatch, caplog):
    """As on Windows, where `fcntl` is missing."""
    monkeypatch.setattr("trl.checkpoints.ownership.fcntl", None)
    (tmp_path / "_run-other-1-abc").mkdir()
    with owned(tmp_path / run_folder_name()) as own:
        clear(tmp_path, own.name)
        assert own.is_dir()
    assert "Leaving" in caplog.text and (tmp_path / "_run-other-1-abc").is_dir() and not own.exists()


def test_a_file_system_without_locks_is_as_windows(tmp_path, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")

    def unsupported(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / "_run-other-1-abc").mkdir()
    (tmp_path / "_run-other-1-abc" / LOCK).touch()
    with owned(tmp_path / run_folder_name()) as own:
        assert list(own.iterdir()) == []
        clear(tmp_path, own.name)
    assert "without file locks" in caplog.text and "Leaving" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["_run-other-1-abc"]


def test_nfs_locks_files_open_for_writing_and_keeps_open_ones(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    real, removed, opened = fcntl.flock, [], []

    def nfs(file, operation):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        opened.append(file)
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", nfs)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: removed.append([file.closed for file in opened]))
    left = tmp_path / run_folder_name()
    left.mkdir()
    (left / LOCK).touch()
    assert liveness(left) == "dead"
    with owned(tmp_path / run_folder_name()) as folder:
        assert liveness(folder) == "alive"
    assert removed == [[True] * 3]
