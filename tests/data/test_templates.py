"""Chat templates applied to rows, their properties, training stand-ins, and answers parsed back."""

import json
from typing import Any

import pytest
from datasets import Json, List, load_dataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.rendering import Chat, TemplateRefusal, read_tools, render
from trl.data.templates import (
    CHATML_TRAINING_TEMPLATE,
    QWEN3_TRAINING_TEMPLATE,
    add_response_schema,
    apply_chat_template,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    maybe_apply_chat_template,
    parse_response,
)
from trl.data.text import SFTPreparation

USER = [{"role": "user", "content": "And then?"}]
BLUE = [{"role": "assistant", "content": "Blue."}]
GREEN = [{"role": "assistant", "content": "Green."}]
ASKED = "<|im_start|>user\nAnd then?<|im_end|>\n"
OPENED = ASKED + "<|im_start|>assistant\n"
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": USER + BLUE}, {"text": OPENED + "Blue.<|im_end|>\n"}),
        ({"prompt": USER}, {"prompt": OPENED}),
        ({"prompt": USER + BLUE}, {"prompt": OPENED + "Blue."}),
        ({"prompt": USER, "completion": BLUE}, {"prompt": OPENED, "completion": "Blue.<|im_end|>\n"}),
        (
            {"prompt": USER, "chosen": BLUE, "rejected": GREEN},
            {"prompt": OPENED, "chosen": "Blue.<|im_end|>\n", "rejected": "Green.<|im_end|>\n"},
        ),
        (
            {"chosen": USER + BLUE, "rejected": USER + GREEN},
            {"chosen": OPENED + "Blue.<|im_end|>\n", "rejected": OPENED + "Green.<|im_end|>\n"},
        ),
        (
            {"prompt": USER, "completion": BLUE, "label": True},
            {"prompt": OPENED, "completion": "Blue.<|im_end|>\n", "label": True},
        ),
    ],
)
def test_apply_chat_template(row: dict[str, Any], expected: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    assert apply_chat_template(row, tokenizer) == expected
    assert maybe_apply_chat_template(row, tokenizer) == expected


def test_standard_rows_pass_and_unknown_columns_do_not() -> None:
    tokenizer = tiny_tokenizer()
    assert maybe_apply_chat_template({"prompt": "a", "completion": "b"}, tokenizer) == {  # type: ignore[dict-item]
        "prompt": "a",
        "completion": "b",
    }
    with pytest.raises(KeyError, match="columns must be"):
        apply_chat_template({"completion": BLUE}, tokenizer)


def test_a_tool_result_opens_for_generation_and_an_assistant_is_continued() -> None:
    tokenizer = tiny_tokenizer()
    tool = [{"role": "tool", "content": "blue"}]
    assert apply_chat_template({"prompt": USER + tool}, tokenizer)["prompt"].endswith("<|im_start|>assistant\n")
    rendered = apply_chat_template({"prompt": USER + BLUE, "completion": USER}, tokenizer)
    assert rendered == {"prompt": OPENED + "Blue.", "completion": "<|im_end|>\n" + ASKED}


def test_cut_where_the_generation_prompt_writes_more_than_the_conversation_keeps() -> None:
    tokenizer = tiny_tokenizer("opens_thought")
    assert apply_chat_template({"prompt": USER}, tokenizer) == {"prompt": OPENED + "<think>\n"}
    rendered = apply_chat_template({"prompt": USER, "chosen": BLUE, "rejected": GREEN}, tokenizer)
    assert rendered == {"prompt": OPENED, "chosen": "Blue.<|im_end|>\n", "rejected": "Green.<|im_end|>\n"}


def test_a_completion_that_changes_the_prompt_is_refused() -> None:
    tokenizer = tiny_tokenizer("qwen3_like")
    prompt = [*USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nBlue."}, *USER]
    # The thought of the first answer is dropped in both renderings: the prompt stays a prefix.
    assert "Hm." not in apply_chat_template({"prompt": prompt, "completion": BLUE}, tokenizer)["prompt"]
    # Cut after the answer instead, the next question takes the thought out of what was the prompt.
    with pytest.raises(TemplateRefusal, match=r"renders the prompt differently.*get_training_chat_template"):
        apply_chat_template({"prompt": prompt[:2], "completion": USER + BLUE}, tokenizer)


def test_tools_from_argument_column_and_json_string() -> None:
    tokenizer = tiny_tokenizer("qwen3_like")

    def look(where: str) -> str:
        """Look somewhere.

        Args:
            where: The direction.
        """
        return where

    as_list = apply_chat_template({"prompt": USER, "tools": [LOOK]}, tokenizer)["prompt"]  # type: ignore[dict-item]
    assert '"name": "look"' in as_list
    assert apply_chat_template({"prompt": USER, "tools": json.dumps([LOOK])}, tokenizer)["prompt"] == as_list  # type: ignore[dict-item]
    assert apply_chat_template({"prompt": USER}, tokenizer, tools=[LOOK])["prompt"] == as_list
    assert "The direction." in apply_chat_template({"prompt": USER}, tokenizer, tools=[look])["prompt"]
    assert "# Tools" not in apply_chat_template({"prompt": USER, "tools": []}, tokenizer)["prompt"]


OPTIONAL: dict = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"properties": {"where": {"type": "string", "default": None}}},
    },
}
OTHER: dict = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"n": {"default": 3}}}},
}


