"""The texts of rows as a user wrote them: who says what, which are answers, and which rows are alike."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import xxhash
from datasets import Dataset

from trl.data.formats import Row, RowDict, maybe_convert_to_chatml
from trl.rewards.ready_made import content_of

TEXTS = ("text", "messages", "prompt", "completion", "chosen", "rejected", "completions")
ANSWERED = ("messages", "completion", "chosen", "rejected")  # whose last text is an answer
BLOCK_ROWS = 1_000
COMPARED_ROWS = 5_000  # whose texts are compared for near duplicates
SCRIPT_WORDS = 200  # that are kept of a script
WORDS, LEAST_WORDS = 3, 20  # in a shingle; in a text that is compared
ALIKE = 0.85  # the share of the shingles of two texts that both have

Compared = tuple[int, frozenset[bytes]]
"""The number of a row, and its shingles."""


class Part(NamedTuple):
    """A text of a row: its column, the role that says it ("prompt" or "text" without one), and if it is an answer."""

    column: str
    role: str
    text: str
    is_answer: bool


def row_parts(row: Row, text_field: str = "text") -> list[Part]:
    """The texts of a row, of messages and without. Rows of tokens have none."""
    parts = list[Part]()
    columns: RowDict = dict(maybe_convert_to_chatml(dict(row)))
    for column in (name for name in columns if name in TEXTS or name == text_field):
        values = columns[column] if isinstance(columns[column], list) else [columns[column]]
        values = [value for value in values if isinstance(value, (str, dict))]
        turns = [{"content": value} if isinstance(value, str) else value for value in values]
        for place, turn in enumerate(turns, start=1):
            role = turn.get("role") or ("prompt" if column == "prompt" else "text")
            is_last = column in ANSWERED and place == len(turns) and not turn.get("tool_calls")
            parts.append(Part(column, role, content_of([turn]), is_last and role in ("assistant", "text")))
    return parts


class Texts:
    """What the texts of a set's rows show, in a few bytes for each row.

    `keys` `(rows,)` are equal for exact duplicates, of which `is_first` marks the first; `is_empty` marks rows with an
    empty answer, `scripts` those with letters of a script, of which some `words` are kept. `COMPARED_ROWS` of the first
    ones, evenly spaced, are `compared`.
    """

    def __init__(self, dataset: Dataset, text_field: str = "text") -> None:
        """Read all rows, a block at a time."""
        total, compared = len(dataset), list[Compared]()
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
                compared.append((number, shingles(text)))
            for script in set(map(script_of, set(text))) - {""}:
                self.scripts[script][number] = True
                if len(self.words[script]) < SCRIPT_WORDS:
                    self.words[script] += ["".join(run) for kind, run in groupby(text, script_of) if kind == script]
        self.is_first[np.unique(self.keys, return_index=True)[1]] = True
        self.compared = [row for row in compared if self.is_first[row[0]]]


@cache
def script_of(character: str) -> str:
    """The script of a letter, the first word of its Unicode name: LATIN, CYRILLIC, CJK; "" of others."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def shingles(text: str) -> frozenset[bytes]:
    """The runs of three words of a text, in lower case, without punctuation; none of a short one."""
    words = re.findall(r"\w+", text.lower())
    runs = zip(*(words[at:] for at in range(WORDS)), strict=False) if len(words) >= LEAST_WORDS else ()
    return frozenset(" ".join(run).encode() for run in runs)


def near_rows(rows: Sequence[Compared], others: Sequence[Compared]) -> tuple[list[int], list[int]]:
    """The rows of which `ALIKE` of the shingles are those of an earlier row, and those with one of the `others`.

    MinHash, then the exact share. Raises: ImportError without datasketch. A. Z. Broder, On the resemblance and
    containment of documents, 1997.
    """
    from datasketch import MinHash, MinHashLSH

    index, sets = MinHashLSH(threshold=0.7, num_perm=64), [*others, *rows]
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
