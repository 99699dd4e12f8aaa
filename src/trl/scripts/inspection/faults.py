"""The faults of a data set that cost runs: what is cut, dropped, repeated, leaked, empty, or says nothing."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import xxhash
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trl.data.pipeline import SHOWN_ROWS, PreparationReport
from trl.scripts.inspection.tokens import ShownRow, row_parts

BLOCK_ROWS = 1_000
COMPARED_ROWS = 5_000  # whose texts are compared for near duplicates
SCRIPT_WORDS = 200  # that are kept of a script
WORDS, LEAST_WORDS = 3, 20  # in a shingle; in a text that is compared
ALIKE = 0.85  # the share of the shingles of two texts that both have
LOST = 0.5  # the share of bytes and unknown tokens above which a script is lost
LABELS = {"kto": "label", "bco": "label", "prm": "labels"}  # columns
Shingles = Mapping[int, frozenset[bytes]]  # by row


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
    "constant rewards": "{} gives every answer the same reward, or none, which trains nothing. Check that it reads "
    "answers of this form.",
}


def of_rows(name: str, rows: Sequence[int] | np.ndarray | None, total: int, *values: object) -> list[Fault]:
    """A fault of these rows (None: of all, of which none stands out); none where there are no rows."""
    count, first = (total, []) if rows is None else (len(rows), [int(row) for row in rows[:SHOWN_ROWS]])
    return [Fault(name, count, total, first, TEXT[name].format(*values))] if count else []


def text_faults(sets: Mapping[str, Dataset], text_field: str, tokenizer: PreTrainedTokenizerBase) -> list[Fault]:
    """Repeated and empty texts, those of the evaluation set, and scripts that the tokenizer cannot write."""
    train, evaluation = (Texts(sets.get(name, sets["train"].select([])), text_field) for name in ("train", "eval"))
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
    faults = [
        Fault(name.replace("_", " "), count, report.rows, report.first[name], report.warning(name))
        for name in report.warnings if (count := getattr(report, name))
    ]  # fmt: skip
    if report.truncated_rows:
        rows = report.first["removed_tokens"]
        faults.append(Fault("cut rows", report.truncated_rows, report.rows, rows, TEXT["cut rows"]))
    return faults


def prompt_faults(rows: Sequence[ShownRow]) -> list[Fault]:
    """Words of others than the assistant that are trained, in the rows that are shown."""
    others = {("trained", role) for role in ("user", "system", "tool", "prompt")}
    pairs = {number: {pair for x in row for pair in zip(x.states, x.roles, strict=True)} for number, row in rows}
    return of_rows("trained prompts", [number for number in pairs if others & pairs[number]], len(rows))


def label_faults(dataset: Dataset, method: str) -> list[Fault]:
    """Labels that are all alike: of answers, or of the steps of solutions."""
    column = LABELS.get(method)
    values = dataset[column] if column in dataset.column_names else ()
    kinds = set(chain.from_iterable(values) if column == "labels" else values)
    return of_rows("one label", None, len(dataset)) if len(kinds) == 1 < len(dataset) else []


class Texts:
    """What the texts of a set's rows show, in a few bytes for each row.

    `keys` `(rows,)` are equal for exact duplicates, of which `is_first` marks the first; `is_empty` marks rows with an
    empty answer, `scripts` those with letters of a script, of which some `words` are kept. `COMPARED_ROWS` of the first
    ones, evenly spaced, are `compared`.
    """

    def __init__(self, dataset: Dataset, text_field: str = "text") -> None:
        """Read all rows, a block at a time."""
        total, compared = len(dataset), dict[int, frozenset[bytes]]()
        self.keys, self.is_empty, self.is_first = np.empty(total, np.uint64), *np.zeros((2, total), bool)
        self.scripts: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(total, bool))
        self.words: defaultdict[str, list[str]] = defaultdict(list)
        blocks = map(dict, dataset.iter(BLOCK_ROWS))
        rows = (dict(zip(block, row, strict=True)) for block in blocks for row in zip(*block.values(), strict=True))
        for number, row in enumerate(rows):
            parts = row_parts(row, text_field)
            said = [part[:3] for part in parts] or row.get("input_ids") or row
            self.keys[number] = xxhash.xxh3_64_intdigest(repr(said).encode())
            self.is_empty[number] = any(part.is_answer and not part.text.strip() for part in parts)
            text = " ".join(part.text for part in parts)
            if number % -(-total // COMPARED_ROWS) == 0:
                compared[number] = shingles(text)
            for script in set(map(script_of, set(text))) - {""}:
                self.scripts[script][number] = True
                if len(self.words[script]) < SCRIPT_WORDS:
                    self.words[script] += ["".join(run) for kind, run in groupby(text, script_of) if kind == script]
        self.is_first[np.unique(self.keys, return_index=True)[1]] = True
        self.compared = {number: runs for number, runs in compared.items() if self.is_first[number]}


@cache
def script_of(character: str) -> str:
    """The script of a letter, the first word of its Unicode name: LATIN, CYRILLIC, CJK; "" of others."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def shingles(text: str) -> frozenset[bytes]:
    """The runs of three words of a text, in lower case, without punctuation; none of a short one."""
    words = re.findall(r"\w+", text.lower())
    runs = zip(*(words[at:] for at in range(WORDS)), strict=False) if len(words) >= LEAST_WORDS else ()
    return frozenset(" ".join(run).encode() for run in runs)


def near_rows(rows: Shingles, others: Shingles) -> tuple[list[int], list[int]]:
    """The rows of which `ALIKE` of the shingles are those of an earlier row, and those with one of the `others`.

    MinHash, then the exact share. Raises: ImportError without datasketch. A. Z. Broder, On the resemblance and
    containment of documents, 1997.
    """
    from datasketch import MinHash, MinHashLSH

    index, sets = MinHashLSH(threshold=0.7, num_perm=64), [*others.items(), *rows.items()]
    repeated, leaked = list[int](), list[int]()
    for at, (number, parts) in enumerate(sets):
        if not parts:
            continue
        sketch = MinHash(num_perm=64, seed=1)
        sketch.update_batch(list(parts))
        places: list[int] = index.query(sketch)  # type: ignore[assignment]
        near = [place for place in places if len(parts & sets[place][1]) >= ALIKE * len(parts | sets[place][1])]
        index.insert(at, sketch)
        if at >= len(others):
            repeated += [number] * (max(near, default=-1) >= len(others))
            leaked += [number] * (min(near, default=at) < len(others))
    return repeated, leaked
