"""Chat templates: applying them to rows, and what a template can be trusted to do."""

import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl.data.formats import RowDict, common_prefix_length, is_conversational, remove_none_values, written
from trl.data.rendering import (
    Chat,
    Message,
    ProcessingClass,
    TemplateRefusal,
    read_tools,
    render,
    render_prompt,
    split_rendering,
    template_source,
)
from trl.data.training_templates import CHATML_TRAINING_TEMPLATE, QWEN3_TRAINING_TEMPLATE

APPLICABLE_TYPES = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)


def apply_chat_template(
    example: dict[str, list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    tools: list[dict | Callable] | None = None, **template_kwargs: Any,
) -> dict[str, str]:  # fmt: skip
    """The text columns of a conversational row: `messages` becomes `text`, the others keep their names.

    A prompt is rendered up to where the model goes on (generation prompt, or an open last assistant message), and
    completions are what follows it in the rendering of both. Tools come from the argument or the row's `tools` column
    (a list or a JSON string), further template variables from `chat_template_kwargs` and from the keyword arguments.
    Raises: KeyError for columns of no known type, ValueError where the template refuses or is not prefix-preserving.
    """
    columns = {key for key in example if key in {"messages", "prompt", "completion", "chosen", "rejected", "label"}}
    if columns not in APPLICABLE_TYPES:
        raise KeyError(f"columns must be one of {[*map(sorted, APPLICABLE_TYPES)]}, got {sorted(example)}.")
    kwargs = {**remove_none_values(example.get("chat_template_kwargs") or {}), **template_kwargs}
    tools = read_tools(written(tools) if tools is not None else example.get("tools"))
    turns = {key: remove_none_values(example[key]) for key in columns if key != "label"}
    rendered = _render_columns(tokenizer, turns, Chat([], tools, kwargs))
    return {**rendered, "label": example["label"]} if "label" in columns else rendered  # type: ignore[dict-item]


def _render_columns(processing_class: ProcessingClass, turns: RowDict, chat: Chat) -> dict[str, str]:
    if "messages" in turns:
        return {"text": render(processing_class, chat._replace(messages=turns["messages"]))}
    answers = {key: turns[key] for key in ("chosen", "rejected", "completion") if key in turns}
    if "prompt" not in turns:
        return {key: render(processing_class, chat._replace(messages=answer)) for key, answer in answers.items()}
    prompt = chat._replace(messages=turns["prompt"])
    if not answers:
        return {"prompt": render_prompt(processing_class, prompt)}
    pieces = {key: split_rendering(processing_class, prompt, answer) for key, answer in answers.items()}
    heads = [piece[0] for piece in pieces.values()]
    shared = heads[0]  # all of it, but for templates that are cut in the middle
    for head in heads[1:]:
        shared = shared[: common_prefix_length(shared, head)]
    return {"prompt": shared, **{key: "".join(piece)[len(shared) :] for key, piece in pieces.items()}}


def maybe_apply_chat_template(
    example: dict[str, list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase,
    tools: list[dict | Callable] | None = None, **template_kwargs: Any,
) -> dict[str, str]:  # fmt: skip
    """`apply_chat_template` for a conversational row; a standard row comes back as it is."""
    if not is_conversational(example):
        return example  # type: ignore[return-value]
    return apply_chat_template(example, tokenizer, tools, **template_kwargs)


GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANY_MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def has_generation_marks(processing_class: ProcessingClass, *, tools: list | None = None) -> bool:
    """Whether the chat template says with `{% generation %}` blocks which text the assistant wrote."""
    return GENERATION_MARK.search(template_source(processing_class, tools=tools)) is not None


_QUESTION: Message = {"role": "user", "content": "What colour is the sky?"}
_ANSWER: Message = {"role": "assistant", "content": "It is blue."}
_THOUGHT: Message = {"role": "assistant", "content": "<think>\nLook up.\n</think>\n\nIt is blue."}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}],
}
_RESULT: Message = {"role": "tool", "name": "look", "content": "blue"}


