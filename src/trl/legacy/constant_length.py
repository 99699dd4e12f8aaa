"""Text to rows of exactly one length: buffered, tokenized, joined with end tokens and cut (0.4-0.11)."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase


class ConstantLengthDataset(IterableDataset):
    """A stream of `{"input_ids", "labels"}`, int64 `(seq_length,)` each, cut through a stream of joined texts.

    Texts are read until a buffer holds `seq_length * chars_per_token * num_of_sequences` characters, tokenized, joined
    (with `eos_token_id` after each if `append_concat_token`) and cut; what does not fill a row is left out. Newer
    programs use `packing=True` with `packing_strategy="wrapped"`.

    Args:
        tokenizer: Turns the texts into tokens. Its `eos_token_id`, where it has one, wins over the argument.
        dataset: Rows to read the texts from; it is read again for each iteration.
        dataset_text_field: Column with the text. Give it or `formatting_func`.
        formatting_func: Makes the text of a row.
        infinite: Whether to begin again when the rows end.
        seq_length: Length of a row, in tokens.
        num_of_sequences: Rows that the buffer should give.
        chars_per_token: Characters per token, to size the buffer.
        eos_token_id: Token between texts where the tokenizer has none of its own.
        shuffle: Whether the rows of a buffer come in random order.
        append_concat_token: Whether an end token follows each text.
        add_special_tokens: Whether the tokenizer adds its special tokens to each text.
        seed: Seed of the order; each iteration over the rows has the same.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        dataset: Iterable[dict[str, Any]],
        dataset_text_field: str | None = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        infinite: bool = False,
        seq_length: int = 1024,
        num_of_sequences: int = 1024,
        chars_per_token: float = 3.6,
        eos_token_id: int = 0,
        shuffle: bool = True,
        append_concat_token: bool = True,
        add_special_tokens: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        if (dataset_text_field is None) == (formatting_func is None):
            raise ValueError(
                f"dataset_text_field is {dataset_text_field!r} and formatting_func is {formatting_func!r}, expected exactly "
                "one of them. Name the column with the text, or give a function that makes it."
            )
        if seq_length < 1:
            raise ValueError(
                f"seq_length must be >= 1, got {seq_length}. Give the number of tokens in a row."
            )
        own_eos = tokenizer.eos_token_id
        self.tokenizer = tokenizer
        self.concat_token_id: int = eos_token_id if own_eos is None else own_eos  # type: ignore[assignment]
        self.dataset = dataset
        self.seq_length = seq_length
        self.infinite = infinite
        self.max_buffer_size = seq_length * chars_per_token * num_of_sequences
        self.shuffle = shuffle
        self.append_concat_token = append_concat_token
        self.add_special_tokens = add_special_tokens
        self.seed = seed
        self.formatting_func = formatting_func or (lambda row: row[dataset_text_field])

    @property
    def column_names(self) -> list[str] | None:
        """Columns of the rows underneath."""
        return getattr(self.dataset, "column_names", None)

    def __len__(self) -> int:
        """The number of rows underneath, as in TRL; not that of the rows of `seq_length` tokens."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = random.Random(self.seed)
        for texts in self._buffers():
            yield from self._rows(texts, order)

    def _buffers(self) -> Iterator[list[str]]:
        texts: list[str] = []
        characters = 0
        for text in self._texts():
            texts.append(text)
            characters += len(text)
            if characters >= self.max_buffer_size:
                yield texts
                texts, characters = [], 0
        if texts:
            yield texts

    def _texts(self) -> Iterator[str]:
        while True:
            is_empty = True
            for row in self.dataset:
                is_empty, text = False, self.formatting_func(row)
                if not isinstance(text, str):
                    raise TypeError(
                        f"the text of a row is a {type(text).__name__}, expected a string. Let formatting_func return one per row."
                    )
                yield text
            if not self.infinite:
                return
            if is_empty:
                raise ValueError(
                    "the data set has no rows, expected at least 1 to repeat. Check where it comes from."
                )
            warnings.warn("The rows have ended and begin again.", stacklevel=2)

    def _rows(self, texts: list[str], order: random.Random) -> Iterator[dict[str, torch.Tensor]]:
        options: Any = {"add_special_tokens": self.add_special_tokens, "truncation": False}
        end = [self.concat_token_id] if self.append_concat_token else []
        joined = [token for ids in self.tokenizer(texts, **options)["input_ids"] for token in [*ids, *end]]
        last = len(joined) - len(joined) % self.seq_length
        starts = range(0, last, self.seq_length)
        rows = [torch.tensor(joined[start : start + self.seq_length]) for start in starts]
        if self.shuffle:
            order.shuffle(rows)
        for row in rows:
            yield {"input_ids": row, "labels": row.clone()}
