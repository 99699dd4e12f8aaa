"""The faults of a data set that cost runs: what is cut, dropped, repeated, leaked, empty, or says nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from trl.data.pipeline import SHOWN_ROWS, PreparationReport
from trl.scripts.inspection.texts import NearDuplicates, row_blocks, row_key, row_parts
from trl.scripts.inspection.tokens import ScriptCounts, ShownRow

Answers = Sequence[float | None]


class Fault(NamedTuple):
    """A fault: its name, in how many of how many rows, the first of them, and what to do."""

    name: str
    count: int
    of: int
    rows: list[int]
    text: str


@dataclass
class RowFaults:
    """Reads the rows of a set once, and counts what is wrong with their texts: a number of 8 bytes is kept of each row.

    `keys` `(rows,)` are equal for exact duplicates, of which `is_first` marks the first; `counts` and `first` are by
    name of the fault, or by script; `texts` are compared to find near duplicates.
    """

    text_field: str
    scripts: ScriptCounts
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    is_first: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[int]] = field(default_factory=dict)
    texts: list[tuple[int, str]] = field(default_factory=list)

    def read(self, dataset: Dataset, *, compared: int) -> "RowFaults":
        """Read all rows; the texts of `compared` of them, evenly spaced, are kept to find near duplicates."""
        self.keys, self.is_first = np.empty(len(dataset), np.uint64), np.zeros(len(dataset), bool)
        spacing = max(1, -(-len(dataset) // compared))
        for number, row in row_blocks(dataset):
            parts = row_parts(row, self.text_field)
            self.keys[number] = row_key(row, parts)
            if number % spacing == 0:
                self.texts.append((number, " ".join(part.text for part in parts)))
            if any(part.is_answer and not part.text.strip() for part in parts):
                self.note("empty answers", number)
            for script in {script for part in parts for script in self.scripts.read(part.text)}:
                self.note(script, number)
        self.is_first[np.unique(self.keys, return_index=True)[1]] = True
        for number in np.flatnonzero(~self.is_first):
            self.note("exact duplicates", int(number))
        self.texts = [(number, text) for number, text in self.texts if self.is_first[number]]
        return self

    def note(self, name: str, number: int) -> None:
        """Count a row under a fault or script."""
        self.counts[name] += 1
        first = self.first.setdefault(name, [])
        if len(first) < SHOWN_ROWS:
            first.append(number)

    def leaked(self, evaluation: "RowFaults") -> np.ndarray:
        """The numbers of the rows that are evaluation rows too, of exact duplicates the first."""
        return np.flatnonzero(self.is_first & np.isin(self.keys, evaluation.keys))

    def faults(self) -> list[Fault]:
        """What was counted, and the scripts that the tokenizer cannot write."""
        texts = [(name, name, TEXT[name]) for name in ("exact duplicates", "empty answers") if self.counts[name]]
        lost = self.scripts.lost().items()
        texts += [("scripts lost in the tokenizer", script, LOST.format(script, share)) for script, share in lost]
        return [
            Fault(name, self.counts[key], len(self.keys), self.first.get(key, []), text) for name, key, text in texts
        ]


TEXT = {
    "exact duplicates": "they say the same as an earlier row. Remove them, or weight rows on purpose.",
    "near duplicates": "most of their words are those of an earlier row. Remove them.",
    "rows of the evaluation set": "they are in the evaluation set too, so its figures are too good. Remove them here.",
    "near rows of the evaluation set": "most of their words are in a row of the evaluation set. Remove them here.",
    "empty answers": "an answer has no text. Filter these rows.",
    "trained prompts": "the loss is taken on words of the user, the system or a tool too. Set assistant_only_loss=True "
    "(messages) or completion_only_loss=True (prompt and completion) to train on answers alone.",
    "cut rows": "tokens beyond the limit of length are removed. Raise max_length, or split these rows.",
    "rows longer than the context": "the model was made for {} tokens. Set max_length to at most that.",
    "one label": "all labels are alike, so there is nothing to learn from. Add rows with the other label.",
    "constant rewards": "{} gives every answer {}. A reward that never differs trains nothing.",
    "failing rewards": "{} gives no reward. Check that it reads this answer's form.",
}
LOST = "words in {} letters become bytes or unknown tokens ({:.0%} of their tokens). Use a tokenizer that knows them."


def of_rows(name: str, rows: Iterable[int], total: int, *values: object) -> list[Fault]:
    """A fault of these rows; none where there are no rows."""
    numbers = [int(row) for row in rows]
    return [Fault(name, len(numbers), total, numbers[:SHOWN_ROWS], TEXT[name].format(*values))] if numbers else []


def near_faults(train: RowFaults, evaluation: RowFaults | None) -> list[Fault]:
    """Near duplicates within the training rows that are compared, and near ones of the evaluation rows."""
    near, others, leaks = NearDuplicates(), NearDuplicates(), []
    twins = [row for row, text in train.texts if near.earlier(row, text, keep=True) is not None]
    if evaluation is not None:
        for row, text in evaluation.texts:
            others.earlier(row, text, keep=True)
        leaked = set(train.leaked(evaluation))
        rows = [(row, text) for row, text in train.texts if row not in leaked]
        leaks = [row for row, text in rows if others.earlier(row, text, keep=False) is not None]
    total = len(train.texts)
    return [*of_rows("near duplicates", twins, total), *of_rows("near rows of the evaluation set", leaks, total)]


def leak_faults(train: RowFaults, evaluation: RowFaults) -> list[Fault]:
    """Training rows that are evaluation rows too."""
    return of_rows("rows of the evaluation set", train.leaked(evaluation), len(train.keys))


def report_faults(report: PreparationReport) -> list[Fault]:
    """The counts of a preparation that need attention, with the warning that training gives."""
    made = []
    for name, text in report.warnings.items():
        if count := getattr(report, name):
            words = name.replace("_", " ")
            made.append(Fault(words, count, report.rows, report.first.get(name, []), text.format(report)))
    if report.truncated_rows:
        first = report.first.get("removed_tokens", [])
        made.append(Fault("cut rows", report.truncated_rows, report.rows, first, TEXT["cut rows"]))
    return made


def length_faults(lengths: np.ndarray, context: int | None) -> list[Fault]:
    """Sequences that are longer than the model's context."""
    longer = np.flatnonzero(lengths > (context or np.inf))
    return of_rows("rows longer than the context", longer, len(lengths), context)


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
    for column in ("label", "labels"):
        if column not in dataset.column_names or "input_ids" in dataset.column_names:
            continue
        values = dataset[column]
        kinds = {label for value in values for label in (value if isinstance(value, list) else [value])}
        if len(kinds) == 1 and len(dataset) > 1:
            return [Fault("one label", len(dataset), len(dataset), [], TEXT["one label"])]
    return []


def reward_faults(rewards: Mapping[str, Answers], total: int) -> list[Fault]:
    """Reward functions that never differ over the answers, or give none."""
    made = []
    for name, values in rewards.items():
        known = [value for value in values if value is not None]
        if not known:
            made.append(Fault("failing rewards", total, total, [], TEXT["failing rewards"].format(name)))
        elif len(set(known)) == 1 and len(known) > 1:
            text = TEXT["constant rewards"].format(name, f"{known[0]:g}")
            made.append(Fault("constant rewards", total, total, [], text))
    return made
