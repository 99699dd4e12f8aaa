"""The completions that reward sources score, with their prompts and dataset columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RESERVED = ("prompts", "completions", "completion_ids", "completions_ids", "trainer_state", "prompt_ids")
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """B completions, in the terms of reward functions. Scoring changes nothing in it.

    `prompts` and `completions` are texts, or lists of messages; the ids are lists of token ids, empty if unknown. `columns` are
    the other columns of the dataset, one value for each row; `prompt` and `completion` are removed from them.

    Raises: ValueError for columns of another length, or with the name of an argument that every function is given.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]] = ()
    prompt_ids: Sequence[Sequence[int]] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trainer_state: Any = None

    def __post_init__(self) -> None:
        columns = {name: v for name, v in self.columns.items() if name not in ("prompt", "completion")}
        object.__setattr__(self, "columns", columns)
        if taken := sorted(set(columns) & set(RESERVED)):
            raise ValueError(
                f"the dataset has columns {taken}, which are arguments of every reward function. Rename them."
            )
        given = {"completions": self.completions} | {f"column {name!r}": v for name, v in columns.items()}
        given |= {n: ids for n in ("completion_ids", "prompt_ids") if len(ids := getattr(self, n))}
        for name, values in given.items():
            if len(values) != len(self.prompts):
                raise ValueError(
                    f"{name} has {len(values)} values, expected {len(self.prompts)}, one for each prompt."
                )

    def __len__(self) -> int:
        return len(self.prompts)

    def row_text(self, row: int) -> str:
        """A row's prompt and completion, shortened, for messages."""
        shown = (repr(self.prompts[row]), repr(self.completions[row]))
        return " -> ".join(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in shown)


def rows_by_prompt(prompts: Sequence[Any]) -> list[list[int]]:
    """The rows of each prompt (text or messages), prompts in the order of their first row.

    >>> rows_by_prompt(["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        key = prompt if isinstance(prompt, str) else json.dumps(prompt, default=repr)
        groups.setdefault(key, []).append(row)
    return list(groups.values())
