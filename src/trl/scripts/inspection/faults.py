"""The faults of a data set that cost runs: what is cut, dropped, repeated, leaked, empty, or says nothing."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl.data.pipeline import SHOWN_ROWS, PreparationReport
from trl.scripts.inspection.texts import Texts, near_rows
from trl.scripts.inspection.tokens import ShownRow, lost_share

LOST = 0.5  # the share of bytes and unknown tokens above which a script is lost


class Fault(NamedTuple):
    """A fault: its name, in how many of how many rows, the first of them, and what to do."""

    name: str
    count: int
    of: int
    rows: list[int]
    text: str


TEXT = {
    "exact duplicates": "they say the same as an earlier row. Remove them, or weight rows on purpose.",
    "near duplicates": "most of their words are those of an earlier row. Remove them.",
    "rows of the evaluation set": "they are in the evaluation set too, so its figures are too good. Remove them here.",
    "near rows of the evaluation set": "most of their words are in a row of the evaluation set. Remove them here.",
    "scripts lost in the tokenizer": "words in {} letters become bytes or unknown tokens ({:.0%} of their tokens). Use "
    "a tokenizer that knows them.",
    "empty answers": "an answer has no text. Filter these rows.",
    "trained prompts": "the loss is taken on words of the user, the system or a tool too. Set assistant_only_loss=True "
    "(messages) or completion_only_loss=True (prompt and completion) to train on answers alone.",
    "cut rows": "tokens beyond the limit of length are removed. Raise max_length, or split these rows.",
    "rows longer than the context": "the model was made for {} tokens. Set max_length to at most that.",
    "one label": "all labels are alike, so there is nothing to learn from. Add rows with the other label.",
    "constant rewards": "{} gives every answer {}. A reward that never differs trains nothing.",
    "failing rewards": "{} gives no reward. Check that it reads this answer's form.",
}


def of_rows(name: str, rows: Sequence[int] | np.ndarray, total: int, *values: object) -> list[Fault]:
    """A fault of these rows; none where there are no rows."""
    first = [int(row) for row in rows[:SHOWN_ROWS]]
    return [Fault(name, len(rows), total, first, TEXT[name].format(*values))] if first else []


def of_all(name: str, total: int, *values: object) -> list[Fault]:
    """A fault of no row more than of others."""
    return [Fault(name, total, total, [], TEXT[name].format(*values))]


def text_faults(train: Texts, evaluation: Texts | None, tokenizer: PreTrainedTokenizerBase) -> list[Fault]:
    """Repeated and empty texts, those of the evaluation set, and scripts that the tokenizer cannot write."""
    total = len(train.keys)
    made = of_rows("exact duplicates", np.flatnonzero(~train.is_first), total)
    made += of_rows("empty answers", np.flatnonzero(train.is_empty), total)
    for script, words in train.words.items():
        if (share := lost_share(words, tokenizer)) > LOST:
            made += of_rows(
                "scripts lost in the tokenizer", np.flatnonzero(train.scripts[script]), total, script, share
            )
    return made + (of_rows("rows of the evaluation set", leaked(train, evaluation), total) if evaluation else [])


def leaked(train: Texts, evaluation: Texts) -> np.ndarray:
    """The numbers of the rows that are evaluation rows too, of exact duplicates the first."""
    return np.flatnonzero(train.is_first & np.isin(train.keys, evaluation.keys))


def near_faults(train: Texts, evaluation: Texts | None) -> list[Fault]:
    """Near duplicates within the training rows that are compared, and near ones of the evaluation rows."""
    total = len(train.compared)
    made = of_rows("near duplicates", near_rows(train.compared), total)
    if evaluation is not None:
        others = set(leaked(train, evaluation))
        rows = [row for row in train.compared if row.number not in others]
        made += of_rows("near rows of the evaluation set", near_rows(rows, evaluation.compared), total)
    return made


def report_faults(report: PreparationReport) -> list[Fault]:
    """The counts of a preparation that need attention, with the warning that training gives."""
    made: list[Fault] = []
    for name, text in report.warnings.items():
        if count := getattr(report, name):
            words = name.replace("_", " ")
            made.append(Fault(words, count, report.rows, report.first.get(name, []), text.format(report)))
    if report.truncated_rows:
        first = report.first.get("removed_tokens", [])
        made.append(Fault("cut rows", report.truncated_rows, report.rows, first, TEXT["cut rows"]))
    return made


def shown_faults(rows: Sequence[ShownRow]) -> list[Fault]:
    """Words of others than the assistant that are trained, in the rows that are shown."""
    others = ("user", "system", "tool", "prompt")
    trained = [
        row.number
        for row in rows
        if any(token.state == "trained" and token.role in others for part in row.sequences.values() for token in part)
    ]
    return of_rows("trained prompts", trained, len(rows))


def label_faults(dataset: Dataset) -> list[Fault]:
    """Labels that are all alike: of answers (`label`), or of the steps of solutions (`labels`)."""
    names = set(dataset.column_names)
    for column in {"label", "labels"} & names if "input_ids" not in names else ():
        kinds = set(chain.from_iterable(value if isinstance(value, list) else [value] for value in dataset[column]))
        if len(kinds) == 1 and len(dataset) > 1:
            return of_all("one label", len(dataset))
    return []


def reward_faults(rewards: Mapping[str, np.ndarray], total: int) -> list[Fault]:
    """Reward functions that never differ over the answers, or give none."""
    made: list[Fault] = []
    for name, values in rewards.items():
        if not len(values):
            made += of_all("failing rewards", total, name)
        elif len(values) > 1 and len(set(values)) == 1:
            made += of_all("constant rewards", total, name, f"{values[0]:g}")
    return made
