"""The process that compares answers for `ready_made.py`: one JSON request per line in, one JSON reply per line out.

Some completions (towers of powers) are simplified for ever, in one operation that no signal interrupts.
"""

import contextlib
import json
import logging
import re
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 4 << 30
_GRACE_SECONDS = 5

_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_FORMULA = re.compile(r"[A-Za-z\\^_{:]|^\s*[(\[]")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox|begin|end)\s*\{[^}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_BOX = re.compile(r"\\boxed\s*\{|\\fbox\s*\{")
_JOINT = re.compile(r"[\s$.,;]*(?:and|or)?[\s$]*")


def main() -> None:
    """Answer requests until the input ends."""
    replies, sys.stdout = sys.stdout, sys.stderr  # so that a library's prints are not replies
    logging.disable(logging.WARNING)  # math-verify warns that its timeouts are off
    alarm: Callable[[int], int] = getattr(signal, "alarm", int)  # ends this process where the trainer has not
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        request = json.loads(line)
        alarm(int(request["seconds"] + _GRACE_SECONDS))
        replies.write(json.dumps(_answer(request)) + "\n")
        replies.flush()
        alarm(0)


def _answer(request: dict[str, Any]) -> bool | None:
    from math_verify import parse, verify

    gold: tuple[Any, ...] = ()
    try:
        gold = _gold(request["gold"])
        text = from_last_box(request["answer"])  # or LaTeX after words such as "the final answer is"
        answer = parse(text, [_extraction()], extraction_mode="first_match", parsing_timeout=None)  # type: ignore[arg-type]
        return verify(list(gold), answer, timeout_seconds=None) if gold else None
    except (MemoryError, RecursionError):
        return False if gold else None


@lru_cache(maxsize=4096)
def _gold(text: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(as_latex(text), parsing_timeout=None))  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _extraction() -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    on = dict.fromkeys(("basic_latex", "units", "malformed_operators", "equations"), True)
    normalization = NormalizationConfig(**on, nits=False, boxed="last")
    options = {"boxed_match_priority": 0, "try_extract_without_anchor": False}
    return LatexExtractionConfig(**options, normalization_config=normalization)


def as_latex(text: str) -> str:
    r"""A bare formula in dollars; prose, plain numbers and formulas with delimiters are unchanged.

    >>> as_latex(r"2 \pi"), as_latex("2x + 1"), as_latex("(1, 2)"), as_latex("42"), as_latex(r"so \frac{1}{2} of all")
    ('$2 \\pi$', '$2x + 1$', '$(1, 2)$', '42', 'so \\frac{1}{2} of all')
    """
    if _DELIMITED.search(text) or not _FORMULA.search(text) or _WORD.search(_COMMAND.sub(" ", text)):
        return text
    return f"${text.strip()}$"


def from_last_box(text: str) -> str:
    r"""The text from its last `\boxed{...}` on (the first of several that form one list), or all of it without a box.

    >>> from_last_box(r"It is \boxed{1}. No, wait: \boxed{2}."), from_last_box(r"So: \boxed{1} and \boxed{2}")
    ('\\boxed{2}.', '\\boxed{1} and \\boxed{2}')
    """
    starts = [match.start() for match in _BOX.finditer(text)]
    for previous, start in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        if not _JOINT.fullmatch(text, _end_of_box(text, previous), start):
            return text[start:]
    return text[starts[0] :] if starts else text


def _end_of_box(text: str, start: int) -> int:
    """The place after the brace that closes the box at `start`, or the end of the text."""
    depth = 0
    for at in range(text.index("{", start), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


if __name__ == "__main__":
    main()
