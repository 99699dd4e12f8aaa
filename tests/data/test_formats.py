"""Dataset types: detection, conversion to ChatML, prompts taken out, preferences unpaired."""

from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from trl.data.formats import (
    column_names,
    extract_prompt,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    prepare_multimodal_messages,
    prepare_multimodal_messages_vllm,
    remove_none_values,
    split_dialogue,
    unpair_preference_dataset,
)

USER = [{"role": "user", "content": "What colour is the sky?"}]
BLUE = [{"role": "assistant", "content": "Blue."}]
GREEN = [{"role": "assistant", "content": "Green."}]

CONVERSATIONAL = {
    "language modelling": {"messages": USER + BLUE},
    "prompt-only": {"prompt": USER},
    "prompt-completion": {"prompt": USER, "completion": BLUE},
    "preference": {"prompt": USER, "chosen": BLUE, "rejected": GREEN},
    "implicit preference": {"chosen": USER + BLUE, "rejected": USER + GREEN},
    "unpaired preference": {"prompt": USER, "completion": BLUE, "label": True},
    "with tools": {"messages": USER + BLUE, "tools": [{"type": "function"}]},
}
STANDARD = {
    "language modelling": {"text": "The sky is blue."},
    "prompt-only": {"prompt": "The sky is"},
    "prompt-completion": {"prompt": "The sky is", "completion": " blue."},
    "preference": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "implicit preference": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "unpaired preference": {"prompt": "The sky is", "completion": " blue.", "label": True},
    "stepwise": {"prompt": "2+2", "completions": ["4"], "labels": [True]},
}


@pytest.mark.parametrize("row", CONVERSATIONAL.values(), ids=CONVERSATIONAL)
def test_conversational_rows(row: dict[str, Any]) -> None:
    assert is_conversational(row)


@pytest.mark.parametrize(
    "row", [*STANDARD.values(), {}, {"messages": []}, {"messages": None}, {"text": ["a"]}, {"prompt": [1]}]
)
def test_other_rows(row: dict[str, Any]) -> None:
    assert not is_conversational(row)


def test_from_value_conversations_become_messages() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Ho"},
        ],
        "id": 3,
    }
    assert is_conversational_from_value(row)
    converted = maybe_convert_to_chatml(row)
    assert converted == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho"},
        ],
        "id": 3,
    }
    assert maybe_convert_to_chatml(converted) == converted
    assert maybe_convert_to_chatml({"conversations": USER}) == {"messages": USER}
    row = {"prompt": [{"from": "narrator", "value": "Once"}], "completion": "upon"}
    assert maybe_convert_to_chatml(row)["prompt"] == [{"role": "narrator", "content": "Once"}]  # type: ignore[arg-type]
    assert maybe_convert_to_chatml(STANDARD["stepwise"]) == STANDARD["stepwise"]


def test_nones_from_columnar_storage_are_removed() -> None:
    messages = [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "look", "arguments": {"where": "up"}}}],
        },
    ]
    stored = Dataset.from_list([{"messages": messages}])[0]["messages"]
    assert stored[0] == {"role": "user", "content": "Look", "tool_calls": None}
    assert remove_none_values(stored) == messages


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),
        ("Yes", "No", ("", "Yes", "No")),
        (" a", " b", ("", " a", " b")),
        ("The sky", "The sky is", ("The sky", "", " is")),
        ("same", "same", ("same", "", "")),
        (USER + BLUE, USER + GREEN, (USER, BLUE, GREEN)),
        (BLUE, GREEN, ([], BLUE, GREEN)),
    ],
)
def test_extract_prompt(chosen: Any, rejected: Any, expected: tuple) -> None:
    row = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert (row["prompt"], row["chosen"], row["rejected"]) == expected


def test_maybe_extract_prompt_keeps_explicit_prompts_of_the_same_format() -> None:
    assert maybe_extract_prompt(STANDARD["preference"]) == STANDARD["preference"]
    assert maybe_extract_prompt(CONVERSATIONAL["preference"]) == CONVERSATIONAL["preference"]
    assert maybe_extract_prompt({"text": "a"}) == {"text": "a"}  # type: ignore[dict-item]
    assert maybe_extract_prompt(CONVERSATIONAL["implicit preference"]) == CONVERSATIONAL["preference"]


