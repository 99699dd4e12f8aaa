"""A data set of unpaired preferences (or of pairs) -> token rows for KTO and BCO, and a report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from trl.data.formats import column_names
from trl.data.preference_lengths import PairLengths, TruncationMode
from trl.data.preference_rows import SIDES, PairReader, pair_row_type
from trl.data.preparation import AnyDataset, allowed_ids
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.row_counters import Numbers, RowReport, count_rows_by, map_rows
from trl.data.unpaired_tokens import (
    EMBEDDING_COLUMN,
    KL_COLUMNS,
    REFERENCE_LOGPS,
    TOKEN_COLUMNS,
    WHOLE,
    CompletionLengths,
    Mismatching,
    UnpairedCounts,
    UnpairedReader,
    UnpairedTokenizer,
    row_kind,
)
from trl.data.unread_tools import warn_of_unread_tools
from trl.data.validation import Place, check_chat_template, check_eos

logger = logging.getLogger(__name__)

BATCH = 1000
BALANCED = (1.0, 4 / 3)  # of weight x rows, desirable over undesirable


@dataclass(frozen=True)
class UnpairedPreparation:
    """How rows of prompt, completion and label become token rows; lengths in tokens, None for no limit.

    - A prompt is cut only where it and its completion exceed `max_length`: to its last ("keep_end") or first
      `max_prompt_length` tokens. If that is not enough, the completion keeps its first `max_length - max_prompt_length`,
      and its eos. `max_completion_length` acts on encoder-decoders only.
    - `mismatch_group`: for KTO's KL estimate, the rows among which completions are exchanged, which are those of one
      batch: `per_device_train_batch_size`. None: no such column.
    - `weights`: KTO's desirable_weight and undesirable_weight, compared with the numbers of rows; None: not compared.
    - `embedding_tokenizer`: BCO's; adds `embedding_input_ids`, the prompts under it.
    - `untrained_rows`: rows of which truncation takes the whole completion are left out and counted, or an error.

    Raises: ValueError for lengths below 1, for `max_length` below 3, and for a group of one row.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: TruncationMode = "keep_end"
    is_encoder_decoder: bool = False
    mismatch_group: int | None = None
    weights: tuple[float, float] | None = None
    embedding_tokenizer: PreTrainedTokenizerBase | None = None
    add_special_tokens: bool = True
    num_proc: int | None = None
    vocab_size: int | None = None
    untrained_rows: Literal["drop", "error"] = "drop"

    def __post_init__(self) -> None:
        if self.untrained_rows not in ("drop", "error"):
            raise ValueError(f"untrained_rows must be 'drop' or 'error', got {self.untrained_rows!r}. Choose one.")  # fmt: skip
        if self.mismatch_group is not None and self.mismatch_group < 2:
            raise ValueError(
                f"per_device_train_batch_size must be at least 2 for loss_type='kto', got {self.mismatch_group}: the KL "
                "estimate needs another row's completion from the same batch. Raise it (at least 4 is advised) and lower "
                "gradient_accumulation_steps, or use loss_type='apo_zero_unpaired'."
            )
        _ = self.limits  # whose constructor checks them
        if self.max_length is not None and self.max_length < 3:
            raise ValueError(f"max_length must be >= 3, got {self.max_length}. A begin token, a token to train on and an eos need that.")  # fmt: skip

    @property
    def limits(self) -> PairLengths:
        """The limits of prompt and completion."""
        return PairLengths(
            self.max_length,
            self.max_prompt_length,
            self.max_completion_length,
            self.truncation_mode,
            "prompt_first",
            self.is_encoder_decoder,
        )


@dataclass
class UnpairedReport(RowReport):
    """Counts of one data set of unpaired preferences; of pairs both completions are rows."""

    desirable_rows: int = 0
    undesirable_rows: int = 0

    def phrases(self) -> Mapping[str, str]:
        return {"desirable_rows": "{0.desirable_rows} desirable", **super().phrases(), **_PHRASES}

    def warnings(self) -> Mapping[str, str]:
        return {**super().warnings(), **_WARNINGS}


