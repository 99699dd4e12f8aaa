"""Rows for supervised fine-tuning (text, messages, prompt and completion, tokens) -> token rows, packed or truncated."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, List, Value
from transformers import PreTrainedTokenizerBase

from trl.data.formats import column_names
from trl.data.packing import pack_dataset
from trl.data.pipeline import (
    AnyDataset,
    Numbers,
    Preparation,
    PreparationReport,
    RowKind,
    Vocabulary,
    allowed_ids,
    check_ids,
    count_rows,
    first_row,
    map_rows,
)
from trl.data.ragged import Ragged, is_number_list, read_ragged
from trl.data.rendering import Chat, ProcessingClass, render, split_rendering, text_tokenizer
from trl.data.spans import StopTokens, assistant_tokens
from trl.data.tokenization import encode, encode_closed, encode_open, read_chat, read_text, rows_of, split_ids
from trl.data.truncation import truncate_dataset
from trl.data.validation import (
    SFT_TYPES,
    Place,
    SFTRowType,
    check_sft_settings,
    check_tokenizer,
    sft_row_type,
    vocabulary_token,
)

logger = logging.getLogger(__name__)

MASKS = ("completion_mask", "assistant_masks", "labels")


@dataclass(frozen=True, kw_only=True)
class SFTPreparation(Preparation):
    """How rows become training sequences."""

    text_field: str = "text"
    packing: bool = False
    packing_strategy: str = "bfd"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    formatting_func: Callable[[dict], Any] | None = None
    eos_token: str | None = None
    dataset_name: str = "train"
    skip_prepare: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and self.max_length is None:
            raise ValueError("packing=True with max_length=None, expected a length to fill. Set max_length.")

    @property
    def kept_length(self) -> int | None:
        """The tokens that a row may keep; wrapped packing loses none."""
        return None if self.packing and self.packing_strategy == "wrapped" else self.max_length


def prepare_sft_dataset(
    dataset: AnyDataset, processing_class: ProcessingClass, settings: SFTPreparation
) -> tuple[AnyDataset, PreparationReport]:
    """The data set as rows of `input_ids` (and masks), tokenised, checked, then packed or truncated, and its report.

    Steps: formatting function, checks, chat template and tokenisation, policy for untrained rows, packing or
    truncation. The report of a streaming data set fills as rows pass.

    Raises: ValueError or TypeError naming row, column and remedy for the first row that cannot be trained on. A
    streaming data set is checked on its first rows here, and on the others as they pass.
    """
    name = settings.dataset_name
    report = PreparationReport(name)
    if settings.skip_prepare:
        return dataset, report
    processing_class = with_eos(processing_class, settings.eos_token)
    dataset, row_type, columns = _formatted(dataset, settings)
    check_sft_settings(
        row_type,
        name=name,
        columns=columns,
        assistant_only_loss=settings.assistant_only_loss,
        completion_only_loss=settings.completion_only_loss,
        is_formatted=settings.formatting_func is not None,
    )
    is_chat, place = row_type.is_conversational, Place(name, 0, row_type.columns[0])
    needs_eos = not is_chat and row_type.kind != "tokens"
    check_tokenizer(dataset, processing_class, place, is_chat=is_chat, needs_eos=needs_eos)
    kind = SFTTokenizer(
        processing_class,
        row_type,
        name,
        completion_mask=row_type.kind == "prompt_completion" and settings.completion_only_loss is not False,
        assistant_masks=settings.assistant_only_loss,
        add_special_tokens=settings.add_special_tokens,
        max_length=settings.kept_length,
        vocabulary=allowed_ids(processing_class, settings.vocab_size, given=row_type.kind == "tokens"),
    )
    if row_type.kind == "tokens":
        masks = [
            mask for mask in MASKS if mask != "completion_mask" or settings.completion_only_loss is not False
        ]
        wanted = ("input_ids", *masks, "seq_lengths", *settings.keep_columns)
        rows: Any = dataset.select_columns([column for column in wanted if column in columns])
    else:
        rows = map_rows(
            dataset, kind, name=name, num_proc=settings.num_proc, keep_columns=settings.keep_columns
        )
    return _cut(count_rows(rows, kind, report, settings.untrained_rows), settings), report


def with_eos(processing_class: ProcessingClass, eos_token: str | None) -> ProcessingClass:
    """A copy with this eos token, where it is another than the tokenizer's own."""
    if eos_token is None or text_tokenizer(processing_class).eos_token == eos_token:
        return processing_class
    vocabulary_token(text_tokenizer(processing_class), eos_token, setting="eos_token")
    changed = copy.deepcopy(processing_class)
    text_tokenizer(changed).eos_token = eos_token
    return changed


