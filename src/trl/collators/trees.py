"""Prompts that are shared by several completions, as one flat row of trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl.collators.rows import IGNORED, as_ids
from trl.tensors.segments import Segments


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Which hidden states of the flat row predict which branch tokens: int64 `(K,)` each, in branch order.

    `source` is a flat position (for a branch's first token the last one of its prompt), `target` the predicted token,
    `branch` the index of the branch, counted over all rows.
    """

    source: Tensor
    target: Tensor
    branch: Tensor


@dataclass(frozen=True, slots=True)
class FlatTrees:
    """One flat row of trees: `input_ids`, `position_ids`, `labels` `(1, N)` int64.

    `labels` holds the branch tokens and -100 on prompts. They show what is trained; what predicts a branch's first token
    is not its neighbour on the left, so score with `scored`.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    segments: Segments
    scored: ScoredTokens

    def as_batch(self) -> dict[str, Tensor]:
        """The tensors under the names by which a model's layout knows them."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "labels": self.labels,
            "segment_table": self.segments.to_table(),
            "scored_source": self.scored.source,
            "scored_target": self.scored.target,
            "scored_sequence": self.scored.branch,
        }


def flatten_trees(rows: Sequence[tuple[Any, Sequence[Any]]]) -> FlatTrees:
    """Rows of `(prompt_ids, [completion_ids, ...])` (lists, arrays or tensors) as one flat row.

    Raises: ValueError naming row and completion where a prompt or completion has no tokens, or a row no completions.

    >>> flat = flatten_trees([([5, 6], [[7, 8], [9]])])
    >>> flat.position_ids.tolist(), flat.scored.source.tolist(), flat.scored.target.tolist()
    ([[0, 1, 2, 3, 2]], [1, 2, 1], [7, 8, 9])
    """
    trees = [(as_ids(prompt), [as_ids(branch) for branch in branches]) for prompt, branches in rows]
    _check(trees)
    segments = Segments.from_trees([(len(prompt), [len(b) for b in branches]) for prompt, branches in trees])
    input_ids = torch.cat([part for prompt, branches in trees for part in (prompt, *branches)])
    scored = _scored(input_ids, segments)
    labels = torch.full_like(input_ids, IGNORED)
    for start, length, _, prefix_length in segments:
        if prefix_length:
            labels[start : start + length] = input_ids[start : start + length]
    return FlatTrees(input_ids[None], segments.position_ids(), labels[None], segments, scored)


def _scored(input_ids: Tensor, segments: Segments) -> ScoredTokens:
    table = segments.to_table()[0, 0]
    start, length, prefix_start, prefix_length = table[table[:, 3] > 0].unbind(dim=1)
    branch = torch.repeat_interleave(torch.arange(len(start)), length)
    first = length.cumsum(0) - length  # where each branch begins among the scored tokens
    target = torch.arange(int(length.sum())) - (first - start)[branch]
    source = target - 1
    source[first] = prefix_start + prefix_length - 1
    return ScoredTokens(source, input_ids[target], branch)


def _check(trees: list[tuple[Tensor, list[Tensor]]]) -> None:
    if not trees:
        raise ValueError("a batch must have at least 1 row, got 0. Check the sampler and the data set.")
    for row, (prompt, branches) in enumerate(trees):
        if not len(prompt) or not branches:
            raise ValueError(
                f"row {row} has a prompt of {len(prompt)} tokens and {len(branches)} completions, expected at least 1 of "
                "each. Give an empty prompt its beginning-of-text token, or leave the row out."
            )
        empty = [index for index, branch in enumerate(branches) if not len(branch)]
        if empty:
            raise ValueError(
                f"row {row}, completion {empty[0]} has no tokens, expected at least 1. Leave it out."
            )
