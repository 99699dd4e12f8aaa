"""Comparison of mathematical answers in a process of its own, which is ended when one takes too long.

math-verify's own timeouts are signals: they work in the main thread of a POSIX process only.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
SECONDS_EACH = 5.0


class MathProcess:
    """A process that compares answers, started with the first request and again after each that had to be ended.

    Safe to be asked by several threads: one after the other.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.ended = 0  # processes that took too long
        atexit.register(self.close)

    def can_be_read(self, gold: str) -> bool:
        """Whether a gold answer is mathematics that can be compared with."""
        return self._asked({"gold": gold}) is True

    def is_equal(self, gold: str, answer: str) -> bool | None:
        """Whether the answer that a text gives is the gold one; None where the gold one cannot be read.

        False, too, where the comparison took longer than 5 s, or more memory than it may.
        """
        if not self.can_be_read(gold):
            return None
        return self._asked({"gold": gold, "answer": answer}) is True

    def close(self) -> None:
        """End the process, if there is one; a later request starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()

    def _asked(self, request: dict[str, Any]) -> bool | None:
        with self._lock:
            try:
                return json.loads(self._reply(json.dumps({**request, "seconds": SECONDS_EACH}), SECONDS_EACH))
            except (queue.Empty, OSError, EOFError):
                self.close()
                self.ended += 1
                if self.ended == 1:
                    logger.warning(
                        "An answer took longer than %g s or too much memory to compare with its solution and counts as wrong: %s. "
                        "Further ones are not spoken of.",
                        SECONDS_EACH,
                        str(request)[:300],
                    )
                return None

    def _reply(self, request: str, seconds: float) -> str:
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(request + "\n")
        process.stdin.flush()
        reply = self._replies.get(timeout=seconds)
        if reply is None:
            raise EOFError
        return reply

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        _require_math_verify()
        self._owner, self._replies = os.getpid(), queue.Queue()
        self._process = process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "trl.rewards.math_worker",
            ],  # nothing of the working directory is imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": _import_path()},
        )
        threading.Thread(target=_read_into, args=(process, self._replies), daemon=True).start()
        self._reply(json.dumps({"gold": "1", "answer": "$1$", "seconds": START_SECONDS}), START_SECONDS)
        return process


def _import_path() -> str:
    """Where this very package is found, installed or not, before what the environment says."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)


def _read_into(process: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(line)
    replies.put(None)


def _require_math_verify() -> None:
    if find_spec("math_verify") is None:
        raise ImportError(
            "accuracy rewards compare answers with math-verify, which is not installed. Install it with "
            "`pip install trl[math]`."
        )


MATH = MathProcess()