def _formatted(dataset: Any, settings: SFTPreparation) -> tuple[Any, SFTRowType, list[str]]:
    name = settings.dataset_name
    row, columns = first_row(dataset, name, SFT_TYPES), column_names(dataset)
    if settings.formatting_func is not None and "input_ids" in columns:
        logger.warning("%s dataset: formatting_func is ignored, because the rows are tokens already.", name)
    elif settings.formatting_func is not None:
        formatter = RowFormatter(settings.formatting_func, settings.text_field, name)
        kept = [column for column in settings.keep_columns if column in columns]
        options = _map_options(dataset, settings, "Formatting")
        removed = [column for column in columns if column not in kept]
        dataset = dataset.map(formatter, with_indices=True, remove_columns=removed, **options)
        return dataset, SFTRowType("text", (settings.text_field,), False), [settings.text_field, *kept]
    row_type = sft_row_type(columns, row, text_field=settings.text_field, name=name)
    if row_type.kind == "prompt_completion" and isinstance(row.get("label"), bool):
        logger.warning(
            "%s dataset: the rows have a true-or-false 'label', as unpaired preferences do; SFT trains on all of them "
            "alike. Filter the false ones, or train with KTOTrainer.",
            name,
        )
    return dataset, row_type, columns


def _map_options(dataset: Any, settings: SFTPreparation, step: str) -> dict[str, Any]:
    is_stored = isinstance(dataset, Dataset)
    desc = f"{step} {settings.dataset_name} dataset"
    return {"num_proc": settings.num_proc, "desc": desc} if is_stored else {}


@dataclass(frozen=True)
class RowFormatter:
    """The text of a row by a user's function of a row, or of a batch (a dict of lists) that returns a list of texts.

    Each row is given alone first. Where that raises IndexError, KeyError or TypeError, or returns a list, it is given as
    a batch of one.
    """

    formatting_func: Callable[[dict], Any]
    text_field: str
    dataset_name: str

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, str]:
        alone: Any = None
        try:
            text = self.formatting_func(row)
        except (IndexError, KeyError, TypeError) as error:
            alone = error
        if alone is not None or isinstance(text, list):
            try:
                text = self.formatting_func({column: [value] for column, value in row.items()})
            except (IndexError, KeyError, TypeError) as error:
                alone = alone or error
                text = None
            text = text[0] if isinstance(text, list) and len(text) == 1 else text
        if isinstance(text, str):
            return {self.text_field: text}
        outcome = f"returned {str(text)[:40]!r} of type {type(text).__name__}"
        if text is None and alone is not None:
            outcome = f"raised {type(alone).__name__}: {alone}"
        remedy = (
            f"It takes a row, a dict of the columns {sorted(row)}, and returns its text; or a batch, a dict of lists, and "
            "returns a list with one text per row."
        )
        place = Place(self.dataset_name, index, self.text_field)
        raise place.error(f"formatting_func {outcome}", "a string", remedy, TypeError) from alone


class TokenRow(NamedTuple):
    """One tokenised row; a mask is None where the setting does not need it."""

    input_ids: list[int]
    completion_mask: list[int] | None = None
    assistant_masks: list[int] | None = None
    shifted_rows: int = 0
    unstopped_rows: int = 0
    removed_begin_tokens: int = 0


