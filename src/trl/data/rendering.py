"""Messages -> text through a chat template, with errors that say which row and what the template complained about."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from trl.data.formats import common_prefix_length, remove_none_values, written

_CLOCK = threading.RLock()
Message = dict[str, Any]
Json = dict[str, Any]
Fields = Mapping[str, Any]
"""Values by name: of a row, of a record, of settings, of a schema."""
ProcessingClass = PreTrainedTokenizerBase | ProcessorMixin

# What rendering a user's messages may raise: the template's own complaints, and Python's on values it did not expect.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, KeyError, AttributeError, IndexError, ValueError)


class TemplateRefusal(ValueError):
    """A chat template raised on a conversation; the caller adds which row it was."""

    @classmethod
    def of(cls, error: Exception) -> "TemplateRefusal":
        raised = f"the chat template raised {type(error).__name__}: {error}"
        return cls(f"{raised}. Make the messages fit the template, or change it.")


class Chat(NamedTuple):
    """A conversation and what its template is given beside it."""

    messages: list[Message]
    tools: list[dict | Callable] | None = None
    template_kwargs: Mapping[str, Any] = {}


def text_tokenizer(processing_class: ProcessingClass) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or the one inside a processor."""
    return vars(processing_class).get("tokenizer", processing_class)  # tokenizers are slow to say what they lack


def read_tools(tools: object) -> list[dict | Callable] | None:
    """The tools of a row as a list, from a list of schemas or functions, a JSON string, or None; None without any.

    Keys with None, which columnar storage adds to the schemas, are removed; JSON keeps its `null`.

    >>> read_tools('[{"type": "function", "function": {"name": "add"}}]')
    [{'type': 'function', 'function': {'name': 'add'}}]
    """
    tools = _parsed(tools)
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise TypeError(f"tools must be a list of JSON schemas or functions, got {type(tools).__name__}.")
    parsed = [_parsed(tool) for tool in tools]
    for tool in parsed:
        if not isinstance(tool, Mapping) and not callable(tool):
            raise TypeError(f"tools must be JSON schemas (dicts) or functions, got {type(tool).__name__}.")
    return [remove_none_values(tool) if isinstance(tool, Mapping) else tool for tool in parsed] or None


def _parsed(value: Any) -> Any:
    try:
        return written(json.loads(value)) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"tools must be a list of schemas, or its JSON, got a string ({error}).") from error


def set_run_date(processing_class: ProcessingClass, run_date: str) -> None:
    """Let a chat template that reads the clock (`strftime_now`) show this ISO date; a part of cache keys."""
    for holder in (processing_class, text_tokenizer(processing_class)):
        templates = getattr(holder, "chat_template", None)
        if any("strftime_now" in str(source) for source in (templates, template_source(holder))):
            text_tokenizer(processing_class).run_date = run_date  # type: ignore[attr-defined]


def _showing_run_date(processing_class: ProcessingClass) -> AbstractContextManager[None]:
    """A block in which chat templates show the run's date."""
    run_date = vars(text_tokenizer(processing_class)).get("run_date")
    return nullcontext() if run_date is None else _showing(run_date)


@contextmanager
def _showing(run_date: str) -> Iterator[None]:
    """transformers' `strftime_now` reads the clock of its module (5.23 makes text of functions among the variables)."""
    with _CLOCK:
        system = chat_template_utils.datetime
        clock = SimpleNamespace(now=lambda: datetime.fromisoformat(run_date))
        chat_template_utils.datetime = clock  # type: ignore[assignment]
        try:
            yield
        finally:
            chat_template_utils.datetime = system