def test_maybe_extract_prompt_replaces_a_string_beside_messages() -> None:
    row = {"prompt": "What colour is the sky?", "chosen": USER + BLUE, "rejected": USER + GREEN, "score": 1}
    assert maybe_extract_prompt(row) == {**CONVERSATIONAL["preference"], "score": 1}  # type: ignore[arg-type]


PAIRS = {"prompt": ["a", "b"], "chosen": ["1", "2"], "rejected": ["3", "4"], "margin": [0.5, 0.25]}
UNPAIRED = [
    {"prompt": "a", "margin": 0.5, "completion": "1", "label": True},
    {"prompt": "b", "margin": 0.25, "completion": "2", "label": True},
    {"prompt": "a", "margin": 0.5, "completion": "3", "label": False},
    {"prompt": "b", "margin": 0.25, "completion": "4", "label": False},
]


def test_unpair_stored_and_streaming() -> None:
    stored = Dataset.from_dict(PAIRS)
    assert list(unpair_preference_dataset(stored)) == UNPAIRED
    assert list(unpair_preference_dataset(stored.to_iterable_dataset())) == UNPAIRED
    both = unpair_preference_dataset(DatasetDict(train=stored, test=stored))
    assert list(both["test"]) == UNPAIRED
    streams = IterableDatasetDict(train=stored.to_iterable_dataset())
    assert list(unpair_preference_dataset(streams)["train"]) == UNPAIRED


def test_maybe_unpair_leaves_others_alone() -> None:
    unpaired = Dataset.from_list(UNPAIRED)
    assert maybe_unpair_preference_dataset(unpaired) is unpaired
    stream = IterableDataset.from_generator(lambda: iter([{"chosen": "1", "rejected": "2"}]))
    assert stream.column_names is None
    assert column_names(stream) == ["chosen", "rejected"]
    assert len(list(maybe_unpair_preference_dataset(stream))) == 2
    assert len(maybe_unpair_preference_dataset(DatasetDict(train=Dataset.from_dict(PAIRS)))["train"]) == 4


# ---- dialogues written as text

ASK = "\n\nHuman: Why?\n\nAssistant:"


def test_at_the_last_turn_that_both_share():
    row = {"chosen": ASK + " So." + ASK + " Because.", "rejected": ASK + " So." + ASK + " Go away."}
    assert split_dialogue(row) == {
        "prompt": ASK + " So." + ASK,
        "chosen": " Because.",
        "rejected": " Go away.",
    }


def test_where_dialogues_part_before_their_last_turn():
    row = {"chosen": ASK + " So." + ASK + " Because.", "rejected": ASK + " No." + ASK + " Go away."}
    assert split_dialogue(row) == {
        "prompt": ASK,
        "chosen": " So." + ASK + " Because.",
        "rejected": " No." + ASK + " Go away.",
    }


def test_no_shared_turn():
    with pytest.raises(ValueError, match=r"share no '\\n\\nAssistant:'"):
        split_dialogue({"chosen": "Why?", "rejected": "Why not?"})


def test_every_row_of_hh_harmless(published):
    for row in published("hh_harmless/test"):
        found = split_dialogue(row)
        assert found["prompt"].endswith("Assistant:")
        for side in ("chosen", "rejected"):
            assert found["prompt"] + found[side] == row[side]


# ---- images in messages

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
        ([{"role": "user", "content": [{"type": "image"}]}], ValueError, "2 images for 1"),
        ([{"role": "assistant", "content": "A cat."}], ValueError, "no user message"),
        ([{"role": "user", "content": 3}], TypeError, "got int"),
    ],
)
def test_refusals(messages: list[dict[str, Any]], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        prepare_multimodal_messages(messages, images=["a", "b"])


def test_vllm_form() -> None:
    prepared = prepare_multimodal_messages_vllm([{"role": "user", "content": [image("a"), text("?")]}, TALK[2]])
    assert prepared == [
        {"role": "user", "content": [{"type": "image_pil", "image_pil": "a"}, text("?")]},
        TALK[2],
    ]