@dataclass(frozen=True)
class SFTTokenizer(RowKind):
    """Rows of one type as `input_ids` and the masks of what is trained.

    Text gets the tokenizer's special tokens and an eos token unless it ends with one; conversations get exactly what
    the chat template writes. Rows longer than `max_length` are counted as cut, which is done later. `version` is part of
    the cache key of the prepared data set.
    """

    counts = ("shifted_rows", "unstopped_rows", "removed_begin_tokens")

    processing_class: ProcessingClass
    row_type: SFTRowType
    dataset_name: str
    completion_mask: bool = False
    assistant_masks: bool = False
    add_special_tokens: bool = True
    max_length: int | None = None
    vocabulary: Vocabulary | None = None
    version: int = 3

    @property
    def features(self) -> dict[str, Any]:
        masks = {"completion_mask": self.completion_mask, "assistant_masks": self.assistant_masks}
        made = {name: List(Value("int8")) for name, is_made in masks.items() if is_made}
        return {"input_ids": List(Value("int32")), **made}

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        tokenize = {
            ("text", False): self._text_rows,
            ("prompt_completion", False): self._halves,
            ("messages", True): self._message_rows,
            ("prompt_completion", True): self._chat_halves,
        }[self.row_type.kind, self.row_type.is_conversational]
        rows = tokenize(rows_of(batch), indices)
        return {name: [getattr(row, name) for row in rows] for name in (*self.features, *self.counts)}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return text_tokenizer(self.processing_class)

    def _texts(
        self, rows: list[dict], indices: Sequence[int], column: str, *, may_be_empty: bool = False
    ) -> list[str]:
        places = (Place(self.dataset_name, index, column) for index in indices)
        return [
            read_text(self.processing_class, row, place, may_be_empty=may_be_empty)
            for place, row in zip(places, rows, strict=True)
        ]

    def _text_rows(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        texts = self._texts(rows, indices, self.row_type.columns[0])
        encoded = encode_closed(self.tokenizer, texts, add_special_tokens=self.add_special_tokens)
        return [TokenRow(ids, removed_begin_tokens=removed) for ids, removed in encoded]

    def _halves(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        prompts = self._texts(rows, indices, "prompt", may_be_empty=True)
        completions = self._texts(rows, indices, "completion")
        joint = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        special = self.add_special_tokens
        whole = encode_closed(self.tokenizer, joint, add_special_tokens=special)
        heads = encode_open(self.tokenizer, prompts, add_special_tokens=special)
        return [
            _completion_row(head, ids)._replace(removed_begin_tokens=removed)
            for (head, _), (ids, removed) in zip(heads, whole, strict=True)
        ]

    def _message_rows(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        stop_tokens, texts = StopTokens(self.tokenizer), []
        places = [Place(self.dataset_name, index, self.row_type.columns[0]) for index in indices]
        chats = [
            read_chat(self.processing_class, row, place) for row, place in zip(rows, places, strict=True)
        ]
        if self.assistant_masks:
            return [self._assistant_row(*each, stop_tokens) for each in zip(chats, places, strict=True)]
        for chat, place in zip(chats, places, strict=True):
            with place.named():
                texts.append(render(self.processing_class, chat))
        return [
            TokenRow(ids, unstopped_rows=int(stop_tokens.end_in(text) is None))
            for ids, text in zip(encode(self.tokenizer, texts), texts, strict=True)
        ]

    def _chat_halves(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        stop_tokens, halves, chats = StopTokens(self.tokenizer), [], []
        places = [Place(self.dataset_name, index, "completion") for index in indices]
        for row, place in zip(rows, places, strict=True):
            prompt = read_chat(self.processing_class, row, place._replace(column="prompt"))
            answer = read_chat(self.processing_class, row, place)
            with place.named():
                halves.append(split_rendering(self.processing_class, prompt, answer.messages))
            chats.append(prompt._replace(messages=[*prompt.messages, *answer.messages]))
        heads = encode(self.tokenizer, [prompt for prompt, _ in halves])
        if not self.assistant_masks:
            whole = encode(self.tokenizer, ["".join(half) for half in halves])
            return [
                _completion_row(head, ids)._replace(unstopped_rows=int(stop_tokens.end_in(answer) is None))
                for head, ids, (_, answer) in zip(heads, whole, halves, strict=True)
            ]
        made = []
        for head, chat, place in zip(heads, chats, places, strict=True):
            row = self._assistant_row(chat, place, stop_tokens)
            split = _completion_row(head, row.input_ids)
            is_shifted = max(split.shifted_rows, row.shifted_rows)
            made.append(row._replace(completion_mask=split.completion_mask, shifted_rows=is_shifted))
        return made

    def _assistant_row(self, chat: Chat, place: Place, stop_tokens: StopTokens) -> TokenRow:
        if not any(message["role"] == "assistant" for message in chat.messages):
            remedy = "Filter the row out, or set assistant_only_loss=False."
            expected = "one to train on with assistant_only_loss=True"
            raise place.error("no message of the assistant", expected, remedy)
        with place.named():
            tokens = assistant_tokens(self.processing_class, chat, stop_tokens)
        return TokenRow(
            tokens.input_ids,
            assistant_masks=tokens.mask,
            shifted_rows=int(tokens.shifted > 0),
            unstopped_rows=int(tokens.unstopped > 0),
        )

    def numbers(self, columns: Any, first_row: int) -> Numbers:
        """Tokens before and after the cut to `max_length`, and whether any is trained.

        A token is trained where all masks are 1 (and `labels` is not -100); the first token of a row is predicted from
        nothing and does not count.

        Raises: ValueError naming the row whose mask has another length than its `input_ids`.
        """
        names = columns.column_names if isinstance(columns, pa.Table) else list(columns)
        found = {
            name: self._ragged(columns[name], name, first_row)
            for name in ("input_ids", *MASKS)
            if name in names
        }
        ids = found.pop("input_ids")
        trained = np.ones(len(ids.values), dtype=bool)
        for name, mask in found.items():
            wrong = np.flatnonzero(ids.lengths != mask.lengths)
            if len(wrong):
                row = int(wrong[0])
                given = f"{mask.lengths[row]} values for {ids.lengths[row]} tokens in 'input_ids'"
                place = Place(self.dataset_name, first_row + row, name)
                raise place.error(given, "as many", "Give one value for each token.")
            trained &= (mask.values != -100) if name == "labels" else (mask.values == 1)
        lengths = ids.lengths
        kept = lengths if self.max_length is None else np.minimum(lengths, self.max_length)
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained, dtype=np.int64)])
        starts = ids.offsets[:-1]
        return {
            "row": first_row + np.arange(len(lengths)),
            "tokens": kept,
            "removed_tokens": lengths - kept,
            "untrained_rows": (sums[starts + kept] == sums[starts + np.minimum(kept, 1)]).astype(np.int64),
            **{name: np.asarray(columns[name]) for name in self.counts if name in names},
        }

    def _ragged(self, column: Any, name: str, first_row: int) -> Ragged:
        if isinstance(column, pa.ChunkedArray):
            kind: Any = column.type
            if not is_number_list(kind) or not pa.types.is_integer(kind.value_type):
                remedy = "Tokenize the text, or rename the column."
                place = Place(self.dataset_name, 0, name)
                raise place.error(f"values of type {kind}", "lists of integers", remedy, TypeError)
            found = read_ragged(column, name)
            rows = np.split(found.values, found.offsets[1:-1]) if self.vocabulary else []
        else:
            rows, found = column, None
        if name in ("input_ids", "labels") and self.vocabulary:
            check_ids(rows, self.vocabulary, self.dataset_name, range(first_row, first_row + len(rows)), name)
        if found is not None:
            return found
        offsets = np.cumsum([0, *(len(row) for row in column)], dtype=np.int64)
        return Ragged(np.fromiter(chain.from_iterable(column), np.int64, offsets[-1]), offsets)


def _completion_row(head: list[int], ids: list[int]) -> TokenRow:
    boundary, shifted = split_ids(head, [ids])
    return TokenRow(ids, [0] * boundary + [1] * (len(ids) - boundary), shifted_rows=shifted)


def _cut(dataset: Any, settings: SFTPreparation) -> Any:
    if settings.max_length is None:
        return dataset
    if settings.packing:
        tokens = [column for column in column_names(dataset) if column in ("input_ids", *MASKS)]
        options = _map_options(dataset, settings, "Packing")
        return pack_dataset(
            dataset.select_columns(tokens), settings.max_length, settings.packing_strategy, options
        )
    return truncate_dataset(dataset, settings.max_length, _map_options(dataset, settings, "Truncating"))