_PHRASES = {
    "untrained_rows": "{0.untrained_rows} with the completion cut off whole",
    "equal_rows": "{0.equal_rows} of pairs with equal completions",
    "promptless_rows": "{0.promptless_rows} with no prompt",
    "empty_completions": "{0.empty_completions} with a completion of the eos token alone",
}
_WARNINGS = {
    "untrained_rows": (
        "in {0.untrained_rows} of {0.rows} rows (first: {0.first[untrained_rows]}) truncation left no token of the completion; "
        "{0.dropped_rows} of them were left out. Raise max_length, lower max_prompt_length, or filter these rows."
    ),
    "equal_rows": (
        "in {0.equal_rows} rows of pairs (first pairs: {0.first[equal_rows]}) the undesirable completion is the desirable one "
        "too, so the two teach nothing. Filter these pairs, or raise the lengths if truncation made them equal."
    ),
    "promptless_rows": (
        "in {0.promptless_rows} of {0.rows} rows (first: {0.first[promptless_rows]}) there is no token of a prompt, and the "
        "completion's first token is not trained. Give prompts, or a tokenizer that adds a begin token."
    ),
    "empty_completions": (
        "in {0.empty_completions} of {0.rows} rows (first: {0.first[empty_completions]}) one answer of a pair is what the "
        "other one continues; its completion is the eos token alone. Give the prompts in a column 'prompt' if that is "
        "not meant."
    ),
}
_FLAGS = ("equal_rows", "promptless_rows", "empty_completions")


def prepare_unpaired_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: UnpairedPreparation,
    *,
    name: str = "train",
) -> tuple[AnyDataset, UnpairedReport]:
    """The data set as rows of `prompt_input_ids`, `completion_input_ids` and `label`, and its report.

    Pairs are taken apart: each chosen completion (label true) is followed by the rejected one (label false). With
    `mismatch_group`, `KL_completion_input_ids` is the completion of the row before it in its group (groups are counted
    from the first row; of pairs, the row before it with the same label, which is of another pair), cut behind this row's prompt; `KL_prompt_input_ids` is that prompt where its length took more or
    less of it than of `prompt_input_ids`, None elsewhere; a stored data set without any such row lacks the column.
    `reference_logps` and `reference_KL_logps` are kept. The report of a stream fills as rows pass.

    Raises: ValueError or TypeError naming row, column and remedy for the first row that cannot be trained on. A stream
    is checked on its first rows here, and on the others as they pass.
    """
    reader = _checked(dataset, processing_class, settings, name)
    report = UnpairedReport(name, is_streaming=isinstance(dataset, IterableDataset))
    columns = column_names(dataset)
    group = settings.mismatch_group if KL_COLUMNS[0] not in columns or reader.kind != "tokens" else None
    tokenizer = text_tokenizer(processing_class)
    lengths = CompletionLengths(settings.limits, tokenizer.bos_token_id, tokenizer.eos_token_id)  # type: ignore[arg-type]
    tokenize = UnpairedTokenizer(
        reader,
        lengths,
        settings.add_special_tokens,
        allowed_ids(processing_class, settings.vocab_size, given=reader.kind == "tokens"),
        settings.embedding_tokenizer,
        keep_whole=group is not None,
    )
    rows = map_rows(
        dataset,
        tokenize,
        features={**_features(columns, tokenize), **dict.fromkeys(UnpairedCounts._fields, Value("int32"))},
        keep_columns=(*KL_COLUMNS, EMBEDDING_COLUMN) if reader.kind == "tokens" else (),
        num_proc=settings.num_proc,
        desc=f"Tokenizing {name} dataset",
    )
    rows = count_rows_by(rows, UnpairedCounting(report, settings), UnpairedCounts._fields)
    if isinstance(rows, Dataset):
        _warn_of_balance(report, settings)
    if group is not None:
        paired = reader.pairs is not None
        if paired and group < 4:
            logger.warning(
                "%s dataset: an optimiser step of %d rows holds too few pairs for the KL estimate, which then reads the other "
                "completion of the same pair. Raise per_device_train_batch_size, to at least 4 rows per step.",
                name,
                group,
            )
        rows = _with_mismatches(rows, Mismatching(lengths, group, same_label=paired), name)
    return rows, report  # type: ignore[return-value]


