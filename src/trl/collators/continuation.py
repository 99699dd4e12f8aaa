"""A second completion behind prompts that were read with a first one, as a flat row of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trl.collators.rows import IGNORED
from trl.tensors.segments import Segments


class Continuation(NamedTuple):
    """A flat row behind tokens of another one.

    `kept` int64 `(P,)`: which tokens of the first row come in front of this one's. `batch`: the row; its segment table
    begins with them.
    """

    kept: Tensor
    batch: dict[str, Tensor]


def behind_prompts(batch: Mapping[str, Tensor]) -> Continuation | None:
    """The second completions of a flat row of trees with two branches each, behind the row of the first ones alone.

    That first row is `single_completions(batch, 0, of=2)`. A prompt's last token is read again, because it predicts the
    first of the completion. None for batches of another layout.

    >>> from trl.collators.preference import completion_batch
    >>> trees = completion_batch([([5, 6, 7], [[8], [9, 10]]), ([11], [[12, 13], [14]])], prefix_sharing=True)
    >>> kept, row = behind_prompts(trees)
    >>> kept.tolist(), row["input_ids"].tolist(), row["labels"].tolist()
    ([0, 1], [[7, 9, 10, 11, 14]], [[-100, 9, 10, -100, 14]])
    """
    trees = None if "segment_table" not in batch else _trees(Segments.from_table(batch["segment_table"]))
    if trees is None:
        return None
    kept, tokens, first = [], [], 0
    for prompt_start, prompt, own, start, length in trees:
        kept.append(torch.arange(first, first + prompt - 1))
        tokens += [torch.tensor([prompt_start + prompt - 1]), torch.arange(start, start + length)]
        first += prompt + own
    ids = batch["input_ids"][:, torch.cat(tokens).to(batch["input_ids"].device)]
    lengths = torch.tensor([1 + length for *_, length in trees])
    labels = ids.clone()
    labels[:, lengths.cumsum(0) - lengths] = IGNORED
    segments = _segments([prompt - 1 for _, prompt, *_ in trees], lengths.tolist())
    row = {"input_ids": ids, "labels": labels, "segment_table": segments.to_table()}
    return Continuation(torch.cat(kept).to(ids.device), row)


def _trees(segments: Segments) -> list[tuple[int, int, int, int, int]] | None:
    """Of each tree, start and length of its prompt, length of its first branch, start and length of its second."""
    every = list(segments)
    found = []
    for prompt, own, other in zip(every[0::3], every[1::3], every[2::3], strict=False):
        if prompt[3] or not own[2:] == other[2:] == prompt[:2]:
            return None
        found.append((*prompt[:2], own[1], *other[:2]))
    return found if len(every) == 3 * len(found) else None


def _segments(kept: list[int], lengths: list[int]) -> Segments:
    """Plain segments of `kept` tokens, where there are any, and then one branch of each length behind its own."""
    columns: list[tuple[int, int, int, int]] = []
    branches, start, branch_start = [], 0, sum(kept)
    for prefix, length in zip(kept, lengths, strict=True):
        if prefix:
            columns.append((start, prefix, 0, 0))
        branches.append((branch_start, length, start if prefix else 0, prefix))
        start, branch_start = start + prefix, branch_start + length
    return Segments(*zip(*columns, *branches, strict=True))
