"""Tokens of two tokenizers over one text, aligned by bytes, because a decoded token may be half a character."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trl.data.formats import common_prefix_length

_SAMPLE = "Sum of 12 + 7:\n\tñandú, 中 and 🙂."


def vocabulary_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes that each token id stands for; special tokens stand for their names.

    Byte-level BPE, SentencePiece (with byte fallback) and tokenizers whose tokens are text. Raises: ValueError for
    others, such as WordPiece, whose tokens do not say where spaces were.
    """
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}, ensure_ascii=False)
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    # The alphabet of byte-level BPE: printable bytes are themselves, others the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    of_char = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}

    def of_token(token: str | None) -> bytes:
        if token is None:
            return b""
        if token in special:
            return token.encode()
        if '"ByteLevel"' in decoder:
            return bytes(of_char[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and '"ByteFallback"' in decoder:
            return bytes.fromhex(token[3:5])
        if '"Metaspace"' in decoder or "▁" in decoder:
            token = token.replace("▁", " ")
        return token.encode()

    pieces = [of_token(token) for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    ids = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if b"".join(pieces[token] for token in ids).removeprefix(b" ") != text.encode().removeprefix(b" "):
        raise ValueError(f"{type(tokenizer).__name__} must be byte-level BPE or SentencePiece. Use one tokenizer.")
    return pieces


STOP = b"\xff<stop>\xff"
"""What the end tokens of both tokenizers stand for in an alignment, whatever their names: no text has these bytes."""


class Alignment(NamedTuple):
    """Spans of tokens of two tokenizers that cover the same bytes.

    `left (S,)` and `right (S',)`, int64: the span of each token, -1 for tokens in none. Spans are as short as they can
    be and have rising numbers, with gaps where `stops` is False; there are `count` of them.
    """

    left: np.ndarray
    right: np.ndarray
    count: int


def align(
    left: Sequence[bytes], right: Sequence[bytes], texts: Sequence[bytes] | None = None, *, stops: bool = True
) -> Alignment:
    """The shortest spans of tokens with the same bytes; every byte of what both have in common is in one span.

    In common are the `texts`, which both have in this order, between other bytes of their chat templates, each with the
    `STOP` behind it (unless `stops` is False); without `texts`, or where both have the same bytes, their common
    beginning. A span begins and ends at a border of tokens on both sides, so a token that reaches over the beginning of
    a text is in none.

    >>> align([b"ab", b"c", b"d"], [b"a", b"bc", b"d"])
    Alignment(left=array([0, 0, 1]), right=array([0, 0, 1]), count=2)
    >>> align([b"<", b"ab", b">"], [b"(", b"a", b"b"], [b"ab"]).right
    array([-1,  0,  0])
    """
    wholes = [b"".join(tokens) for tokens in (left, right)]
    ends = [np.cumsum([len(token) for token in tokens], dtype=np.int64) for tokens in (left, right)]
    starts = [np.concatenate([[0], end])[:-1] for end in ends]
    spans_of = [np.full(len(tokens), -1, np.int64) for tokens in (left, right)]
    if texts is None or wholes[0] == wholes[1]:
        texts = [wholes[0][: common_prefix_length(*wholes)]]
    count, read = 0, [0, 0]
    for text in texts:
        places = [whole.find(text, begin) for whole, begin in zip(wholes, read, strict=True)]
        if min(places) < 0:
            continue
        if all(w.startswith(STOP, place + len(text)) for w, place in zip(wholes, places, strict=True)):
            text += STOP
        read = [place + len(text) for place in places]
        inside = [(s >= p) & (e <= last) for s, e, p, last in zip(starts, ends, places, read, strict=True)]
        borders = [np.union1d(s[part], e[part]) - p for s, e, part, p in zip(starts, ends, inside, places, strict=True)]
        common = np.intersect1d(borders[0], borders[1])
        for side, end, part, place in zip(spans_of, ends, inside, places, strict=True):
            spans = np.searchsorted(common, end[part] - place) - 1
            side[part] = np.where((spans >= 0) & (spans < len(common) - 1), spans + count, -1)
        count += max(len(common) - 1, 0)
    if not stops:
        for side, tokens in zip(spans_of, (left, right), strict=True):
            side[[token == STOP for token in tokens]] = -1
    return Alignment(*spans_of, count=len(np.unique(spans_of[0][spans_of[0] >= 0])))


def shared_tokens(left: Sequence[bytes], right: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """The ids of the tokens with the same bytes (not empty) in both vocabularies, in the order of the first.

    >>> shared_tokens([b"a", b"b", b"ab"], [b"ab", b"c", b"a"])
    ([0, 2], [2, 0])
    """
    place = {token: number for number, token in reversed(list(enumerate(right))) if token}
    seen: dict[bytes, int] = {}
    for number, token in enumerate(left):
        if token in place:
            seen.setdefault(token, number)
    return list(seen.values()), [place[token] for token in seen]
