"""Ready-made reward functions: correct answers, format and length.

A process (`math_worker.py`) compares answers, as math-verify's own timeouts only work in a POSIX main thread.
"""

import atexit
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from trl.reporting.deadlines import start
from trl.rewards.result import Text

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
SECONDS_EACH = 5.0
_THOUGHT_FIRST = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def content_of(completion: Text) -> str:
    """The text of a completion, or of its last message; parts that are not text are left out.

    >>> content_of([{"role": "assistant", "content": "Blue."}]), content_of("Blue.")
    ('Blue.', 'Blue.')
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") or "" if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if part.get("type") == "text")


def think_format_reward(completions: Sequence[Text], **kwargs: object) -> list[float]:
    """1.0 for completions that begin with their only thought, `<think>...</think>`, else 0.0 (arXiv:2501.12948, 2.2.2).

    >>> think_format_reward([[{"role": "assistant", "content": "<think>Look up.</think>Blue."}], "Blue."])
    [1.0, 0.0]
    """
    return [float(bool(_THOUGHT_FIRST.match(content_of(completion)))) for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A reward function that is 0 for short completions and falls to -1 near the maximum length.

    With L_max = `max_completion_len` and L_cache = `soft_punish_cache`, in tokens: 0 up to L_max - L_cache, then (L_max
    - L_cache - length) / L_cache, and -1 beyond L_max. Source: DAPO, eq. 13 (arXiv:2503.14476). Raises: ValueError
    unless 1 <= `soft_punish_cache` <= `max_completion_len`.

    >>> get_soft_overlong_punishment(10, 4)(completion_ids=[[0] * n for n in (6, 7, 10, 11)])
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 1 <= soft_punish_cache <= max_completion_len:
        most = f"max_completion_len={max_completion_len}"
        raise ValueError(f"soft_punish_cache must be between 1 and {most}, got {soft_punish_cache}.")

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        free = max_completion_len - soft_punish_cache
        excess = (len(ids) - free for ids in completion_ids)
        return [0.0 if over <= 0 else max(-over / soft_punish_cache, -1.0) for over in excess]

    return soft_overlong_punishment_reward


def accuracy_reward(completions: Sequence[Text], solution: Sequence[str], **kwargs: object) -> list[float | None]:
    r"""1.0 for a completion whose answer equals the solution, else 0.0; None if the solution cannot be parsed.

    The answer is the last `\boxed{...}` (several joined by commas or `and` are one list), or LaTeX (`$...$`) after
    words such as "the final answer is". The solution is a number, an expression or LaTeX. math-verify (the `math`
    extra) compares them as mathematics, in a process of its own: `1/2` equals `0.5`. After 5 s it counts as wrong.
    Raises: ImportError without math-verify.
    """
    pairs = zip(completions, solution, strict=True)
    equal = [MATH.is_equal(str(gold), content_of(completion)) for completion, gold in pairs]
    return [None if answer is None else float(answer) for answer in equal]


def reasoning_accuracy_reward(
    completions: Sequence[Text], solution: Sequence[str], reasoning_delimiters: list[str] | None = None,
    **kwargs: object,
) -> list[float | None]:  # fmt: skip
    """`accuracy_reward` of the text after the last reasoning delimiter (`</think>`), 0.0 without one."""
    ends = ("</think>",) if reasoning_delimiters is None else reasoning_delimiters
    answers = []
    for text in map(content_of, completions):
        begin = max((text.rfind(end) + len(end) for end in ends if end in text), default=len(text))
        answers.append(text[begin:])
    return accuracy_reward(answers, solution)


class MathProcess:
    """A process that compares answers, started at the first request and after each kill; threads take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.ended = 0  # processes that were killed
        atexit.register(self.close)

    def is_equal(self, gold: str, answer: str) -> bool | None:
        """Whether the answer in a text equals the gold one, within limits; None if gold cannot be parsed."""
        for text in (answer, ""):  # after a failure: whether the gold answer alone can be parsed
            request = {"gold": gold, "answer": text}
            with self._lock:
                try:
                    return json.loads(self._reply(request, SECONDS_EACH))
                except (TimeoutError, OSError, EOFError) as error:
                    self.close()
                    self.ended += 1
                    if self.ended == 1:
                        is_late = isinstance(error, TimeoutError)
                        why = f"took more than {SECONDS_EACH:g} s" if is_late else f"ended its process ({error!r})"
                        message = "Comparing an answer %s, so it counts as wrong (logged once): %.300s"
                        logger.warning(message, why, request)
        return None

    def close(self) -> None:
        """Kill the process, if there is one; a later request starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()

    def _reply(self, request: dict[str, str], seconds: float) -> str:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({**request, "seconds": seconds}) + "\n")
        process.stdin.flush()
        reply = start(process.stdout.readline, "math-reply").future.result(seconds)
        if not reply:
            raise EOFError
        return reply

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        if find_spec("math_verify") is None:
            raise ImportError("accuracy rewards need math-verify. Install it with `pip install 'trl[math]'`.")
        self._owner = os.getpid()
        paths = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))  # this package first
        path = os.pathsep.join(part for part in paths if part)
        self._process = process = subprocess.Popen(
            # -P: no imports from the working directory
            [sys.executable, "-P", "-m", "trl.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": path},
        )
        self._reply({"gold": "1", "answer": "$1$"}, START_SECONDS)
        return process


MATH = MathProcess()
