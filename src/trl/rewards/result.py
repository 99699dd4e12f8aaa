"""Scores: reading what a source returned, and the scores of a batch by all sources."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trl.tensors.reduce import Weighted, weighted

_LARGEST = torch.finfo(torch.float32).max  # what trainers compute with
_SHOWN_ROWS = 3
_SCORE_OF = "score_of_"


class RewardError(RuntimeError):
    """A reward source raised, missed its deadline, or returned something that is not a score."""


class Answers(NamedTuple):
    """One value for each row (None: no score); `unusable` describes invalid values by row."""

    values: list[float | None]
    unusable: dict[int, str]


def read_answers(given: Any, *, count: int) -> Answers:
    """The values `(count,)` of a list, tuple, array or tensor (on any device; detached).

    Raises: RewardError if there are not `count` values.
    """
    values = given
    if isinstance(given, (Tensor, np.ndarray)):
        if given.ndim != 1:
            squeeze = " Use .squeeze(-1)." if tuple(given.shape) == (count, 1) else ""
            raise RewardError(f"gave a tensor of shape {tuple(given.shape)}, expected ({count},).{squeeze}")
        values = given.tolist()
    if not isinstance(values, (list, tuple)):
        kind = "None (is a return statement missing?)" if given is None else f"a {type(given).__name__}"
        raise RewardError(f"gave {kind}, expected a list of {count} numbers.")
    if len(values) != count:
        raise RewardError(
            f"gave {len(values)} values, expected {count}, one for each completion (None: no score)."
        )
    read = [_read(value) for value in values]
    unusable = {row: value for row, value in enumerate(read) if isinstance(value, str)}
    return Answers([None if isinstance(value, str) else value for value in read], unusable)


def read_scores(given: Any, *, count: int, name: str) -> list[float]:
    """A finite number for each of `count` texts, as the function `name` returned them; a tensor may have any shape.

    Raises: ValueError for another number of values, and for values that are not finite numbers (also None).
    """
    try:
        answers = read_answers(given.flatten() if isinstance(given, Tensor) else given, count=count)
    except RewardError as error:
        raise ValueError(f"{name} {error}") from None
    nones = {row: "None" for row, value in enumerate(answers.values) if value is None}
    wrong = [f"{what} for text {row}" for row, what in sorted({**nones, **answers.unusable}.items())]
    if wrong:
        shown = ", ".join(wrong[:_SHOWN_ROWS])
        raise ValueError(f"{name} gave {shown}, expected a finite number for each of {count} texts.")
    return [value for value in answers.values if value is not None]


def describe_unusable(unusable: Mapping[int, str], row_text: Callable[[int], str]) -> str:
    """The first invalid values, with the texts of their rows."""
    rows = sorted(unusable)
    shown = "; ".join(f"{unusable[row]} for row {row} ({row_text(row)})" for row in rows[:_SHOWN_ROWS])
    rest = f" and for {len(rows) - _SHOWN_ROWS} more rows" if len(rows) > _SHOWN_ROWS else ""
    return f"gave {shown}{rest}, expected a finite number, or None for no score"


def _read(value: Any) -> float | str | None:
    """The number, None for no score, or a description of an invalid value."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        if math.prod(value.shape) != 1:
            return f"a tensor of shape {tuple(value.shape)}"
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, Real):
        return f"{reprlib.repr(value)} (a {type(value).__name__})"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if abs(number) <= _LARGEST else str(number)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Scores `(B, S)` of B rollouts by S sources: float64 on the CPU, NaN for no score.

    For each source `failures` counts the rows that it failed on, `nones` the other rows without a score.
    """

    names: tuple[str, ...]
    scores: Tensor
    weights: Tensor
    nones: Mapping[str, int]
    failures: Mapping[str, int]

    @property
    def rewards(self) -> Tensor:
        """The weighted sum `(B,)` of the scores; NaN for rows without any."""
        return combine(self.scores, self.weights)

    @property
    def unscored(self) -> Tensor:
        """Rows without any score: bool `(B,)`."""
        return self.scores.isnan().all(dim=1)

    def metrics(self) -> dict[str, float]:
        """`reward_metrics` of the rows of this process."""
        return reward_metrics(self.names, self.scores)


def combine(scores: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each row's scores, `(B, S), (S,) -> (B,)`: NaN adds nothing, a row of NaN is NaN."""
    missing = scores.isnan()
    total = torch.where(missing, 0.0, scores * weights).sum(dim=1)
    return torch.where(missing.all(dim=1), torch.nan, total)


def reward_metrics(names: Sequence[str], scores: Tensor) -> dict[str, float]:
    """`rewards/<name>/mean` and `rewards/<name>/std` of each source's scores `(N, S)`.

    The deviation divides by n - 1, as `torch.std` does. A mean without scores is NaN, and a deviation of fewer than two.
    """
    found: dict[str, float] = {}
    for name, column in zip(names, scores.unbind(dim=1), strict=True):
        known = column[~column.isnan()]
        found[f"rewards/{name}/mean"] = known.mean().item()
        found[f"rewards/{name}/std"] = known.std().item() if len(known) > 1 else float("nan")
    return found


def source_columns(result: RewardResult) -> dict[str, Tensor]:
    """The scores of each source `(B,)` as columns of an `Experience`."""
    return {f"{_SCORE_OF}{number}": column for number, column in enumerate(result.scores.unbind(dim=1))}


def source_table(columns: Mapping[str, Tensor], sources: Sequence[str]) -> list[Tensor]:
    """The columns of `source_columns` in the order of the sources."""
    return [columns[f"{_SCORE_OF}{number}"] for number in range(len(sources))]


def source_means(columns: Mapping[str, Tensor], sources: Sequence[str]) -> dict[str, Weighted]:
    """`rewards/<name>/mean` over the rows that a source scored."""
    table = zip(sources, source_table(columns, sources), strict=True)
    return {f"rewards/{name}/mean": weighted(column, ~column.isnan()) for name, column in table}
