"""The process that compares answers: one JSON request per line in, one JSON reply per line out.

What a model wrote is parsed and simplified here, where it can be stopped: some of it (towers of powers) keeps a processor
busy inside one operation, which no signal handler of Python interrupts. Started by math_process.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from trl.rewards.latex import as_latex, from_last_box

MEMORY_BYTES = 4 << 30
_GRACE_SECONDS = 5


def main() -> None:
    """Answer requests until the input ends."""
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints is a reply
    logging.disable(
        logging.WARNING
    )  # math-verify reports that it has no timeouts: this process is the timeout
    _limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        _end_if_hung(request["seconds"] + _GRACE_SECONDS)
        replies.write(json.dumps(_answer(request)) + "\n")
        replies.flush()
        _end_if_hung(0)


def _answer(request: dict[str, Any]) -> bool | None:
    """Whether the answer is the gold one; None where the gold one cannot be read. Without an answer: whether it can."""
    try:
        gold = _gold(request["gold"])
        if not gold or "answer" not in request:
            return bool(gold) or None
        return _equal(gold, _written(request["answer"]))
    except (MemoryError, RecursionError):
        return False if "answer" in request else None


@lru_cache(maxsize=4096)
def _gold(text: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(as_latex(text), parsing_timeout=None))  # type: ignore[arg-type]


def _written(text: str) -> list[Any]:
    """What a completion gives as its answer: the last box, or LaTeX behind words such as "the final answer is"."""
    from math_verify import parse

    text = from_last_box(text)
    return parse(text, [_extraction()], extraction_mode="first_match", parsing_timeout=None)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _extraction() -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    normalization = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=False, boxed="last", equations=True
    )
    return LatexExtractionConfig(
        boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=normalization
    )


def _equal(gold: tuple[Any, ...], written: list[Any]) -> bool:
    from math_verify import verify

    return verify(list(gold), written, timeout_seconds=None)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limits on this system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _end_if_hung(seconds: float) -> None:
    """Let the system end this process after some seconds, whatever it does, should nobody else; 0: not any more."""
    alarm: Callable[[int], Any] | None = getattr(signal, "alarm", None)
    if alarm is not None:
        alarm(int(seconds))


if __name__ == "__main__":
    main()
