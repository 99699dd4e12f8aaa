"""Rows with images as batches: what is trained, what is cut, what is refused."""

import re

import pytest
import torch
from tests.tiny_vision import FAMILIES, PLACEHOLDERS, tiny_image, tiny_processor

from trl.collators.images import DataCollatorForVisionLanguageModeling

ASK = {"role": "user", "content": "What colour is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
AGAIN = {"role": "user", "content": "And then?"}
PART = {"type": "image"}


@pytest.fixture(scope="module")
def llava():
    return tiny_processor("llava")


def trained(processor, batch):
    """The trained tokens of each row as text."""
    return [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]


def image_tokens(processor, batch):
    return torch.isin(batch["input_ids"], torch.tensor(processor.image_token_ids))


# ---- what is trained


@pytest.mark.parametrize("family", FAMILIES)
def test_of_messages_all_but_images_and_padding_is_trained(family):
    processor = tiny_processor(family)
    rows = [
        {"images": [tiny_image()], "messages": [ASK, BLUE]},
        {"images": [tiny_image(1), tiny_image(2)], "messages": [ASK, BLUE, AGAIN, BLUE]},
    ]
    batch = DataCollatorForVisionLanguageModeling(processor)(rows)
    is_image = image_tokens(processor, batch)
    assert is_image.sum(dim=1).tolist() == ([1, 2] if family == "idefics3" else [4, 8])
    assert (batch["labels"][is_image] == -100).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert batch["attention_mask"][:, 0].all() and not batch["attention_mask"][0, -1], "padded on the right"
    kept = batch["labels"] != -100
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    text = trained(processor, batch)
    assert text[0].startswith("<|im_start|>user\n")
    assert text[0].endswith("sky?<|im_end|>\n<|im_start|>assistant\nIt is blue.<|im_end|>\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_of_prompt_and_completion_the_completion_is_trained(family):
    processor = tiny_processor(family)
    rows = [
        {"images": [tiny_image()], "prompt": [ASK], "completion": [BLUE]},
        {"images": [], "prompt": [ASK], "completion": [BLUE, AGAIN, BLUE]},
        {"images": [tiny_image(1), tiny_image(2)], "prompt": [ASK], "completion": [BLUE]},
    ]
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    answer = "It is blue.<|im_end|>\n"
    more = "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert trained(processor, collate(rows)) == [answer, answer + more + answer, answer]
    batch = DataCollatorForVisionLanguageModeling(processor)(rows)
    assert all(text.startswith("<|im_start|>user\n") for text in trained(processor, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_in_the_completion_moves_no_boundary(family):
    processor = tiny_processor(family)
    look = {"role": "user", "content": [{"type": "text", "text": "And then? "}, PART]}
    row = {"images": [tiny_image(), tiny_image(1)], "prompt": [{**ASK, "content": [PART]}], "completion": [BLUE, look, BLUE]}  # fmt: skip
    batch = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)([row])
    text = trained(processor, batch)[0]
    assert text.startswith("It is blue.<|im_end|>\n<|im_start|>user\nAnd then? ")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\nIt is blue.<|im_end|>\n")
    assert (batch["labels"][image_tokens(processor, batch)] == -100).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_holds_the_placeholder_and_gets_an_eos_token(family):
    processor, mark = tiny_processor(family), PLACEHOLDERS[family]
    row = {"image": tiny_image(), "prompt": f"{mark}What is it?", "completion": " blue."}
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=None)
    assert trained(processor, collate([row])) == [" blue.<|im_end|>"]
    closed = {"image": tiny_image(), "text": f"{mark}It is blue.<|im_end|>"}
    assert trained(processor, collate([closed]))[0].endswith("It is blue.<|im_end|>")


def test_a_pad_token_that_is_the_eos_token_stays_trained():
    processor = tiny_processor("llava")
    processor.tokenizer.pad_token = "<|im_end|>"
    rows = [
        {"images": [tiny_image()], "messages": [ASK, BLUE]},
        {"images": [tiny_image()], "messages": [ASK, BLUE, AGAIN, BLUE]},
    ]
    batch = DataCollatorForVisionLanguageModeling(processor)(rows)
    assert [text.count("<|im_end|>") for text in trained(processor, batch)] == [2, 4]


def test_what_only_some_models_take_is_kept():
    rows = [{"images": [tiny_image()], "messages": [ASK, BLUE]}]
    keys = {family: set(DataCollatorForVisionLanguageModeling(tiny_processor(family))(rows)) for family in FAMILIES}
    shared = {"input_ids", "attention_mask", "labels", "pixel_values"}
    assert keys == {
        "llava": shared,
        "qwen2_vl": shared | {"image_grid_thw", "mm_token_type_ids"},
        "idefics3": shared | {"pixel_attention_mask"},
        "gemma3": shared | {"token_type_ids"},
    }


# ---- lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_lose_their_end_but_no_image(family):
    processor = tiny_processor(family)
    rows = [
        {"images": [tiny_image()], "messages": [ASK, BLUE]},
        {"images": [tiny_image(1)], "messages": [ASK, BLUE, AGAIN, BLUE]},
    ]
    whole = DataCollatorForVisionLanguageModeling(processor)(rows)
    collate = DataCollatorForVisionLanguageModeling(processor, max_length=30)
    batch = collate(rows)
    for name in set(whole) - {"pixel_values", "pixel_attention_mask", "image_grid_thw"}:
        assert torch.equal(batch[name], whole[name][:, :30]), name
    assert torch.equal(batch["pixel_values"], whole["pixel_values"])
    lengths = whole["attention_mask"].sum(dim=1)
    assert collate.rows_cut == int((lengths > 30).sum()) >= 1
    end = int(image_tokens(processor, whole)[0].nonzero()[-1])
    with pytest.raises(ValueError, match=rf"row 0 of the batch, column 'images': .*max_length={end}"):
        DataCollatorForVisionLanguageModeling(processor, max_length=end)(rows)


def test_rows_of_which_nothing_trained_is_left_are_told(llava, caplog):
    row = {"images": [tiny_image()], "prompt": [ASK], "completion": [BLUE]}
    batch = DataCollatorForVisionLanguageModeling(llava, completion_only_loss=True, max_length=15)([row])
    assert (batch["labels"] == -100).all()
    assert "1 rows of a batch have no trained token left within max_length=15" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_are_rounded_up(family):
    processor = tiny_processor(family)
    rows = [{"images": [tiny_image()], "messages": [ASK, BLUE]}]
    plain = DataCollatorForVisionLanguageModeling(processor)(rows)
    batch = DataCollatorForVisionLanguageModeling(processor, pad_to_multiple_of=64)(rows)
    width = plain["input_ids"].shape[1]
    for name in set(plain) - {"pixel_values", "pixel_attention_mask", "image_grid_thw"}:
        assert batch[name].shape == (1, 64), name
        assert torch.equal(batch[name][:, :width], plain[name]), name
    assert (batch["labels"][:, width:] == -100).all() and not batch["attention_mask"][:, width:].any()


# ---- bad input

IMAGE = tiny_image()
BAD = {
    "None for a list": ({"images": None, "messages": [ASK, BLUE]}, ValueError, "row 0 of the batch, column 'images': None.*Give []"),
    "an image for a list": ({"images": IMAGE, "messages": [ASK, BLUE]}, TypeError, "column 'images': a Image, expected a list of images"),
    "a path": ({"images": ["cat.png"], "messages": [ASK, BLUE]}, TypeError, "image 0 is of type str.*cast_column"),
    "both columns": ({"images": [IMAGE], "image": IMAGE, "messages": [ASK, BLUE]}, ValueError, "'images' and 'image'"),
    "more places": (
        {"images": [IMAGE], "messages": [{"role": "user", "content": [PART, PART]}, BLUE]},
        ValueError, "row 0 of the batch, column 'images': 1 images for 2 image parts",
    ),
    "places without a column": (
        {"messages": [{"role": "user", "content": [PART]}, BLUE]}, ValueError, "column 'messages': 0 images",
    ),
    "a placeholder in a message": (
        {"images": [IMAGE], "messages": [{"role": "user", "content": "<image>Look"}, BLUE]},
        ValueError, "column 'messages': 1 images for 2 placeholders '<image>'",
    ),
    "no placeholder in text": ({"images": [IMAGE], "text": "Look up."}, ValueError, "column 'images': 1 images for 0 placeholders '<image>'"),
    "tokens": ({"images": [IMAGE], "input_ids": [1, 2]}, ValueError, "tokens beside images"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused(name, llava):
    row, error, says = BAD[name]
    with pytest.raises(error, match=says.replace("[]", re.escape("[]"))):
        DataCollatorForVisionLanguageModeling(llava)([row])


def test_a_template_that_drops_images_is_refused():
    processor = tiny_processor("llava")
    processor.chat_template = processor.chat_template.replace("'<image>'", "''")
    with pytest.raises(ValueError, match=r"1 images for 0 placeholders '<image>'.*own chat template"):
        DataCollatorForVisionLanguageModeling(processor)([{"images": [IMAGE], "messages": [ASK, BLUE]}])


def test_bad_settings_are_refused(llava):
    with pytest.raises(ValueError, match="return_tensors must be 'pt'"):
        DataCollatorForVisionLanguageModeling(llava, return_tensors="np")
    with pytest.raises(ValueError, match="max_length must be"):
        DataCollatorForVisionLanguageModeling(llava, max_length=0)
    with pytest.raises(ValueError, match="pad_to_multiple_of must be"):
        DataCollatorForVisionLanguageModeling(llava, pad_to_multiple_of=0)
    with pytest.raises(TypeError, match="processor must have an image_processor"):
        DataCollatorForVisionLanguageModeling(llava.tokenizer)
    with pytest.raises(ValueError, match="at least 1 row"):
        DataCollatorForVisionLanguageModeling(llava)([])
    with pytest.raises(ValueError, match="completion_only_loss=True"):
        DataCollatorForVisionLanguageModeling(llava, completion_only_loss=True)([{"images": [], "messages": [ASK, BLUE]}])  # fmt: skip
