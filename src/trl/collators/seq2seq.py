"""Prepared preference rows as a batch for an encoder-decoder: prompts for the encoder, completions for the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.collators.preference import reference_logps
from trl.collators.rows import IGNORED, Row, as_ids, check_not_empty, pad_rows, pad_with_mask

PAIR = ("chosen_input_ids", "rejected_input_ids")


def seq2seq_batch(
    rows: Sequence[Row], *, pad_token_id: int = 0, completions: Sequence[str] = PAIR
) -> dict[str, Tensor]:
    """Prompts (`prompt_input_ids`) and the `completions` of each row, side by side.

    `input_ids`, `attention_mask` `(B, P)`; `decoder_labels` `(S, T)`, -100 on padding; `decoder_prompt` `(S,)`, the row of
    each completion. Completions of one row follow one another: with pairs, completion 2i is row i's chosen one.

    Raises: ValueError naming the row and column where a prompt or completion is missing or has no tokens.

    >>> row = {"prompt_input_ids": [5, 6], "chosen_input_ids": [7, 1], "rejected_input_ids": [1]}
    >>> batch = seq2seq_batch([row])
    >>> batch["decoder_labels"].tolist(), batch["decoder_prompt"].tolist()
    ([[7, 1], [1, -100]], [0, 0])
    """
    check_not_empty(rows)
    prompts = [_tokens(row, number, "prompt_input_ids") for number, row in enumerate(rows)]
    labels = [_tokens(row, number, name) for number, row in enumerate(rows) for name in completions]
    input_ids, mask = pad_with_mask(prompts, pad_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "decoder_labels": pad_rows(labels, IGNORED),
        "decoder_prompt": torch.arange(len(rows)).repeat_interleave(len(completions)),
    }


@dataclass
class Seq2SeqPairCollator:
    """Batches rows of pairs for an encoder-decoder as `seq2seq_batch` says, with `rows (B,)` and, where the rows have the
    reference's columns, `ref_logps (2B,)`."""

    pad_token_id: int = 0

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """The batch of some rows, in their order."""
        batch = seq2seq_batch(rows, pad_token_id=self.pad_token_id)
        return {"rows": torch.arange(len(rows)), **batch, **reference_logps(rows)}


def _tokens(row: Row, number: int, name: str) -> Tensor:
    given = row.get(name)
    if given is None or not len(given):
        raise ValueError(
            f"row {number} of the batch has {'no tokens in' if given is not None else 'no'} {name!r}, expected at least 1 "
            "token. Prepare the data set first, or leave the row out."
        )
    return as_ids(given)
