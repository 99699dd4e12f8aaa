"""Run folders: each run writes its checkpoints into a folder of its own, which names the process that owns it.

`_run-<host>-<pid>-<id>` lies in the output directory while the run lasts. It holds `owner.json`, a `heartbeat` that is touched
each minute, and the checkpoint that is being written. (The Hub's uploads of an output directory leave `_*` out.)
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from trl.checkpoints.wholeness import CheckpointError

logger = logging.getLogger(__name__)

PREFIX = "_run-"
BEAT_SECONDS = 60
STALE_SECONDS = 5 * BEAT_SECONDS
_OWNER, _HEARTBEAT = "owner.json", "heartbeat"
_held: dict[
    str, bool
] = {}  # run folders of this process by name, and whether each allows no other run beside it


def run_folder_name() -> str:
    """A new name for a run's folder."""
    return f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextmanager
def owned(folder: Path, *, exclusive: bool = True) -> Iterator[Path]:
    """Own `folder`, which is removed afterwards.

    With `exclusive`, other runs of this process are refused meanwhile, as those of other processes always are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _held[folder.name] = exclusive
    (folder / _HEARTBEAT).touch()
    own = {"host": _host(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    (folder / _OWNER).write_text(json.dumps(own))
    ended = threading.Event()
    threading.Thread(target=_beat, args=(folder / _HEARTBEAT, ended), daemon=True).start()
    try:
        yield folder
    finally:
        ended.set()
        del _held[folder.name]
        shutil.rmtree(folder, ignore_errors=True)


def clear(output_dir: Path, own: str = "", *, alone: bool = True) -> None:
    """Remove the run folders that dead processes left in `output_dir`; `own` is the caller's.

    A folder whose owner may be alive stays, with a warning where that cannot be decided.

    Raises: CheckpointError, where the caller must be `alone`, for another active run.
    """
    for folder in sorted(output_dir.glob(f"{PREFIX}*")):
        state = "alive" if folder.name == own else liveness(folder)
        if state == "dead":
            logger.warning("Removing %s: its run was stopped before it ended.", folder)
            shutil.rmtree(folder, ignore_errors=True)
        elif state == "unknown":
            logger.warning(
                "Leaving %s: whether the run that owns it is alive cannot be decided. Remove it if it is not.",
                folder,
            )
        elif alone and _held.get(folder.name, True) and folder.name != own:
            raise CheckpointError(
                f"Another run is active in {output_dir} ({folder.name}). Choose another output_dir, or wait until that run "
                "has ended."
            )


def liveness(folder: Path) -> Literal["alive", "dead", "unknown"]:
    """Whether the process that owns a run folder is alive and its run has not ended."""
    try:
        owner = json.loads((folder / _OWNER).read_text())
        host, pid, started = owner["host"], owner["pid"], owner["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
    if host != _host():
        return _by_heartbeat(folder)
    if pid == os.getpid():
        return "alive" if folder.name in _held else "dead"
    try:
        process = psutil.Process(pid)
        reused = abs(process.create_time() - started) > 2  # seconds: a change of the clock moves it a little
        return "dead" if reused or process.status() == psutil.STATUS_ZOMBIE else "alive"
    except psutil.NoSuchProcess:
        return "unknown" if psutil.pid_exists(pid) else "dead"
    except psutil.AccessDenied:
        return "unknown"


def _by_heartbeat(folder: Path) -> Literal["alive", "dead", "unknown"]:
    """By the age of the heartbeat, on the clock of the file system that both hosts see."""
    try:
        with tempfile.TemporaryFile(dir=folder.parent) as now:
            age = os.fstat(now.fileno()).st_mtime - (folder / _HEARTBEAT).stat().st_mtime
    except OSError:
        return "unknown"
    if age > STALE_SECONDS:
        return "dead"
    return "alive" if age > -STALE_SECONDS else "unknown"


def _beat(heartbeat: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with suppress(OSError):  # tried again a minute later
            os.utime(heartbeat)


def _host() -> str:
    """The machine, its boot and the pid namespace: a pid means a process only within the three."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [boot.read_text().strip() if boot.is_file() else "", os.readlink(pids) if pids.exists() else ""]
    return " ".join([socket.gethostname(), *parts])
