"""One pipeline for every kind of row: read, tokenise and cut a batch at a time, count, report."""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from datasets.features.features import FeatureType

from trl.data.formats import IMAGE_COLUMNS, Row, RowDict, StoredOrStream, column_names, written
from trl.data.ragged import STREAM_BATCH, table_blocks
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.token_rows import is_plain, mask_columns, real_row
from trl.data.tokenization import with_eos
from trl.data.validation import Place
from trl.options.checks import check_at_least, check_one_of

logger = logging.getLogger(__name__)

AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)
UntrainedPolicy = Literal["report", "error", "drop"]
Numbers = Mapping[str, np.ndarray]

SHOWN_ROWS = 3


# Counts that need a user's attention, and the warning behind "in N of M rows" (of tokens and steps, behind N).
WARNINGS: Mapping[str, str] = {
    "removed_steps": "labelled steps were cut off and are not trained. Raise max_length or max_completion_length, or "
    "lower max_prompt_length.",
    "untrained_rows": "no trained token is left{}. Raise max_length, shorten the prompts, or filter these rows.",
    "unstopped_rows": "a turn ends without a stop token, so the model does not learn to stop there. Put the token "
    "inside the template's generation marks, or add one to the template.",
    "hidden_answers": "the chat template leaves out a part of the answer (its reasoning, perhaps): it is not trained. "
    "Choose another chat template.",
    "shifted_rows": "a token reaches over the end of the prompt, or of a turn; it is trained. Let prompts end before a "
    "space, not after it.",
    "removed_begin_tokens": "begin tokens that repeated the tokenizer's own were removed.",
    "equal_rows": "the chosen and the rejected completion are equal, so they show no preference. Filter these rows, or "
    "raise the lengths if truncation made them equal.",
    "promptless_rows": "the prompt has no token, or truncation removed all, and the completion's first token is not "
    "trained. Give prompts, a tokenizer that adds a begin token, or longer limits.",
    "empty_completions": "one answer is a beginning of the other, so its completion is the eos token alone. If that is "
    "not intended, add a column 'prompt'.",
    "repeated_prompts": "'chosen' and 'rejected' repeat the messages of 'prompt'; these were removed. Give the answers "
    "only, or remove the column 'prompt'.",
}


@dataclass(frozen=True, kw_only=True)
class Preparation(ABC):
    """How rows of one kind are prepared: their `row_kind` and its settings; lengths in tokens, None for no limit.

    `untrained_rows`: what happens to rows in which nothing is trained: "report" keeps and counts them, "error" raises,
    "drop" leaves them out and counts them. `vocab_size`: number of token ids that the model embeds (None: that of the
    tokenizer, checked for rows that are tokens already). `keep_columns` stay beside the tokens. `eos_token`: the
    tokenizer's, where it is another one. `skip_prepare`: rows stay as they are. Raises: ValueError.
    """

    max_length: int | None = None
    add_special_tokens: bool = True
    num_proc: int | None = None
    vocab_size: int | None = None
    untrained_rows: UntrainedPolicy = "report"
    keep_columns: tuple[str, ...] = ()
    eos_token: str | None = None
    skip_prepare: bool = False
    policies: ClassVar[tuple[str, ...]] = ("report", "error", "drop")

    takes: ClassVar[str]
    """The columns of the rows, in words."""
    sequences: ClassVar[tuple[tuple[str, ...], ...]] = (("input_ids",),)
    """Columns that make up one sequence, for each sequence of a prepared row."""
    other_prompts: ClassVar[str | None] = None
    """The column of prompts of the last sequence, where they are not those of the first."""

    @property
    def prepared_columns(self) -> tuple[str, ...]:
        """Columns by which prepared rows are recognised."""
        return tuple({name: None for sequence in self.sequences for name in sequence})

    def __post_init__(self) -> None:
        check_one_of("untrained_rows", self.untrained_rows, self.policies)
        for name in ("max_length", "max_prompt_length", "max_completion_length"):
            check_at_least(name, getattr(self, name, None), minimum=1)

    @abstractmethod
    def row_kind(self, dataset: StoredOrStream, row: Row, processing_class: ProcessingClass, name: str) -> "RowKind":
        """The kind of the rows of a data set, of which `row` is the first. Raises: ValueError for misfits."""

    def finished(self, rows: StoredOrStream, kind: Any, report: "PreparationReport") -> StoredOrStream:
        """The prepared rows in their last form."""
        return rows

    def is_prepared(self, dataset: StoredOrStream) -> bool:
        """Whether rows are prepared already."""
        columns = column_names(dataset)
        return set(self.prepared_columns) <= set(columns) and not mask_columns(columns)


