"""Where the answer stands in a text, and bare LaTeX told from prose."""

import re

_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_FORMULA = re.compile(r"[A-Za-z\\^_{:]|^\s*[(\[]")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox|begin|end)\s*\{[^}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_BOX = re.compile(r"\\boxed\s*\{|\\fbox\s*\{")
_JOINT = re.compile(r"[\s$.,;]*(?:and|or)?[\s$]*")


def as_latex(text: str) -> str:
    r"""A formula without delimiters between dollars; prose, plain numbers and what has delimiters as they are.

    >>> as_latex(r"2 \pi"), as_latex("2x + 1"), as_latex("(1, 2)"), as_latex("42"), as_latex(r"so \frac{1}{2} of all")
    ('$2 \\pi$', '$2x + 1$', '$(1, 2)$', '42', 'so \\frac{1}{2} of all')
    """
    if _DELIMITED.search(text) or not _FORMULA.search(text) or _WORD.search(_COMMAND.sub(" ", text)):
        return text
    return f"${text.strip()}$"


def from_last_box(text: str) -> str:
    r"""The text from its last `\boxed{...}` on, or from the first of several that are one list; all of it without a box.

    >>> from_last_box(r"It is \boxed{1}. No, wait: \boxed{2}."), from_last_box(r"So: \boxed{1} and \boxed{2}")
    ('\\boxed{2}.', '\\boxed{1} and \\boxed{2}')
    """
    starts = [match.start() for match in _BOX.finditer(text)]
    for previous, start in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        if not _JOINT.fullmatch(text, _end_of_box(text, previous), start):
            return text[start:]
    return text[starts[0] :] if starts else text


def _end_of_box(text: str, start: int) -> int:
    """Behind the brace that closes the box at `start`; the end of the text where none does."""
    depth = 0
    for at in range(text.index("{", start), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)
