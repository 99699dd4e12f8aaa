"""Functions that turn rows into text, chosen by what the columns of a data set look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from datasets import Dataset, IterableDataset, Value
from transformers import PreTrainedTokenizerBase

FormattingFunction = Callable[[dict[str, Any]], str | list[str]]
MessagesField = Literal["messages", "conversations"]

MESSAGE_COLUMNS: tuple[MessagesField, ...] = ("messages", "conversations")
INSTRUCTION_COLUMNS = ("prompt", "completion")
_TEXT = Value("string")
FORMAT_MAPPING = {
    "chatml": [{"content": _TEXT, "role": _TEXT}],
    "instruction": dict.fromkeys(("completion", "prompt"), _TEXT),
}


def conversations_formatting_function(
    tokenizer: PreTrainedTokenizerBase, messages_field: MessagesField, tools: list | None = None
) -> FormattingFunction:
    """A function that renders `row[messages_field]` with the tokenizer's chat template.

    It takes one row (a conversation: `-> str`) or a batch of rows as columns (`-> list[str]`).
    """

    def format_row(row: dict[str, Any]) -> str | list[str]:
        given = row[messages_field]
        if given and isinstance(given[0], list):
            return [format_row({messages_field: messages}) for messages in given]  # type: ignore[misc]
        return str(tokenizer.apply_chat_template(given, tools=tools, tokenize=False))

    return format_row


def instructions_formatting_function(tokenizer: PreTrainedTokenizerBase) -> FormattingFunction:
    """A function that renders `prompt` and `completion` as a user's and an assistant's message.

    It takes one row (`-> str`) or a batch of rows as columns (`-> list[str]`).
    """

    def format_row(row: dict[str, Any]) -> str | list[str]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list):
            pairs = zip(prompt, completion, strict=True)
            return [format_row({"prompt": one, "completion": other}) for one, other in pairs]  # type: ignore[misc]
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    return format_row


def get_formatting_func_from_dataset(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, tools: list | None = None
) -> FormattingFunction | None:
    """The function that fits the columns of a data set, None where none does.

    `messages` or `conversations` with lists of `{"role", "content"}`, or `prompt` and `completion` as text.
    """
    features = dataset.features or {}
    for name in MESSAGE_COLUMNS:
        if name in features and _is_messages(features[name]):
            return conversations_formatting_function(tokenizer, name, tools)
    if all(_is_text(features.get(name)) for name in INSTRUCTION_COLUMNS):
        return instructions_formatting_function(tokenizer)
    return None


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_messages(feature: Any) -> bool:
    message = getattr(feature, "feature", feature)  # a list of dicts, or datasets 3's list of length one
    if isinstance(message, list):
        message = message[0]
    return isinstance(message, dict) and all(_is_text(message.get(key)) for key in ("role", "content"))