def is_chat_template_prefix_preserving(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether adding messages to a conversation leaves the text of those before it as it was.

    Tried on a question with its generation prompt, an answer, a second question, and an answer with `<think>`.
    """
    for answer in (_ANSWER, _THOUGHT):
        messages = [_QUESTION, answer, _QUESTION, answer, _QUESTION, answer]
        whole = render(tokenizer, Chat(messages))
        for length in range(1, len(messages)):
            opens = [False, True] if length % 2 else [False]  # behind a question also with its generation prompt
            parts = (render(tokenizer, Chat(messages[:length]), add_generation_prompt=open) for open in opens)
            if not all(map(whole.startswith, parts)):
                return False
    return True


def get_training_chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A prefix-preserving template with `{% generation %}` marks that stands in for the tokenizer's own in training.

    Known are the Qwen3 family (every assistant turn then keeps its `<think>` block, as its last turn does) and plain
    ChatML, recognised by what they render; ChatML also by the variables that it reads. None where the template is of
    neither kind, or needs no replacement.
    """
    source = template_source(tokenizer)
    if not source or (has_generation_marks(tokenizer) and is_chat_template_prefix_preserving(tokenizer)):
        return None
    for candidate in (CHATML_TRAINING_TEMPLATE, QWEN3_TRAINING_TEMPLATE):
        is_known = candidate is QWEN3_TRAINING_TEMPLATE or _variables(source) <= _CHATML_VARIABLES
        if is_known and all(_renders_alike(tokenizer, candidate, *probe) for probe in _PROBES[candidate]):
            return candidate
    return None


def _variables(source: str) -> set[str]:
    """The variables that a template reads, without those that it sets."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return find_undeclared_variables(environment.parse(_ANY_MARK.sub("", source))) - set(environment.globals)


_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_TOOLS: list[dict | Callable] = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
]
_COMMON_PROBES: list[tuple[list[Message], list | None]] = [
    ([_QUESTION], None),
    ([_SYSTEM, _QUESTION], None),
    ([_QUESTION, _ANSWER], None),
]
_CHATML_VARIABLES = {"messages", "add_generation_prompt", "raise_exception", "bos_token", "eos_token", "pad_token"}
# What plain ChatML has no rules for.
_FURTHER: list[list[Message]] = [
    [_QUESTION, _CALL, _RESULT],
    [{**_SYSTEM, "role": "developer"}, {**_QUESTION, "name": "Ann"}, {**_ANSWER, "reasoning_content": "Up."}],
    [_QUESTION, _THOUGHT, {"role": "user", "content": " Why? \n"}, {"role": "assistant", "content": " So.\n"}],
    [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}],
]
# What a template must render exactly as its stand-in does: (messages, tools). It need not refuse what that refuses.
_PROBES: dict[str, list[tuple[list[Message], list | None]]] = {
    CHATML_TRAINING_TEMPLATE: [
        *_COMMON_PROBES,
        ([_SYSTEM, _QUESTION, _ANSWER, _QUESTION, _THOUGHT], None),
        *(([*messages, _ANSWER], tools) for messages in _FURTHER for tools in (None, _TOOLS)),
    ],
    QWEN3_TRAINING_TEMPLATE: [
        *_COMMON_PROBES,
        ([_SYSTEM, _QUESTION, _THOUGHT], None),
        # Without a thought, Qwen3 gives a tool call an empty <think> block only where it is the last message.
        ([_SYSTEM, _QUESTION, {**_CALL, "reasoning_content": "Look up."}, _RESULT, _ANSWER], _TOOLS),
        ([_QUESTION, _CALL], _TOOLS),
    ],
}


def _renders_alike(
    tokenizer: PreTrainedTokenizerBase, candidate: str, messages: list[Message], tools: list | None
) -> bool:
    texts = []
    for kwargs in ({}, {"chat_template": candidate}):
        try:
            opens = messages[-1]["role"] == "user"
            texts.append(render(tokenizer, Chat(messages, tools, kwargs), add_generation_prompt=opens))
        except TemplateRefusal:
            texts.append("")
    is_printed = "{'type':" in texts[0]  # a list of parts as Python shows it
    return texts[0] == texts[1] or (is_printed and not texts[1])


# How Qwen-style text reads as a message, in the language of transformers' response parser.
QWEN_RESPONSE_TEMPLATE: dict[str, object] = {
    "defaults": {"role": "assistant", "content": ""},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open_pattern": r"\s*<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)\s*", "content": "text"},
    },
}


def add_response_schema(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, now with the rules by which `parse_response` reads its model's answers (Qwen3-style templates).

    Raises: ValueError for a template that writes no `<|im_start|>` turns and `<tool_call>` blocks.
    """
    source = template_source(tokenizer)
    if "<|im_start|>" not in source or "<tool_call>" not in source:
        raise ValueError("only Qwen-style templates have a known schema. Set tokenizer.response_template.")
    tokenizer.response_template = QWEN_RESPONSE_TEMPLATE  # type: ignore[attr-defined]
    return tokenizer


def parse_response(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> dict:
    """The assistant message that generated token ids spell: role, content, and reasoning and tool calls if any.

    An answer that breaks the format (a tool call that is no JSON, say) becomes plain content, special tokens removed.
    Raises: ValueError where the tokenizer has no rules to parse by.
    """
    if getattr(tokenizer, "response_template", None) is None:
        raise ValueError("the tokenizer has no response template. Call add_response_schema(tokenizer) first.")
    try:
        return tokenizer.parse_response(ids, prefix="")  # type: ignore[attr-defined, return-value]
    except (ValueError, KeyError, TypeError):  # the model wrote something that is not in the format
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
