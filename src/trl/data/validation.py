"""Checks of rows: the type of a data set's rows, and the values in them, each named by its place in errors."""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

from datasets import Dataset

from trl.data.formats import (
    Row,
    StoredOrStream,
    Written,
    column_names,
    is_conversational,
    is_list_of_dicts_with,
    maybe_convert_to_chatml,
    remove_none_values,
    written,
)
from trl.data.rendering import Message, ProcessingClass, encodes_arguments, template_source, text_tokenizer
from trl.options.spelling import did_you_mean

logger = logging.getLogger(__name__)

# Remedies for commands, which read files, and for Python.
RENAME = "Rename the columns (--column_mapping OLD=NEW ..., or rows.rename_columns in Python)"
IN_QUOTES = "Write it in quotes in a .jsonl file; in Python, convert it with str()"
ROWS_WITH_CALLS = 1_000  # of a stored data set, in which tool calls are looked for
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

SFT_TYPES = (
    "'text' (or the column named by dataset_text_field), 'messages' or 'conversations', 'prompt' with 'completion', "
    "or tokenized 'input_ids'"
)


class Place(NamedTuple):
    """The position of a value: a row of a data set, or of a batch (`dataset` is ""), and its column."""

    dataset: str
    row: int
    column: str
    message: int | None = None

    def __str__(self) -> str:
        rows = f"{self.dataset} dataset, row {self.row}" if self.dataset else f"row {self.row} of the batch"
        message = "" if self.message is None else f", message {self.message}"
        return f"{rows}, column {self.column!r}{message}"

    def error(self, fault: str, expected: str, remedy: str, kind: type[Exception] = ValueError) -> Exception:
        """The error for a value here: what was given, what was expected, what to do."""
        return kind(f"{self}: {fault}, expected {expected}. {remedy}")

    def mistyped(self, value: object, expected: str, remedy: str) -> Exception:
        shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."
        return self.error(f"{shown} is of type {type(value).__name__}", expected, remedy, TypeError)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name this place in a TypeError or ValueError of the block."""
        try:
            yield
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self}: {error}") from error


class RowType(NamedTuple):
    """The type of a data set's rows, read off its columns and first row."""

    kind: Literal["tokens", "text", "messages"]
    columns: tuple[str, ...]  # those that hold the row's text, messages or tokens

    @property
    def is_chat(self) -> bool:
        return self.kind == "messages"

    @property
    def has_completion(self) -> bool:
        return self.columns == ("prompt", "completion")


def sft_row_type(columns: Sequence[str], first_row: Row, *, text_field: str, name: str) -> RowType:
    """The type of rows: tokens, prompt and completion, messages or text. Raises: ValueError for other columns."""
    row = maybe_convert_to_chatml(dict(first_row))
    if "input_ids" in columns:
        return RowType("tokens", ("input_ids",))
    if {"prompt", "completion"} <= set(columns):
        is_chat = is_conversational({key: row.get(key) for key in ("prompt", "completion")})
        return RowType("messages" if is_chat else "text", ("prompt", "completion"))
    if "messages" in columns or "conversations" in columns:
        return RowType("messages", ("messages",))
    if text_field in columns:
        is_chat = is_list_of_dicts_with(row[text_field], "role")
        return RowType("messages" if is_chat else "text", (text_field,))
    needed = ("prompt", "completion") if {"prompt", "completion"} & set(columns) else (text_field,)
    remedy = None if len(needed) == 2 else f"{RENAME}, set dataset_text_field, or pass formatting_func in Python."
    remedy = renaming(columns) or remedy
    raise wrong_columns(columns, name, takes=SFT_TYPES, needed=needed, remedy=remedy)


_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
COMPLETIONS = ("completion", "output", "answer", "response", "solution")


def renaming(columns: Sequence[str]) -> str:
    """The remedy for prompts with completions under other names, such as Alpaca's; else empty.

    >>> renaming(["question", "answer"])
    'Rename them: --column_mapping question=prompt answer=completion'
    """
    prompt, completion = (next((name for name in names if name in columns), "") for names in (_PROMPTS, COMPLETIONS))
    if not prompt or not completion:
        return ""
    names = {prompt: "prompt", completion: "completion"}
    pairs = " ".join(f"{old}={new}" for old, new in names.items() if old != new)
    unread = " (`input` is not read then: append it to the instruction)." if "input" in set(columns) - {prompt} else ""
    return f"Rename them: --column_mapping {pairs}{unread}"


# Columns of rows of another kind, and the trainers that take them.
_OTHER_KINDS = (
    ({"chosen", "rejected"}, "preference pairs: train with DPOTrainer or RewardTrainer"),
    ({"completion", "label"}, "unpaired: train with KTOTrainer or BCOTrainer"),
    ({"completions", "labels"}, "solutions in steps: train with PRMTrainer"),
    ({"completion"}, "demonstrations: train with SFTTrainer"),
    ({"messages"}, "demonstrations: train with SFTTrainer"),
    ({"text"}, "demonstrations: train with SFTTrainer"),
    ({"prompt"}, "prompts alone: train with GRPOTrainer or RLOOTrainer"),
)


