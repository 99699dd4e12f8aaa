"""What a row must look like before anything is trained on it; every complaint names row, column and remedy."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from trl.data.formats import (
    is_conversational,
    is_list_of_dicts_with,
    maybe_convert_to_chatml,
    remove_none_values,
)
from trl.data.rendering import Message, ProcessingClass, template_source, text_tokenizer

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

SFT_TYPES = (
    "'text' (or the column named by dataset_text_field), 'messages' or 'conversations', 'prompt' with 'completion', "
    "or tokenized 'input_ids'"
)

RowKind = Literal["tokens", "text", "messages", "prompt_completion"]


class Place(NamedTuple):
    """Where in which data set a value stands."""

    dataset: str
    row: int
    column: str

    def __str__(self) -> str:
        return f"{self.dataset} dataset, row {self.row}, column {self.column!r}"


class SFTRowType(NamedTuple):
    """What the rows of a data set for supervised fine-tuning are, as read off its columns and first row."""

    kind: RowKind
    columns: tuple[str, ...]  # those that hold the row's text, messages or tokens
    is_conversational: bool


def sft_row_type(
    columns: Sequence[str], first_row: Mapping[str, Any], *, text_field: str, name: str
) -> SFTRowType:
    """The type of a data set's rows: tokens, prompt-completion, messages or text, in this order.

    Raises: ValueError for columns of none of these, with what to do for preference and prompt-only data.
    """
    row = maybe_convert_to_chatml(dict(first_row))
    if "input_ids" in columns:
        return SFTRowType("tokens", ("input_ids",), False)
    if {"prompt", "completion"} <= set(columns):
        chat = is_conversational({key: row.get(key) for key in ("prompt", "completion")})
        return SFTRowType("prompt_completion", ("prompt", "completion"), chat)
    if "messages" in columns or "conversations" in columns:
        return SFTRowType("messages", ("messages",), True)
    if text_field in columns:
        chat = is_list_of_dicts_with(row[text_field], "role")
        return SFTRowType("messages" if chat else "text", (text_field,), chat)
    raise ValueError(_wrong_columns(set(columns), list(columns), name))


def _wrong_columns(columns: set[str], given: list[str], name: str) -> str:
    start = f"{name} dataset, row 0, has columns {given}"
    if {"chosen", "rejected"} <= columns:
        return (
            f"{start}, which is preference data; SFT takes {SFT_TYPES}. Train with DPOTrainer, or rename "
            "'chosen' to 'completion' (with a 'prompt') and remove 'rejected'."
        )
    if "prompt" in columns:
        return (
            f"{start}: a prompt without a 'completion'; SFT takes {SFT_TYPES}. Add a 'completion' column, or train on "
            "prompts alone with GRPOTrainer or RLOOTrainer."
        )
    if "completion" in columns:
        return f"{start}: a completion without a 'prompt'; SFT takes {SFT_TYPES}. Add a 'prompt' column."
    return f"{start}; SFT takes {SFT_TYPES}. Rename the columns, set dataset_text_field, or pass formatting_func."


def check_text(value: Any, place: Place, *, may_be_empty: bool = False) -> str:
    """The value of a text column.

    Raises: TypeError for anything but a string, ValueError for None and (unless allowed) for "".
    """
    if value is None:
        raise ValueError(f"{place}: None, expected text. Fill it in or filter the row out.")
    if isinstance(value, list | tuple):
        raise TypeError(
            f"{place}: a list, expected a string as in the other columns and rows. Do not mix the standard and the "
            "conversational format; convert one into the other."
        )
    if not isinstance(value, str):
        raise TypeError(
            f"{place}: {value!r} is of type {type(value).__name__}, expected a string. Convert it with str()."
        )
    if not value and not may_be_empty:
        raise ValueError(f"{place}: an empty string, expected text to train on. Filter the row out.")
    return value


def check_label(value: Any, place: Place) -> bool:
    """The true or false at a place.

    Raises: TypeError for anything else (0 and 1 too, which may mean anything), ValueError for None.
    """
    if isinstance(value, bool):
        return value
    if value is None:
        raise ValueError(f"{place}: None, expected true or false. Fill it in or filter the row out.")
    remedy = "Map it to True where the completion (or step) is good, and to False elsewhere."
    if isinstance(value, int) and value in (0, 1):
        remedy = "Convert the column with dataset.cast_column (to Value('bool'), or a list of it), or the values with bool()."
    raise TypeError(f"{place}: {value!r} is of type {type(value).__name__}, expected true or false. {remedy}")


def accepted_roles(template: str) -> frozenset[str]:
    """The roles that messages may have: the usual ones, and every word that the chat template compares with.

    >>> sorted(accepted_roles("{% if m.role == 'context' %}") - set(KNOWN_ROLES))
    ['context']
    """
    return frozenset(KNOWN_ROLES) | frozenset(re.findall(r"""["'](\w+)["']""", template))


def check_messages(value: Any, place: Place, *, roles: frozenset[str]) -> list[Message]:
    """The messages of a conversation, without the Nones that columnar storage added for absent keys.

    Raises: TypeError for what is not a list of dicts, ValueError for empty lists, unknown roles and missing content.
    """
    if value is None:
        raise ValueError(f"{place}: None, expected a list of messages. Fill it in or filter the row out.")
    if not isinstance(value, list | tuple):
        raise TypeError(
            f"{place}: {str(value)[:40]!r} is of type {type(value).__name__}, expected a list of messages as in the "
            'other columns and rows. Write it as [{"role": "user", "content": ...}].'
        )
    if not value:
        raise ValueError(f"{place}: an empty list, expected at least one message. Filter the row out.")
    return [_check_message(message, index, place, roles) for index, message in enumerate(value)]


def check_answer(messages: Sequence[Message], place: Place) -> None:
    """Check that the last message of an answer has a content, a tool call or anything else beside its role.

    Raises: ValueError where it has not.
    """
    last = messages[-1]
    said = {key: value for key, value in last.items() if key not in ("role", "name", "content")}
    content = last.get("content")
    if isinstance(content, list | tuple):
        content = [part for part in content if not _is_empty_text(part)]
    if not content and not any(said.values()):
        raise ValueError(
            f"{place}: the last message is an empty answer (content {last.get('content')!r}), expected text to train on. Filter "
            "the row out."
        )


def _is_empty_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and not part.get("text")


def _check_message(message: Any, index: int, place: Place, roles: frozenset[str]) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"{place}, message {index}: {message!r} is of type {type(message).__name__}, expected a dict with 'role' "
            'and \'content\'. Write it as {"role": "user", "content": ...}.'
        )
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(
            f"{place}, message {index}: no 'role' (keys: {sorted(remove_none_values(message))}), expected one of "
            f"{', '.join(KNOWN_ROLES)}. Add it."
        )
    if role not in roles:
        near = difflib.get_close_matches(role, KNOWN_ROLES, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Rename it, or use a chat template that knows it."
        raise ValueError(
            f"{place}, message {index}: unknown role {role!r}, expected one of {', '.join(KNOWN_ROLES)}. {hint}"
        )
    _check_content(message, index, place)
    return remove_none_values(message)


def _check_content(message: Mapping[str, Any], index: int, place: Place) -> None:
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        given = "content is None" if "content" in message else "no 'content'"
        raise ValueError(
            f"{place}, message {index}: {given}, expected text (only messages with 'tool_calls' may go without). "
            "Fill it in or filter the row out."
        )
    if content is not None and not isinstance(content, str | list):
        raise TypeError(
            f"{place}, message {index}: content {content!r} is of type {type(content).__name__}, expected a string or "
            "a list of parts. Convert it with str()."
        )
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, Mapping) or "type" not in part:
            raise TypeError(
                f"{place}, message {index}: content part {part!r}, expected dicts with a 'type'. "
                'Write text as {"type": "text", "text": ...}.'
            )


