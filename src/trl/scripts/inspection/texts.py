"""The texts of rows as a user wrote them: who says what, which are answers, and which rows are alike."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash
from datasets import Dataset

from trl.data.formats import Row, RowDict, maybe_convert_to_chatml
from trl.rewards.ready_made import content_of

ANSWERS = ("completion", "chosen", "rejected")
TEXTS = ("text", "messages", "prompt", *ANSWERS, "completions")
BLOCK_ROWS = 1_000
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
    value = [value, row["image_digest"]] if "image_digest" in row else value
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def row_blocks(rows: Dataset) -> Iterator[tuple[int, Row]]:
    """The rows with their numbers, read a block at a time."""
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        columns = list(block)
        for offset, values in enumerate(zip(*block.values(), strict=True)):
            yield start + offset, dict(zip(columns, values, strict=True))


def shingles(text: str) -> frozenset[bytes]:
    """The runs of three words of a text, in lower case and without punctuation; none of a short text."""
    words = re.findall(r"\w+", text.lower())
    if len(words) < LEAST_WORDS:
        return frozenset()
    return frozenset(" ".join(words[at : at + WORDS]).encode() for at in range(len(words) - WORDS + 1))


class NearDuplicates:
    """Finds texts of which `ALIKE` of the shingles are those of an earlier one: MinHash, then the exact share.

    Raises: ImportError without datasketch. A. Z. Broder, On the resemblance and containment of documents, 1997.
    """

    def __init__(self) -> None:
        from datasketch import MinHash, MinHashLSH

        self._sketch = lambda: MinHash(num_perm=64, seed=1)
        self._index = MinHashLSH(threshold=0.7, num_perm=64)
        self._texts: dict[int, frozenset[bytes]] = {}

    def earlier(self, row: int, text: str, *, keep: bool) -> int | None:
        """The row of an earlier text that is alike; `keep` takes this one up."""
        parts = shingles(text)
        if not parts:
            return None
        sketch = self._sketch()
        sketch.update_batch(list(parts))
        candidates: list[int] = self._index.query(sketch)  # type: ignore[assignment]
        match = min((other for other in candidates if _share(self._texts[other], parts) >= ALIKE), default=None)
        if keep:
            self._index.insert(row, sketch)
            self._texts[row] = parts
        return match


def _share(first: frozenset[bytes], second: frozenset[bytes]) -> float:
    return len(first & second) / len(first | second)