@dataclass
class PreparationReport:
    """Counts of one data set's preparation (of a stream, so far); `first` has the first rows behind a count."""

    dataset_name: str = "train"
    rows: int = 0
    tokens: int = 0
    truncated_rows: int = 0
    removed_tokens: int = 0
    untrained_rows: int = 0
    dropped_rows: int = 0
    unstopped_rows: int = 0
    hidden_answers: int = 0
    shifted_rows: int = 0
    removed_begin_tokens: int = 0
    equal_rows: int = 0
    promptless_rows: int = 0
    empty_completions: int = 0
    repeated_prompts: int = 0
    desirable_rows: int = 0
    undesirable_rows: int = 0
    steps: int = 0
    removed_steps: int = 0
    is_streaming: bool = False
    first: dict[str, list[int]] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=lambda: WARNINGS, repr=False)
    warned: list[str] = field(default_factory=list)  # counts that a warning was already given for

    def summary(self) -> str:
        """Every count that is not zero, in one line."""
        counts = {item.name: getattr(self, item.name) for item in fields(self) if item.type is int}
        parts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
        seen = " (streaming, so far)" if self.is_streaming else ""
        return f"{self.dataset_name} dataset{seen}: {', '.join(parts)}"

    def warn(self) -> None:
        """Log a warning for each count that needs a user's attention, once."""
        for name in self.warnings:
            count = getattr(self, name)
            if count and name not in self.warned:
                self.warned.append(name)
                rows = f"in {count} of {self.rows} rows (first: {self.first[name]})"
                what = str(count) if name.startswith("removed_") else rows
                logger.warning("%s dataset: %s %s", self.dataset_name, what, self.warning(name))

    def warning(self, name: str) -> str:
        """The warning of a count."""
        return self.warnings[name].format(", so they are dropped" if self.dropped_rows else "")


class Vocabulary(NamedTuple):
    """The token ids that are allowed, 0 to `size - 1`, and why."""

    size: int
    words: str


def allowed_ids(processing_class: ProcessingClass, rows: int | None, *, is_tokenized: bool) -> Vocabulary | None:
    """The allowed token ids, None where the tokenizer makes them and the model embeds all that it makes.

    `rows`: how many token ids the model embeds (None: as the tokenizer has); `is_tokenized`: the rows came as tokens.
    """
    tokens = len(text_tokenizer(processing_class))
    if not is_tokenized and (rows is None or tokens <= rows):
        return None
    if rows is None:
        return Vocabulary(tokens, f"the tokenizer has {tokens} tokens")
    return Vocabulary(rows, f"the model embeds {rows} token ids, the tokenizer has {tokens} tokens")


def check_ids(
    row: Sequence[int] | np.ndarray, vocabulary: Vocabulary | None, place: Place, *, may_be_empty: bool = False
) -> None:
    """Raise for a row of token ids that the model does not have; -100 in `labels` marks what is not trained."""
    if vocabulary is None:
        return
    ids, is_label = np.asarray(row), place.column == "labels"
    if ids.size == 0:
        if may_be_empty:
            return
        raise place.error("an empty list, or one of masked tokens", "token ids", "Filter the row out.")
    if not np.issubdtype(ids.dtype, np.integer):
        remedy = "Tokenize the text, or rename the column."
        raise place.error(f"values of type {ids.dtype}", "lists of integers", remedy, TypeError)
    wrong = ids[((ids < 0) & ~(is_label & (ids == -100))) | (ids >= vocabulary.size)]
    if wrong.size:
        allowed = f"0 to {vocabulary.size - 1}{' or -100' if is_label else ''} ({vocabulary.words})"
        remedy = "Use the model's tokenizer, or grow it with model.resize_token_embeddings(len(tokenizer))."
        raise place.error(f"token id {wrong[0]}", allowed, remedy)


