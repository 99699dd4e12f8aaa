"""Rows with what training does to each token."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl.data.pipeline import Preparation, PreparationReport
from trl.data.prepared_sets import PreparedSets
from trl.data.rendering import text_tokenizer
from trl.scripts.inspection.texts import Part, row_parts
from trl.scripts.messages import Shown, Trainer, sequences

UNLIMITED = dict.fromkeys(("max_length", "max_prompt_length", "max_completion_length"))


class Token(NamedTuple):
    """A token; `state` is "trained", "masked" or "cut", `role` that of its text (None: of the template)."""

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
    else:
        for number in numbers:
            shown = sequences(trainer, trainer.train_dataset[number])
            yield number, shown, shown


def changed(settings: Preparation, **values: object) -> Preparation:
    """The settings with other values of those fields that they have."""
    return replace(settings, **{name: value for name, value in values.items() if hasattr(settings, name)})


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
