"""Rewards for a right answer, where mathematics can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl.rewards.formats import Completion, content_of
from trl.rewards.math_process import MATH

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
