"""Rows for supervised fine-tuning (text, messages, prompts, tokens) -> token rows, packed or truncated."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, List, Value
from datasets.features.features import FeatureType

from trl.data.formats import Row, RowDict, StoredOrStream, column_names
from trl.data.packing import pack_dataset
from trl.data.pipeline import Numbers, Preparation, PreparationReport, RowKind, Vocabulary, allowed_ids, check_ids
from trl.data.ragged import (
    Ragged,
    is_list,
    list_lengths,
    read_ragged,
    restore_format,
    truncate_rows,
    without_list_sizes,
)
from trl.data.rendering import Chat, ProcessingClass, hides_answer, render, split_rendering, text_tokenizer
from trl.data.spans import StopTokens, assistant_tokens
from trl.data.token_rows import is_plain, mask_columns
from trl.data.tokenization import Split, encode, encode_closed, read_chat, read_text, special_texts, tokenize_split
from trl.data.validation import SFT_TYPES, Place, RowType, check_sft_settings, check_tokenizer, sft_row_type
from trl.tensors.padding import IGNORED

logger = logging.getLogger(__name__)

MASKS = ("completion_mask", "assistant_masks", "labels")
PROMPT_ALONE = "prompt_alone"
"""The tokens of a row's prompt by itself, where the row does not begin with them; else -100 alone."""


@dataclass(frozen=True, kw_only=True)
class SFTPreparation(Preparation):
    """How rows become training sequences."""

    text_field: str = "text"
    packing: bool = False
    packing_strategy: str = "bfd"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    formatting_func: Callable[[dict], object] | None = None
    keep_end: bool = False  # of rows that are longer than max_length
    prompts_alone: bool = False  # also tokenise prompts by themselves, for completions that a model writes

    takes = SFT_TYPES

    def is_prepared(self, dataset: StoredOrStream) -> bool:
        columns = column_names(dataset)
        is_packed = "seq_lengths" in columns and not {"position_ids", *mask_columns(columns)} & set(columns)
        return is_packed or (isinstance(dataset, Dataset) and not len(dataset) and bool(columns))

    def row_kind(
        self, dataset: StoredOrStream, row: Row, processing_class: ProcessingClass, name: str
    ) -> "SFTTokenizer":
        if self.packing and self.max_length is None:
            raise ValueError("packing=True with max_length=None, expected a length to fill. Set max_length.")
        columns, formatter = column_names(dataset), None
        row_type = RowType("text", (self.text_field,))
        if self.formatting_func is None or "input_ids" in columns:
            row_type = sft_row_type(columns, row, text_field=self.text_field, name=name)
        else:
            formatter = RowFormatter(self.formatting_func, self.text_field, name)
        is_given = row_type.kind == "tokens"
        if is_given and self.formatting_func is not None:
            logger.warning("%s dataset: formatting_func is ignored, because the rows are tokens already.", name)
        if row_type.has_completion and isinstance(row.get("label"), bool):
            text = "%s dataset: SFT trains on rows with 'label' false too. Filter them, or use KTOTrainer."
            logger.warning(text, name)
        check_sft_settings(
            row_type, name=name, columns=columns, assistant_only_loss=self.assistant_only_loss,
            completion_only_loss=self.completion_only_loss, is_formatted=self.formatting_func is not None,
        )  # fmt: skip
        place, is_text = Place(name, 0, row_type.columns[0]), row_type.kind == "text"
        check_tokenizer(dataset, processing_class, place, is_chat=row_type.is_chat, needs_eos=is_text)
        loses_none = self.packing and self.packing_strategy == "wrapped"
        return SFTTokenizer(
            processing_class, row_type, name,
            completion_mask=row_type.has_completion and self.completion_only_loss is not False,
            assistant_masks=self.assistant_only_loss, add_special_tokens=self.add_special_tokens,
            max_length=None if loses_none else self.max_length, keep_end=self.keep_end,
            vocabulary=allowed_ids(processing_class, self.vocab_size, is_tokenized=is_given),
            prompts_alone=self.prompts_alone and row_type.has_completion and not self.assistant_only_loss,
            formatter=formatter, columns=self._token_columns(dataset) if is_given else None,
            splits="Set packing=False." if is_given and self.packing else None if is_given else RowKind.splits,
        )  # fmt: skip

    def _token_columns(self, dataset: StoredOrStream) -> Mapping[str, FeatureType | None]:
        """The columns that are trained on of rows of tokens, with their types; packed rows have `seq_lengths`."""
        types = without_list_sizes(dataset.features) or {}
        wanted = {"input_ids", *MASKS, *self.keep_columns}
        wanted -= {"completion_mask"} if self.completion_only_loss is False else set()
        columns = {column: types.get(column) for column in column_names(dataset) if column in wanted}
        return columns | ({} if self.packing else {"seq_lengths": List(Value("int64")) if types else None})

    def finished(self, rows: StoredOrStream, kind: "SFTTokenizer", report: PreparationReport) -> StoredOrStream:
        """The rows packed or truncated."""
        length, step = self.max_length, "Packing" if self.packing else "Truncating"
        options: RowDict = {}
        if isinstance(rows, Dataset):
            if kind.prompts_alone and not report.shifted_rows:
                rows = rows.remove_columns(PROMPT_ALONE)
            if length is None or (not self.packing and list_lengths(rows, "input_ids").max(initial=0) <= length):
                return rows  # without a copy of its columns
            options = {"num_proc": self.num_proc, "desc": f"{step} {kind.dataset_name} dataset"}
        if length is None:
            return rows
        if not self.packing:
            return truncate_rows(rows, length, options, keep_end=self.keep_end)
        wanted = ("input_ids", *MASKS, *self.keep_columns)
        tokens: Any = rows.select_columns([column for column in column_names(rows) if column in wanted])
        return pack_dataset(tokens, length, self.packing_strategy, options)