def check_sft_settings(
    row_type: SFTRowType,
    *,
    name: str,
    columns: Sequence[str],
    assistant_only_loss: bool,
    completion_only_loss: bool | None,
    is_formatted: bool,
) -> None:
    """Refuse loss settings that this type of rows cannot serve.

    Raises: ValueError naming the column and the setting to change.
    """
    start = f"{name} dataset, row 0, column {row_type.columns[0]!r}"
    if completion_only_loss and is_formatted:
        raise ValueError(
            f"{start}: completion_only_loss=True with a formatting_func, whose text has no completion to tell apart. "
            "Drop formatting_func and give 'prompt' and 'completion' columns, or unset completion_only_loss."
        )
    has_completions = row_type.kind == "prompt_completion" or (
        row_type.kind == "tokens" and bool({"completion_mask", "labels"} & set(columns))
    )
    if completion_only_loss and not has_completions:
        raise ValueError(
            f"{start}: completion_only_loss=True, but the data is language modelling without completions. Give "
            "'prompt' and 'completion' columns, or leave completion_only_loss unset."
        )
    has_turns = row_type.is_conversational or (row_type.kind == "tokens" and "assistant_masks" in columns)
    if assistant_only_loss and not has_turns:
        raise ValueError(
            f"{start}: assistant_only_loss=True, but the data is not conversational. Give 'messages' (or conversational "
            "'prompt' and 'completion', or tokens with 'assistant_masks'), or set assistant_only_loss=False."
        )


def check_tokenizer(processing_class: ProcessingClass, row_type: SFTRowType, *, name: str) -> None:
    """Refuse a tokenizer that lacks the chat template, or the eos token, that this type of rows needs.

    Raises: ValueError naming the column and what to set.
    """
    place = Place(name, 0, row_type.columns[0])
    if row_type.is_conversational:
        check_chat_template(processing_class, place)
    elif row_type.kind in ("text", "prompt_completion"):
        check_eos(processing_class, place)


def check_chat_template(processing_class: ProcessingClass, place: Place) -> None:
    """Raise ValueError where there is no chat template for the conversations at `place`."""
    if not template_source(processing_class):
        raise ValueError(
            f"{place}: conversational data, but the tokenizer has no chat template. Set chat_template_path in the "
            "config, tokenizer.chat_template, or give text."
        )


def check_eos(
    processing_class: ProcessingClass,
    place: Place,
    *,
    remedy: str = "Set eos_token in the config to a token of its vocabulary.",
) -> None:
    """Raise ValueError where there is no eos token to close the texts at `place` with."""
    if text_tokenizer(processing_class).eos_token is None:
        raise ValueError(
            f"{place}: the tokenizer has no eos token, so the model would not learn to stop. {remedy}"
        )


def vocabulary_token(tokenizer: PreTrainedTokenizerBase, token: str, *, setting: str) -> int:
    """The id of a token that a setting names.

    Raises: ValueError where the vocabulary does not have it.
    """
    identifier = tokenizer.get_vocab().get(token)
    if identifier is None:
        near = difflib.get_close_matches(token, list(tokenizer.get_vocab()), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{setting} {token!r} is not in the tokenizer's vocabulary, expected one of its tokens. Choose another, or "
            f"add it with tokenizer.add_special_tokens first.{hint}"
        )
    return identifier