def wrong_columns(
    columns: Sequence[str], name: str, *, takes: str, needed: Sequence[str], remedy: str | None = None
) -> ValueError:
    """The error for a data set without some `needed` columns; for rows of another kind with their trainers."""
    missing = [repr(column) for column in needed if column not in columns]
    remedy = remedy or f"{RENAME}, or add {' and '.join(missing)}."
    if not set(needed) - {"prompt"} & set(columns):
        kinds = [kind for marks, kind in _OTHER_KINDS if marks <= set(columns)]
        remedy = f"These rows are {kinds[0]}. {remedy}" if kinds else remedy
    return ValueError(f"{name} dataset, row 0, has columns {list(columns)}, expected {takes}. {remedy}")


def check_text(value: object, place: Place, *, may_be_empty: bool = False) -> str:
    """The text at a place. Raises TypeError for other values, ValueError for None and (unless allowed) for ""."""
    if value is None:
        raise place.error("None", "text", "Fill it in or filter the row out.")
    if isinstance(value, list | tuple):
        remedy = "Do not mix the standard and the conversational format; convert one into the other."
        raise place.error("a list", "a string as in the other columns and rows", remedy, TypeError)
    if not isinstance(value, str):
        # A column of numbers in a CSV file is read as numbers, without their leading zeros.
        remedy = f"{IN_QUOTES}, a whole column with rows.cast_column({place.column!r}, Value('string'))."
        raise place.mistyped(value, "a string", remedy)
    if not value and not may_be_empty:
        raise place.error("an empty string", "text to train on", "Filter the row out.")
    return value


def check_label(value: object, place: Place) -> bool:
    """The true or false at a place. Raises TypeError for anything else (0 and 1 too), ValueError for None."""
    if isinstance(value, bool):
        return value
    if value is None:
        raise place.error("None", "true or false", "Fill it in or filter the row out.")
    remedy = "Map it to True where the completion (or step) is good, and to False elsewhere."
    if isinstance(value, int) and value in (0, 1):
        remedy = "Write true or false in a .jsonl file; in Python, bool() or rows.cast_column (to Value('bool'))."
    raise place.mistyped(value, "true or false", remedy)