def render(
    processing_class: ProcessingClass, chat: Chat, *, add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:  # fmt: skip
    """The text of a conversation under its chat template. Raises: TemplateRefusal where that does not accept it."""
    try:
        # A batch of one, because a bare empty conversation is refused before the template sees it.
        with _showing_run_date(processing_class):
            rendered = processing_class.apply_chat_template(  # type: ignore[union-attr]
                [chat.messages],  # type: ignore[arg-type]
                tools=chat.tools,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **chat.template_kwargs,
            )
    except TEMPLATE_ERRORS as error:
        raise TemplateRefusal.of(error) from error
    return rendered[0]  # type: ignore[index, return-value]


def render_with_marks(processing_class: ProcessingClass, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
    """`render`, and the character ranges that the template's `{% generation %}` blocks cover."""
    kwargs = dict(chat.template_kwargs)
    template = kwargs.pop("chat_template", None) or template_source(processing_class, tools=chat.tools)
    variables = {**text_tokenizer(processing_class).special_tokens_map, **kwargs}
    try:
        with _showing_run_date(processing_class):
            texts, ranges = render_jinja_template(
                conversations=[chat.messages], tools=chat.tools, chat_template=template,
                return_assistant_tokens_mask=True, **variables,
            )  # fmt: skip
    except TEMPLATE_ERRORS as error:
        raise TemplateRefusal.of(error) from error
    return texts[0], [(int(start), int(end)) for start, end in ranges[0] if end > start]


def template_source(processing_class: ProcessingClass, *, tools: list | None = None) -> str:
    """The Jinja source of the chat template that a conversation with these tools is rendered with; "" without one."""
    template = getattr(processing_class, "chat_template", None)
    if isinstance(template, dict):
        named = template.get("tool_use") if tools else None
        return named or template.get("default", "")
    return template or ""


@cache
def encodes_arguments(template: str) -> bool:
    """Whether a template writes the arguments of tool calls as JSON, even if they are text (Qwen 2.5, Llama 3.1)."""
    text = '{"at": 1}'
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": text}}
    turns = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    try:
        rendered, _ = render_jinja_template(conversations=[turns], chat_template=template, **tokens)
    except TEMPLATE_ERRORS:
        return False
    return json.dumps(text) in rendered[0]


def hides_answer(answer: list[Message], rendered: str) -> bool:
    """Whether the text lacks a part of the last message: some templates leave out reasoning, such as DeepSeek R1's."""
    message, shown = answer[-1], "".join(rendered.split())
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    parts += [message.get(name) or "" for name in ("reasoning_content", "thinking")]
    return not all("".join(part.split()) in shown for part in parts)


def render_prompt(processing_class: ProcessingClass, chat: Chat) -> str:
    """A prompt up to the point where the model goes on: a new assistant message, or the last one left open."""
    opens = chat.messages[-1].get("role") != "assistant"
    return render(processing_class, chat, add_generation_prompt=opens, continue_final_message=not opens)


def split_rendering(
    processing_class: ProcessingClass, prompt: Chat, completion: list[Message], opened: str | None = None
) -> tuple[str, str]:
    """The text of prompt + completion, cut where the prompt's own rendering (ready for generation) ends.

    Some templates write more into the generation prompt than into a finished conversation (an opened `<think>`); the
    cut then lies where the two part. `opened` is that rendering of the prompt, where the caller has it already. Raises:
    TemplateRefusal where the completion changes how the prompt itself is rendered.
    """
    opened = render_prompt(processing_class, prompt) if opened is None else opened
    joint = render(processing_class, prompt._replace(messages=[*prompt.messages, *completion]))
    if joint.startswith(opened):
        return opened, joint[len(opened) :]
    cut = common_prefix_length(opened, joint)
    is_open = prompt.messages[-1].get("role") == "assistant"
    closed = opened if is_open else render(processing_class, prompt)
    if not joint.startswith(closed):
        parts = f"{closed[cut : cut + 20]!r} became {joint[cut : cut + 20]!r}"
        fault = f"the chat template renders the prompt differently once the completion follows ({parts})"
        raise TemplateRefusal(f"{fault}. Use one of get_training_chat_template.")
    return joint[:cut], joint[cut:]
