"""Solutions in steps, each right or wrong -> token rows with a class at the end of every step, for process reward models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from datasets import IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from trl.data.counting import PreparationReport, RowCounts, UntrainedPolicy, apply_policy, untrained_message
from trl.data.formats import column_names
from trl.data.preparation import AnyDataset, Vocabulary, allowed_ids, check_ids
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.row_counters import Numbers, count_rows_by, map_rows
from trl.data.spans import encode
from trl.data.validation import Place, check_label, check_text

IGNORED = -100
COLUMNS = ("prompt", "completions", "labels")
COUNTERS = ("whole_length", "kept_length", "steps", "kept_steps")


@dataclass(frozen=True)
class StepwisePreparation:
    """How solutions become token rows; lengths in tokens, None for no limit.

    `train_on_last_step_only` labels the last step alone, in training (`is_eval=False`). `untrained_rows`: what to do with
    rows whose labelled steps are all cut off. `vocab_size`: how many token ids the model embeds; `num_labels`:
    how many classes it tells apart.

    Raises: ValueError or TypeError for a separator that is no text, and for lengths below 1.
    """

    step_separator: str = "\n"
    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    train_on_last_step_only: bool = False
    is_eval: bool = False
    num_proc: int | None = None
    untrained_rows: UntrainedPolicy = "report"
    vocab_size: int | None = None
    num_labels: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.step_separator, str):
            raise TypeError(
                f"step_separator must be a string, got {self.step_separator!r}. Use '\\n', the default."
            )
        for name in ("max_length", "max_prompt_length", "max_completion_length"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be >= 1, got {given}. Use None for no limit.")


@dataclass
class StepwiseReport(PreparationReport):
    """Counts of the preparation of stepwise data: `steps` are those that were given a label."""

    steps: int = 0
    removed_steps: int = 0

    def phrases(self) -> Mapping[str, str]:
        return {
            "steps": "{0.steps} labelled steps",
            "removed_steps": "{0.removed_steps} of them cut off",
            **super().phrases(),
        }

    def warnings(self) -> Mapping[str, str]:
        words = (
            "{0.removed_steps} of {0.steps} labelled steps were cut off by max_length or max_completion_length, and are "
            "not trained on. Raise them, or lower max_prompt_length."
        )
        return {**super().warnings(), "removed_steps": words}


class StepRow(NamedTuple):
    """One tokenised solution and what truncation did to it."""

    input_ids: list[int]
    labels: list[int]
    whole_length: int
    kept_length: int
    steps: int
    kept_steps: int


@dataclass(frozen=True)
class StepAssembly:
    """Puts the tokens of a prompt and its steps together; `begin` is the begin token, `separator` closes each step."""

    separator: list[int]
    begin: list[int]
    max_length: int | None
    max_prompt_length: int | None
    max_completion_length: int | None
    last_step_only: bool

    def __call__(self, prompt: list[int], steps: Sequence[list[int]], labels: Sequence[bool]) -> StepRow:
        """The row: of a long prompt the end is kept, of long steps, and of the whole, the beginning.

        The class of a step stands on the last token of the separator behind it.
        """
        completion = [token for step in steps for token in (*step, *self.separator)]
        classes = [IGNORED] * len(completion)
        ends = np.cumsum([len(step) + len(self.separator) for step in steps]) - 1
        labelled = list(zip(ends.tolist(), labels, strict=True))[-1 if self.last_step_only else 0 :]
        for end, label in labelled:
            classes[end] = int(label)
        length = len(prompt) + len(completion) + (prompt[:1] != self.begin and len(self.begin))
        if self.max_prompt_length is not None:
            prompt = prompt[-self.max_prompt_length :]
        if prompt[:1] != self.begin:
            prompt = [*self.begin, *prompt]
        ids = [*prompt, *completion[: self.max_completion_length]][: self.max_length]
        kept = [*[IGNORED] * len(prompt), *classes[: self.max_completion_length]][: self.max_length]
        return StepRow(ids, kept, length, len(ids), len(labelled), len(kept) - kept.count(IGNORED))


def tokenize_stepwise_row(
    features: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    step_separator: str,
    max_length: int | None,
    max_prompt_length: int | None,
    max_completion_length: int | None,
    train_on_last_step_only: bool,
    is_eval: bool,
) -> dict[str, list[int]]:
    """`input_ids` and `labels` of one row of `prompt`, `completions` and `labels`; see `StepwisePreparation`."""
    settings = StepwisePreparation(
        step_separator=step_separator,
        max_length=max_length,
        max_prompt_length=max_prompt_length,
        max_completion_length=max_completion_length,
        train_on_last_step_only=train_on_last_step_only,
        is_eval=is_eval,
    )
    row = StepwiseTokenizer(tokenizer, settings).rows([dict(features)], [0])[0]
    return {"input_ids": row.input_ids, "labels": row.labels}


@dataclass(frozen=True)
class StepwiseTokenizer:
    """Tokenises batches of rows for `datasets.Dataset.map` (batched, with indices); each text is tokenised alone.

    `version` is part of the cache key of the prepared data set.
    """

    processing_class: ProcessingClass
    settings: StepwisePreparation
    dataset_name: str = "train"
    vocabulary: Vocabulary | None = None
    version: int = 1

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        """Columns `input_ids`, `labels`, and those in `COUNTERS`."""
        given = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = self.rows(given, indices)
        if self.vocabulary is not None:
            check_ids([row.input_ids for row in rows], self.vocabulary, self.dataset_name, indices[0])
        return {name: [getattr(row, name) for row in rows] for name in StepRow._fields}

    def rows(self, given: list[dict[str, Any]], indices: Sequence[int]) -> list[StepRow]:
        """The tokenised rows.

        Raises: TypeError or ValueError naming row, column and remedy.
        """
        for index, row in zip(indices, given, strict=True):
            _check_row(row, index, self.dataset_name)
        tokenizer, assembly = text_tokenizer(self.processing_class), self._assembly()
        texts = dict.fromkeys(text for row in given for text in (row["prompt"], *row["completions"]))
        ids = dict(zip(texts, encode(tokenizer, list(texts)), strict=True))
        return [
            assembly(ids[row["prompt"]], [ids[step] for step in row["completions"]], row["labels"])
            for row in given
        ]

    def _assembly(self) -> StepAssembly:
        settings, tokenizer = self.settings, text_tokenizer(self.processing_class)
        separator = encode(tokenizer, [settings.step_separator])[0]
        if not separator:
            raise ValueError(
                f"step_separator {settings.step_separator!r} has no token under this tokenizer, expected at least one: "
                "the class of a step stands on it. Use '\\n', or a special token."
            )
        return StepAssembly(
            separator,
            [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id],  # type: ignore[list-item]
            settings.max_length,
            settings.max_prompt_length,
            settings.max_completion_length,
            last_step_only=settings.train_on_last_step_only and not settings.is_eval,
        )


def _check_row(row: Mapping[str, Any], index: int, name: str) -> None:
    check_text(row["prompt"], Place(name, index, "prompt"))
    steps, labels = row["completions"], row["labels"]
    place = Place(name, index, "completions")
    if not isinstance(steps, list | tuple):
        raise TypeError(f"{place}: {steps!r} is of type {type(steps).__name__}, expected a list of steps (strings). Split the solution into steps.")  # fmt: skip
    if not steps:
        raise ValueError(f"{place}: an empty list, expected at least one step. Filter the row out.")
    for number, step in enumerate(steps):
        check_text(step, Place(name, index, f"completions[{number}]"))
    place = place._replace(column="labels")
    if not isinstance(labels, list | tuple):
        raise TypeError(f"{place}: {labels!r} is of type {type(labels).__name__}, expected a list with one true or false for each step.")  # fmt: skip
    if len(labels) != len(steps):
        raise ValueError(
            f"{place}: {len(labels)} labels for {len(steps)} steps in 'completions', expected as many. Give each step "
            "its label, or filter the row out."
        )
    for number, label in enumerate(labels):
        check_label(label, Place(name, index, f"labels[{number}]"))


@dataclass(frozen=True)
class GivenSteps:
    """Checks rows that are tokens already, `input_ids` and `labels`, and cuts them to `max_length`."""

    settings: StepwisePreparation
    dataset_name: str
    vocabulary: Vocabulary | None

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        name = self.dataset_name
        check_ids(batch["input_ids"], self.vocabulary, name, indices[0])  # type: ignore[arg-type]
        given = zip(indices, batch["input_ids"], batch["labels"], strict=True)
        rows = [self._row(ids, labels, Place(name, index, "labels")) for index, ids, labels in given]
        return {column: [getattr(row, column) for row in rows] for column in StepRow._fields}

    def _row(self, ids: list[int], labels: list[int], place: Place) -> StepRow:
        if labels is None or len(labels) != len(ids):
            raise ValueError(
                f"{place}: {len(labels or [])} labels for {len(ids)} tokens in 'input_ids', expected as many. Give each "
                "token its class, or -100."
            )
        for label in labels:
            if (
                isinstance(label, bool)
                or not isinstance(label, int)
                or not (label == IGNORED or 0 <= label < self.settings.num_labels)
            ):
                raise ValueError(
                    f"{place}: {label!r}, expected a class (0 to {self.settings.num_labels - 1}) at the end of a step and "
                    "-100 elsewhere. Correct it."
                )
        kept = labels[: self.settings.max_length]
        count = len(labels) - labels.count(IGNORED)
        return StepRow(ids[: len(kept)], kept, len(ids), len(kept), count, len(kept) - kept.count(IGNORED))


@dataclass
class StepCounting:
    """Sums the numbers of `COUNTERS` into the report."""

    report: StepwiseReport
    policy: UntrainedPolicy

    def tally(self, numbers: Numbers, *, first_row: int, is_whole: bool) -> np.ndarray:
        """Positions of the rows to keep.

        Raises: ValueError where the policy is "error" and a row has no labelled step left, or none of a whole data set has.
        """
        name = self.report.dataset_name
        counts = RowCounts(numbers["whole_length"], numbers["kept_length"], numbers["kept_steps"])
        removed = counts.lengths - counts.kept
        if is_whole and not counts.trained.any():
            raise ValueError(
                f"{untrained_message(counts, 0, name)} All {len(removed)} rows looked at are like this."
            )
        counted = StepwiseReport(
            name,
            rows=len(removed),
            tokens=int(counts.kept.sum()),
            truncated_rows=int((removed > 0).sum()),
            removed_tokens=int(removed.sum()),
            untrained_rows=int((counts.trained == 0).sum()),
            steps=int(numbers["steps"].sum()),
            removed_steps=int((numbers["steps"] - numbers["kept_steps"]).sum()),
        )
        kept = apply_policy(counts, counted, self.policy, first_row=first_row)
        self.report.add(counted)
        return kept


def prepare_stepwise_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: StepwisePreparation,
    *,
    name: str = "train",
) -> tuple[AnyDataset, StepwiseReport]:
    """Rows `prompt`, `completions`, `labels` as rows of `input_ids` and `labels` (class or -100), and the report.

    Rows that have `input_ids` already are checked and passed on. The report of a stream fills as rows pass.

    Raises: ValueError or TypeError naming row, column and remedy for the first row that cannot be trained on; of a
    stream the first rows are looked at here.
    """
    report = StepwiseReport(name, is_streaming=isinstance(dataset, IterableDataset))
    columns = column_names(dataset) if next(iter(dataset), None) is not None else []
    given = "input_ids" in columns
    _check_columns(columns, name, given=given)
    vocabulary = allowed_ids(processing_class, settings.vocab_size, given=given)
    rows = map_rows(
        dataset,
        GivenSteps(settings, name, vocabulary)
        if given
        else StepwiseTokenizer(processing_class, settings, name, vocabulary),
        features={
            "input_ids": List(Value("int32")),
            "labels": List(Value("int8")),
            **dict.fromkeys(COUNTERS, Value("int32")),
        },
        num_proc=settings.num_proc,
        desc=f"Tokenizing {name} dataset",
    )
    return count_rows_by(rows, StepCounting(report, settings.untrained_rows), COUNTERS), report


def _check_columns(columns: Sequence[str], name: str, *, given: bool) -> None:
    wanted = ("input_ids", "labels") if given else COLUMNS
    missing = [column for column in wanted if column not in columns]
    if not columns:
        raise ValueError(f"{name} dataset: no rows, expected at least one with {', '.join(COLUMNS)}. Check its file and filters.")  # fmt: skip
    if not missing:
        return
    hint = "Rename the columns, or add the missing ones."
    if "completion" in columns and "completions" in missing:
        hint = "Split 'completion' into a list of steps, 'completions', with a list of 'labels'."
    raise ValueError(
        f"{name} dataset, row 0, has columns {list(columns)}, without {', '.join(map(repr, missing))}; PRM takes 'prompt' "
        f"(text), 'completions' (a list of steps) and 'labels' (a list of true or false), or tokenized 'input_ids' with "
        f"'labels'. {hint}"
    )
