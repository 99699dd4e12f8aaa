"""What a reward source is asked about: rollouts as their prompts, completions and data set columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RESERVED = ("prompts", "completions", "completion_ids", "completions_ids", "trainer_state", "prompt_ids")
_NOT_HANDED_ON = ("prompt", "completion")
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """B rollouts, in the terms of reward functions. Nothing in it is changed by scoring.

    `prompts` and `completions` are texts, or lists of messages where the data set is conversational; the ids are lists
    of token ids, empty where there are none. `columns` are the other columns of the data set, one value per row;
    `prompt` and `completion` among them are left out.

    Raises: ValueError for columns of another length, or under the name of an argument that every function is given.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]] = ()
    prompt_ids: Sequence[Sequence[int]] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trainer_state: Any = None

    def __post_init__(self) -> None:
        columns = {name: values for name, values in self.columns.items() if name not in _NOT_HANDED_ON}
        object.__setattr__(self, "columns", columns)
        if taken := sorted(set(columns) & set(RESERVED)):
            raise ValueError(
                f"the data set has columns {taken}, which are the names of what every reward function is given. Rename "
                "them."
            )
        _check_count("completions", self.completions, len(self.prompts))
        for name in ("completion_ids", "prompt_ids"):
            if len(getattr(self, name)):
                _check_count(name, getattr(self, name), len(self.prompts))
        for name, values in columns.items():
            _check_count(f"column {name!r}", values, len(self.prompts))

    def __len__(self) -> int:
        return len(self.prompts)

    def row_text(self, row: int) -> str:
        """A row's prompt and completion in a few words, for messages."""
        return f"{_shortened(self.prompts[row])} -> {_shortened(self.completions[row])}"


def rows_by_prompt(prompts: Sequence[Any]) -> list[list[int]]:
    """The rows of each prompt, text or messages, in the order in which prompts first come.

    >>> rows_by_prompt(["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        owner = prompt if isinstance(prompt, str) else json.dumps(prompt, default=repr)
        groups.setdefault(owner, []).append(row)
    return list(groups.values())


def _check_count(name: str, values: Sequence[Any], expected: int) -> None:
    if len(values) != expected:
        raise ValueError(
            f"{name} has {len(values)} values, expected {expected}, one for each prompt. Give every rollout its own."
        )


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
