"""What reward sources are given and what they return: inputs, reading of answers, scores by all sources."""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trl.data.rendering import Json
from trl.data.validation import RENAME

Text = str | Sequence[Json]  # or messages
RESERVED = ("prompts", "completions", "completion_ids", "completions_ids", "trainer_state", "prompt_ids")
_LARGEST = torch.finfo(torch.float32).max  # what trainers compute with
_SCORE_OF = "score_of_"
_LISTS = ("prompts", "completions", "completion_ids", "prompt_ids")


class RewardError(RuntimeError):
    """A reward source raised, missed its deadline, or returned something that is not a score."""


@contextmanager
def refusing_exit() -> Iterator[None]:
    """Turn `sys.exit` of a user's function into a RewardError; the exit of a signal's handler stays one."""
    try:
        yield
    except SystemExit as stop:
        if type(stop) is not SystemExit:
            raise
        raise RewardError(f"called sys.exit({stop.code!r}), which does not end a run. Raise an error.") from stop


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """B completions, in the terms of reward functions. Scoring changes nothing in it.

    Ids are lists, empty if unknown; `columns` are the others of the data set. Raises: ValueError for columns of another
    length, or with the name of an argument of every function.
    """

    prompts: Sequence[Text]
    completions: Sequence[Any]  # texts, messages or images
    completion_ids: Sequence[Sequence[int]] = ()
    prompt_ids: Sequence[Sequence[int]] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trainer_state: object = None

    def __post_init__(self) -> None:
        columns = {name: v for name, v in self.columns.items() if name not in ("prompt", "completion")}
        object.__setattr__(self, "columns", columns)
        if taken := sorted(set(columns) & set(RESERVED)):
            raise ValueError(f"the dataset has columns {taken}, arguments of every reward function. {RENAME}.")
        lists = {"completions": self.completions} | {f"column {name!r}": v for name, v in columns.items()}
        lists |= {n: ids for n in ("completion_ids", "prompt_ids") if len(ids := getattr(self, n))}
        for name, values in lists.items():
            if len(values) != len(self.prompts):
                raise ValueError(f"{name} has {len(values)} values, expected {len(self.prompts)}, one for each prompt.")

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Sequence[int]) -> "RewardInputs":
        lists = {name: getattr(self, name) for name in _LISTS} | dict(self.columns)
        taken = {name: [values[row] for row in rows] if len(values) else values for name, values in lists.items()}
        return replace(self, **{name: taken.pop(name) for name in _LISTS}, columns=taken)

    def row_text(self, row: int) -> str:
        """A row's prompt and completion, at most 200 characters each."""
        return f"{self.prompts[row]!r:.200} -> {self.completions[row]!r:.200}"


def joined(parts: Sequence[RewardInputs]) -> RewardInputs:
    """The rows of several inputs, one after another.

    >>> joined([RewardInputs(["p"], ["a"]), RewardInputs(["q"], ["b"])]).completions
    ['a', 'b']
    """
    rows = {name: [row for part in parts for row in getattr(part, name)] for name in _LISTS}
    columns = {name: [row for part in parts for row in part.columns[name]] for name in parts[0].columns}
    return RewardInputs(**rows, columns=columns, trainer_state=parts[0].trainer_state)


