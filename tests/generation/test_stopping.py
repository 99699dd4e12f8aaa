"""Stop strings are found where the newest token completes them, whatever the tokenizer makes of single tokens."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_tokenizers import tiny_tokenizer
from trl.generation.transformers.requests import StopStrings, end_tokens


def word_tokenizer():
    """In the manner of SentencePiece: a token's leading space is lost where it is decoded first."""
    words = ["<unk>", "\u2581stop", "\u2581the", "\u2581car", "s", "\u2581"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def first_end(strings, ids):
    """After how many tokens generation would have stopped."""
    for count in range(1, len(ids) + 1):
        if strings.may_end(ids[count - 1]) and strings.ended(ids[:count]):
            return count
    return None


def test_strings_that_end_with_a_space():
    tokenizer = word_tokenizer()
    assert tokenizer.decode([3]) == "car"  # its space cannot be seen
    strings = StopStrings(["the "], tokenizer)
    assert first_end(strings, [1, 2, 4, 2, 3, 4]) == 5  # "stop thes the car"


def test_characters_of_several_tokens_and_strings_inside_tokens():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("Look \u20ac up. Next.", add_special_tokens=False)["input_ids"]
    for stop in ("\u20ac", "\u20ac up", "oo", "Look", ". N", "Next."):
        expected = next(count for count in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:count]))
        assert first_end(StopStrings([stop, "never"], tokenizer), ids) == expected
    assert first_end(StopStrings(["Next?"], tokenizer), ids) is None


def test_a_string_that_was_there_before_counts_again():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("up up", add_special_tokens=False)["input_ids"]
    strings = StopStrings(["up"], tokenizer)
    assert strings.ended(ids)
    assert not strings.ended([*ids, *tokenizer(" A", add_special_tokens=False)["input_ids"]])
    with pytest.raises(ValueError, match=r"stop_strings \['up'\] need a tokenizer"):
        StopStrings(["up"], None)


def test_only_tokens_that_come_are_decoded(monkeypatch):
    tokenizer, decoded = tiny_tokenizer(), []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(ids) or "up")
    strings = StopStrings(["p"], tokenizer)
    assert [strings.may_end(token) for token in (5, 6, 5)] == [True] * 3 and decoded == [[5], [6]]


def test_end_tokens_come_from_the_first_that_names_them():
    def model(generation, config):
        parts = {"generation_config": SimpleNamespace(eos_token_id=generation)}
        return SimpleNamespace(**parts, config=SimpleNamespace(eos_token_id=config))

    assert end_tokens((4,), model([2, 3], 5)) == [4]
    assert end_tokens((), model([2, 3], 5)) == []
    assert end_tokens(None, model([2, 3], 5)) == [2, 3]
    assert end_tokens(None, model(None, 5)) == [5]
    assert end_tokens(None, model(None, None)) == []
