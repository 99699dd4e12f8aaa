"""Rows to tokens: end and begin tokens, the prompt-completion boundary, conversational prompts."""

from typing import Any

import pytest
from tests.tiny_tokenizers import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from trl.data.text import SFTTokenizer
from trl.data.tokenization import encode_closed, encode_open, tokenize_split
from trl.data.validation import RowType

TEXT = RowType("text", ("text",))
PAIR = RowType("text", ("prompt", "completion"))
CHAT = RowType("messages", ("messages",))
CHAT_PAIR = RowType("messages", ("prompt", "completion"))
USER = [{"role": "user", "content": "And then?"}]
BLUE = [{"role": "assistant", "content": "Blue."}]


def one_row(tokenizer: PreTrainedTokenizerFast, kind: RowType, row: dict[str, Any], **masks: bool) -> dict[str, Any]:
    batch = SFTTokenizer(tokenizer, kind, "train", **masks)({key: [value] for key, value in row.items()}, [0])
    return {key: values[0] for key, values in batch.items()}


def text_where(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], mask: str) -> str:
    return tokenizer.decode([i for i, m in zip(row["input_ids"], row[mask], strict=True) if m])


def test_text_gets_one_eos() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("The sky is blue.", "The sky is blue.<|im_end|>"):
        row = one_row(tokenizer, TEXT, {"text": text})
        assert tokenizer.decode(row["input_ids"]) == "The sky is blue.<|im_end|>"
        assert row["input_ids"].count(tokenizer.eos_token_id) == 1


def test_one_begin_token_where_text_and_tokenizer_bring_one() -> None:
    tokenizer = tiny_tokenizer(adds_begin=True)
    plain = one_row(tokenizer, TEXT, {"text": "Blue."})
    double = one_row(tokenizer, TEXT, {"text": "<s>Blue."})
    assert plain["input_ids"] == double["input_ids"]
    assert (plain["removed_begin_tokens"], double["removed_begin_tokens"]) == (0, 1)
    assert plain["input_ids"].count(tokenizer.bos_token_id) == 1


def test_begin_token_of_a_template_is_not_doubled() -> None:
    tokenizer = tiny_tokenizer("begin", adds_begin=True)
    row = one_row(tokenizer, CHAT, {"messages": USER + BLUE})
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1
    pair = one_row(tokenizer, CHAT_PAIR, {"prompt": USER, "completion": BLUE}, completion_mask=True)
    assert pair["input_ids"] == row["input_ids"]


def test_eos_that_the_tokenizer_adds_is_not_doubled_and_not_in_the_prompt() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    identifier = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", identifier)]
    )
    (closed, _), *_ = encode_closed(tokenizer, ["Blue."])
    assert closed.count(identifier) == 1
    (opened, _), *_ = encode_open(tokenizer, ["Blue."])
    assert identifier not in opened
    row = one_row(tokenizer, PAIR, {"prompt": "Sky:", "completion": " blue"}, completion_mask=True)
    assert text_where(tokenizer, row, "completion_mask") == " blue<|im_end|>"
    assert row["shifted_rows"] == 0


@pytest.mark.parametrize("is_chat", [True, False])
def test_an_encoder_decoder_reads_a_chat_that_a_special_token_ends(is_chat: bool) -> None:
    """Prompt and answer have an eos of their own, but where a chat ends with another special token already."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    rows, eos = [("Why?<turn>", ["So.<turn>", "No."])], tokenizer.eos_token
    (split,) = tokenize_split(tokenizer, rows, add_special_tokens=False, is_chat=is_chat, is_encoder_decoder=True)
    end = "" if is_chat else eos
    texts = [tokenizer.decode(ids) for ids in (split.prompt, *split.completions)]
    assert texts == [f"Why?<turn>{end}", f"So.<turn>{end}", f"No.{eos}"]


def test_special_tokens_are_read_once_for_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer makes its table of them anew each time, for thousands of tokens in milliseconds."""
    calls = []

    def read(tokenizer: Any) -> tuple[str, ...]:
        calls.append(tokenizer)
        return ("<|im_end|>",)

    monkeypatch.setattr("trl.data.tokenization.special_texts", read)
    encode_closed(tiny_tokenizer(), ["Blue."] * 5, is_chat=True)
    assert len(calls) == 1


def test_completion_mask_covers_the_completion_and_its_eos() -> None:
    tokenizer = tiny_tokenizer(pad_token="<|im_end|>")
    row = one_row(tokenizer, PAIR, {"prompt": "The sky is", "completion": " blue."}, completion_mask=True)
    assert text_where(tokenizer, row, "completion_mask") == " blue.<|im_end|>"
    assert row["shifted_rows"] == 0


def test_boundary_inside_a_token_starts_the_completion_at_that_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([" blue"])
    row = one_row(tokenizer, PAIR, {"prompt": "The sky is bl", "completion": "ue."}, completion_mask=True)
    assert text_where(tokenizer, row, "completion_mask") == " blue.<|im_end|>"
    assert row["shifted_rows"] == 1


def test_conversations_get_no_extra_eos() -> None:
    tokenizer = tiny_tokenizer()
    row = one_row(tokenizer, CHAT, {"messages": USER + BLUE})
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(USER + BLUE, tokenize=False)
    assert row["unstopped_rows"] == 0
    assert one_row(tiny_tokenizer("no_stop"), CHAT, {"messages": USER + BLUE})["unstopped_rows"] == 1


def test_conversational_prompt_ends_with_the_generation_prompt() -> None:
    tokenizer = tiny_tokenizer()
    row = one_row(tokenizer, CHAT_PAIR, {"prompt": USER, "completion": BLUE}, completion_mask=True)
    assert text_where(tokenizer, row, "completion_mask") == "Blue.<|im_end|>\n"
    assert "assistant_masks" not in row


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_both_masks_of_a_conversational_pair(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    pair = {"prompt": USER + BLUE + USER, "completion": BLUE}
    row = one_row(tokenizer, CHAT_PAIR, pair, completion_mask=True, assistant_masks=True)
    assert text_where(tokenizer, row, "completion_mask") == "Blue.<|im_end|>\n"
    assert text_where(tokenizer, row, "assistant_masks") == "Blue.<|im_end|>Blue.<|im_end|>"