class RowKind(ABC):
    """Reads, tokenises and cuts a batch of rows of one kind, for `datasets.Dataset.map` (batched, with indices)."""

    counts: ClassVar[tuple[str, ...]] = ("row", "tokens", "removed_tokens", "untrained_rows")
    """Columns of numbers beside the tokens: summed into the report under these names, then removed."""
    refused: ClassVar[tuple[str, ...]] = ("untrained_rows",)
    """The numbers that the policy "error" refuses."""
    warnings: ClassVar[Mapping[str, str]] = WARNINGS
    dataset_name: str
    splits: str | None = "Give a row for each document."
    """The remedy for packed rows; None: they may be packed."""
    formatter: Callable[[RowDict, int], str] | None = None
    """A user's function over rows, which may read their masks."""
    batch_rows: ClassVar[int] = 1000
    """Rows of a stored data set that are in memory at once."""

    def __call__(
        self, batch: dict[str, list], indices: Sequence[int], json_columns: Mapping[str, object] = {}
    ) -> dict[str, list]:
        """The columns of `features` and `counts`; `json_columns`: the types of columns that store values as JSON."""
        parsed = {name: [written(value, kind) for value in batch[name]] for name, kind in json_columns.items()}
        batch = {**batch, **parsed}
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if self.formatter is None and not is_plain(batch):
            name, places = self.dataset_name, zip(rows, indices, strict=True)
            rows = [real_row(row, name, index, splits=self.splits) for row, index in places]
        finished = self.rows(rows, indices)
        return {name: [row.get(name, 0) for row in finished] for name in (*self.features, *self.counts)}

    @abstractmethod
    def rows(self, rows: Sequence[Row], indices: Sequence[int]) -> list[RowDict]:
        """The finished rows, with their counts (0 where one is missing)."""

    @property
    @abstractmethod
    def features(self) -> Mapping[str, FeatureType | None]:
        """The columns that rows become, and their types; None: those of a stream are not known."""

    def map(
        self, dataset: StoredOrStream, *, num_proc: int | None = None, keep_columns: Sequence[str] = ()
    ) -> StoredOrStream:
        """The data set with the columns of `features`, `counts` and `keep_columns` only."""
        columns, types = column_names(dataset), {**self.features, **dict.fromkeys(self.counts, Value("int32"))}
        kept = [column for column in keep_columns if column in columns and column not in types]
        types = {**{column: (dataset.features or {}).get(column) for column in kept}, **types}
        is_stored = isinstance(dataset, Dataset)
        options: RowDict = {"num_proc": num_proc, "desc": f"Tokenizing {self.dataset_name} dataset"}
        return dataset.map(
            self, batched=True, with_indices=True, batch_size=self.batch_rows if is_stored else STREAM_BATCH,
            fn_kwargs={"json_columns": json_columns(dataset)},
            remove_columns=[column for column in columns if column not in kept],
            features=None if None in types.values() else Features(types), **(options if is_stored else {}),
        )  # fmt: skip

    def complaint(self, numbers: Mapping[str, int]) -> tuple[str, str, str, str]:
        """Of a row of these numbers without a trained token: its column, what is given, expected, and the remedy."""
        kept, removed = numbers["tokens"], numbers["removed_tokens"]
        cut = f" ({kept} after truncation to max_length)" if removed else ""
        remedy = (
            "Raise max_length, shorten the prompt, or filter the row out."
            if removed
            else "Check the masks, the chat template's generation marks, or filter the row out."
        )
        return ("input_ids", f"none of the row's {kept + removed} tokens{cut} is trained", "at least one", remedy)

    def numbers(self, columns: Any, first_row: int) -> Numbers:
        """The numbers of a block of tokenised rows (a table, or lists by name)."""
        return {name: np.asarray(columns[name]) for name in self.counts}


def first_row(dataset: StoredOrStream, name: str, expected: str) -> Row:
    """The first row of a data set of text. Raises: ValueError without any, for images, and for a transform's rows."""
    if set(IMAGE_COLUMNS) & set(column_names(dataset)):
        raise ValueError(
            f"{name} dataset has images, but this trainer was made for text. Remove the column of images. SFTTrainer, "
            "DPOTrainer, GRPOTrainer and RLOOTrainer take images if the data sets given to their constructor have them."
        )
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        remedy = "dataset.with_format(None).map(transform, batched=True, remove_columns=dataset.column_names)"
        fault = f"{name} dataset has a transform (with_transform or set_transform), expected stored rows"
        raise ValueError(f"{fault}. Store what it makes: {remedy}.")
    rows: Any = dataset.with_format(None) if isinstance(dataset, Dataset) else dataset
    for row in rows:
        return row
    raise ValueError(f"{name} dataset: no rows, expected {expected}. Check its file and filters.")


