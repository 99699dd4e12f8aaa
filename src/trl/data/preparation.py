"""A data set of any type that supervised fine-tuning takes -> token rows, packed or truncated, and a report."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from trl.data.counting import (
    MASKS,
    PreparationReport,
    RowCounts,
    UntrainedPolicy,
    apply_policy,
    count_rows,
    count_stored,
    ragged_of,
    report_of,
    untrained_message,
)
from trl.data.formats import column_names
from trl.data.packing import pack_dataset
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.tokenization import COUNTED, SFTTokenizer
from trl.data.truncation import truncate_dataset
from trl.data.unread_tools import warn_of_unread_tools
from trl.data.validation import (
    SFT_TYPES,
    SFTRowType,
    check_sft_settings,
    check_tokenizer,
    sft_row_type,
    vocabulary_token,
)

logger = logging.getLogger(__name__)

AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)
STREAM_BATCH = 64  # rows tokenised at a time, and looked at before the first step, of a streaming data set


@dataclass(frozen=True)
class SFTPreparation:
    """How rows become training sequences; lengths in tokens.

    `untrained_rows`: what to do with rows in which nothing is trained: keep and count them, raise, or drop them.
    `vocab_size`: the first token id that is not allowed in tokenized input (default: the tokenizer's size).
    """

    text_field: str = "text"
    max_length: int | None = None
    packing: bool = False
    packing_strategy: str = "bfd"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    formatting_func: Callable[[dict], Any] | None = None
    eos_token: str | None = None
    add_special_tokens: bool = True
    num_proc: int | None = None
    dataset_name: str = "train"
    skip_prepare: bool = False
    untrained_rows: UntrainedPolicy = "report"
    vocab_size: int | None = None
    keep_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.packing and self.max_length is None:
            raise ValueError("packing=True with max_length=None, expected a length to fill. Set max_length.")
        if self.untrained_rows not in ("report", "error", "drop"):
            raise ValueError(
                f"untrained_rows must be 'report', 'error' or 'drop', got {self.untrained_rows!r}. Choose one."
            )

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
    report = PreparationReport(settings.dataset_name, is_streaming=isinstance(dataset, IterableDataset))
    if settings.skip_prepare:
        return dataset, report
    processing_class = with_eos(processing_class, settings.eos_token)
    dataset, row_type, columns = _formatted(dataset, settings)
    check_sft_settings(
        row_type,
        name=settings.dataset_name,
        columns=columns,
        assistant_only_loss=settings.assistant_only_loss,
        completion_only_loss=settings.completion_only_loss,
        is_formatted=settings.formatting_func is not None,
    )
    check_tokenizer(processing_class, row_type, name=settings.dataset_name)
    if row_type.is_conversational:
        warn_of_unread_tools(dataset, processing_class, name=settings.dataset_name)
    if row_type.kind == "tokens":
        tokenized = _only_tokens(dataset, columns, settings)
    else:
        tokenized = _tokenized(dataset, columns, row_type, processing_class, settings)
    vocabulary = _vocabulary(settings, row_type, processing_class)
    if isinstance(tokenized, Dataset):
        counted = _count_stored(tokenized, report, settings, vocabulary)
        log_warnings(report)
    else:
        counted = _count_passing(tokenized, report, settings, vocabulary)
    return _cut(counted, settings), report  # type: ignore[return-value]


class Vocabulary(NamedTuple):
    """The token ids that are allowed, 0 to `size - 1`, and why."""

    size: int
    words: str


def _vocabulary(
    settings: SFTPreparation, row_type: SFTRowType, processing_class: ProcessingClass
) -> Vocabulary | None:
    return allowed_ids(processing_class, settings.vocab_size, given=row_type.kind == "tokens")


def allowed_ids(processing_class: ProcessingClass, rows: int | None, *, given: bool) -> Vocabulary | None:
    """The ids to hold rows to, or None where the tokenizer makes them and the model takes all that it makes.

    `rows`: how many token ids the model embeds (None: as many as the tokenizer has); `given`: whether the rows came as
    tokens.
    """
    tokens = len(text_tokenizer(processing_class))
    if rows is None:
        return Vocabulary(tokens, f"the tokenizer has {tokens} tokens") if given else None
    if not given and tokens <= rows:
        return None
    return Vocabulary(rows, f"the model embeds {rows} token ids, the tokenizer has {tokens} tokens")


def with_eos(processing_class: ProcessingClass, eos_token: str | None) -> ProcessingClass:
    """A copy with this eos token, where it is another than the tokenizer's own."""
    if eos_token is None or text_tokenizer(processing_class).eos_token == eos_token:
        return processing_class
    vocabulary_token(text_tokenizer(processing_class), eos_token, setting="eos_token")
    changed = copy.deepcopy(processing_class)
    text_tokenizer(changed).eos_token = eos_token
    return changed


def log_warnings(report: PreparationReport) -> None:
    for warning in report.new_warnings():
        logger.warning(warning)


def _formatted(dataset: Any, settings: SFTPreparation) -> tuple[Any, SFTRowType, list[str]]:
    name = settings.dataset_name
    first_row = next(iter(dataset), None)
    if first_row is None:
        raise ValueError(
            f"{name} dataset: no rows, expected at least one with {SFT_TYPES}. Check its file and filters."
        )
    columns = column_names(dataset)
    if settings.formatting_func is not None and "input_ids" in columns:
        logger.warning("%s dataset: formatting_func is ignored, because the rows are tokens already.", name)
    elif settings.formatting_func is not None:
        formatter = RowFormatter(settings.formatting_func, settings.text_field, name)
        kept = [column for column in settings.keep_columns if column in columns]
        options = _map_options(dataset, settings, f"Formatting {name} dataset")
        removed = [column for column in columns if column not in kept]
        dataset = dataset.map(formatter, with_indices=True, remove_columns=removed, **options)
        return dataset, SFTRowType("text", (settings.text_field,), False), [settings.text_field, *kept]
    row_type = sft_row_type(columns, first_row, text_field=settings.text_field, name=name)
    if row_type.kind == "prompt_completion" and isinstance(first_row.get("label"), bool):
        logger.warning(
            "%s dataset: the rows have a true-or-false 'label', as unpaired preferences do; SFT trains on all of them "
            "alike. Filter the false ones, or train with KTOTrainer.",
            name,
        )
    return dataset, row_type, columns


def _map_options(dataset: Any, settings: SFTPreparation, desc: str) -> dict[str, Any]:
    return {"num_proc": settings.num_proc, "desc": desc} if isinstance(dataset, Dataset) else {}


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
        raise TypeError(
            f"{self.dataset_name} dataset, row {index}, column {self.text_field!r}: formatting_func {outcome}, expected a "
            f"string. It takes a row, a dict of the columns {sorted(row)}, and returns its text; or a batch, a dict of lists, "
            "and returns a list with one text per row."
        ) from alone


def _tokenized(
    dataset: Any,
    columns: Sequence[str],
    row_type: SFTRowType,
    processing_class: ProcessingClass,
    settings: SFTPreparation,
) -> Any:
    separate = row_type.kind == "prompt_completion" and settings.completion_only_loss is not False
    tokenize = SFTTokenizer(
        processing_class,
        row_type,
        settings.dataset_name,
        completion_mask=separate,
        assistant_masks=settings.assistant_only_loss,
        add_special_tokens=settings.add_special_tokens,
    )
    made = {"input_ids": List(Value("int32"))}
    made |= {"completion_mask": List(Value("int8"))} if separate else {}
    made |= {"assistant_masks": List(Value("int8"))} if settings.assistant_only_loss else {}
    kept = [column for column in settings.keep_columns if column in columns and column not in made]
    features = {**{column: dataset.features[column] for column in kept}, **made} if dataset.features else None
    if features is None and not kept:
        features = made
    counted = {column: Value("int32") for column in COUNTED}
    return dataset.map(
        tokenize,
        batched=True,
        with_indices=True,
        remove_columns=[column for column in columns if column not in kept],
        features=None if features is None else Features({**features, **counted}),
        **({} if isinstance(dataset, Dataset) else {"batch_size": STREAM_BATCH}),
        **_map_options(dataset, settings, f"Tokenizing {settings.dataset_name} dataset"),
    )


def _only_tokens(dataset: Any, columns: Sequence[str], settings: SFTPreparation) -> Any:
    wanted = ["input_ids", *MASKS, "seq_lengths", *settings.keep_columns]
    if settings.completion_only_loss is False:
        wanted.remove("completion_mask")
    return dataset.select_columns([column for column in wanted if column in columns])


def _count_stored(
    dataset: Dataset, report: PreparationReport, settings: SFTPreparation, vocabulary: "Vocabulary | None"
) -> Dataset:
    name = settings.dataset_name
    if vocabulary is not None:
        _check_stored_ids(dataset, vocabulary, name)
    counts, flags = count_stored(dataset, max_length=settings.kept_length, name=name)
    if not counts.trained.any():
        raise ValueError(
            f"{untrained_message(counts, 0, name)} All {len(counts.trained)} rows are like this."
        )
    counted = report_of(counts, flags, name=name)
    kept = apply_policy(counts, counted, settings.untrained_rows)
    report.add(counted)
    dataset = dataset.remove_columns(list(flags))
    return dataset if len(kept) == len(counts.lengths) else dataset.select(kept)


def _check_stored_ids(dataset: Dataset, vocabulary: "Vocabulary", name: str) -> None:
    start = 0
    columns = [column for column in ("input_ids", "labels") if column in dataset.column_names]
    for table in dataset.with_format("numpy").select_columns(columns).iter(batch_size=1000):
        for column in columns:
            check_ids(list(table[column]), vocabulary, name, start, column)  # type: ignore[index]
        start += len(table["input_ids"])  # type: ignore[index]


def check_ids(
    rows: list, vocabulary: "Vocabulary", name: str, first_row: int, column: str = "input_ids"
) -> None:
    """Raise for the first row whose token ids the model has not; -100 in `labels` marks what is not trained."""
    for index, row in enumerate(rows):
        ids, place = np.asarray(row), f"{name} dataset, row {first_row + index}, column {column!r}"
        if ids.size == 0:
            raise ValueError(f"{place}: an empty list, expected token ids. Filter the row out.")
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(
                f"{place}: values of type {ids.dtype}, expected lists of integers. Tokenize the text, or rename the "
                "column."
            )
        wrong = ids[((ids < 0) & ~((column == "labels") & (ids == -100))) | (ids >= vocabulary.size)]
        if wrong.size:
            allowed = f"0 to {vocabulary.size - 1}" + (" or -100" if column == "labels" else "")
            raise ValueError(
                f"{place}: token id {wrong[0]}, expected {allowed} ({vocabulary.words}). Tokenize with the tokenizer "
                "that belongs to the model, or grow it with model.resize_token_embeddings(len(tokenizer))."
            )


@dataclass
class PassingRows:
    """Checks and counts token rows of a stream into a report, and leaves out what the policy drops."""

    report: PreparationReport
    settings: SFTPreparation
    vocabulary: "Vocabulary | None"

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        counts = self.count(batch, indices[0])
        flags = {column: np.asarray(batch[column]) for column in COUNTED if column in batch}
        counted = report_of(counts, flags, name=self.settings.dataset_name)
        kept = apply_policy(counts, counted, self.settings.untrained_rows, first_row=indices[0])
        self.report.add(counted)
        log_warnings(self.report)
        return {name: [values[row] for row in kept] for name, values in batch.items() if name not in COUNTED}

    def count(self, batch: dict[str, list], first_row: int) -> RowCounts:
        name = self.settings.dataset_name
        if self.vocabulary is not None:
            for column in ("input_ids", "labels"):
                check_ids(batch.get(column, []), self.vocabulary, name, first_row, column)
        columns = {column: ragged_of(batch[column]) for column in ("input_ids", *MASKS) if column in batch}
        return count_rows(columns, max_length=self.settings.kept_length, name=name, first_row=first_row)


def _count_passing(
    dataset: IterableDataset,
    report: PreparationReport,
    settings: SFTPreparation,
    vocabulary: "Vocabulary | None",
) -> IterableDataset:
    _check_first_rows(dataset, settings, vocabulary)
    features = dataset.features
    if features is not None:
        features = Features({column: kind for column, kind in features.items() if column not in COUNTED})
    return dataset.map(
        PassingRows(report, settings, vocabulary),
        batched=True,
        batch_size=STREAM_BATCH,
        with_indices=True,
        remove_columns=[column for column in COUNTED if column in column_names(dataset)],
        features=features,
    )


def _check_first_rows(
    dataset: IterableDataset, settings: SFTPreparation, vocabulary: "Vocabulary | None"
) -> None:
    rows = list(dataset.take(STREAM_BATCH))
    batch = {column: [row[column] for row in rows] for column in rows[0]}
    scratch = PreparationReport(settings.dataset_name)
    counts = PassingRows(scratch, settings, vocabulary).count(batch, 0)
    apply_policy(counts, scratch, settings.untrained_rows)
    if not counts.trained.any():
        message = untrained_message(counts, 0, settings.dataset_name)
        raise ValueError(f"{message} The first {len(rows)} rows are all like this.")


def _cut(dataset: Any, settings: SFTPreparation) -> Any:
    if settings.max_length is None:
        return dataset
    name = settings.dataset_name
    if settings.packing:
        options = _map_options(dataset, settings, f"Packing {name} dataset")
        tokens = [column for column in column_names(dataset) if column in ("input_ids", *MASKS)]
        packed = dataset.select_columns(tokens)
        return pack_dataset(packed, settings.max_length, settings.packing_strategy, options)
    return truncate_dataset(
        dataset, settings.max_length, _map_options(dataset, settings, f"Truncating {name} dataset")
    )
