"""Rows with what training does to each token, and the texts that a user wrote."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl.data.formats import Row, RowDict, maybe_convert_to_chatml
from trl.data.pipeline import PreparationReport
from trl.data.prepared_sets import PreparedSets
from trl.data.rendering import Fields, text_tokenizer
from trl.rewards.ready_made import content_of
from trl.scripts.messages import Trainer, sequences

TEXTS = ("text", "messages", "prompt", "completion", "chosen", "rejected", "completions")
ANSWERED = ("messages", "completion", "chosen", "rejected")  # whose last text is an answer
ROW_BY_ROW = {"packing": False, "num_proc": None}
UNLIMITED = {**ROW_BY_ROW, "max_length": None, "max_prompt_length": None, "max_completion_length": None}


class Part(NamedTuple):
    """A text of a row: its column, the role that says it ("prompt" or "text" without one), and if it is an answer."""

    column: str
    role: str
    text: str
    is_answer: bool


class TokenSequence(NamedTuple):
    """A sequence of a row. `states`: "trained", "masked" or "cut"; `roles`: those of texts (None: of the template)."""

    title: str
    ids: list[int]
    states: list[str]
    texts: list[str]
    roles: Sequence[str | None]


ShownRow = tuple[int, list[TokenSequence]]
"""The number of a row, and its sequences of tokens."""


def row_parts(row: Row, text_field: str = "text") -> list[Part]:
    """The texts of a row, of messages and without. Rows of tokens have none."""
    parts = list[Part]()
    columns: RowDict = dict(maybe_convert_to_chatml(dict(row)))
    for column in (name for name in columns if name in TEXTS or name == text_field):
        values = columns[column] if isinstance(columns[column], list) else [columns[column]]
        turns = [{"content": x} if isinstance(x, str) else x for x in values if isinstance(x, (str, dict))]
        for place, turn in enumerate(turns, start=1):
            role = turn.get("role") or ("prompt" if column == "prompt" else "text")
            is_last = column in ANSWERED and place == len(turns) and not turn.get("tool_calls")
            parts.append(Part(column, role, content_of([turn]), is_last and role in ("assistant", "text")))
    return parts


def shown_rows(trainer: Trainer, rows: Dataset, count: int, text_field: str) -> list[ShownRow]:
    """`count` rows, evenly spaced, with what training does to each token; without dropped ones."""
    numbers = np.unique(np.linspace(0, len(rows) - 1, num=min(count, len(rows))).astype(int)).tolist()
    tokenizer, shown = text_tokenizer(trainer.processing_class), list[ShownRow]()
    for number, *pair in prepared_rows(trainer, rows, numbers):
        row, whole = (sequences(trainer, fields) for fields in pair)
        parts, made = row_parts(rows[number], text_field), list[TokenSequence]()
        titles, whole_ids = {sequence.title for sequence in row}, {sequence.title: sequence.ids for sequence in whole}
        for title, ids, states in row:
            name = title.rpartition("_")[2]  # of "rejected_prompt", which is there where prompts are cut
            all_ids = whole_ids.get(title) or whole_ids[name]
            cut = len(all_ids) - len(ids)
            before = 0 if all_ids[: len(ids)] == ids else cut
            if all_ids[before : before + len(ids)] == ids:
                ids, states = all_ids, [*["cut"] * before, *states, *["cut"] * (cut - before)]
            said = [part for part in parts if part.column == name or part.column not in titles]
            texts = texts_of(ids, tokenizer)
            roles = piece_roles(texts, said) if said else ["text"] * len(ids)
            made.append(TokenSequence(title, ids, states, texts, roles))
        shown.append((number, made))
    return shown


def prepared_rows(trainer: Trainer, rows: Dataset, numbers: Sequence[int]) -> Iterator[tuple[int, Fields, Fields]]:
    """The numbers of rows, the rows as in training, and those without limits of length; without dropped ones."""
    sets, sample = trainer._sets, rows.select(numbers)
    if not isinstance(sets, PreparedSets):  # of prompts
        yield from ((number, row := trainer.train_dataset[number], row) for number in numbers)
        return
    settings, tables = sets.train_settings or sets.settings, list[Any]()
    for options in (ROW_BY_ROW, UNLIMITED):
        changed = replace(settings, **{name: options[name] for name in options.keys() & vars(settings)})
        kind = changed.row_kind(sample, sample[0], sets.processing_class, "train")
        tables.append(changed.finished(kind.map(sample), kind, PreparationReport()))
    for place, (row, whole) in enumerate(zip(*tables, strict=True)):
        if not row.get("untrained_rows") or "report" in settings.policies:
            yield numbers[row.get("row", place)], row, whole


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
        content = part.text if part.text in text[start:] else part.text.strip()  # as templates do
        if (place := text.find(content, start)) >= 0:
            start = place + len(content)
            roles[place:start] = [part.role] * len(content)
    ends = list(accumulate(map(len, pieces), initial=0))
    return [next(filter(None, roles[first : max(end, first + 1)]), None) for first, end in pairwise(ends)]
