"""What a processor made, by hand: which positions are images', and inputs per token of prompts within rows."""

from types import SimpleNamespace

import pytest
import torch

from trl.collators.images import (
    PromptText,
    as_read,
    check_processor,
    image_tokens,
    is_per_token,
    processed,
    prompt_inputs,
    prompt_tokens,
)

IDS = torch.tensor([[1, 9, 9, 5], [1, 6, 0, 0]])


class Processor:
    """Answers what it is told to and keeps what it was asked."""

    image_token_ids = (9, None)
    image_processor = None

    def __init__(self, *names, **made):
        self.model_input_names, self.made = ["input_ids", *names], {"input_ids": IDS, **made}

    def __call__(self, **asked):
        self.asked = asked
        return self.made


def reader(processor):
    """Prompts without the token that the processor puts first."""
    return SimpleNamespace(processor=processor, adds_special=True, own_tokens=lambda ids, text: slice(1, len(ids)))


def test_image_positions_are_told_by_type_or_by_token():
    types = torch.tensor([[0, 2, 1, 0], [0, 0, 0, 0]])
    for names in ((), ("mm_token_type_ids",)):
        processor = Processor(*names, mm_token_type_ids=types, labels=IDS)
        made, is_image = processed(processor, ["a", "b"], [["x"], []], adds_special=False)
        assert is_image.tolist() == (types > 0).tolist() and set(made) == {"input_ids", *names}
        asked = {"text": ["a", "b"], "images": [["x"], []], "padding": True, "padding_side": "right",
                 "add_special_tokens": False, "return_mm_token_type_ids": True, "return_tensors": "pt"}  # fmt: skip
        assert processor.asked == asked
    processor = Processor()
    assert processed(processor, ["a"], [[], []], adds_special=True)[1].tolist() == (IDS == 9).tolist()
    assert "images" not in processor.asked and processor.asked["add_special_tokens"] is True


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("token_type_ids", IDS, True),
        ("position_ids", IDS[..., None].expand(2, 4, 3), True),
        ("image_token_type_ids", IDS, True),
        ("image_sizes", IDS, False),
        ("pixel_values", IDS, False),
        ("token_type_ids", IDS[:1], False),
        ("token_type_ids", IDS[:, :3], False),
        ("token_type_ids", IDS.tolist(), False),
    ],
)
def test_what_belongs_to_tokens(name, value, expected):
    assert is_per_token(name, value, {"input_ids": IDS}) is expected


def test_inputs_of_prompts_stand_where_their_rows_have_the_prompts():
    pixels = torch.ones(1, 3)
    types = torch.tensor([[7, 1, 2, 3], [7, 4, 8, 8]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    processor = Processor(attention_mask=mask, token_type_ids=types, pixel_values=pixels)
    prompts = [PromptText("a", ["x"], 2), PromptText("b", [], 1)]
    found = prompt_inputs(reader(processor), prompts, [3, 2], 5)
    assert set(found) == {"token_type_ids", "pixel_values"} and found["pixel_values"] is pixels
    assert found["token_type_ids"].tolist() == [[0, 2, 3, 0, 0], [0, 4, 0, 0, 0]]
    assert found["token_type_ids"].dtype == types.dtype
    assert processor.asked["text"] == ["a", "b"] and processor.asked["images"] == [["x"], []]
    assert prompt_tokens(reader(processor), "a", ["x"]) == ([9, 9, 5], [True, True, False])
    with pytest.raises(ValueError, match="zip"):
        prompt_inputs(reader(processor), prompts, [3], 5)


def test_tokens_that_a_model_replaces():
    processor = Processor()
    assert image_tokens(processor, SimpleNamespace(image_token_id=11, image_token_index="3")) == (3, 9, 11)
    assert image_tokens(SimpleNamespace(image_token_ids=None), SimpleNamespace(image_token_index=4)) == (4,)
    assert image_tokens(SimpleNamespace(), None) == ()
    generated = torch.tensor([False, True, True, True])
    assert as_read(torch.tensor([9, 9, 5, 8]), generated, [9, 8], pad=3).tolist() == [9, 3, 5, 3]


def test_processors_that_make_no_batch():
    check_processor(Processor())
    with pytest.raises(TypeError, match="image_processor, got SimpleNamespace"):
        check_processor(SimpleNamespace())
    for name in ("PaliGemmaProcessor", "ColPaliProcessor"):
        with pytest.raises(ValueError, match=name):
            check_processor(type(name, (Processor,), {})())
