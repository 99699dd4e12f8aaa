"""Run folders: each run writes its checkpoints into a folder of its own, and holds a lock on it.

`_run-<host>-<pid>-<id>` lies in the output directory while the run lasts (the Hub's uploads leave `_*` out), with the
checkpoint that is being written and a file `lock`, which the system unlocks when the process ends, however it ends.
"""

import errno
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from trl.checkpoints.wholeness import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, and the folders of other runs are left alone
    fcntl = None

logger = logging.getLogger(__name__)

PREFIX = "_run-"
LOCK = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
_held: dict[str, tuple[TextIO, bool]] = {}
"""The locks of this process by folder, and whether each allows no other run of this process beside it."""


def _release_in_child() -> None:
    """A forked process (a loader's worker) shares its parent's locks, and would hold them after its end."""
    for lock, _ in _held.values():
        lock.close()
    _held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_release_in_child)


def run_folder_name() -> str:
    """A new name for a run's folder."""
    return f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextmanager
def owned(folder: Path, *, exclusive: bool = True) -> Iterator[Path]:
    """Own `folder`, which is removed afterwards; `exclusive` also refuses other runs of this process meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    if lock is not None:
        _held[folder.name] = lock, exclusive
    try:
        yield folder
    finally:
        _held.pop(folder.name, None)
        if lock is not None:
            lock.close()  # NFS keeps a removed file in its folder while it is open
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> TextIO | None:
    """The locked file `lock` of a folder; None where the system or the file system has no locks."""
    if fcntl is None:
        return None
    new = folder / f"{LOCK}.new"
    lock = new.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        lock.close()
        new.unlink()
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s is on a file system without file locks (%s), so other runs cannot see that this one is active. "
            "Give each run an output_dir of its own.", folder, error.strerror,
        )  # fmt: skip
        return None
    new.rename(folder / LOCK)  # others see it locked or not at all
    return lock


def clear(output_dir: Path, caller: str = "", *, alone: bool = True) -> None:
    """Remove the run folders that dead processes left in `output_dir`; that of the `caller` stays.

    One whose owner may be alive stays, with a warning. Raises: CheckpointError, if `alone`, for another active run.
    """
    for folder in sorted(output_dir.glob(f"{PREFIX}*")):
        state = "alive" if folder.name == caller else liveness(folder)
        if state == "dead":
            logger.warning("Removing %s: its run was stopped before it ended.", folder)
            shutil.rmtree(folder, ignore_errors=True)
        elif state == "unknown":
            logger.warning("Leaving %s: its run may be active. Remove it if it is not.", folder)
        elif alone and folder.name != caller and _held.get(folder.name, (None, True))[1]:
            other = f"Another run is active in {output_dir} ({folder.name})"
            raise CheckpointError(f"{other}. Choose another output_dir, or wait until that run has ended.")


def liveness(folder: Path) -> Literal["alive", "dead", "unknown"]:
    """Whether the run of a folder is active; unknown without a lock file, or where the system has no locks."""
    if fcntl is None:
        return "unknown"
    try:
        # NFS locks only files that are open for writing. Another user's may be readable only.
        with (folder / LOCK).open("r+" if os.access(folder / LOCK, os.W_OK) else "r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "alive"
    except OSError:
        return "unknown"
    return "dead"
