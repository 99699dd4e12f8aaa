"""Rows of token columns (lists, arrays or tensors) as int64 tensors, padded or laid one after another."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.data.formats import Row
from trl.tensors.padding import IGNORED, pad
from trl.tensors.segments import Segments

Batch = Mapping[str, Any]


def as_ids(value: object) -> Tensor:
    """One int64 tensor `(T,)` from a list, array or tensor of numbers or truth values."""
    if isinstance(value, Tensor):
        return value.to(torch.int64)
    return torch.from_numpy(np.array(value, dtype=np.int64))


def as_rows(examples: Sequence[object]) -> list[Row]:
    """Rows of a batch, of which some may be bare lists of token ids."""
    return [row if isinstance(row, Mapping) else {"input_ids": row} for row in examples]


def read_column(rows: Sequence[Row], name: str) -> list[Tensor] | None:
    """A column of all rows as int64 tensors, None where no row has it.

    Raises: ValueError where some rows have the column and others do not.
    """
    has = [row.get(name) is not None for row in rows]
    if not any(has):
        return None
    if not all(has):
        raise ValueError(
            f"row {has.index(False)} of the batch has no {name!r}, unlike row {has.index(True)}. Give it in every row "
            "or none."
        )
    return [as_ids(row[name]) for row in rows]


def round_up(length: int, multiple: int | None) -> int:
    """The smallest multiple of `multiple` that is not below `length`; `length` itself for None.

    >>> round_up(9, 8), round_up(8, 8), round_up(9, None)
    (16, 8, 9)
    """
    return length if multiple is None else -(-length // multiple) * multiple


def pack_sequences(
    ids: Tensor, labels: Tensor, lengths: Sequence[int], *, pad_token_id: int, multiple: int | None = None,
    ignored: int = IGNORED,
) -> dict[str, Tensor]:  # fmt: skip
    """Sequences that lie one after another as one packed batch: `input_ids`, `position_ids`, `labels`, `(1, N)` each.

    `lengths` are those of the sequences; each one's first label is ignored, because nothing before it predicts it.
    Where N is rounded up to `multiple`, the tail is a sequence of its own without labels, and `filler` `(1,)` says how
    many tokens it has.
    """
    total = ids.shape[0]
    tail = round_up(total, multiple) - total
    segments = Segments.from_lengths([length for length in [*lengths, tail] if length])
    labels = torch.nn.functional.pad(labels, (0, tail), value=ignored)
    labels[segments.start] = ignored
    return {
        "input_ids": torch.nn.functional.pad(ids, (0, tail), value=pad_token_id)[None],
        "position_ids": segments.position_ids(),
        "labels": labels[None],
        **({"filler": torch.tensor([tail])} if tail else {}),
    }


def pad_with_mask(
    rows: Sequence[Tensor], value: int, *, side: Literal["left", "right"] = "right", multiple: int | None = None
) -> tuple[Tensor, Tensor]:
    """Ragged rows as one tensor `(B, T)`, T rounded up to `multiple`, and the mask of the real tokens.

    >>> pad_with_mask([torch.tensor([1, 2]), torch.tensor([3])], 0, side="left")[0]
    tensor([[1, 2],
            [0, 3]])
    """
    ones = [torch.ones_like(row) for row in rows]
    return pad(list(rows), value, side, multiple), pad(ones, 0, side, multiple)


def real_tokens(batch: Batch, column: str, *, labels: Tensor | None = None) -> list[Tensor]:
    """The tokens of each row of a padded column that its mask, if the batch has one, and `labels`, if given, keep."""
    ids = batch[column]
    shown = batch.get(mask_of(column), torch.ones_like(ids)).bool()
    shown = shown if labels is None else shown & labels.ne(IGNORED)
    return [row[real] for row, real in zip(ids, shown, strict=True)]


def mask_of(column: str) -> str:
    """The attention mask's column that belongs to a column of token ids.

    >>> mask_of("chosen_input_ids"), mask_of("input_ids_chosen")
    ('chosen_attention_mask', 'attention_mask_chosen')
    """
    return column.replace("input_ids", "attention_mask")


def check_filled(rows: Sequence[Sequence]) -> None:
    """Raise ValueError for a batch without rows, and for a row with a part (prompt, completion) without tokens."""
    if not rows:
        raise ValueError("a batch must have at least 1 row, got 0. Check the sampler and the data set.")
    for row, lengths in enumerate([len(part) for part in parts] for parts in rows):
        if not all(lengths):
            raise ValueError(f"row {row} of the batch has sequences of {lengths} tokens, expected 1 or more.")


def check_columns(batch: Batch, wanted: Sequence[str]) -> None:
    if not set(wanted) <= set(batch):
        raise ValueError(f"a batch must have {', '.join(wanted)}, got {sorted(batch)} (see data_collator).")


def build_bert_batch_from_txt(
    text_list: Sequence[str], tokenizer: PreTrainedTokenizerBase, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Texts as token ids and attention mask, `(B, T)` each, padded on the right with 0, on `device`."""
    ids, mask = pad_with_mask([as_ids(tokenizer.encode(text)) for text in text_list], 0)
    return ids.to(device), mask.to(device)
