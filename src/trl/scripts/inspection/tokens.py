"""Rows as training reads them: their lengths, and what it does to each token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl.data.pipeline import Counting, PreparationReport, RowKind
from trl.data.prepared_sets import PreparedSets, sequence_lengths
from trl.data.rendering import text_tokenizer
from trl.scripts.inspection.texts import Part, row_parts
from trl.scripts.messages import Shown, Trainer, sequences
from trl.trainer.images import ImageSets

UNLIMITED = dict.fromkeys(("max_length", "max_prompt_length", "max_completion_length"))


class Token(NamedTuple):
    """A token; `state` is "trained", "masked", "cut" or "image", `role` that of its text (None: of the template)."""

    id: int
    text: str
    state: str
    role: str | None


ShownRow = tuple[int, dict[str, list[Token]]]
"""The number of a row, and its sequences of tokens by title."""


def shown_rows(trainer: Trainer, rows: Dataset, count: int, text_field: str) -> list[ShownRow]:
    """`count` rows, evenly spaced, with what training does to each token."""
    numbers = np.unique(np.linspace(0, len(rows) - 1, num=min(count, len(rows))).astype(int)).tolist()
    tokenizer, shown = text_tokenizer(trainer.processing_class), list[ShownRow]()
    for number, row, whole in prepared_rows(trainer, rows, numbers):
        parts, tokens = row_parts(rows[number], text_field), dict[str, list[Token]]()
        titles, ids = {sequence.title for sequence in row}, {sequence.title: sequence.ids for sequence in whole}
        for sequence in row:
            name = sequence.title.rpartition("_")[2]  # of "rejected_prompt", which is there where prompts are cut
            texts = [part for part in parts if part.column == name or part.column not in titles]
            tokens[sequence.title] = shown_tokens(sequence, ids.get(sequence.title) or ids[name], texts, tokenizer)
        shown.append((number, tokens))
    return shown


def prepared_rows(
    trainer: Trainer, rows: Dataset, numbers: Sequence[int]
) -> Iterator[tuple[int, list[Shown], list[Shown]]]:
    """The numbers of rows, their sequences in training, and those without limits of length; without dropped rows."""
    sets, sample = trainer._sets, rows.select(numbers)
    if isinstance(sets, PreparedSets):
        settings = changed(sets.train_settings or sets.settings, packing=False, num_proc=None)
        tables = []
        for limited in (settings, changed(settings, **UNLIMITED)):
            kind = limited.row_kind(sample, sample[0], sets.processing_class, "train")
            tables.append(limited.finished(kind.map(sample), kind, PreparationReport()))
        for place, (row, whole) in enumerate(zip(*tables, strict=True)):
            if not row.get("untrained_rows") or "report" in settings.policies:
                yield numbers[row.get("row", place)], sequences(trainer, row), sequences(trainer, whole)
    elif isinstance(sets, ImageSets):
        collator, unlimited = trainer.data_collator, changed(trainer.data_collator, **UNLIMITED)
        for number, row in zip(numbers, map(dict, sample), strict=True):
            collator.rows_cut = 0
            try:
                shown = sequences(trainer, row)
            except ValueError as error:
                raise ValueError(str(error).replace("row 0 of the batch", f"row {number}")) from error
            yield number, shown, sequences(trainer, row, unlimited) if collator.rows_cut else shown
    else:
        for number in numbers:
            shown = sequences(trainer, trainer.train_dataset[number])
            yield number, shown, shown


def changed(settings: Any, **values: object) -> Any:
    """A dataclass with other values of those fields that it has."""
    return replace(settings, **{name: value for name, value in values.items() if hasattr(settings, name)})


def lengths_and_reports(
    trainer: Trainer, sets: Mapping[str, Dataset]
) -> tuple[np.ndarray, Mapping[str, PreparationReport]]:
    """Tokens of the longest sequence of each training row, and what the preparation of the sets counted."""
    prepared = trainer._sets
    if isinstance(prepared, ImageSets):
        read = {name: read_images(trainer, rows, name) for name, rows in sets.items()}
        return read["train"][0], {name: report for name, (_, report) in read.items()}
    return sequence_lengths(trainer.train_dataset, prepared.settings), getattr(prepared, "reports", {})


def read_images(trainer: Trainer, rows: Dataset, name: str) -> tuple[np.ndarray, PreparationReport]:
    """Tokens of the longest sequence of each row with images, and the counts that a preparation of text makes."""
    report, lengths, counts = PreparationReport(name), list[int](), list[tuple[int, ...]]()
    for number, row, whole in prepared_rows(trainer, rows, range(len(rows))):
        sizes, tokens = [len(sequence.ids) for sequence in row], sum(len(sequence.ids) for sequence in whole)
        is_untrained = not all("trained" in sequence.states for sequence in row)
        is_equal = len(row) == 2 and row[0].ids == row[1].ids
        counts.append((number, sum(sizes), tokens - sum(sizes), is_untrained, is_equal))
        lengths.append(max(sizes))
    names = ("row", "tokens", "removed_tokens", "untrained_rows", "equal_rows")
    numbers = dict(zip(names, np.array(counts).T, strict=True))
    Counting(RowKind, report, "report").tally(numbers, is_whole=False)  # type: ignore[arg-type]
    return np.array(lengths), report


def shown_tokens(
    sequence: Shown, whole: list[int], parts: Sequence[Part], tokenizer: PreTrainedTokenizerBase
) -> list[Token]:
    """The tokens of a sequence of a prepared row; `whole`: those of the row without limits of length."""
    _, ids, states = sequence
    for before in (0, len(whole) - len(ids)):
        if len(ids) < len(whole) and whole[before : before + len(ids)] == ids:
            after = len(whole) - len(ids) - before
            ids, states = whole, [*["cut"] * before, *states, *["cut"] * after]
    pieces, special = texts_of(ids, tokenizer), set(tokenizer.all_special_ids)
    roles = piece_roles(pieces, parts) if parts else ["text"] * len(ids)
    return [
        Token(token, piece, state, None if token in special else role)
        for token, piece, state, role in zip(ids, pieces, states, roles, strict=True)
    ]


def texts_of(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each token; a character of several tokens is that of the last one, the others are empty."""
    texts, start = list[str](), 0
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[start:end]))
        is_whole = not text.endswith("\ufffd") or end - start == 4 or end == len(ids)  # bytes at most
        texts.append(text if is_whole else "")
        start = end if is_whole else start
    return texts


def piece_roles(pieces: Sequence[str], parts: Sequence[Part]) -> list[str | None]:
    """The role of the text that each piece belongs to; None for the rest, which a template wrote."""
    text, start = "".join(pieces), 0
    roles: list[str | None] = [None] * len(text)  # of characters
    for part in parts:
        content = part.text if text.find(part.text, start) >= 0 else part.text.strip()  # as templates do
        place = text.find(content, start) if content else -1
        if place >= 0:
            start = place + len(content)
            roles[place:start] = [part.role] * len(content)
    ends = list(accumulate(map(len, pieces), initial=0))
    return [next(filter(None, roles[first : max(end, first + 1)]), None) for first, end in pairwise(ends)]
