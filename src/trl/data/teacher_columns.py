"""A teacher's most likely tokens as columns of a data set, which `trl teach` writes: `teacher_ids` and `teacher_logps`.

Each holds k numbers for every trained token of a row: token ids, and their log-probs under the teacher's whole
distribution. `teacher_settings`, a JSON object, has the tokenizer and the temperature that they belong to.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl.data.formats import Row, RowDict, column_names
from trl.data.ragged import list_lengths, read_ragged
from trl.tensors.padding import IGNORED

TEACHER_COLUMNS = TEACHER_IDS, TEACHER_LOGPS = "teacher_ids", "teacher_logps"
TEACHER_SETTINGS = "teacher_settings"
TEACHER = "teacher"  # a row's teacher by name, where there are several
LARGEST_LOGP = 1e-3  # of rounded log-probs


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of a tokenizer's tokens and their ids, 32 hex digits."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return xxhash.xxh3_128(json.dumps(tokens).encode()).hexdigest()


def has_teacher_columns(dataset: Any) -> bool:
    """Whether the rows have a teacher's tokens and log-probs."""
    return hasattr(dataset, "column_names") and set(TEACHER_COLUMNS) <= set(column_names(dataset))


def trained_tokens(dataset: Dataset, *, completion_only: bool = True) -> np.ndarray:
    """Trained tokens of each prepared row, `(rows,)`, without the first of a sequence, which nothing predicts.

    >>> trained_tokens(Dataset.from_dict({"input_ids": [[5, 6, 7], [8]], "completion_mask": [[0, 1, 1], [1]]})).tolist()
    [2, 0]
    """
    masks = {"labels": IGNORED, "assistant_masks": 0, **({"completion_mask": 0} if completion_only else {})}
    counts = [np.zeros(0, np.int64)]
    for block in dataset.with_format("arrow").iter(batch_size=10_000):
        table: Any = block
        offsets = read_ragged(table["input_ids"], "input_ids").offsets
        trained = np.ones(offsets[-1], dtype=bool)
        for name in set(masks) & set(table.column_names):
            trained &= read_ragged(table[name], name).values != masks[name]
        is_packed = "seq_lengths" in table.column_names
        lengths = read_ragged(table["seq_lengths"], "seq_lengths").values if is_packed else np.diff(offsets)
        trained[(lengths.cumsum() - lengths)[lengths > 0]] = False
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained)])
        counts.append(sums[offsets[1:]] - sums[offsets[:-1]])
    return np.concatenate(counts)


def check_teacher_columns(
    source: object, dataset: object, tokenizer: PreTrainedTokenizerBase, *, temperature: float,
    max_length: int | None, completion_only: bool = True, name: str = "train",
) -> None:  # fmt: skip
    """Raise ValueError unless the columns of rows (of a stream: their names) belong to these settings."""
    if not has_teacher_columns(dataset):
        missing = f"no columns {' and '.join(TEACHER_COLUMNS)}, which stand for a teacher"
        raise ValueError(f"{name} dataset: {missing}. Write them with `trl teach`, or pass teacher_model.")
    if not isinstance(dataset, Dataset) or not isinstance(source, Dataset):
        return
    texts = source.unique(TEACHER_SETTINGS) if TEACHER_SETTINGS in source.column_names else []
    for settings in (json.loads(text) for text in texts if text is not None):
        if settings["tokenizer"] != vocabulary_hash(tokenizer):
            fault = f"{name} dataset: {TEACHER_COLUMNS[0]} belong to another tokenizer than the student's"
            remedy = "Run `trl teach` with --model_name_or_path STUDENT; for another vocabulary use GOLDTrainer"
            raise ValueError(f"{fault}. {remedy}.")
        if settings["temperature"] != temperature:
            fault = f"temperature={temperature}, but the teacher columns of the {name} dataset are at temperature"
            remedy = f"Set that temperature, or run `trl teach` again with --temperature {temperature}"
            raise ValueError(f"{fault} {settings['temperature']}. {remedy}.")
    if max_length is not None and "input_ids" in source.column_names and "seq_lengths" not in source.column_names:
        longest = int(list_lengths(source, "input_ids").max())
        if longest > max_length:
            fault = f"max_length={max_length} truncates rows with teacher columns, the longest has {longest} tokens"
            remedy = f"Set max_length={longest}, or run `trl teach` again with --max_length {max_length}"
            raise ValueError(f"{fault}. {remedy}.")
    trained = trained_tokens(dataset, completion_only=completion_only)
    for column in TEACHER_COLUMNS:
        entries = list_lengths(dataset, column)
        if len(wrong := np.flatnonzero(entries != trained)):
            raise ValueError(
                f"{name} dataset, row {wrong[0]}: {column} has {entries[wrong[0]]} entries for {trained[wrong[0]]} "
                f"trained tokens ({len(wrong)} such rows). The rows were truncated or prepared with other settings. "
                "Use those of `trl teach` (max_length and the losses' masks; they are in its teacher.json)."
            )


