"""From an assistant's token ids to its message and tool calls, and from tool answers to the token ids that follow.

Sampled tokens are kept: answers are rendered in a fixed conversation, cut at the turn's end, and tokenised alone.
"""

import contextlib
import copy
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from trl.agents.tools import ToolCall
from trl.data.formats import common_prefix_length
from trl.data.rendering import (
    Chat,
    Fields,
    Json,
    Message,
    ProcessingClass,
    TemplateRefusal,
    render,
    render_prompt,
    split_rendering,
    template_source,
    text_tokenizer,
)
from trl.data.templates import QWEN_RESPONSE_TEMPLATE
from trl.data.tokenization import encode

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"\s*{OPEN}(.*?)(?:{CLOSE}\s*|\Z)", re.DOTALL)
_SHAPE = f'{OPEN}{{"name": <tool>, "arguments": {{<name>: <value>}}}}{CLOSE}'
_MARK, _ANSWER = "trl-mark-{}.", "trl-answer"
_QUESTION: Message = {"role": "user", "content": "What colour is the sky?"}


class Turn(NamedTuple):
    """An assistant's turn as a message, and its calls, including invalid ones."""

    message: Message
    calls: list[ToolCall]


class TurnReader:
    """Parses turns by the `response_template`, or as `<tool_call>{JSON}</tool_call>` blocks outside `<think>`."""

    def __init__(self, processing_class: ProcessingClass, schemas: Sequence[Json]) -> None:
        self.tokenizer: Any = text_tokenizer(processing_class)
        self.schemas = list(schemas)
        template = getattr(self.tokenizer, "response_template", None)
        self.template = None if template == QWEN_RESPONSE_TEMPLATE else template  # which has blocks
        marks = {OPEN, CLOSE, "<think>", "</think>"}
        special = [re.escape(token) for token in self.tokenizer.all_special_tokens if token not in marks]
        self._special = re.compile("|".join(special) or r"\b\B")

    def read(self, ids: Sequence[int], *, context: Sequence[int], ends: Collection[int]) -> Turn:
        """The turn with the token `ids`, sampled after `context`; its last token may be one of `ends`."""
        if self.template is not None:
            return self.of_text(self._decode(ids), self._decode(context))
        closed = bool(ids) and ids[-1] in ends
        return self.of_text(self._decode(ids[:-1] if closed else ids), "")

    def of_text(self, text: str, context: str) -> Turn:
        if self.template is None:
            return self._by_blocks(text)
        try:
            message = self.tokenizer.parse_response(text, prefix=context, tools=self.schemas)
            calls = [_read_call(call.get("function", call)) for call in message.get("tool_calls") or []]
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # raised for another format
            plain = self._special.sub("", text).strip()
            wrong = ToolCall("", error=f"the call cannot be read ({error}).")
            return Turn({"role": "assistant", "content": plain}, [wrong])
        return Turn({"role": "assistant", "content": "", **message}, calls)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _by_blocks(self, text: str) -> Turn:
        thought = ""
        if "</think>" in text or text.lstrip().startswith("<think>"):
            thought = text[: text.find("</think>") + len("</think>")] if "</think>" in text else text
        rest, calls, content = text[len(thought) :], [], [thought]
        place = 0
        for block in _BLOCK.finditer(rest):
            try:
                call = ToolCall("", error=f"the call is not closed, expected {_SHAPE}.")
                if CLOSE in block[0]:
                    call = _read_call(json.loads(block[1]))
            except (ValueError, RecursionError) as error:
                call = ToolCall("", error=f"the call is not JSON ({error}), expected {_SHAPE}.")
            content.append(rest[place : block.start() if call.error is None else block.end()])
            calls.append(call)
            place = block.end()
        content.append(rest[place:])
        message: Message = {"role": "assistant", "content": self._special.sub("", "".join(content)).strip()}
        if known := [call for call in calls if call.error is None]:
            functions = [{"name": call.name, "arguments": call.arguments} for call in known]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return Turn(message, calls)