def rows_by_prompt(prompts: Sequence[Text]) -> list[list[int]]:
    """The rows of each prompt (text or messages), prompts in the order of their first row.

    >>> rows_by_prompt(["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        key = prompt if isinstance(prompt, str) else json.dumps(prompt, default=repr)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


class Answers(NamedTuple):
    """One value for each row (None: no score); `unusable` describes invalid values by row."""

    values: list[float | None]
    unusable: dict[int, str]


def read_answers(answer: object, *, count: int) -> Answers:
    """The values `(count,)` of a list, tuple, array or tensor. Raises: RewardError for another number of values."""
    if isinstance(answer, (Tensor, np.ndarray)):
        if answer.ndim != 1:
            raise RewardError(f"gave a tensor of shape {tuple(answer.shape)}, expected ({count},).")
        answer = answer.tolist()
    if not isinstance(answer, (list, tuple)):
        kind = "None (is a return statement missing?)" if answer is None else f"a {type(answer).__name__}"
        raise RewardError(f"gave {kind}, expected a list of {count} numbers.")
    if len(answer) != count:
        raise RewardError(f"gave {len(answer)} values, expected {count}, one for each completion or image.")
    values, unusable = list[float | None](), dict[int, str]()
    for row, value in enumerate(answer):
        if isinstance(value, (Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1:
            value = value.item()
        number = None
        if isinstance(value, Real):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not abs(number) <= _LARGEST:
                unusable[row] = f"{number}{' (beyond float32)' if math.isfinite(number) else ''}"
                number = None
        elif isinstance(value, (Tensor, np.ndarray)):
            unusable[row] = f"a tensor of shape {tuple(value.shape)}"
        elif value is not None:
            unusable[row] = f"{reprlib.repr(value)} (a {type(value).__name__})"
        values.append(number)
    return Answers(values, unusable)


def read_scores(answer: object, *, count: int, name: str, of: str = "text") -> list[float]:
    """Finite numbers for `count` texts or images (`of`) from the function `name`. Raises: ValueError for others."""
    try:
        answers = read_answers(answer.flatten() if isinstance(answer, Tensor) else answer, count=count)
    except RewardError as error:
        raise ValueError(f"{name} {error}") from None
    for row, value in enumerate(answers.values):
        if value is None:
            wrong = answers.unusable.get(row, "None")
            raise ValueError(f"{name} gave {wrong} for {of} {row}, expected a finite number for each of {count} {of}s.")
    return [value for value in answers.values if value is not None]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Scores `(B, S)` of B rows by S sources, float64; NaN for `failures` of a source and its `nones`."""

    names: tuple[str, ...]
    scores: Tensor
    weights: Tensor
    nones: Mapping[str, int]
    failures: Mapping[str, int]

    @property
    def rewards(self) -> Tensor:
        """The weighted sum `(B,)` of the scores: NaN adds nothing, a row of NaN is NaN."""
        sums = torch.where(self.scores.isnan(), 0.0, self.scores * self.weights).sum(dim=1)
        return torch.where(self.unscored, torch.nan, sums)

    @property
    def unscored(self) -> Tensor:
        """Rows without any score: bool `(B,)`."""
        return self.scores.isnan().all(dim=1)

    def metrics(self) -> dict[str, float]:
        return reward_metrics(self.names, self.scores)


def reward_metrics(names: Sequence[str], scores: Tensor) -> dict[str, float]:
    """`rewards/<name>/mean` and `/std` (over n - 1) of each source's scores `(N, S)`; NaN for none, or one."""
    metrics: dict[str, float] = {}
    for name, column in zip(names, scores.unbind(dim=1), strict=True):
        metrics[f"rewards/{name}/mean"] = column[~column.isnan()].mean().item()
        metrics[f"rewards/{name}/std"] = score_std(column).item()
    return metrics


def score_std(scores: Tensor) -> Tensor:
    """Deviation (over n - 1) of the scores `(N,)` that are known, 0-dim; NaN for one or none."""
    scored = scores[~scores.isnan()]
    return scored.std() if len(scored) > 1 else scored.new_tensor(float("nan"))


def source_columns(result: RewardResult) -> dict[str, Tensor]:
    """The scores of each source `(B,)` as columns of an `Experience`."""
    return {f"{_SCORE_OF}{number}": column for number, column in enumerate(result.scores.unbind(dim=1))}


def scores_by_source(columns: Mapping[str, Tensor], sources: Sequence[str]) -> dict[str, Tensor]:
    """The scores that `source_columns` wrote, by the name of their source."""
    return {name: columns[f"{_SCORE_OF}{number}"] for number, name in enumerate(sources)}
