"""Rewards for a right answer, where mathematics can tell.

Answers are compared in a process of their own, which is ended when one takes too long: math-verify's own timeouts are signals, which
only work in the main thread of a POSIX process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl.reporting.deadlines import start
from trl.rewards.formats import Completion, content_of

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
SECONDS_EACH = 5.0
_REASONING_ENDS = ("</think>",)


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str], **kwargs: Any
) -> list[float | None]:
    r"""1.0 for a completion whose answer equals the solution, 0.0 for another, None where the solution cannot be read.

    The answer is what stands in the last `\boxed{...}` (several joined by commas or `and` are one list), or LaTeX (`$...$`)
    behind words such as "the final answer is".
    The solution is a number, an expression or LaTeX. Both are compared as mathematics by math-verify (the `math` extra):
    `1/2` equals `0.5`. The comparison runs in a process of its own; one that takes longer than 5 s counts as wrong.

    Raises: ImportError without math-verify.
    """
    pairs = zip(completions, solution, strict=True)
    equal = [MATH.is_equal(_as_text(gold), content_of(completion)) for completion, gold in pairs]
    return [None if answer is None else float(answer) for answer in equal]


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    reasoning_delimiters: list[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of what stands behind the reasoning: behind the last of any of the delimiters.

    `reasoning_delimiters` are what reasoning ends with, `</think>` by default. A completion whose reasoning does not end
    gets 0.0, and None where the solution cannot be read.
    """
    ends = _REASONING_ENDS if reasoning_delimiters is None else reasoning_delimiters
    answers = [_behind_reasoning(content_of(completion), ends) for completion in completions]
    return accuracy_reward(answers, solution)


def _behind_reasoning(text: str, ends: Sequence[str]) -> str:
    found = max((text.rfind(end) + len(end) for end in ends if end in text), default=len(text))
    return text[found:]


def _as_text(gold: Any) -> str:
    return gold if isinstance(gold, str) else str(gold)


class MathProcess:
    """A process that compares answers, started with the first request and again after each that had to be ended.

    Several threads may call it: one waits for the other.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
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
            except (TimeoutError, OSError, EOFError):
                self.close()
                self.ended += 1
                if self.ended == 1:
                    logger.warning(
                        "An answer took longer than %g s or too much memory to compare with its solution and counts as wrong: %s "
                        "(logged once).",
                        SECONDS_EACH,
                        str(request)[:300],
                    )
                return None

    def _reply(self, request: str, seconds: float) -> str:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request + "\n")
        process.stdin.flush()
        reply = start(process.stdout.readline, "math-reply").future.result(seconds)
        if not reply:
            raise EOFError
        return reply

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        _require_math_verify()
        self._owner = os.getpid()
        self._process = process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "trl.rewards.math_worker",
            ],  # -P: no imports from the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": _import_path()},
        )
        self._reply(json.dumps({"gold": "1", "answer": "$1$", "seconds": START_SECONDS}), START_SECONDS)
        return process


def _import_path() -> str:
    """Where this very package is found, installed or not, before what the environment says."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)


def _require_math_verify() -> None:
    if find_spec("math_verify") is None:
        raise ImportError(
            "accuracy rewards compare answers with math-verify, which is not installed. Install it with "
            "`pip install trl[math]`."
        )


MATH = MathProcess()
