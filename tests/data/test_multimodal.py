"""Images in messages."""

from typing import Any

import pytest

from trl.data.formats import prepare_multimodal_messages, prepare_multimodal_messages_vllm

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A cat."},
]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def image(value: str) -> dict[str, str]:
    return {"type": "image", "image": value}


def test_images_go_to_the_first_user_message() -> None:
    prepared = prepare_multimodal_messages(TALK, images=["a", "b"])
    assert [message["content"] for message in prepared] == [
        [text("Be brief.")],
        [image("a"), image("b"), text("What is it?")],
        [text("A cat.")],
    ]
    assert TALK[1]["content"] == "What is it?"


def test_places_are_filled_in_order_and_filled_ones_kept() -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, text("or"), {"type": "image"}]},
        {"role": "user", "content": [image("c")]},
    ]
    prepared = prepare_multimodal_messages(messages, images=["a", "b"])
    assert [part.get("image") for message in prepared for part in message["content"]] == ["a", None, "b", "c"]
    assert messages[0]["content"][0] == {"type": "image"}  # type: ignore[index]


def test_without_images_only_the_structure_changes() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}
    prepared = prepare_multimodal_messages([*TALK, call], images=[])
    assert prepared[1]["content"] == [text("What is it?")]
    assert prepared[3] == {**call, "content": []}


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], ValueError, "2 images for 1 image places"),
        ([{"role": "assistant", "content": "A cat."}], ValueError, "no user message"),
        ([{"role": "user", "content": 3}], TypeError, "of type int"),
    ],
)
def test_refusals(messages: list[dict[str, Any]], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        prepare_multimodal_messages(messages, images=["a", "b"])


def test_vllm_form() -> None:
    prepared = prepare_multimodal_messages_vllm(
        [{"role": "user", "content": [image("a"), text("?")]}, TALK[2]]
    )
    assert prepared == [
        {"role": "user", "content": [{"type": "image_pil", "image_pil": "a"}, text("?")]},
        TALK[2],
    ]
