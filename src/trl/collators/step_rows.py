"""The rows that a call of `IterativeSFTTrainer.step` is given: tokens or texts, checked and cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.collators.rows import IGNORED
from trl.collators.seq2seq import seq2seq_batch
from trl.data.tokenization import encode_closed

Rows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class StepRows:
    """Makes rows of `input_ids` and `labels` (int64, as long as each other for a decoder) of what `step` is given."""

    tokenizer: PreTrainedTokenizerBase
    is_encoder_decoder: bool
    max_length: int | None
    keep_end: bool

    def __call__(
        self, *, input_ids: Any, attention_mask: Any, labels: Any, texts: Any, texts_labels: Any
    ) -> Rows:
        """The rows, in their order.

        Raises: ValueError or TypeError naming the argument and the row that cannot be used.
        """
        if (input_ids is None) == (texts is None):
            both = "both" if input_ids is not None else "neither"
            raise ValueError(f"step takes input_ids or texts, got {both}. Give one of them.")
        of_tokens = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        unread = {"texts_labels": texts_labels} if texts is None else of_tokens
        if given := [name for name, value in unread.items() if value is not None]:
            other = "input_ids" if texts is None else "texts"
            raise ValueError(f"{', '.join(given)} cannot be given with {other}. Leave it out.")
        masks = None
        if texts is None:
            name, ids = "labels", _token_rows("input_ids", input_ids)
            targets = None if labels is None else _token_rows("labels", labels, len(ids))
            masks = (
                None if attention_mask is None else _token_rows("attention_mask", attention_mask, len(ids))
            )
        else:
            name, ids = "texts_labels", self._encoded("texts", texts)
            targets = None if texts_labels is None else self._encoded("texts_labels", texts_labels, len(ids))
        if targets is None and self.is_encoder_decoder:
            raise ValueError(
                f"step of an encoder-decoder needs {name}, got None. Give what the decoder is to write for each row."
            )
        targets = ids if targets is None else targets
        return [
            self._row(number, name, row, target, None if masks is None else masks[number])
            for number, (row, target) in enumerate(zip(ids, targets, strict=True))
        ]

    def _row(
        self, number: int, name: str, row: Tensor, target: Tensor, mask: Tensor | None
    ) -> dict[str, Tensor]:
        if mask is not None and len(row) != len(mask):
            raise ValueError(
                f"attention_mask, row {number}: {len(mask)} values for {len(row)} tokens, expected one for each."
            )
        if not self.is_encoder_decoder and len(row) != len(target):
            raise ValueError(
                f"{name}, row {number}: {len(target)} labels for {len(row)} tokens, expected one for each. Use -100 where "
                "nothing is trained."
            )
        if mask is not None:
            target = target if self.is_encoder_decoder else target[mask != 0]
            row = row[mask != 0]
        labels = self._cut_target(target)
        own = labels if self.is_encoder_decoder else labels[1:]  # nothing predicts a decoder's first token
        if not (own != IGNORED).any():
            cut = (
                f" after it was cut from {len(target)} to {len(labels)}" if len(target) > len(labels) else ""
            )
            raise ValueError(
                f"row {number} has no trained token{cut}, expected at least 1. Leave it out, or change its labels or "
                "max_length."
            )
        return {"input_ids": self._cut(row), "labels": labels}

    def _cut(self, row: Tensor) -> Tensor:
        if self.max_length is None:
            return row
        return row[-self.max_length :] if self.keep_end else row[: self.max_length]

    def _cut_target(self, target: Tensor) -> Tensor:
        """As the tokens of a decoder; of an encoder-decoder's answer the beginning is kept, without what fills it up."""
        if not self.is_encoder_decoder:
            return self._cut(target).clone()
        trained = (target != IGNORED).nonzero()
        return target[: int(trained[-1]) + 1 if len(trained) else 0][: self.max_length]

    def _encoded(self, name: str, texts: Any, count: int | None = None) -> list[Tensor]:
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not len(texts):
            raise TypeError(
                f"{name} must be a list of at least 1 text, got {texts!r:.40}. Put the texts in a list."
            )
        _check_count(name, texts, count)
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                got = "an empty text" if text == "" else f"a {type(text).__name__}"
                raise TypeError(
                    f"{name}, row {number}: got {got}, expected a text. Leave the row out, or correct it."
                )
        return [torch.tensor(ids, dtype=torch.int64) for ids, _ in encode_closed(self.tokenizer, list(texts))]


def _token_rows(name: str, given: Any, count: int | None = None) -> list[Tensor]:
    """Rows of whole numbers `(T,)` from a list of tensors or lists, or a tensor `(B, T)`."""
    if not isinstance(given, Tensor | list | tuple) or not len(given):
        got = "none" if isinstance(given, Tensor | list | tuple) else f"a {type(given).__name__}"
        raise TypeError(f"{name} must be a list of at least 1 tensor, got {got}. Put the rows in a list.")
    _check_count(name, given, count)
    return [_token_row(name, number, row) for number, row in enumerate(given)]


def _token_row(name: str, number: int, row: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or (len(tensor.shape) == 1 and len(tensor) and tensor.is_floating_point()):
        got = f"a {type(row).__name__}" if tensor is None else tensor.dtype
        raise TypeError(f"{name}, row {number}: got {got}, expected whole numbers. Convert it with .long().")
    if tensor.ndim != 1 or not len(tensor):
        raise ValueError(
            f"{name}, row {number}: got the shape {tuple(tensor.shape)}, expected (T,) with at least 1 token. Leave "
            "empty rows out."
        )
    return tensor.detach().to("cpu", torch.int64)


def _check_count(name: str, rows: Any, expected: int | None) -> None:
    if expected is not None and len(rows) != expected:
        raise ValueError(
            f"{name} has {len(rows)} rows, expected {expected}, one for each input. Give as many."
        )


@dataclass
class Seq2SeqRowsCollator:
    """Batches rows of `input_ids` (for the encoder) and `labels` (for the decoder), as `seq2seq_batch` does."""

    pad_token_id: int = 0

    def __call__(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """The batch of some rows, in their order."""
        named = [{"prompt_input_ids": row.get("input_ids"), "labels": row.get("labels")} for row in rows]
        return seq2seq_batch(named, pad_token_id=self.pad_token_id, completions=("labels",))
