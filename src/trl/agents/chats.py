"""Conversations as token ids, and what the policy wrote as messages."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from trl.agents.tool_turns import ReplyWriter, TurnReader
from trl.agents.tools import ToolCall
from trl.data.byte_alignment import vocabulary_bytes
from trl.data.rendering import Chat, Fields, Json, Message, ProcessingClass, render_prompt, text_tokenizer
from trl.data.tokenization import encode
from trl.generation.serving.answers import APIError, ScoredPrompt, check_text

TOO_LONG = "context_length_exceeded"  # the code of an error


@dataclass
class Chats:
    """The chat template and tokenizer of all sessions of an endpoint. `ends` are the tokens that end a turn."""

    processing_class: ProcessingClass
    ends: frozenset[int]
    context_length: int
    template_kwargs: Fields

    def __post_init__(self) -> None:
        self.tokenizer: Any = text_tokenizer(self.processing_class)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        """The tokens of a conversation. Raises: TemplateRefusal, APIError if it is too long."""
        chat = Chat(list(messages), list(tools) or None, self.template_kwargs)
        text = render_prompt(self.processing_class, chat)
        self._check_length(len(text))
        return list(encode(self.tokenizer, [text])[0])

    def ids(self, text: str, *, begins: bool) -> list[int]:
        """The tokens of a text, with special ones where it `begins`. Raises: APIError if it is too long."""
        self._check_length(len(text))
        return self.tokenizer(text, **({} if begins else {"add_special_tokens": False}))["input_ids"]

    def _check_length(self, characters: int) -> None:
        if characters <= self.context_length:
            return
        if characters > (most := self.context_length * self._longest_token):
            allowed = f"This model's maximum context length is {self.context_length} tokens"
            text = f"{allowed} (at most {most} characters), the prompt has {characters} characters."
            raise APIError(400, f"{text} Shorten it.", code=TOO_LONG, param="messages")

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab())) + 1  # with a space that tokens do not have

    def after(self, last: int, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        """The tokens of messages after a turn with the last token `last`. Raises: TemplateRefusal, APIError."""
        self._check_length(sum(len(message["content"]) for message in messages))
        writer = ReplyWriter(self.processing_class, list(tools))
        return writer.ids(messages, last=last, ends=self.ends, template_kwargs=self.template_kwargs)

    def text(self, ids: Sequence[int], stops: Sequence[str] = (), *, special: bool = False) -> str:
        """The text of a completion up to a stop string, with its end token and other special tokens if `special`."""
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return _cut(self.tokenizer.decode(list(ids), **options), stops)

    def token_bytes(self, ids: Sequence[int]) -> list[list[int] | None]:
        """The bytes of each token of a completion, none of special ones; None where it has none (WordPiece)."""
        try:
            vocabulary = _vocabulary(self.tokenizer, len(self.tokenizer))
        except (ValueError, AttributeError):  # AttributeError: of tokenizers without a fast backend
            return [None] * len(ids)
        texts = [list(vocabulary[token]) if token < len(vocabulary) else [] for token in ids]
        first = next((text for text in texts if text), [])
        if bytes(first[:1]) == b" " != self.text(ids)[:1].encode():  # SentencePiece's first space
            del first[0]
        return list(texts)

    def read(
        self, ids: Sequence[int], context: Sequence[int], tools: Sequence[Json], stops: Sequence[str]
    ) -> tuple[str, list[ToolCall]]:
        """The text of a completion, and its calls, which are read where there are tools."""
        if not tools:
            return self.text(ids, stops), []
        turn = TurnReader(self.processing_class, tools).read(ids, context=context, ends=self.ends)
        return _cut(turn.message.get("content") or "", stops), turn.calls

    def scored(self, prompt: Sequence[int], count: int, as_ids: bool, live: Any) -> ScoredPrompt:
        """Log-probs of a prompt's tokens and of the `count` likeliest. Raises: ValueError if the engine gives none."""
        if not hasattr(live, "prompt_logps"):
            raise ValueError("this engine gives no log-probs of prompts. Serve the model with `trl serve`.")
        places, decode = live.prompt_logps(prompt, count), self.tokenizer.decode
        used = {prompt[0], *(token for place in places for token, _, _ in place)}
        texts = {token: f"token_id:{token}" if as_ids else decode([token]) for token in used}
        return ScoredPrompt(prompt, decode(prompt), places, texts)


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> list[bytes]:
    vocabulary = vocabulary_bytes(tokenizer)
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special:
            vocabulary[token] = b""
    return vocabulary


def _cut(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def readable_all(messages: Sequence[Fields]) -> list[Message]:
    """Messages as templates read them: answers of tools have the names of their calls. Raises: APIError."""
    readable_messages, names = list[Message](), dict[str, str]()
    for message in map(readable, messages):
        names |= {str(call.get("id")): call["function"]["name"] for call in message.get("tool_calls", [])}
        if message["role"] == "tool" and (name := names.get(str(message.get("tool_call_id")))) is not None:
            message.setdefault("name", name)
        readable_messages.append(message)
    return readable_messages


def readable(message: Fields) -> Message:
    """A message as templates read it: text content, arguments as objects. Raises: APIError for anything else."""
    kept = {name: value for name, value in message.items() if value is not None and value != []}
    content = kept.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise APIError(400, "messages: only text is supported in content.", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(kept.get("role"), str) or not isinstance(content, str):
        raise APIError(400, "messages: each needs a role, and content of text.", param="messages")
    kept["content"] = content
    if kept["role"] == "developer":
        kept["role"] = "system"
    if "tool_calls" in kept:
        try:
            kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
            check_text(kept["tool_calls"])  # arguments are JSON within JSON
        except ValueError as error:
            raise APIError(400, f"messages: tool_calls: {error}.", param="messages") from None
        except (TypeError, KeyError, AttributeError):
            text = "messages: tool_calls must be a list of calls with names."
            raise APIError(400, text, param="messages") from None
    return kept


def _call(call: Json) -> Json:
    function, arguments = call["function"], call["function"].get("arguments")
    if not isinstance(function["name"], str):
        raise TypeError
    with suppress(ValueError):  # other texts are shown as they are
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def meaning(message: Message) -> list[object]:
    """What tells messages apart: not the order of JSON keys, names of calls, or spaces around the content."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [[function["name"], function["arguments"]] for function in functions]
    more = [message.get(name) for name in ("name", "reasoning_content")] if message["role"] != "tool" else []
    return [message["role"], message["content"].strip(), calls, more]