def check_teacher_names(dataset: object, teachers: Sequence[str], *, name: str) -> None:
    """Raise ValueError unless the column `teacher` of stored rows names one of several teachers in each."""
    if isinstance(dataset, Dataset):
        for teacher in dataset.unique(TEACHER) if TEACHER in dataset.column_names else [None]:
            teacher_number(teacher, teachers, f"{name} dataset")


def teacher_number(name: str | None, teachers: Sequence[str], place: str) -> int:
    """The number of a teacher among several."""
    if name is None or name not in teachers:
        raise ValueError(f"{place}: column {TEACHER!r} has {name!r}, expected one of {', '.join(teachers)}.")
    return list(teachers).index(name)


@dataclass
class WithTeacherColumns:
    """Adds `teacher_ids` and `teacher_logps` `(K, k)` of a batch's K trained tokens, where its rows have them.

    `vocabulary` is the number of tokens that the student has. With several `teachers`, by name, the rows' column
    `teacher` becomes `teacher (B,)`, their numbers. Raises: ValueError naming the row for an unknown teacher, ids
    outside of the vocabulary, NaN and positive log-probs; for rows of different k or number of positions.
    """

    collate: Callable[[Sequence[Row]], RowDict]
    vocabulary: int
    teachers: Sequence[str] = ()

    def __call__(self, rows: Sequence[Row]) -> RowDict:
        batch = self.collate(rows)
        if self.teachers:
            names = [(row.get(TEACHER), f"row {number} of the batch") for number, row in enumerate(rows)]
            return {**batch, TEACHER: torch.tensor([teacher_number(n, self.teachers, place) for n, place in names])}
        if not all(row.get(name) is not None for row in rows for name in TEACHER_COLUMNS):
            return batch
        tables = [self._read(row, number) for number, row in enumerate(rows) if len(row[TEACHER_COLUMNS[0]])]
        if len(sizes := {ids.shape[-1] for ids, _ in tables}) > 1:
            raise ValueError(f"the rows of a batch have {sorted(sizes)} teacher tokens per position. Use one top_k.")
        columns, labels = concatenated(tables), batch["labels"]
        shown = batch["attention_mask"][:, :-1].bool() if "attention_mask" in batch else True
        trained = int(((labels[:, 1:] != IGNORED) & shown).sum())
        if trained != len(columns[TEACHER_COLUMNS[0]]):
            raise ValueError(
                f"the rows of a batch have teacher columns for {len(columns[TEACHER_COLUMNS[0]])} tokens, and "
                f"{trained} are trained: they were truncated or prepared with other settings than those of `trl teach`."
            )
        return {**batch, **columns}

    def _read(self, row: Row, number: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, logps = np.array(row[TEACHER_COLUMNS[0]], np.int64), np.array(row[TEACHER_COLUMNS[1]], float)
            fault = "" if ids.ndim == 2 and ids.shape == logps.shape else f"{ids.shape} and {logps.shape}"
        except (ValueError, TypeError) as error:
            raise ValueError(f"row {number} of the batch: {_EXPECTED}, got lists that differ.") from error
        if not fault and not ((ids >= 0) & (ids < self.vocabulary)).all():
            fault = f"token ids from {ids.min()} to {ids.max()} for a vocabulary of {self.vocabulary}"
        if not fault and not (logps <= LARGEST_LOGP).all():
            fault = "log-probs that are NaN or above 0"
        if fault:
            raise ValueError(f"row {number} of the batch: {_EXPECTED}, got {fault}. Write them with `trl teach`.")
        return ids, logps


def concatenated(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Token ids and log-probs of rows, `(K_i, k)` each, as a batch's columns."""
    columns = zip(*parts, strict=True) if parts else ([np.zeros((0, 1), np.int64)], [np.zeros((0, 1))])
    named_columns = zip(TEACHER_COLUMNS, columns, strict=True)
    return {name: torch.from_numpy(np.concatenate(column)) for name, column in named_columns}


_EXPECTED = f"{' and '.join(TEACHER_COLUMNS)} must have k token ids and log-probs for each trained token, (K, k)"
