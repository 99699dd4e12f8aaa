"""The texts of rows as a user wrote them: who says what, which are answers, and which rows are alike."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import xxhash
from datasets import Dataset

from trl.data.formats import Row, RowDict, image_column, maybe_convert_to_chatml
from trl.rewards.ready_made import content_of

ANSWERS = ("completion", "chosen", "rejected")
TEXTS = ("text", "messages", "prompt", *ANSWERS, "completions")
DIGEST = "image_digest"  # the column in place of images
BLOCK_ROWS = 1_000
COMPARED_ROWS = 5_000  # whose texts are compared for near duplicates
READ_CHARACTERS = 2_000  # of a script
WORDS, LEAST_WORDS = 3, 20  # in a shingle; in a text that is compared
ALIKE = 0.85  # the share of the shingles of two texts that both have


class Part(NamedTuple):
    """A text of a row: its column, who says it (None: a text without roles), and whether it is an answer."""

    column: str
    role: str | None
    text: str
    is_answer: bool


def row_parts(row: Row, text_field: str = "text") -> list[Part]:
    """The texts of a row, in order. Rows of tokens have none."""
    parts: list[Part] = []
    for column, value in maybe_convert_to_chatml(dict(row)).items():
        if column not in TEXTS and column != text_field:
            continue
        if isinstance(value, str):
            parts.append(Part(column, None, value, column in ANSWERS))
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            parts += [Part(column, None, item, False) for item in value]
        elif isinstance(value, list):
            parts += message_parts(column, [item for item in value if isinstance(item, dict)])
    return parts


def message_parts(column: str, messages: Sequence[RowDict]) -> Iterator[Part]:
    """The texts of messages; the answer is the assistant's last turn, where the messages do not end with a prompt."""
    for index, message in enumerate(messages):
        is_last = index == len(messages) - 1 and column != "prompt"
        is_answer = is_last and message.get("role") == "assistant" and not message.get("tool_calls")
        yield Part(column, message.get("role"), content_of([message]), is_answer)


def row_key(row: Row, parts: Sequence[Part]) -> int:
    """A hash of what a row says: equal for exact duplicates. Of rows of tokens, that of their tokens."""
    value = [part[:3] for part in parts] or row.get("input_ids") or row
    return xxhash.xxh3_64_intdigest(repr([value, row.get(DIGEST)]).encode())


class Compared(NamedTuple):
    """A row that is compared with others: its number, its texts, and the digest of its images."""

    number: int
    text: str
    digest: str


class Texts(NamedTuple):
    """What the texts of a set's rows show, in a few bytes for each row.

    `keys` `(rows,)` are equal for exact duplicates, of which `is_first` marks the first; `is_empty` marks rows with an
    empty answer, `scripts` those with letters of a script. `words` of each script have about `READ_CHARACTERS`.
    """

    keys: np.ndarray
    is_first: np.ndarray
    is_empty: np.ndarray
    scripts: Mapping[str, np.ndarray]
    words: Mapping[str, list[str]]
    compared: list[Compared]


def with_digests(rows: Dataset) -> Dataset:
    """The rows with a digest in place of their images."""
    if (column := image_column(rows.column_names)) is None:
        return rows

    def read(row: Row) -> RowDict:
        images = (row[column] or ()) if column == "images" else [row[column]]
        return {DIGEST: xxhash.xxh3_64_hexdigest(b"".join(image.tobytes() for image in images if image))}

    return rows.map(read, remove_columns=[column])


def read_texts(dataset: Dataset, text_field: str, *, compared: int = COMPARED_ROWS) -> Texts:
    """Read all rows, a block at a time; the texts of `compared` of them, evenly spaced, are kept."""
    dataset = with_digests(dataset)
    total, characters, kept = len(dataset), Counter[str](), list[Compared]()
    keys, is_first, is_empty = np.empty(total, np.uint64), np.zeros(total, bool), np.zeros(total, bool)
    scripts: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(total, bool))
    words: defaultdict[str, list[str]] = defaultdict(list)
    spacing = max(1, -(-total // compared))
    blocks: Iterator[dict[str, list[object]]] = dataset.iter(BLOCK_ROWS)  # type: ignore[assignment]
    rows = (dict(zip(block, row, strict=True)) for block in blocks for row in zip(*block.values(), strict=True))
    for number, row in enumerate(rows):
        parts = row_parts(row, text_field)
        keys[number] = row_key(row, parts)
        is_empty[number] = any(part.is_answer and not part.text.strip() for part in parts)
        text = " ".join(part.text for part in parts)
        if number % spacing == 0:
            kept.append(Compared(number, text, row.get(DIGEST, "")))
        for script in (of_row := set(map(script_of, set(text))) - {""}):
            scripts[script][number] = True
        if any(characters[script] < READ_CHARACTERS for script in of_row):
            for script, letters in groupby(text, key=script_of):
                if script and characters[script] < READ_CHARACTERS:
                    words[script].append("".join(letters))
                    characters[script] += len(words[script][-1])
    is_first[np.unique(keys, return_index=True)[1]] = True
    return Texts(keys, is_first, is_empty, scripts, words, [row for row in kept if is_first[row.number]])


@cache
def script_of(character: str) -> str:
    """The script of a letter, the first word of its Unicode name: LATIN, CYRILLIC, CJK; "" of others."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def shingles(row: Compared) -> frozenset[bytes]:
    """The runs of three words of a text, in lower case, without punctuation, beside the images; none of a short one."""
    words = re.findall(r"\w+", row.text.lower())
    if len(words) < LEAST_WORDS:
        return frozenset()
    runs = zip(*(words[at:] for at in range(WORDS)), strict=False)
    return frozenset(" ".join([row.digest, *run]).encode() for run in runs)


def near_rows(rows: Sequence[Compared], others: Sequence[Compared] | None = None) -> list[int]:
    """The rows of which `ALIKE` of the shingles are those of one of the `others`, or (None) of an earlier row.

    MinHash, then the exact share. Raises: ImportError without datasketch. A. Z. Broder, On the resemblance and
    containment of documents, 1997.
    """
    from datasketch import MinHash, MinHashLSH

    index, known, near = MinHashLSH(threshold=0.7, num_perm=64), list[frozenset[bytes]](), list[int]()
    count = len(others or ())
    for at, row in enumerate([*(others or ()), *rows]):
        if not (parts := shingles(row)):
            continue
        sketch = MinHash(num_perm=64, seed=1)
        sketch.update_batch(list(parts))
        if at >= count:
            places: list[int] = index.query(sketch)  # type: ignore[assignment]
            if any(len(parts & known[place]) >= ALIKE * len(parts | known[place]) for place in places):
                near.append(row.number)
        if at < count or others is None:
            index.insert(len(known), sketch)
            known.append(parts)
    return near
