"""Whose run folder is whose: live, killed, forked, and not to be decided."""

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from trl.checkpoints.ownership import LOCK, clear, liveness, owned, run_folder_name
from trl.checkpoints.wholeness import CheckpointError


def hold(place: Path, pipe: Connection) -> None:
    """Owns a run folder, as does a child of this process: a data loader's worker outlives its parent for a while."""
    os.setsid()
    with owned(place / run_folder_name()) as folder:
        ready = multiprocessing.get_context("fork").Event()
        child = multiprocessing.get_context("fork").Process(target=lambda: ready.set() or time.sleep(600))
        child.start()
        ready.wait()  # it has run what a fork runs
        pipe.send(folder)
        time.sleep(600)


@contextmanager
def holder(place: Path) -> Iterator[tuple[BaseProcess, Path]]:
    """A process that owns a run folder in `place`, and that folder. No fork of this one, which has threads: it may hang."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(place, writer))
    process.start()
    try:
        yield process, reader.recv()
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its child too
        process.join()


def test_a_live_process_keeps_its_folder_and_a_killed_one_loses_it(tmp_path, caplog):
    with holder(tmp_path) as (process, folder):
        with pytest.raises(CheckpointError, match=r"Another run is active in .*Choose another output_dir"):
            clear(tmp_path)
        clear(tmp_path, alone=False)
        assert folder.is_dir() and not caplog.records
        process.kill()
        process.join()
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
