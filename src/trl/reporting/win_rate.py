"""Win rates from the answers of a pairwise judge: with an interval, and with the effect of length taken out."""

import inspect
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

Z = 1.959964  # of a normal distribution's central 95 %


class WinRate(NamedTuple):
    """The share of comparisons won, ties as half, with its 95 % interval; NaN without an answer."""

    rate: float
    low: float
    high: float
    answered: int
    unanswered: int


class JudgeError(ValueError):
    """A judge gave an invalid answer, or none because its budget is spent: `text` says which."""

    def __init__(self, judge: object, text: str) -> None:
        super().__init__(f"{type(judge).__name__} {text}.")
        self.text = text


def win_shares(
    judge: Any, prompts: Sequence[str], pairs: Sequence[Sequence[str]], **options: object
) -> list[float | None]:
    """How far the second text of each pair wins, in [0, 1]; see `shares_of_first`."""
    return [None if share is None else 1 - share for share in shares_of_first(judge, prompts, pairs, **options)]


def shares_of_first(
    judge: Any, prompts: Sequence[str], pairs: Sequence[Sequence[str]], **options: object
) -> list[float | None]:
    """How far the first text of each pair wins, in [0, 1]; None where the judge gives no answer (-1 or None).

    Answers are 0 or 1, the better one, 0.5 for a tie, or with `return_scores=True` a probability. Equal texts are a tie
    and are not shown. Raises: TypeError for a judge without `return_scores`, JudgeError for invalid answers.
    """
    soft = bool(options.get("return_scores"))
    if soft and "return_scores" not in inspect.signature(judge.judge).parameters:
        name = type(judge).__name__
        raise TypeError(f"{name} has no return_scores. Use a judge with probabilities, such as PairRMJudge.")
    asked = [row for row, (first, second) in enumerate(pairs) if first != second]
    shares: list[float | None] = [0.5] * len(pairs)
    if not asked:
        return shares
    answers = judge.judge([prompts[row] for row in asked], [list(pairs[row]) for row in asked], **options)
    if len(answers) != len(asked):
        raise JudgeError(judge, f"gave {len(answers)} answers, expected {len(asked)}, one for each question")
    for row, answer in zip(asked, answers, strict=True):
        value = -1.0 if answer is None else float(answer) if isinstance(answer, Real) else math.nan
        if not (value in (0.0, 0.5, 1.0, -1.0) or (soft and 0 <= value <= 1)):
            allowed = "a probability, or -1" if soft else "0, 1, 0.5 (a tie) or -1"
            raise JudgeError(judge, f"gave {answer!r}, expected {allowed}")
        shares[row] = None if value == -1 else value if soft else 1 - value
    return shares


def win_rate(shares: Sequence[float | None]) -> WinRate:
    """The mean of the known shares, with Wilson's score interval (Wilson 1927, Probable Inference).

    >>> win_rate([1.0, 1.0, 0.0, None])
    WinRate(rate=0.6666..., low=0.2076..., high=0.9385..., answered=3, unanswered=1)
    """
    known = [share for share in shares if share is not None]
    n, missing = len(known), len(shares) - len(known)
    if not n:
        return WinRate(math.nan, math.nan, math.nan, 0, missing)
    rate = sum(known) / n
    centre = (rate + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(rate * (1 - rate) / n + Z**2 / (4 * n**2))
    return WinRate(rate, centre - half, centre + half, n, missing)


def length_controlled(shares: Sequence[float | None], lengths: Sequence[tuple[int, int]]) -> float:
    """The win rate of the second texts at equal lengths, by a logistic model of shares over the difference of lengths.

    `lengths` are those of the first and the second text; their difference enters as `tanh` of its standardised value.
    Source: Dubois et al. 2024, eq. 2 (arXiv:2404.04475), without the third term, which needs answers of many models.

    >>> round(length_controlled([1.0, 0.0, 1.0, 0.0], [(5, 9), (9, 5), (5, 9), (9, 5)]), 2)  # the longer wins
    0.5
    """
    rows = [(share, b - a) for share, (a, b) in zip(shares, lengths, strict=True) if share is not None]
    if not rows:
        return math.nan
    target, gaps = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    scaled = torch.tanh(gaps / gaps.square().mean().sqrt().clamp(min=1e-9))
    features = torch.stack([torch.ones_like(gaps), scaled], dim=1)
    weights = torch.zeros(2, dtype=torch.float64)
    ridge = 1e-2 * torch.eye(2, dtype=torch.float64)  # keeps separable answers finite
    for _ in range(50):  # Newton
        p = torch.sigmoid(features @ weights)
        gradient = features.T @ (p - target) + ridge @ weights
        weights = weights - torch.linalg.solve(features.T @ (features * (p * (1 - p))[:, None]) + ridge, gradient)
    return torch.sigmoid(weights[0]).item()
