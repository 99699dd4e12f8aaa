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
        if texts is not None:
            _refuse(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
            ids = self._encoded("texts", texts)
            targets = None if texts_labels is None else self._encoded("texts_labels", texts_labels)
            name = "texts_labels"
        else:
            _refuse(texts_labels=texts_labels)
            ids, name = _token_rows("input_ids", input_ids), "labels"
            targets = None if labels is None else _token_rows("labels", labels)
            ids, targets = self._visible(ids, attention_mask, targets)
        return self._rows(ids, targets, name)

    def _rows(self, ids: list[Tensor], targets: list[Tensor] | None, name: str) -> Rows:
        if targets is None and self.is_encoder_decoder:
            raise ValueError(
                f"step of an encoder-decoder needs {name}, got None. Give what the decoder is to write for each row."
            )
        if targets is None:
            targets = [row.clone() for row in ids]
        _check_count(name, targets, len(ids))
        rows = []
        for number, (row, target) in enumerate(zip(ids, targets, strict=True)):
            if not self.is_encoder_decoder and len(row) != len(target):
                raise ValueError(
                    f"{name}, row {number}: {len(target)} labels for {len(row)} tokens, expected one for each. Use -100 where "
                    "nothing is trained."
                )
            rows.append({"input_ids": self._cut(row), "labels": self._cut_target(target)})
            self._check_trained(rows[-1]["labels"], number, len(row))
        return rows

    def _check_trained(self, labels: Tensor, number: int, length: int) -> None:
        own = labels if self.is_encoder_decoder else labels[1:]  # nothing predicts a decoder's first token
        if not (own != IGNORED).any():
            cut = f" after it was cut from {length} to {len(labels)}" if length > len(labels) else ""
            raise ValueError(
                f"row {number} has no trained token{cut}, expected at least 1. Leave it out, or change its labels or "
                "max_length."
            )

    def _cut(self, row: Tensor) -> Tensor:
        if self.max_length is None or len(row) <= self.max_length:
            return row
        return row[-self.max_length :] if self.keep_end else row[: self.max_length]

    def _cut_target(self, target: Tensor) -> Tensor:
        """As the tokens of a decoder; of an encoder-decoder's answer the beginning is kept, without what fills it up."""
        if not self.is_encoder_decoder:
            return self._cut(target)
        trained = (target != IGNORED).nonzero()
        end = int(trained[-1]) + 1 if len(trained) else 0
        return target[: end if self.max_length is None else min(end, self.max_length)]

    def _visible(
        self, ids: list[Tensor], masks: Any, targets: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Without the tokens that the attention mask hides, in a decoder's labels too."""
        if masks is None:
            return ids, targets
        masks = _token_rows("attention_mask", masks)
        _check_count("attention_mask", masks, len(ids))
        for number, (row, mask) in enumerate(zip(ids, masks, strict=True)):
            if len(row) != len(mask):
                raise ValueError(
                    f"attention_mask, row {number}: {len(mask)} values for {len(row)} tokens, expected one for each."
                )
        shown = [row[mask != 0] for row, mask in zip(ids, masks, strict=True)]
        if targets is None or self.is_encoder_decoder:
            return shown, targets
        _check_count("labels", targets, len(ids))
        same = all(len(target) == len(mask) for target, mask in zip(targets, masks, strict=True))
        pairs = zip(targets, masks, strict=True)
        return shown, [target[mask != 0] for target, mask in pairs] if same else targets

    def _encoded(self, name: str, texts: Any) -> list[Tensor]:
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not len(texts):
            got = "none" if isinstance(texts, Sequence) and not len(texts) else f"a {type(texts).__name__}"
            raise TypeError(f"{name} must be a list of at least 1 text, got {got}. Put the texts in a list.")
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                got = "an empty text" if text == "" else f"a {type(text).__name__}"
                raise TypeError(
                    f"{name}, row {number}: got {got}, expected a text. Leave the row out, or correct it."
                )
        return [torch.tensor(ids, dtype=torch.int64) for ids, _ in encode_closed(self.tokenizer, list(texts))]


def _refuse(**arguments: Any) -> None:
    if given := [name for name, value in arguments.items() if value is not None]:
        other = "texts" if "input_ids" in arguments else "input_ids"
        raise ValueError(f"{', '.join(given)} cannot be given with {other}. Leave it out.")


def _token_rows(name: str, given: Any) -> list[Tensor]:
    """Rows of whole numbers `(T,)` from a list of tensors or lists, or a tensor `(B, T)`."""
    rows = list(given) if isinstance(given, (Tensor, list, tuple)) else None
    if not rows:
        got = f"a {type(given).__name__}" if rows is None else "none"
        raise TypeError(f"{name} must be a list of at least 1 tensor, got {got}. Put the rows in a list.")
    return [_token_row(name, number, row) for number, row in enumerate(rows)]


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


def _check_count(name: str, rows: list[Tensor], expected: int) -> None:
    if len(rows) != expected:
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