def test_none_that_the_user_wrote_is_kept() -> None:
    """JSON text and schemas given in Python say whose the None is; a list of a stored data set does not."""
    tokenizer = tiny_tokenizer("qwen3_like")
    for tools in (json.dumps([OPTIONAL]), [json.dumps(OPTIONAL)]):
        assert read_tools(tools) == [OPTIONAL]
        assert '"default": null' in apply_chat_template({"prompt": USER, "tools": tools}, tokenizer)["prompt"]
    assert '"default": null' in apply_chat_template({"prompt": USER}, tokenizer, tools=[OPTIONAL])["prompt"]
    assert "default" not in apply_chat_template({"prompt": USER, "tools": [OPTIONAL]}, tokenizer)["prompt"]


@pytest.mark.parametrize("streaming", [False, True])
def test_none_of_values_that_are_stored_as_json_is_kept(streaming: bool, tmp_path: Any) -> None:
    """`load_dataset("json")` stores what differs from row to row as JSON."""
    calls = [
        {"type": "function", "function": {"name": "look", "arguments": arguments}}
        for arguments in ({"where": None}, {"how": 3})
    ]
    rows = [
        {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool]}
        for call, tool in zip(calls, (OPTIONAL, OTHER), strict=True)
    ]
    rows[1]["messages"] = [*rows[1]["messages"], {"role": "tool", "content": "4"}, *BLUE]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {
        "data_files": str(tmp_path / "rows.jsonl"),
        "split": "train",
        "cache_dir": str(tmp_path / "cache"),
    }
    dataset: Any = load_dataset("json", **files)
    assert "Json(" in repr(dataset.features["tools"])
    dataset = dataset.cast_column("messages", List(Json()))
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    tokenizer = tiny_tokenizer("qwen3_like")
    prepared, _ = prepare_dataset(dataset, tokenizer, SFTPreparation())
    text, other = (tokenizer.decode(row["input_ids"]) for row in prepared)
    assert '{"where": {"type": "string", "default": null}}' in text and "null" not in other
    assert '"arguments": {"where": null}' in text and '"arguments": {"how": 3}' in other


def test_template_kwargs_come_from_the_row_and_the_call() -> None:
    tokenizer = tiny_tokenizer("qwen3_like")
    row = {"prompt": USER, "chat_template_kwargs": {"enable_thinking": False}}
    quiet = apply_chat_template(row, tokenizer)["prompt"]  # type: ignore[arg-type]
    assert quiet == OPENED + "<think>\n\n</think>\n\n"
    assert apply_chat_template({"prompt": USER}, tokenizer, enable_thinking=False)["prompt"] == quiet


def test_read_tools_refuses_other_things() -> None:
    assert read_tools(None) is None
    assert read_tools([json.dumps(LOOK)]) == [LOOK]
    with pytest.raises(ValueError, match="or its JSON"):
        read_tools("{look}")
    with pytest.raises(TypeError, match="got int"):
        read_tools(3)
    with pytest.raises(TypeError, match="got int"):
        read_tools([3])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", True),
        ("marked", True),
        ("stop_in_next", True),
        ("opens_thought", False),
        ("qwen3_like", False),
    ],
)
def test_prefix_preserving(template: str, expected: bool) -> None:
    assert is_chat_template_prefix_preserving(tiny_tokenizer(template)) is expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", CHATML_TRAINING_TEMPLATE),
        ("qwen3_like", QWEN3_TRAINING_TEMPLATE),
        ("marked", None),
        ("other_stop", None),
        ("begin", None),
        ("none", None),
    ],
)
def test_training_template(template: str, expected: str | None) -> None:
    tokenizer = tiny_tokenizer(template)
    found = get_training_chat_template(tokenizer)
    assert found == expected
    if found is not None:
        tokenizer.chat_template = found
        assert is_chat_template_prefix_preserving(tokenizer)
        assert get_training_chat_template(tokenizer) is None


