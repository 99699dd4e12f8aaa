"""A data set of paired preferences -> token rows for the pair losses and for reward models, and a report."""

from dataclasses import dataclass
from typing import Any, Literal

from datasets import Dataset, IterableDataset, List, Value

from trl.data.formats import column_names
from trl.data.preference_lengths import PairLengths, TruncationMode, TruncationOrder
from trl.data.preference_report import PairCounting, PairReport
from trl.data.preference_reward import RewardTokenizer
from trl.data.preference_rows import PairReader, PairRowType, pair_row_type
from trl.data.preference_tokens import (
    OWN_PROMPT,
    PairTokenizer,
    PreferenceTokenizer,
    RowCounts,
    tokenize_preference_row,
)
from trl.data.preparation import AnyDataset, allowed_ids, with_eos
from trl.data.rendering import ProcessingClass
from trl.data.row_counters import count_rows_by, map_rows
from trl.data.unread_tools import warn_of_unread_tools
from trl.data.validation import Place, check_chat_template, check_eos

__all__ = [
    "PairReport",
    "PreferencePreparation",
    "RewardPreparation",
    "prepare_preference_dataset",
    "prepare_reward_dataset",
    "tokenize_preference_row",
]


@dataclass(frozen=True)
class RewardPreparation:
    """How rows of preferences become whole sequences; lengths in tokens.

    `max_length`: rows with a longer sequence are left out and counted ("drop"), or an error (`untrained_rows="error"`).
    `tools`: stand in for the rows' own `tools` column. `vocab_size`: the first token id that the model does not embed
    (default: the tokenizer's size, for rows that come as tokens). `keep_columns`: columns that stay beside the tokens.
    """

    max_length: int | None = None
    eos_token: str | None = None
    add_special_tokens: bool = True
    tools: list | None = None
    num_proc: int | None = None
    vocab_size: int | None = None
    untrained_rows: Literal["drop", "error"] = "drop"
    keep_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.untrained_rows not in ("drop", "error"):
            raise ValueError(
                f"untrained_rows must be 'drop' or 'error', got {self.untrained_rows!r}. Choose one."
            )
        _ = self.lengths  # whose constructor checks them

    @property
    def lengths(self) -> PairLengths:
        """The limits of the sequences."""
        return PairLengths(self.max_length)


@dataclass(frozen=True)
class PreferencePreparation(RewardPreparation):
    """How rows of preferences become prompts and completions; lengths in tokens (see `PairLengths`).

    `untrained_rows`: rows of which truncation takes a whole completion are left out and counted ("drop"), or an error;
    "error" also refuses rows of which it takes the whole prompt, which else are counted.
    """

    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: TruncationMode = "keep_end"
    truncation_order: TruncationOrder = "sequence"
    is_encoder_decoder: bool = False

    @property
    def lengths(self) -> PairLengths:
        return PairLengths(
            self.max_length,
            self.max_prompt_length,
            self.max_completion_length,
            self.truncation_mode,
            self.truncation_order,
            self.is_encoder_decoder,
        )


def prepare_preference_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: PreferencePreparation,
    *,
    name: str = "train",
) -> tuple[AnyDataset, PairReport]:
    """The data set as rows of `prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids`, and its report.

    Where the two completions do not stand behind the same tokens, `rejected_prompt_input_ids` holds the rejected one's
    prompt; it is None elsewhere, and a stored data set without any such row lacks the column. `ref_chosen_logps` and
    `ref_rejected_logps` are kept. The report of a streaming data set fills as rows pass.

    Raises: ValueError or TypeError naming row, column and remedy for the first row that cannot be trained on. A
    streaming data set is checked on its first rows here, and on the others as they pass.
    """
    row_type, processing_class = _checked(dataset, processing_class, settings, name=name, for_reward=False)
    reader = PairReader(processing_class, row_type, name, tools=settings.tools)
    vocabulary = allowed_ids(processing_class, settings.vocab_size, given=row_type.kind == "tokens")
    special = settings.add_special_tokens
    tokenizer = PreferenceTokenizer(reader, special, vocabulary, lengths=settings.lengths)
    return _prepared(dataset, tokenizer, settings, PairReport(name))


def prepare_reward_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: RewardPreparation,
    *,
    name: str = "train",
) -> tuple[AnyDataset, PairReport]:
    """The data set as rows of whole sequences, `chosen_input_ids` and `rejected_input_ids`, and its report.

    A column `margin` is kept as floats. Rows longer than `max_length` are left out and counted. Raises as
    `prepare_preference_dataset` does.
    """
    row_type, processing_class = _checked(dataset, processing_class, settings, name=name, for_reward=True)
    reader = PairReader(processing_class, row_type, name, needs_prompt=False, tools=settings.tools)
    vocabulary = allowed_ids(processing_class, settings.vocab_size, given=row_type.kind == "tokens")
    special = settings.add_special_tokens
    tokenizer = RewardTokenizer(reader, special, vocabulary, max_length=settings.max_length)
    return _prepared(dataset, tokenizer, settings, PairReport(name, for_reward=True))


def _checked(
    dataset: Any,
    processing_class: ProcessingClass,
    settings: RewardPreparation,
    *,
    name: str,
    for_reward: bool,
) -> tuple[PairRowType, ProcessingClass]:
    first_row = next(iter(dataset), None)
    if first_row is None:
        raise ValueError(
            f"{name} dataset: no rows, expected at least one with 'chosen' and 'rejected'. Check its file and filters."
        )
    processing_class = with_eos(processing_class, settings.eos_token)
    row_type = pair_row_type(column_names(dataset), first_row, name=name, for_reward=for_reward)
    place = Place(name, 0, row_type.columns[0])
    if row_type.kind == "messages":
        check_chat_template(processing_class, place)
    if row_type.kind == "text" or (row_type.kind == "messages" and not for_reward):
        check_eos(processing_class, place, remedy="Set tokenizer.eos_token to a token of its vocabulary.")
    is_chat = row_type.kind == "messages"
    warn_of_unread_tools(dataset, processing_class, name=name, is_chat=is_chat, tools=settings.tools)
    return row_type, processing_class


def _prepared(
    dataset: Any, tokenizer: PairTokenizer, settings: RewardPreparation, report: PairReport
) -> tuple[Any, PairReport]:
    report.is_streaming = isinstance(dataset, IterableDataset)
    columns = column_names(dataset)
    features: dict[str, Any] = dict.fromkeys(tokenizer.columns, List(Value("int32")))
    features |= {column: Value("float32") for column in tokenizer.numbers if column in columns}
    rows = map_rows(
        dataset,
        tokenizer,
        features={**features, **dict.fromkeys(RowCounts._fields, Value("int32"))},
        keep_columns=settings.keep_columns,
        num_proc=settings.num_proc,
        desc=f"Tokenizing {report.dataset_name} dataset",
    )
    if isinstance(rows, Dataset) and OWN_PROMPT in tokenizer.columns:
        is_needed = rows.data.column(OWN_PROMPT).null_count < len(rows)
        rows = rows if is_needed else rows.remove_columns(OWN_PROMPT)
    counting = PairCounting(report, settings.lengths, is_strict=settings.untrained_rows == "error")
    return count_rows_by(rows, counting, RowCounts._fields), report