def check_number(value: object, place: Place) -> float:
    """The number at a place. Raises TypeError for what is no number, ValueError for None, infinities and NaN."""
    if value is None:
        raise place.error("None", "a number", "Fill it in or filter the row out.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise place.mistyped(value, "a number", "Convert it with float().")
    if not math.isfinite(value):
        raise place.error(str(value), "a finite number", "Correct it or filter the row out.")
    return float(value)


@cache
def accepted_roles(template: str) -> frozenset[str]:
    """The roles that messages may have: the usual ones, and every word that the chat template compares with.

    >>> sorted(accepted_roles("{% if m.role == 'context' %}") - set(KNOWN_ROLES))
    ['context']
    """
    return frozenset(KNOWN_ROLES) | frozenset(re.findall(r"""["'](\w+)["']""", template))


def check_messages(value: object, place: Place, *, template: str) -> list[Message]:
    """The messages of a conversation as its chat template reads them, without Nones that storage added.

    Arguments of tool calls that are JSON text become objects if the template would encode the text once more. Raises:
    TypeError or ValueError for others.
    """
    if value is None:
        raise place.error("None", "a list of messages", "Fill it in or filter the row out.")
    if not isinstance(value, list | tuple):
        expected = "a list of messages as in the other columns and rows"
        raise place.mistyped(value, expected, 'Write it as [{"role": "user", "content": ...}].')
    if not value:
        raise place.error("an empty list", "at least one message", "Filter the row out.")
    roles = accepted_roles(template)
    messages = [_check_message(message, place._replace(message=index), roles) for index, message in enumerate(value)]
    for message in messages:
        if message.get("tool_calls") and encodes_arguments(template):
            message["tool_calls"] = [_decoded(call) for call in message["tool_calls"]]
    return messages


def _decoded(call: Any) -> Any:
    """A tool call whose arguments, where they are the JSON of an object, are that object."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    changed = {**function, "arguments": written(arguments)}
    return {**call, "function": changed} if "function" in call else changed


def check_answer(messages: Sequence[Message], place: Place) -> None:
    """Raise ValueError for an answer whose last message has nothing (text, tool call, ...) beside its role and name."""
    said = {key: value for key, value in messages[-1].items() if key not in ("role", "name")}
    if isinstance(said.get("content"), list):
        said["content"] = [part for part in said["content"] if part["type"] != "text" or part.get("text")]
    if not any(said.values()):
        fault = f"the last message is an empty answer (content {messages[-1].get('content')!r})"
        raise place.error(fault, "text to train on", "Filter the row out.")


def _check_message(message: object, place: Place, roles: frozenset[str]) -> Message:
    if not isinstance(message, Mapping):
        remedy = 'Write it as {"role": "user", "content": ...}.'
        raise place.mistyped(message, "a dict with 'role' and 'content'", remedy)
    role, known = message.get("role"), f"one of {', '.join(KNOWN_ROLES)}"
    if not isinstance(role, str):
        raise place.error(f"no 'role' (keys: {sorted(remove_none_values(message))})", known, "Add it.")
    if role not in roles:
        hint = did_you_mean(role, KNOWN_ROLES).strip() or "Rename it, or use a chat template that knows it."
        raise place.error(f"unknown role {role!r}", known, hint)
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        fault = "content is None" if "content" in message else "no 'content'"
        expected = "text (only messages with 'tool_calls' may go without)"
        raise place.error(fault, expected, "Fill it in or filter the row out.")
    if content is not None and not isinstance(content, str | list):
        fault = f"content {content!r} is of type {type(content).__name__}"
        raise place.error(fault, "a string or a list of parts", f"{IN_QUOTES}.", TypeError)
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, Mapping) or "type" not in part:
            remedy = 'Write text as {"type": "text", "text": ...}.'
            raise place.error(f"content part {part!r}", "dicts with a 'type'", remedy, TypeError)
    clean = (lambda value: value) if isinstance(message, Written) else remove_none_values
    return {key: clean(value) for key, value in message.items() if value is not None}


def check_sft_settings(
    row_type: RowType, *, name: str, columns: Sequence[str], assistant_only_loss: bool,
    completion_only_loss: bool | None, is_formatted: bool,
) -> None:  # fmt: skip
    """Raise ValueError for loss settings that this type of rows does not allow, naming column and setting."""
    place, given_tokens = Place(name, 0, row_type.columns[0]), row_type.kind == "tokens"
    masks = set(columns) if given_tokens else set()
    has_completions = row_type.has_completion or bool({"completion_mask", "labels"} & masks)
    if completion_only_loss and (is_formatted or not has_completions):
        fault = "completion_only_loss=True" + (" with a formatting_func" if is_formatted else "")
        remedy = "Drop formatting_func, or unset completion_only_loss." if is_formatted else "Or unset it."
        raise place.error(fault, "'prompt' and 'completion' columns", remedy)
    if assistant_only_loss and not (row_type.is_chat or "assistant_masks" in masks):
        expected = "conversations, or tokens with 'assistant_masks'"
        raise place.error("assistant_only_loss=True", expected, "Or set assistant_only_loss=False.")


def check_tokenizer(
    dataset: StoredOrStream, processing_class: ProcessingClass, place: Place, *, is_chat: bool, needs_eos: bool,
    tools: object = None,
) -> None:  # fmt: skip
    """Check that the tokenizer has what the rows at `place` need, and warn of tools that reach no prompt.

    Raises: ValueError for conversations without a chat template, and without an eos token where texts end with one.
    """
    if is_chat and not template_source(processing_class):
        remedy = "Set chat_template_path in the config, tokenizer.chat_template, or give text."
        raise place.error("conversational data, but the tokenizer has no chat template", "one", remedy)
    if needs_eos and text_tokenizer(processing_class).eos_token is None:
        fault = "the tokenizer has no eos token, so the model would not learn to stop"
        raise place.error(fault, "one", "Set tokenizer.eos_token to a token of its vocabulary.")
    if is_chat and "system" in column_names(dataset):
        text = "%s dataset: the column 'system' is not read. Write it as the first message, of the role 'system'."
        logger.warning(text, place.dataset)
    warn_of_unread_tools(dataset, processing_class, name=place.dataset, is_chat=is_chat, tools=tools)


def warn_of_unread_tools(
    dataset: StoredOrStream, processing_class: ProcessingClass, *, name: str, is_chat: bool = True, tools: object = None
) -> None:
    """Warn of tools that reach no prompt: `tools` for all rows, or those of conversations' column (streams: row 0).

    Also of tool calls in the first rows that the template does not read.
    """
    is_stored = isinstance(dataset, Dataset)
    rows = dataset.with_format(None).take(min(len(dataset), ROWS_WITH_CALLS)) if is_stored else dataset.take(1)
    lists = (value for row in rows for value in dict(row).values() if isinstance(value, list))
    messages = (message for values in lists for message in values if isinstance(message, Mapping))
    shows_calls = not is_chat or "tool_calls" in template_source(processing_class, tools=[{}])
    if not shows_calls and any(message.get("tool_calls") for message in messages):
        logger.warning(
            "%s dataset: the messages' tool calls are not shown, because the chat template reads none. Choose another "
            "chat template.",
            name,
        )
    if is_chat and re.search(r"\btools\b", template_source(processing_class, tools=[{}])):
        return
    all_tools = [tools]
    if not tools and is_chat and "tools" in column_names(dataset):
        all_tools = dataset.with_format(None)["tools"] if is_stored else [next(iter(dataset)).get("tools")]
    if any(row_tools and row_tools not in ("[]", "null") for row_tools in all_tools):
        logger.warning(
            "%s dataset: the prompts do not show the rows' tools, because %s. Choose another chat template.",
            name,
            "the chat template reads none" if is_chat else "only conversations are rendered with tools",
        )
