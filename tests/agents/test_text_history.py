"""A history knows who wrote what, in text and in tokens."""

import pytest
import torch

from tests.tiny_tokenizers import tiny_tokenizer
from trl import TextHistory


def history():
    found = TextHistory("Look up", torch.tensor([3, 4]))
    found.append_segment(" now<call>", [5, 6, 7], system=False)
    found.append_segment("12<response>", [8], system=True)
    found.append_segment(" then", [9, 10], system=False)
    return found


def test_spans_masks_and_the_split():
    found = history()
    assert found.text == "Look up now<call>12<response> then"
    assert found.last_text_segment == found.last_model_text == " then"
    assert found.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert found.token_masks.tolist() == [0, 0, 1, 1, 1, 0, 1, 1]
    assert found.token_spans == [(0, 2), (2, 5), (5, 6), (6, 8)]
    assert [found.text[begin:end] for begin, end in found.text_spans] == [
        "Look up", " now<call>", "12<response>", " then"
    ]  # fmt: skip
    assert found.system_spans == [True, False, True, False]
    query, response, mask = found.split_query_response_tokens()
    assert (query.tolist(), response.tolist(), mask.tolist()) == (
        [3, 4],
        [5, 6, 7, 8, 9, 10],
        [1, 1, 1, 0, 1, 1],
    )
    assert TextHistory("a", [3]).last_model_text == ""


def test_the_end():
    found = history()
    assert not found.completed and not found.truncated and found.reward is None
    with pytest.raises(ValueError, match="at least one token, got none with the text 'x'"):
        found.append_segment("x", [])
    found.complete(truncated=True)
    assert found.completed and found.truncated
    with pytest.raises(ValueError, match="completed, so nothing can be added"):
        found.append_segment("x", [3])


def test_on_the_screen(capsys):
    found, tokenizer = history(), tiny_tokenizer()
    found.reward = torch.tensor(0.5)
    found.show_text()
    assert capsys.readouterr().out == "Look up now<call>12<response> then\n\nReward: 0.5\n"
    found.show_tokens(tokenizer, show_legend=True)
    shown = capsys.readouterr().out.replace("\n", " ").split()
    tokens = tokenizer.convert_ids_to_tokens(found.tokens.tolist())
    assert shown == [*tokens, "Reward:", "0.5", "Prompt|System|Model|Reward"]
    found.show_colour_legend()
    assert capsys.readouterr().out == "Prompt|System|Model|Reward\n"
