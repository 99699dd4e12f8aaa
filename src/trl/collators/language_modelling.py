"""Prepared SFT rows as a batch: padded rows, or one packed row of sequences."""

from __future__ import annotations  # field types are recorded as they are written

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers.data.data_collator import DataCollatorMixin

from trl.collators.rows import IGNORED, Row, as_ids, as_rows, check_filled, pack_sequences, pad_with_mask, read_column
from trl.data.text import PROMPT_ALONE
from trl.data.token_rows import is_plain, real_row
from trl.options.checks import check_at_least
from trl.tensors.padding import pad


@dataclass
class DataCollatorForLanguageModeling(DataCollatorMixin):
    """Batches lists of token ids, or rows with `input_ids`, masks, `labels` and `seq_lengths`.

    A token is trained where every mask that applies is 1; `labels` of the data set, where given, stand in for
    `input_ids` before the masks act. Padding is told by position, never by token id. Labels are not shifted.

    Padded: `input_ids`, `attention_mask`, `labels`, `(B, T)` each, padded on the right. With `padding_free`, and always
    for packed rows (those with `seq_lengths`): `input_ids`, `position_ids` (restarting at 0 with each sequence) and
    `labels`, `(1, N)` each, without an attention mask; the first label of each sequence is -100. Where N is rounded up,
    `filler` says by how many tokens. All other columns are left out, except `attention_mask`, whose hidden tokens are
    removed first, and `position_ids`, which restart with each document of a packed row.

    Args:
        pad_token_id: Token that fills padded positions.
        completion_only_loss: Whether `completion_mask`, where a row has one, limits what is trained.
        padding_free: Whether to lay all sequences into one packed row.
        pad_to_multiple_of: Rounds T or N up to a multiple, in tokens.
        return_tensors: Only "pt".

    >>> collate = DataCollatorForLanguageModeling(pad_token_id=0)
    >>> rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}, {"input_ids": [8], "completion_mask": [1]}]
    >>> collate(rows)["labels"].tolist()
    [[-100, 6, 7], [8, -100, -100]]
    """

    pad_token_id: int
    completion_only_loss: bool = True
    padding_free: bool = False
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    padding_side: Literal["left", "right"] = field(default="right", init=False)

    def __post_init__(self) -> None:
        check_at_least("pad_to_multiple_of", self.pad_to_multiple_of, minimum=1)
        if self.return_tensors != "pt":
            raise ValueError(f"return_tensors must be 'pt', got {self.return_tensors!r}.")

    def torch_call(self, examples: Sequence[object]) -> dict[str, Tensor]:
        check_filled([()] * len(examples))
        examples = [
            row if is_plain(row, may_be_packed=True) else real_row(row, "", index)
            for index, row in enumerate(as_rows(examples))
        ]
        if examples[0].get("input_ids") is None:
            raise ValueError(f"row 0 of the batch must have 'input_ids', got {sorted(examples[0])}.")
        ids = read_column(examples, "input_ids") or []
        labels = self._labels(examples, ids)
        multiple, alone = self.pad_to_multiple_of, read_column(examples, PROMPT_ALONE)
        prompts = {} if alone is None else {PROMPT_ALONE: pad(alone, IGNORED)}
        if self.padding_free or any(row.get("seq_lengths") is not None for row in examples):
            lengths: list[int] = []
            for index, (row, row_ids) in enumerate(zip(examples, ids, strict=True)):
                documents = row.get("seq_lengths")
                parts = [len(row_ids)] if documents is None else as_ids(documents).tolist()
                if sum(parts) != len(row_ids):
                    place = f"row {index} of the batch"
                    raise ValueError(
                        f"{place}: seq_lengths add up to {sum(parts)}, but there are {len(row_ids)} tokens."
                    )
                lengths += parts
            packed = pack_sequences(
                torch.cat(ids), torch.cat(labels), lengths, pad_token_id=self.pad_token_id, multiple=multiple
            )
            return {**packed, **prompts}
        padded, mask = pad_with_mask(ids, self.pad_token_id, side=self.padding_side, multiple=multiple)
        labelled = pad(labels, IGNORED, self.padding_side, multiple)
        return {"input_ids": padded, "attention_mask": mask, "labels": labelled, **prompts}

    def _labels(self, rows: Sequence[Row], ids: list[Tensor]) -> list[Tensor]:
        labels = [row.clone() for row in read_column(rows, "labels") or ids]
        masks = ("completion_mask", "assistant_masks") if self.completion_only_loss else ("assistant_masks",)
        columns = {name: read_column(rows, name) for name in masks}
        for name, column in {"labels": labels, **columns}.items():
            for index, values in enumerate(column or ()):
                if len(values) != len(ids[index]):
                    raise ValueError(
                        f"row {index} of the batch: {name!r} has {len(values)} items, 'input_ids' {len(ids[index])}, "
                        "expected as many."
                    )
                if name != "labels":
                    labels[index][values == 0] = IGNORED
        return labels