def _read_call(call: object) -> ToolCall:
    """A call from its object. Raises: RecursionError for deep nesting, ValueError for halves of surrogate pairs."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", error=f"the call names no tool, expected {_SHAPE}.")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models write JSON within JSON
        with contextlib.suppress(ValueError, RecursionError):  # the check of arguments refuses text
            arguments = json.loads(arguments)
    copy.deepcopy(arguments)  # a RecursionError here, and not where the call is made
    json.dumps([call["name"], arguments], ensure_ascii=False).encode()  # fails for halves of surrogate pairs
    return ToolCall(call["name"], arguments)


class ReplyWriter:
    """Token ids of tool answers and messages, from the end of the assistant's turn to the next one."""

    def __init__(self, processing_class: ProcessingClass, schemas: Sequence[Json]) -> None:
        self.processing_class, self.schemas = processing_class, list(schemas)
        self.tokenizer: Any = text_tokenizer(processing_class)

    def ids(
        self, replies: Sequence[Message], *, last: int, ends: Collection[int], template_kwargs: Fields
    ) -> list[int]:
        """Messages and generation prompt after a turn that ends with `last`; `tool` messages answer its calls.

        `last` is one of the tokens `ends`, or another after a stop string. Raises: TemplateRefusal.
        """
        stop = self._text(last) if last in ends else None
        text = self._tail(replies, template_kwargs)
        cut = self._end_of_turn(text, self._tail(replies, template_kwargs, answered=False), stop, ends)
        if stop is not None:  # tokenised with `stop`, so that it is not the beginning of a text
            tokens = encode(self.tokenizer, [stop + text[cut:]])[0]
            if tokens[:1] == [last]:
                return tokens[1:]
        return encode(self.tokenizer, [text[cut:]])[0]

    def _end_of_turn(self, text: str, closed: str, stop: str | None, ends: Collection[int]) -> int:
        """The end, in `text`, of a turn that the model closed with the text `stop`, or left open (None)."""
        shared = common_prefix_length(closed, text)
        if stop is None:
            places = [at for token in ends if (at := text.find(self._text(token), 0, shared)) >= 0]
            return min(places, default=shared)
        if (at := text.find(stop, 0, shared)) >= 0:
            return at + len(stop)
        return shared + len(stop) if text.startswith(stop, shared) else shared

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tail(self, replies: Sequence[Message], template_kwargs: Fields, *, answered: bool = True) -> str:
        """The rendered text after the last argument of a call: the turn's end and, if `answered`, its answers."""
        tools = [reply for reply in replies if reply["role"] == "tool"]
        if tools:
            turn = _call_message([reply.get("name") or "" for reply in tools])
        else:
            turn = {"role": "assistant", "content": _MARK.format(0)}
        ids = map(_id, range(len(tools)))
        answers = [{**reply, "tool_call_id": next(ids)} if reply["role"] == "tool" else reply for reply in replies]
        chat = Chat([_QUESTION, turn, *(answers if answered else [])], [*self.schemas], template_kwargs)
        text = render(self.processing_class, chat, add_generation_prompt=answered)
        _, mark, tail = text.partition(_MARK.format(max(len(tools) - 1, 0)))
        if not mark:
            left_out = "the arguments of tool calls" if tools else "an assistant's message"
            raise TemplateRefusal(f"the chat template leaves out {left_out}.")
        return tail


def _id(number: int) -> str:
    return f"call{number:05d}"  # Mistral's templates need nine letters or digits


def _call_message(names: Sequence[str]) -> Message:
    """An assistant's message with calls, whose arguments can be found in the rendered text."""
    functions = [{"name": name or "tool", "arguments": {"x": _MARK.format(n)}} for n, name in enumerate(names)]
    calls = [{"id": _id(n), "type": "function", "function": function} for n, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def check_tool_template(processing_class: ProcessingClass, schemas: Sequence[Json], *, template_kwargs: Fields) -> None:
    """Raise ValueError if a template does not show tools or answers, or its calls cannot be read back."""
    if not template_source(processing_class):
        raise ValueError("tools need a chat template, the tokenizer has none. Set tokenizer.chat_template.")
    prompt, name = Chat([_QUESTION], list(schemas), template_kwargs), schemas[0]["function"]["name"]
    try:
        shown = render_prompt(processing_class, prompt)
        if shown == render_prompt(processing_class, prompt._replace(tools=None)):
            raise ValueError("the chat template reads no tools. Use that of a model with tools (Qwen3).")
        writer, calls = ReplyWriter(processing_class, schemas), _call_message([name])
        answered = writer._tail([{"role": "tool", "name": name, "content": _ANSWER}], template_kwargs)
        before, written = split_rendering(processing_class, prompt, [calls])
    except TemplateRefusal as error:
        raise ValueError(f"tools: {error}") from error
    if _ANSWER not in answered:
        raise ValueError("the chat template leaves role 'tool' out. Use that of a model with tools (Qwen3).")
    calls_read = TurnReader(processing_class, schemas).of_text(written, before).calls
    if calls_read != [ToolCall(name, calls["tool_calls"][0]["function"]["arguments"])]:
        fault = f"calls of the chat template cannot be read back: {written[:200]!r} was read as {calls_read}"
        raise ValueError(f"{fault}. Use add_response_schema.")
