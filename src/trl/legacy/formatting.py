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
        conversations = row[messages_field]
        if conversations and isinstance(conversations[0], list):
            return [_render(tokenizer, conversation, tools) for conversation in conversations]
        return _render(tokenizer, conversations, tools)

    return format_row


def instructions_formatting_function(tokenizer: PreTrainedTokenizerBase) -> FormattingFunction:
    """A function that renders `prompt` and `completion` as a user's and an assistant's message.

    It takes one row (`-> str`) or a batch of rows as columns (`-> list[str]`).
    """

    def format_row(row: dict[str, Any]) -> str | list[str]:
        prompts, completions = row["prompt"], row["completion"]
        if isinstance(prompts, list):
            pairs = zip(prompts, completions, strict=True)
            return [_render(tokenizer, _exchange(prompt, completion)) for prompt, completion in pairs]
        return _render(tokenizer, _exchange(prompts, completions))

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


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: list | None = None) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def _exchange(prompt: str, completion: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_messages(feature: Any) -> bool:
    message = getattr(feature, "feature", feature)  # a list of dicts, or datasets 3's list of length one
    if isinstance(message, list):
        message = message[0]
    return isinstance(message, dict) and all(_is_text(message.get(key)) for key in ("role", "content"))
