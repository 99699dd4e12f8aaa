"""Every byte of a text is in one span of both tokenizers' tokens."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl.data.byte_alignment import STOP, align, shared_tokens, vocabulary_bytes

CORPUS = [
    "What colour is the sky? It is blue.",
    "Seven apples and 12 pears: 7 + 12 = 19.",
    "naïve façade 中文 🙂",
]
ALPHABET = "abc dé中🙂\n12+=<|end|>▁"


@cache
def tokenizer_of(kind: str) -> Any:
    if kind.startswith("bpe"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=int(kind[3:]), initial_alphabet=alphabet)
        backend.train_from_iterator(CORPUS, trainer)
    elif kind == "bytes":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    elif kind == "characters":
        chars = sorted({*ALPHABET, *"".join(CORPUS), *"Sum of 12 + 7:\n\tñandú, 中 and 🙂."})
        backend = Tokenizer(models.WordLevel({char: n for n, char in enumerate(chars)}, unk_token=chars[0]))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:  # as SentencePiece: spaces are written, what is unknown falls back to bytes
        pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
        words = [
            "▁",
            "▁is",
            "▁the",
            "s",
            "k",
            "y",
            "▁and",
            "1",
            "2",
            "12",
            "a",
            "b",
            "ab",
            "c",
            "d",
            "é",
            "an",
        ]
        pieces += [(word, -float(n + 1)) for n, word in enumerate(words)]
        backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    return tokenizer


KINDS = ("bpe300", "bpe500", "bytes", "characters", "pieces")


def texts() -> list[str]:
    draw = random.Random(0)
    made = ["".join(draw.choices("abc dé中🙂\n12+=", k=draw.randint(1, 40))) for _ in range(30)]
    return [*CORPUS, *made, *(text + "<|end|>" for text in made[:10])]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_join_to_the_bytes_of_their_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    known = vocabulary_bytes(tokenizer)
    assert known[tokenizer.eos_token_id] == b"<|end|>"
    for text in texts():
        if "▁" in text:
            continue
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(known[token] for token in ids) == text.encode()


@pytest.mark.parametrize("student", KINDS)
@pytest.mark.parametrize("teacher", KINDS)
def test_every_byte_is_in_one_span_of_both(student: str, teacher: str) -> None:
    for text in texts():
        sides = []
        for kind in (student, teacher):
            tokenizer = tokenizer_of(kind)
            known = vocabulary_bytes_of(kind)
            sides.append([known[token] for token in tokenizer(text, add_special_tokens=False)["input_ids"]])
        found = align(*sides)
        for number in range(found.count):
            own, other = (
                b"".join(token for token, span in zip(tokens, spans, strict=True) if span == number)
                for tokens, spans in zip(sides, (found.left, found.right), strict=True)
            )
            assert own == other != b""
        assert found.left.min() >= 0 and found.right.min() >= 0
        own_ends, other_ends = ({int(end) for end in np.cumsum([len(x) for x in side])} for side in sides)
        assert found.count == len(own_ends & other_ends)
        if student == teacher:
            assert found.left.tolist() == list(range(len(sides[0])))


@cache
def vocabulary_bytes_of(kind: str) -> list[bytes]:
    return vocabulary_bytes(tokenizer_of(kind))


def test_what_follows_a_difference_is_in_no_span() -> None:
    found = align([b"ab", b"cd", b"e"], [b"a", b"b", b"cx", b"e"])
    assert (found.left.tolist(), found.right.tolist(), found.count) == ([0, -1, -1], [0, 0, -1, -1], 1)
    assert align([b"a"], [b"b"]).count == 0
    assert align([], [b"b"]).right.tolist() == [-1]


def test_texts_between_templates_are_aligned_each_with_the_stop_behind_it() -> None:
    own, other = [b"<u>", b"ab", STOP, b"!"], [b"[", b"a", b"b", STOP]
    found = align(own, other, [b"ab"])
    assert (found.left.tolist(), found.right.tolist(), found.count) == ([-1, 0, 1, -1], [-1, 0, 0, 1], 2)
    found = align(own, other, [b"ab"], stops=False)
    assert (found.left.tolist(), found.right.tolist(), found.count) == ([-1, 0, -1, -1], [-1, 0, 0, -1], 1)
    found = align([b"x", b"<a", b"b"], [b"x", b"a", b"b"], [b"x", b"ab"])  # one token reaches over a beginning
    assert (found.left.tolist(), found.right.tolist(), found.count) == ([0, -1, 1], [0, -1, 1], 2)


def test_tokens_without_bytes_belong_to_the_span_before() -> None:
    found = align([b"a", b"", b"b"], [b"ab"])
    assert (found.left.tolist(), found.right.tolist()) == ([0, 0, 0], [0])


def test_shared_tokens_have_the_same_bytes() -> None:
    own, other = (vocabulary_bytes_of(kind) for kind in ("bpe300", "pieces"))
    ids, theirs = shared_tokens(own, other)
    assert [own[token] for token in ids] == [other[token] for token in theirs]
    assert len({own[token] for token in ids}) == len(ids) == len(({*own} & {*other}) - {b""})
    assert {b"<|end|>", b"a", b" "} <= {own[token] for token in ids}


def test_word_pieces_are_refused() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "S": 1, "##um": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="byte-level BPE"):
        vocabulary_bytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