def prepare_dataset(
    dataset: AnyDataset, processing_class: ProcessingClass, settings: Preparation, *, name: str = "train"
) -> tuple[AnyDataset, PreparationReport]:
    """The data set as rows of token ids, and its report, which fills as rows of a stream pass.

    Of the other columns `keep_columns` stay. Raises: ValueError or TypeError naming row, column and remedy for the
    first row that cannot be trained on. A stream is checked on its first rows here, and on the others as they pass.
    """
    if settings.skip_prepare:
        return dataset, PreparationReport(name)
    row = first_row(dataset, name, settings.takes)
    if settings.eos_token is not None:
        processing_class = with_eos(processing_class, settings.eos_token)
    kind = settings.row_kind(dataset, row, processing_class, name)
    report = PreparationReport(name, warnings=kind.warnings)
    rows = kind.map(dataset, num_proc=settings.num_proc, keep_columns=settings.keep_columns)
    rows = count_rows(rows, kind, report, settings.untrained_rows)
    return cast(AnyDataset, settings.finished(rows, kind, report)), report


def json_columns(dataset: StoredOrStream) -> RowDict:
    """The types of the columns in which some values are stored as JSON."""
    return {name: kind for name, kind in (dataset.features or {}).items() if "Json(" in repr(kind)}


def count_rows(dataset: StoredOrStream, kind: RowKind, report: PreparationReport, policy: UntrainedPolicy) -> Any:
    """The data set without its columns of numbers, and without the rows that are dropped.

    A stored data set is counted here; of a stream the first rows are checked here, and all are counted as they pass.
    Raises: ValueError where the policy refuses a row, and where no row has anything to train on.
    """
    report.is_streaming = isinstance(dataset, IterableDataset)
    counting, columns = Counting(kind, report, policy), column_names(dataset)
    extra = [name for name in kind.counts if name in columns]
    if isinstance(dataset, Dataset):
        blocks, start = [], 0
        for table in table_blocks(dataset):
            blocks.append(kind.numbers(table, start))
            start += len(table)
        numbers = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        kept = counting.tally(numbers, is_whole=True)
        report.warn()
        rows = dataset.remove_columns(extra)
        return rows if len(kept) == len(dataset) else rows.select(kept)
    first = list(dataset.take(STREAM_BATCH))
    batch = {column: [row[column] for row in first] for column in first[0]}
    Counting(kind, copy.deepcopy(report), policy).tally(kind.numbers(batch, 0), is_whole=True)
    features = dataset.features
    if features is not None:
        features = Features({name: value for name, value in features.items() if name not in extra})
    options = {"batched": True, "batch_size": STREAM_BATCH, "with_indices": True}
    return dataset.map(counting, remove_columns=extra, features=features, **options)


@dataclass
class Counting:
    """Counts rows into a report, and leaves out those that the policy drops."""

    kind: RowKind
    report: PreparationReport
    policy: UntrainedPolicy

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        kept, counts = self.tally(self.kind.numbers(batch, indices[0]), is_whole=False), self.kind.counts
        self.report.warn()
        return {name: [values[row] for row in kept] for name, values in batch.items() if name not in counts}

    def tally(self, numbers: Numbers, *, is_whole: bool) -> np.ndarray:
        """Add numbers of rows to the report: the positions to keep. `is_whole`: rows that all fail are an error."""
        untrained = numbers["untrained_rows"] > 0
        bad = np.any([numbers[name] > 0 for name in self.kind.refused if name in numbers], axis=0)
        is_all = is_whole and bool(untrained.all())
        if is_all or (self.policy == "error" and bad.any()):
            index = int(np.flatnonzero(bad)[0])
            which = "The first {} rows are all" if self.report.is_streaming else "All {} rows are"
            row = {name: int(values[index]) for name, values in numbers.items()}
            rest = f" {which.format(len(bad))} like this." if is_all else ""
            column, fault, expected, remedy = self.kind.complaint(row)
            place = Place(self.report.dataset_name, row["row"], column)
            raise place.error(fault, expected, remedy + rest)
        kept = np.flatnonzero(~untrained) if self.policy == "drop" else np.arange(len(untrained))
        report = self.report
        report.rows += len(untrained)
        report.tokens += int(numbers["tokens"][kept].sum())
        report.dropped_rows += len(untrained) - len(kept)
        report.truncated_rows += int((numbers["removed_tokens"] > 0).sum())
        for name in set(numbers) - {"row", "tokens"}:
            values = numbers[name]
            setattr(report, name, getattr(report, name) + int(values.sum()))
            if values.any():
                rows = np.unique(numbers["row"][values > 0])[:SHOWN_ROWS].tolist()  # one may become two
                report.first[name] = [*report.first.get(name, []), *rows][:SHOWN_ROWS]
        return kept