def _checked(
    dataset: Any, processing_class: ProcessingClass, settings: UnpairedPreparation, name: str
) -> UnpairedReader:
    """The reader of this data set's rows, whose columns, tokenizer and template it has what it needs."""
    first_row = next(iter(dataset), None)
    if first_row is None:
        raise ValueError(f"{name} dataset: no rows, expected at least one with 'prompt', 'completion' and 'label'. Check its file and filters.")  # fmt: skip
    columns = column_names(dataset)
    if set(TOKEN_COLUMNS) <= set(columns):
        _check_token_columns(columns, settings, name)
        return UnpairedReader(processing_class, "tokens", name)
    if set(SIDES) <= set(columns):
        row_type = pair_row_type(columns, first_row, name=name)
        pairs, kind, column = PairReader(processing_class, row_type, name), row_type.kind, SIDES[0]
    else:
        _check_columns(columns, name)
        pairs, kind, column = None, row_kind(first_row), "completion"
    place = Place(name, 0, column)
    if kind == "messages":
        check_chat_template(processing_class, place)
        warn_of_unread_tools(dataset, processing_class, name=name)
    check_eos(processing_class, place, remedy="Set tokenizer.eos_token to a token of its vocabulary.")
    return UnpairedReader(processing_class, kind, name, pairs)


def _check_columns(columns: Sequence[str], name: str) -> None:
    missing = [column for column in ("prompt", "completion", "label") if column not in columns]
    if not missing:
        return
    hint = "Rename the columns, or add the missing ones."
    if {"completions", "labels"} & set(columns):
        hint = "Steps of solutions are for PRMTrainer."
    elif missing == ["label"]:
        hint = "Add a 'label' (true or false) to each row, or train on all of them alike with SFTTrainer."
    raise ValueError(
        f"{name} dataset, row 0, has columns {list(columns)}, without {', '.join(map(repr, missing))}; KTO and BCO take "
        f"'prompt', 'completion' and 'label', pairs of 'chosen' and 'rejected', or tokenized 'prompt_input_ids' and "
        f"'completion_input_ids' with 'label'. {hint}"
    )


def _check_token_columns(columns: Sequence[str], settings: UnpairedPreparation, name: str) -> None:
    place = f"{name} dataset, row 0, has columns {list(columns)}"
    if "label" not in columns:
        raise ValueError(f"{place}, without 'label'. Add it: true where the completion is desirable.")
    if settings.embedding_tokenizer is not None and EMBEDDING_COLUMN not in columns:
        raise ValueError(
            f"{place}, without {EMBEDDING_COLUMN!r}, the prompts under embedding_tokenizer. Add it, or give text."
        )


def _features(columns: Sequence[str], tokenize: UnpairedTokenizer) -> dict[str, Any]:
    made: dict[str, Any] = {**dict.fromkeys(TOKEN_COLUMNS, List(Value("int32"))), "label": Value("bool")}
    if tokenize.keep_whole:
        made |= dict.fromkeys(WHOLE, List(Value("int32")))
    if tokenize.embedding_tokenizer is not None and tokenize.reader.kind != "tokens":
        made[EMBEDDING_COLUMN] = List(Value("int32"))
    if tokenize.reader.pairs is None:
        made |= {column: Value("float64") for column in REFERENCE_LOGPS if column in columns}
    return made


