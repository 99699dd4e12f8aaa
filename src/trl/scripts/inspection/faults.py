"""The faults of a data set that cost runs: what is cut, dropped, repeated, leaked, empty, or says nothing."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl.data.pipeline import SHOWN_ROWS, PreparationReport
from trl.scripts.inspection.texts import Texts, near_rows
from trl.scripts.inspection.tokens import ShownRow

LOST = 0.5  # the share of bytes and unknown tokens above which a script is lost
LABELS = {"kto": "label", "bco": "label", "prm": "labels"}  # columns


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
    "constant rewards": "{} gives every answer {:g}. A reward that never differs trains nothing.",
    "failing rewards": "{} gives no reward. Check that it reads this answer's form.",
}


def of_rows(name: str, rows: Sequence[int] | np.ndarray | None, total: int, *values: object) -> list[Fault]:
    """A fault of these rows (None: of all, of which none stands out); none where there are no rows."""
    count, first = (total, []) if rows is None else (len(rows), [int(row) for row in rows[:SHOWN_ROWS]])
    return [Fault(name, count, total, first, TEXT[name].format(*values))] if count else []


def text_faults(train: Texts, evaluation: Texts, tokenizer: PreTrainedTokenizerBase) -> list[Fault]:
    """Repeated and empty texts, those of the evaluation set, and scripts that the tokenizer cannot write."""
    total, is_leaked = len(train.keys), train.is_first & np.isin(train.keys, evaluation.keys)
    faults = of_rows("exact duplicates", np.flatnonzero(~train.is_first), total)
    faults += of_rows("empty answers", np.flatnonzero(train.is_empty), total)
    for script, words in train.words.items():
        if (share := lost_share(words, tokenizer)) > LOST:
            rows = np.flatnonzero(train.scripts[script])
            faults += of_rows("scripts lost in the tokenizer", rows, total, script, share)
    faults += of_rows("rows of the evaluation set", np.flatnonzero(is_leaked), total)
    if find_spec("datasketch") is not None:
        repeated, near = near_rows(train.compared, evaluation.compared)
        faults += of_rows("near duplicates", repeated, len(train.compared))
        near = [row for row in near if not is_leaked[row]]
        faults += of_rows("near rows of the evaluation set", near, len(train.compared))
    return faults


def lost_share(words: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, least: int = 20) -> float:
    """The share of the tokens of words that are bytes or unknown; 0 for fewer than `least` characters."""
    if sum(map(len, words)) < least:
        return 0.0
    tokens = [token for word in words for token in tokenizer(word, add_special_tokens=False)["input_ids"]]
    is_lost = [token == tokenizer.unk_token_id or "\ufffd" in tokenizer.decode([token]) for token in tokens]
    return sum(is_lost) / max(len(tokens), 1)


def report_faults(report: PreparationReport) -> list[Fault]:
    """The counts of a preparation that need attention, with the warning that training gives."""
    first = {name: [*dict.fromkeys(rows)] for name, rows in report.first.items()}  # of which a row may have two
    faults = [
        Fault(name.replace("_", " "), count, report.rows, first.get(name, []), text.format(report))
        for name, text in report.warnings.items() if (count := getattr(report, name))
    ]  # fmt: skip
    cut = Fault("cut rows", report.truncated_rows, report.rows, first.get("removed_tokens", []), TEXT["cut rows"])
    return [*faults, cut] if cut.count else faults


def prompt_faults(rows: Sequence[ShownRow]) -> list[Fault]:
    """Words of others than the assistant that are trained, in the rows that are shown."""
    trained = {
        number for number, sequences in rows for token in chain.from_iterable(sequences.values())
        if token.state == "trained" and token.role in ("user", "system", "tool", "prompt")
    }  # fmt: skip
    return of_rows("trained prompts", sorted(trained), len(rows))


def label_faults(dataset: Dataset, method: str) -> list[Fault]:
    """Labels that are all alike: of answers, or of the steps of solutions."""
    column = LABELS.get(method)
    values = dataset[column] if column in dataset.column_names else ()
    kinds = set(chain.from_iterable(values) if column == "labels" else values)
    return of_rows("one label", None, len(dataset)) if len(kinds) == 1 < len(dataset) else []


def reward_faults(rewards: Mapping[str, np.ndarray], total: int) -> list[Fault]:
    """Reward functions that never differ over the answers, or give none."""
    faults: list[Fault] = []
    for name, values in rewards.items():
        if not values.size:
            faults += of_rows("failing rewards", None, total, name)
        elif values.size > 1 and np.ptp(values) == 0:
            faults += of_rows("constant rewards", None, total, name, values[0])
    return faults
