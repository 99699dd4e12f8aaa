"""The function by which GFPO chooses among the completions of a prompt: what it is asked, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl.rewards.functions import accepted, name_of, parameters_of
from trl.rewards.inputs import RewardInputs

GroupFilterFunc = Callable[..., Any]
"""`func(group_completions=, group_rewards=, **columns)`: for every group a list of one score per completion."""


def filter_scores(
    function: GroupFilterFunc, inputs: RewardInputs, rewards: Tensor, group_size: int
) -> Tensor:
    """What the function says of the completions of whole groups, float64 `(B,)`.

    Everything it is given is a list of groups, each a list of `group_size`: `group_completions`, `group_rewards` (None where
    there is no reward), `prompts`, `completion_ids` and the columns. One without `**kwargs` is given what it names.

    Raises: ValueError or TypeError for an answer of another shape, and for scores that are not finite.
    """
    worth = [None if value != value else value for value in rewards.tolist()]
    every: dict[str, Any] = {
        "group_completions": _groups(inputs.completions, group_size),
        "group_rewards": _groups(worth, group_size),
        "prompts": _groups(inputs.prompts, group_size),
        "completion_ids": _groups(inputs.completion_ids, group_size),
        "trainer_state": inputs.trainer_state,
        **{name: _groups(values, group_size) for name, values in inputs.columns.items()},
    }
    answer = function(**accepted(every, parameters_of(function)))
    return _read(answer, len(inputs) // group_size, group_size, name_of(function))


def _groups(values: Sequence[Any], group_size: int) -> list[list[Any]]:
    """
    >>> _groups([1, 2, 3, 4], 2)
    [[1, 2], [3, 4]]
    """
    return [list(values[first : first + group_size]) for first in range(0, len(values), group_size)]


def _read(answer: Any, groups: int, group_size: int, name: str) -> Tensor:
    """The answer as numbers, flat."""
    wanted = f"a list of {group_size} scores for each of {groups} groups"
    try:
        lists = [[float(score) for score in group] for group in answer]
    except TypeError as error:
        raise TypeError(
            f"group_filter_func {name!r} answered with {type(answer).__name__} that holds something else ({error}), expected "
            f"{wanted}. Score every completion of group_completions with a number."
        ) from None
    lengths = [len(group) for group in lists]
    if lengths != [group_size] * groups:
        raise ValueError(
            f"group_filter_func {name!r} answered with {len(lists)} groups of {sorted(set(lengths))} scores, expected {wanted}. "
            "Score every completion of group_completions."
        )
    scores = torch.tensor(lists, dtype=torch.float64).flatten()
    if not scores.isfinite().all():
        row = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(
            f"group_filter_func {name!r} gave completion {row % group_size} of group {row // group_size} the score "
            f"{float(scores[row])}, expected finite numbers. Use a large negative score for one that must not remain."
        )
    return scores
