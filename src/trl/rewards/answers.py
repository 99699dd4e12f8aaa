"""What a reward source answered, read row by row: a finite number, or None for no opinion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max  # what trainers compute with
_SHOWN_ROWS = 3


class RewardError(RuntimeError):
    """A reward source raised, did not answer in time, or answered something that is no reward."""


class Answers(NamedTuple):
    """One value per row (None: no opinion), and for rows whose value cannot be used what is wrong with it."""

    values: list[float | None]
    unusable: dict[int, str]


def read_answers(given: Any, *, count: int) -> Answers:
    """The answers `(count,)` in a list, tuple, array or tensor; a tensor may be on any device, and is detached.

    Raises: RewardError where there are no `count` values to be read.
    """
    values = _as_values(given, count)
    if len(values) != count:
        raise RewardError(
            f"gave {len(values)} values, expected {count}, one for each completion. Return None for a completion it has "
            "no opinion on."
        )
    read = [_read(value) for value in values]
    unusable = {row: value for row, value in enumerate(read) if isinstance(value, str)}
    return Answers([None if isinstance(value, str) else value for value in read], unusable)


def read_scores(given: Any, *, count: int, name: str) -> list[float]:
    """A finite number for each of `count` texts in what the function `name` gave; a tensor may have any shape.

    Raises: ValueError for another number of them, and for what is no finite number, None included.
    """
    try:
        answers = read_answers(given.flatten() if isinstance(given, Tensor) else given, count=count)
    except RewardError as error:
        raise ValueError(f"{name} {error}") from None
    nones = {row: "None" for row, value in enumerate(answers.values) if value is None}
    wrong = [f"{what} for text {row}" for row, what in sorted({**nones, **answers.unusable}.items())]
    if wrong:
        shown = ", ".join(wrong[:_SHOWN_ROWS])
        raise ValueError(
            f"{name} gave {shown}, expected a finite number for each of {count} texts. Score them all."
        )
    return [value for value in answers.values if value is not None]


def describe_unusable(unusable: Mapping[int, str], row_text: Any) -> str:
    """What came for which rows, the first few by their text."""
    rows = sorted(unusable)
    shown = "; ".join(f"{unusable[row]} for row {row} ({row_text(row)})" for row in rows[:_SHOWN_ROWS])
    rest = f" and for {len(rows) - _SHOWN_ROWS} rows more" if len(rows) > _SHOWN_ROWS else ""
    return f"gave {shown}{rest}, expected a finite number, or None for no opinion. Correct what it returns"


def _as_values(given: Any, count: int) -> Sequence[Any]:
    if isinstance(given, (Tensor, np.ndarray)):
        if given.ndim != 1:
            raise RewardError(
                f"gave a tensor of shape {tuple(given.shape)}, expected ({count},). Return one number per completion"
                f"{', for example with .squeeze(-1)' if tuple(given.shape) == (count, 1) else ''}."
            )
        return given.tolist()
    if isinstance(given, (list, tuple)):
        return given
    kind = "None" if given is None else f"a {type(given).__name__}"
    remedy = "Add its return statement." if given is None else "Return a list."
    raise RewardError(f"gave {kind}, expected a list of {count} numbers. {remedy}")


def _read(value: Any) -> float | str | None:
    """The number itself, None for no opinion, or in words what is wrong with it."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        if math.prod(value.shape) != 1:
            return f"a tensor of shape {tuple(value.shape)}"
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, Real):
        return f"{_shortened(value)} (a {type(value).__name__})"
    try:
        number = float(value)
    except OverflowError:
        return "a number beyond the largest float"
    return number if math.isfinite(number) and abs(number) <= _LARGEST else str(number)


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
