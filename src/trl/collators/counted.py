"""Flat batches that know how many sequences each of their rows has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOT_PLAIN = ("attention_mask", "segment_table", "rows")


@dataclass
class CountedSequences:
    """Adds `sequences (B,)` to a flat batch of plain sequences: how many each of its rows has, of which packed ones have several.

    It is the batch's first tensor, by which transformers counts rows. Other batches stay as they are, and those of which the
    rows do not say it.

    >>> rows = [{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, {"input_ids": [8], "seq_lengths": [1]}]
    >>> positions = torch.tensor([[0, 1, 0, 0]])
    >>> CountedSequences(lambda rows: {"position_ids": positions})(rows)["sequences"].tolist()
    [2, 1]
    """

    collate: Callable[[Any], Any]

    def __call__(self, rows: Sequence[Any]) -> Any:
        """The batch of some rows."""
        batch = self.collate(rows)
        if not isinstance(batch, Mapping) or "position_ids" not in batch:
            return batch
        if any(name in batch for name in NOT_PLAIN):
            return batch
        counts = [_sequences(row) for row in rows]
        begun = int((batch["position_ids"] == 0).sum()) - ("filler" in batch)
        return {"sequences": torch.tensor(counts), **batch} if sum(counts) == begun else batch


def _sequences(row: Mapping[str, Any]) -> int:
    lengths: Sequence[int] | Tensor | None = row.get("seq_lengths")
    return 1 if lengths is None else sum(int(length) > 0 for length in lengths)