CHATML_WITH = """{{ HEAD }}{% for m in messages %}<|im_start|>{{ ROLE }}
PRINTED<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("", ""),
        ("PRINTED", "{{ m.content }}"),
        ("HEAD", "tools or ''"),
        ("HEAD", "mode or ''"),
        ("ROLE", "'system' if m.role == 'developer' else m.role"),
        ("ROLE", "m.role + (m.name or '')"),
        ("CONTENT", "m.content + (m.tool_calls | tojson if m.tool_calls else '')"),
        ("CONTENT", "(m.reasoning_content or '') + m.content"),
        ("CONTENT", "m.content | trim"),
        ("CONTENT", "m.content.split('</think>')[-1]"),
        ("CONTENT", "m.content if m.content is string else m.content[0].text"),
    ],
)
def test_chatml_that_does_more_is_not_replaced(part: str, text: str) -> None:
    """What the plain one has no rules for would be lost: tools, calls, thoughts, names, variables."""
    plain = {"PRINTED": "{{ CONTENT }}", "HEAD": "bos_token and ''", "ROLE": "m.role", "CONTENT": "'' + m.content"}
    source = CHATML_WITH
    for name, expression in {**plain, part: text}.items():
        source = source.replace(name or "-", expression)
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = source
    assert get_training_chat_template(tokenizer) == (None if part not in ("", "PRINTED") else CHATML_TRAINING_TEMPLATE)


def test_qwen3_as_published_gives_calls_a_thought_only_where_they_have_one_or_come_last() -> None:
    tokenizer = tiny_tokenizer("qwen3_like")
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}],
    }
    result, empty = {"role": "tool", "content": "blue"}, "<think>\n\n</think>\n\n"
    called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>\n'
    assert render(tokenizer, Chat([*USER, call])) == OPENED + empty + called
    assert render(tokenizer, Chat([*USER, call, result])).startswith(OPENED + called)
    thought = {**call, "reasoning_content": "Up."}
    assert render(tokenizer, Chat([*USER, thought, result])).startswith(OPENED + "<think>\nUp.\n</think>\n\n" + called)
    as_user = {"role": "user", "content": "<tool_response>\nblue\n</tool_response>"}
    assert "Up." in render(tokenizer, Chat([*USER, thought, as_user]))
    assert "Up." not in render(tokenizer, Chat([*USER, thought, *USER]))
    assert get_training_chat_template(tokenizer) == QWEN3_TRAINING_TEMPLATE


ANSWERS = {
    "plain": ("Blue.<|im_end|>", {"role": "assistant", "content": "Blue."}),
    "cut off": ("Blue", {"role": "assistant", "content": "Blue"}),
    "thought": (
        "<think>\nLook up.\n</think>\n\nBlue.<|im_end|>",
        {"role": "assistant", "content": "Blue.", "reasoning_content": "Look up."},
    ),
    "call": (
        '<tool_call>\n{"name": "look", "arguments": {"where": "up"}}\n</tool_call><|im_end|>',
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}],
        },
    ),
    "thought, text and two calls": (
        "<think>\n\n</think>\n\nSee.\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call><|im_end|>".format(
            '{"name": "look", "arguments": {}}', '{"name": "wait", "arguments": {"s": 1}}'
        ),
        {
            "role": "assistant",
            "content": "See.",
            "tool_calls": [
                {"type": "function", "function": {"name": "look", "arguments": {}}},
                {"type": "function", "function": {"name": "wait", "arguments": {"s": 1}}},
            ],
        },
    ),
    "broken call": (
        '<tool_call>\n{"name": look}\n</tool_call><|im_end|>',
        {"role": "assistant", "content": '<tool_call>\n{"name": look}\n</tool_call>'},
    ),
}


@pytest.mark.parametrize(("text", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_parse_response(text: str, expected: dict) -> None:
    tokenizer = tiny_tokenizer("qwen3_like")
    tokenizer.chat_template = QWEN3_TRAINING_TEMPLATE
    add_response_schema(tokenizer)
    assert parse_response(tokenizer, tokenizer(text)["input_ids"]) == expected  # type: ignore[arg-type]


def test_parsing_needs_rules() -> None:
    tokenizer = tiny_tokenizer("chatml")
    with pytest.raises(ValueError, match="add_response_schema"):
        parse_response(tokenizer, [1, 2])
    with pytest.raises(ValueError, match="response_template"):
        add_response_schema(tokenizer)
