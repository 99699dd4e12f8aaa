"""Solutions in steps, each right or wrong -> token rows with a class at the end of every step, for PRMs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from datasets import List, Value
from datasets.features.features import FeatureType
from transformers import PreTrainedTokenizerBase

from trl.data.formats import Row, RowDict, StoredOrStream, column_names
from trl.data.pipeline import Preparation, RowKind, Vocabulary, allowed_ids, check_ids
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.tokenization import Ids, encode
from trl.data.validation import Place, check_label, check_text, wrong_columns
from trl.tensors.padding import IGNORED

COLUMNS = ("prompt", "completions", "labels")


@dataclass(frozen=True, kw_only=True)
class StepwisePreparation(Preparation):
    """How solutions become token rows.

    `train_on_last_step_only` labels the last step alone, in training (`is_eval=False`). `num_labels`: number of
    classes. Raises: ValueError or TypeError for a separator that is no text, and as `Preparation`.
    """

    step_separator: str = "\n"
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    train_on_last_step_only: bool = False
    is_eval: bool = False
    num_labels: int = 2

    takes = ", ".join(COLUMNS)

    @property
    def prepared_columns(self) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def row_kind(
        self, dataset: StoredOrStream, row: Row, processing_class: ProcessingClass, name: str
    ) -> "StepwiseTokenizer":
        columns = column_names(dataset)
        is_given = "input_ids" in columns
        needed = ("input_ids", "labels") if is_given else COLUMNS
        if not set(needed) <= set(columns):
            takes = (
                "'prompt' (text), 'completions' (a list of steps) and 'labels' (a list of true or false), "
                "or tokenized 'input_ids' and 'labels'"
            )
            raise wrong_columns(columns, name, takes=takes, needed=needed)
        vocabulary = allowed_ids(processing_class, self.vocab_size, is_tokenized=is_given)
        return StepwiseTokenizer(processing_class, self, name, vocabulary, is_given)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.step_separator, str):
            raise TypeError(f"step_separator must be a string, got {self.step_separator!r}.")


@dataclass(frozen=True)
class StepwiseTokenizer(RowKind):
    """Solutions as `input_ids` and `labels`, a class on the last token of the separator behind each step.

    Each text is tokenised alone; of a long prompt the end is kept, of long steps, and of the whole, the beginning. Rows
    that are tokens already (`is_given`) are checked and cut. `version` is part of the cache key.
    """

    counts = (*RowKind.counts, "steps", "removed_steps")

    processing_class: ProcessingClass
    settings: StepwisePreparation
    dataset_name: str = "train"
    vocabulary: Vocabulary | None = None
    is_given: bool = False
    version: int = 3

    @property
    def features(self) -> dict[str, FeatureType]:
        return {"input_ids": List(Value("int32")), "labels": List(Value("int8"))}

    def rows(self, rows: Sequence[Row], indices: Sequence[int]) -> list[RowDict]:
        finished = []
        for row, index in zip(rows, indices, strict=True):
            made = row if self.is_given else self._tokenized(row, index)
            check_ids(made["input_ids"], self.vocabulary, Place(self.dataset_name, index, "input_ids"))
            finished.append(self._cut(row, index) if self.is_given else made)
        return finished

    def _tokenized(self, row: Row, index: int) -> RowDict:
        _check_row(row, index, self.dataset_name)
        settings, tokenizer = self.settings, text_tokenizer(self.processing_class)
        prompt, separator, *steps = encode(tokenizer, [row["prompt"], settings.step_separator, *row["completions"]])
        if not separator:
            raise ValueError(f"step_separator {settings.step_separator!r} has no token, expected some.")
        completion = [token for step in steps for token in (*step, *separator)]
        classes = [IGNORED] * len(completion)
        ends = accumulate(len(step) + len(separator) for step in steps)
        labelled = list(zip(ends, row["labels"], strict=True))
        if settings.train_on_last_step_only and not settings.is_eval:
            labelled = labelled[-1:]
        for end, label in labelled:
            classes[end - 1] = int(label)
        length = len(self._begun(prompt)) + len(completion)
        if settings.max_prompt_length is not None:
            prompt = prompt[-settings.max_prompt_length :]
        prompt, last = self._begun(prompt), settings.max_completion_length
        ids = [*prompt, *completion[:last]]
        return self._counted(ids, [*[IGNORED] * len(prompt), *classes[:last]], index, length, len(labelled))

    def _begun(self, prompt: Ids) -> Ids:
        begin: Any = text_tokenizer(self.processing_class).bos_token_id
        return prompt if begin is None or prompt[:1] == [begin] else [begin, *prompt]

    def _cut(self, row: Row, index: int) -> RowDict:
        ids, labels, place = row["input_ids"], row["labels"], Place(self.dataset_name, index, "labels")
        if labels is None or len(labels) != len(ids):
            fault = f"{len(labels or [])} labels for {len(ids)} tokens in 'input_ids'"
            raise place.error(fault, "as many", "Give each token its class, or -100.")
        classes = range(self.settings.num_labels)
        for label in labels:
            if type(label) is not int or not (label == IGNORED or label in classes):
                expected = f"a class (0 to {classes[-1]}) at the end of a step and -100 elsewhere"
                raise place.error(repr(label), expected, "Correct it.")
        return self._counted(ids, labels, index, len(ids), len(labels) - labels.count(IGNORED))

    def _counted(self, ids: Ids, labels: Ids, index: int, length: int, steps: int) -> RowDict:
        """A row cut to `max_length`, with its numbers; it had `length` tokens and `steps` labels."""
        ids, labels = ids[: self.settings.max_length], labels[: self.settings.max_length]
        kept_steps = len(labels) - labels.count(IGNORED)
        return {
            "input_ids": ids,
            "labels": labels,
            "row": index,
            "tokens": len(ids),
            "removed_tokens": length - len(ids),
            "untrained_rows": int(not kept_steps),
            "steps": steps,
            "removed_steps": steps - kept_steps,
        }


def _check_row(row: Row, index: int, name: str) -> None:
    check_text(row["prompt"], Place(name, index, "prompt"))
    steps, labels, place = row["completions"], row["labels"], Place(name, index, "completions")
    if not isinstance(steps, list | tuple):
        raise place.mistyped(steps, "a list of steps (strings)", "Split the solution into steps.")
    if not steps:
        raise place.error("an empty list", "at least one step", "Filter the row out.")
    for number, step in enumerate(steps):
        check_text(step, Place(name, index, f"completions[{number}]"))
    place = place._replace(column="labels")
    if not isinstance(labels, list | tuple):
        raise place.mistyped(labels, "a list of true or false for each step", "Give each step its label.")
    if len(labels) != len(steps):
        fault = f"{len(labels)} labels for {len(steps)} steps in 'completions'"
        raise place.error(fault, "as many", "Give each step its label, or filter the row out.")
    for number, label in enumerate(labels):
        check_label(label, Place(name, index, f"labels[{number}]"))


def tokenize_stepwise_row(
    features: Row, tokenizer: PreTrainedTokenizerBase, step_separator: str, max_length: int | None,
    max_prompt_length: int | None, max_completion_length: int | None, train_on_last_step_only: bool, is_eval: bool,
) -> dict[str, list[int]]:  # fmt: skip
    """`input_ids` and `labels` of one row of `prompt`, `completions` and `labels`; see `StepwisePreparation`."""
    settings = StepwisePreparation(
        step_separator=step_separator, max_length=max_length, max_prompt_length=max_prompt_length,
        max_completion_length=max_completion_length, train_on_last_step_only=train_on_last_step_only, is_eval=is_eval,
    )  # fmt: skip
    row = StepwiseTokenizer(tokenizer, settings)({name: [value] for name, value in features.items()}, [0])
    return {"input_ids": row["input_ids"][0], "labels": row["labels"][0]}