def _with_mismatches(dataset: Any, mismatch: Mismatching, name: str) -> Any:
    stored = isinstance(dataset, Dataset)
    features = None
    if dataset.features is not None:
        kept = {column: kind for column, kind in dataset.features.items() if column not in WHOLE}
        features = Features({**kept, **dict.fromkeys(KL_COLUMNS, List(Value("int32")))})
    if stored and len(dataset) % mismatch.group == 1:
        logger.warning(
            "%s dataset: the last row is alone in its batch of %d, so its own completion stands in for a mismatched one. "
            "Add or remove a row.",
            name,
            mismatch.group,
        )
    rows = dataset.map(
        mismatch,
        batched=True,
        batch_size=-(-BATCH // mismatch.group) * mismatch.group,
        remove_columns=list(WHOLE),
        features=features,
        **({"desc": f"Mismatching {name} dataset"} if stored else {}),
    )
    own = KL_COLUMNS[1]
    if stored and rows.data.column(own).null_count == len(rows):
        return rows.remove_columns(own)
    return rows


@dataclass
class UnpairedCounting:
    """Sums the numbers of `UnpairedCounts` into the report."""

    report: UnpairedReport
    settings: UnpairedPreparation

    def tally(self, numbers: Numbers, *, first_row: int, is_whole: bool) -> np.ndarray:
        """Positions of the rows to keep.

        Raises: ValueError where the policy is "error" and truncation takes a whole completion, or those of all rows.
        """
        left_out = numbers["left_out"] > 0
        if left_out.any() and (self.settings.untrained_rows == "error" or (is_whole and left_out.all())):
            raise ValueError(self._complaint(int(numbers["row"][left_out][0]), all_of=len(left_out) if left_out.all() else 0))  # fmt: skip
        self.report.take(numbers, left_out=left_out, flags=_FLAGS)
        desirable = numbers["desirable"][~left_out]
        self.report.desirable_rows += int(desirable.sum())
        self.report.undesirable_rows += int((desirable == 0).sum())
        return np.flatnonzero(~left_out)

    def _complaint(self, row: int, *, all_of: int) -> str:
        limit = self.settings.max_length
        rest = f" All {all_of} rows looked at are like this." if all_of else ""
        return (
            f"{Place(self.report.dataset_name, row, 'completion_input_ids')}: the prompt fills max_length {limit}, so "
            "truncation leaves no token of the completion; expected at least one. Set or lower max_prompt_length, raise "
            f"max_length, or filter the row out.{rest}"
        )


def _warn_of_balance(report: UnpairedReport, settings: UnpairedPreparation) -> None:
    """Say where rows of one kind only are trained on, or where the weights do not make up for their numbers."""
    name, good, bad = report.dataset_name, report.desirable_rows, report.undesirable_rows
    if not good or not bad:
        kind = "undesirable (label false)" if bad else "desirable (label true)"
        advice = " With these alone, keep the learning rate low." if bad else ""
        logger.warning("%s dataset: all %d rows are %s. That can be trained on, but both kinds teach more.%s", name, good + bad, kind, advice)  # fmt: skip
        return
    if settings.weights is None:
        return
    weight, counterweight = settings.weights
    low, high = (bound * bad / good for bound in BALANCED)
    if (
        weight * good >= BALANCED[0] * counterweight * bad
        and weight * good <= BALANCED[1] * counterweight * bad
    ):
        return
    logger.warning(
        "%s dataset: %d desirable rows of weight %g and %d undesirable ones of weight %g; desirable_weight x rows over "
        "undesirable_weight x rows should be 1 to 4/3 (KTO, arXiv:2402.01306). Set desirable_weight to %.4g to %.4g, or "
        "undesirable_weight to %.4g to %.4g.",
        name, good, weight, bad, counterweight, low * counterweight, high * counterweight, weight / high, weight / low,
    )  # fmt: skip