@dataclass(frozen=True)
class RowFormatter:
    """The text of a row by a user's function of a row, or of a batch (a dict of lists) that returns a list of texts.

    Each row is given alone first; where that raises IndexError, KeyError or TypeError, or returns a list, as a batch.
    """

    formatting_func: Callable[[dict], object]
    text_field: str
    dataset_name: str

    def __call__(self, row: RowDict, index: int) -> str:
        failure, text = None, None
        for argument in (row, {column: [value] for column, value in row.items()}):
            try:
                text = self.formatting_func(argument)
            except (IndexError, KeyError, TypeError) as error:
                failure = failure or error
                continue
            if argument is not row and isinstance(text, list) and len(text) == 1:
                text = text[0]
            if isinstance(text, str):
                return text
            if not isinstance(text, list):
                break
        outcome = f"returned {str(text)[:40]!r} of type {type(text).__name__}"
        if text is None and failure:
            outcome = f"raised {type(failure).__name__}: {failure}"
        remedy = f"It takes a row (columns {sorted(row)}) and returns its text, or a batch and returns a list of texts."
        place = Place(self.dataset_name, index, self.text_field)
        raise place.error(f"formatting_func {outcome}", "a string", remedy, TypeError) from failure


@dataclass(frozen=True)
class SFTTokenizer(RowKind):
    """Rows of one type as `input_ids` and the masks of what is trained.

    Text gets the tokenizer's special tokens and an eos token unless it ends with one; conversations get exactly what
    the chat template writes. Rows longer than `max_length` are counted as cut, which is done later. Rows that are
    tokens already keep their `columns`. `version` is part of the cache key of the prepared data set.
    """

    counts = ("shifted_rows", "unstopped_rows", "hidden_answers", "removed_begin_tokens")

    processing_class: ProcessingClass
    row_type: RowType
    dataset_name: str
    completion_mask: bool = False
    assistant_masks: bool = False
    add_special_tokens: bool = True
    max_length: int | None = None
    keep_end: bool = False
    vocabulary: Vocabulary | None = None
    prompts_alone: bool = False
    formatter: Callable[[RowDict, int], str] | None = None
    columns: Mapping[str, FeatureType | None] | None = None
    splits: str | None = RowKind.splits
    version: int = 6

    @property
    def features(self) -> Mapping[str, FeatureType | None]:
        if self.columns is not None:
            return self.columns
        masks = {"completion_mask": self.completion_mask, "assistant_masks": self.assistant_masks}
        made = {name: List(Value("int8")) for name, is_made in masks.items() if is_made}
        made |= {PROMPT_ALONE: List(Value("int32"))} if self.prompts_alone else {}
        return {"input_ids": List(Value("int32")), **made}

    def map(
        self, dataset: StoredOrStream, *, num_proc: int | None = None, keep_columns: Sequence[str] = ()
    ) -> StoredOrStream:
        """Token rows keep their columns: those that are trained on, without masked tokens."""
        if self.columns is None:
            return super().map(dataset, num_proc=num_proc, keep_columns=keep_columns)
        present, may_be_packed = column_names(dataset), "seq_lengths" in self.columns
        if is_plain(present, may_be_packed=may_be_packed):
            return dataset.select_columns([column for column in present if column in self.columns])
        rows = super().map(dataset.with_format(None))
        if isinstance(rows, Dataset) and may_be_packed and list_lengths(rows, "seq_lengths").max(initial=0) <= 1:
            rows = rows.remove_columns("seq_lengths")
        return restore_format(rows, dataset)

    def rows(self, rows: Sequence[Row], indices: Sequence[int]) -> list[RowDict]:
        if self.columns is not None:
            return [{**row, "seq_lengths": row.get("seq_lengths") or [len(row["input_ids"])]} for row in rows]
        places = [Place(self.dataset_name, index, self.row_type.columns[-1]) for index in indices]
        if self.formatter is not None:
            texts = [self.formatter(dict(row), index) for row, index in zip(rows, indices, strict=True)]
            rows = [{self.row_type.columns[0]: text} for text in texts]
        return self._chats(rows, places) if self.row_type.is_chat else self._texts(rows, places)

    def _texts(self, rows: Sequence[Row], places: list[Place]) -> list[RowDict]:
        columns: list[list[str]] = []
        for column in self.row_type.columns:
            column_places = [place._replace(column=column) for place in places]
            read = partial(read_text, self.processing_class, may_be_empty=column != self.row_type.columns[-1])
            columns.append([read(row, place) for row, place in zip(rows, column_places, strict=True)])
        if self.row_type.has_completion:
            return self._halves(list(zip(*columns, strict=True)))
        tokenizer = text_tokenizer(self.processing_class)
        encoded = encode_closed(tokenizer, columns[0], add_special_tokens=self.add_special_tokens)
        return [{"input_ids": ids, "removed_begin_tokens": removed} for ids, removed in encoded]

    def _halves(self, halves: list[tuple[str, str]]) -> list[RowDict]:
        splits = tokenize_split(
            text_tokenizer(self.processing_class),
            [(prompt, [completion]) for prompt, completion in halves],
            add_special_tokens=self.add_special_tokens,
            adds_eos=not self.row_type.is_chat,
        )
        return [
            {
                "input_ids": [*split.prompt, *split.completions[0]],
                "completion_mask": [0] * len(split.prompt) + [1] * len(split.completions[0]),
                "shifted_rows": split.shifted,
                "removed_begin_tokens": split.removed_begin_tokens,
                PROMPT_ALONE: (split.shifted and self._alone(split)) or [IGNORED],
            }
            for split in splits
        ]

    def _alone(self, split: Split) -> list[int]:
        """The prompt by itself, without as many tokens at its beginning as the row loses."""
        tokens = len(split.prompt) + len(split.completions[0])
        return split.alone[max(tokens - (self.max_length or tokens), 0) :]

    def _chats(self, rows: Sequence[Row], places: list[Place]) -> list[RowDict]:
        tokenizer, texts, chats = text_tokenizer(self.processing_class), [], []
        for row, place in zip(rows, places, strict=True):
            turns = [read_chat(self.processing_class, row, place._replace(column=c)) for c in self.row_type.columns]
            messages = [message for turn in turns for message in turn.messages]
            chats.append(turns[0]._replace(messages=messages))
            with place.named():
                if self.row_type.has_completion:
                    texts.append(split_rendering(self.processing_class, turns[0], turns[1].messages))
                elif not self.assistant_masks:
                    texts.append(("", render(self.processing_class, chats[-1])))
        made: list[RowDict] = [{} for _ in rows]
        if self.row_type.has_completion:
            made = self._halves(texts)
        elif texts:
            made = [{"input_ids": ids} for ids in encode(tokenizer, [text for _, text in texts])]
        if not self.assistant_masks:
            stops = special_texts(tokenizer)
            return [
                {
                    **row,
                    "unstopped_rows": int(not text.rstrip().endswith(stops)),
                    "hidden_answers": int(hides_answer(chat.messages, prompt + text)),
                }
                for row, chat, (prompt, text) in zip(made, chats, texts, strict=True)
            ]
        stop_tokens, chat_rows = StopTokens(tokenizer), zip(made, chats, places, strict=True)
        return [self._with_assistant_mask(row, chat, place, stop_tokens) for row, chat, place in chat_rows]

    def _with_assistant_mask(self, row: Row, chat: Chat, place: Place, stop_tokens: StopTokens) -> RowDict:
        if not any(message["role"] == "assistant" for message in chat.messages):
            remedy = "Filter the row out, or set assistant_only_loss=False."
            expected = "one to train on with assistant_only_loss=True"
            raise place.error("no message of the assistant", expected, remedy)
        with place.named():
            tokens = assistant_tokens(self.processing_class, chat, stop_tokens)
        prompt_length = row.get("completion_mask", []).count(0)
        return {
            "input_ids": tokens.input_ids,
            "completion_mask": [0] * prompt_length + [1] * (len(tokens.input_ids) - prompt_length),
            "assistant_masks": tokens.mask,
            "shifted_rows": int(tokens.shifted > 0 or row.get("shifted_rows", 0)),
            "unstopped_rows": int(tokens.unstopped > 0),
        }

    def numbers(self, columns: Any, first_row: int) -> Numbers:
        """Tokens before and after the cut to `max_length`, and whether any is trained.

        A token is trained where all masks are 1 (and `labels` is not -100), except the first of a row. Raises:
        ValueError naming the row whose mask has another length than its `input_ids`.
        """
        names = columns.column_names if isinstance(columns, pa.Table) else list(columns)
        columns_read = {
            name: self._ragged(columns[name], Place(self.dataset_name, first_row, name))
            for name in ("input_ids", *MASKS)
            if name in names
        }
        ids = columns_read.pop("input_ids")
        trained, lengths = np.ones(len(ids.values), dtype=bool), ids.lengths
        for name, mask in columns_read.items():
            for row in np.flatnonzero(lengths != mask.lengths).tolist():
                fault = f"{mask.lengths[row]} values for {lengths[row]} tokens in 'input_ids'"
                place = Place(self.dataset_name, first_row + row, name)
                raise place.error(fault, "as many", "Give one value for each token.")
            trained &= (mask.values != -100) if name == "labels" else (mask.values == 1)
        kept = lengths if self.max_length is None else np.minimum(lengths, self.max_length)
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained, dtype=np.int64)])
        starts = ids.offsets[1:] - kept if self.keep_end else ids.offsets[:-1]
        return {
            "row": first_row + np.arange(len(lengths)),
            "tokens": kept,
            "removed_tokens": lengths - kept,
            "untrained_rows": (sums[starts + kept] == sums[starts + np.minimum(kept, 1)]).astype(np.int64),
            **{name: np.asarray(columns[name]) for name in self.counts if name in names},
        }

    def _ragged(self, column: Any, first: Place) -> Ragged:
        """A column of a block whose first row stands at `first`, with its token ids checked."""
        if not isinstance(column, pa.ChunkedArray):
            rows = [row.tolist() if hasattr(row, "tolist") else row for row in column]  # tensors and arrays
            column = pa.chunked_array([pa.array(rows)])
        kind = column.type
        if is_list(kind) and pa.types.is_boolean(kind.value_type) and first.column not in ("input_ids", "labels"):
            column = column.cast(pa.large_list(pa.int8()))
            kind = column.type
        if not (is_list(kind) and pa.types.is_integer(kind.value_type)):
            remedy = "Tokenize the text, or rename the column."
            raise first.error(f"values of type {kind}", "lists of integers", remedy, TypeError)
        ragged = read_ragged(column, first.column)
        if first.column in ("input_ids", "labels") and self.vocabulary:
            for index, row in enumerate(np.split(ragged.values, ragged.offsets[1:-1]), start=first.row):
                check_ids(row, self.vocabulary, first._replace(row=index))
        return ragged
