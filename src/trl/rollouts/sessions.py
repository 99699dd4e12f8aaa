"""Sessions of agents with the policy: each turn's tokens as they were shown and sampled, whatever the agent does with its history.

A turn's prompt is the tokens of the longest history that the session holds, and the newly rendered rest. What the policy wrote is
never tokenised again. An agent that changes its history begins another branch or another tree.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl.data.rendering import Chat, Message, ProcessingClass, TemplateRefusal, render_prompt, text_tokenizer
from trl.data.tokenization import encode
from trl.generation.engine import Generated, Sampling
from trl.generation.live import Broker, Listener, Request, prompt_logps
from trl.generation.serving.openai_api import APIError, Body, ChatBody, CompletionBody, ScoredPrompt
from trl.rollouts.schedule import stream_of
from trl.rollouts.tool_turns import ReplyWriter, TurnReader

FIXED = ("temperature", "top_p", "top_k", "min_p")  # settings that change what is learned
BUDGET_EXCEEDED, TOO_LONG = "budget_exceeded", "context_length_exceeded"  # codes of errors
_PAUSE_S = 0.05  # between the events of a stream


@dataclass(frozen=True, slots=True)
class Budget:
    """The most turns, sampled tokens and seconds of a session, and the most tokens after a first prompt (`length`, with those of the agent); None for no limit."""

    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    length: int | None = None


@dataclass(slots=True)
class Written:
    """A completion as the client sees it, and its `message` as the next prompt would have it."""

    text: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    tokens: list[tuple[str, float]]
    prompt_tokens: int
    completion_tokens: int
    prompt: ScoredPrompt | None = None


class Turn:
    """One completion. `shown` are the tokens that came after those of its `parent`; `generated` what the policy wrote."""

    def __init__(self, session: Session, parent: Turn | None, shown: list[int], history: _History) -> None:
        self.session, self.parent, self.shown, self.history = session, parent, shown, history
        self.context = [
            *(parent.tokens if parent is not None else []),
            *shown,
        ]  # all tokens before the completion
        self.tokens = self.context  # all tokens with it, when it has ended
        self.opening: int = parent.opening if parent is not None else len(shown)  # tokens of the first prompt
        self.limit = 0
        self.generated: Generated | None = None
        self.written: Written | None = None
        self.version = session.version
        self.started, self.ended = time.monotonic(), 0.0
        self.future: Future[Generated] | None = None
        self._newest: asyncio.Queue[Sequence[int]] | None = None

    def listen(self) -> Listener:
        """What gives `deltas` the newest tokens, from another thread."""
        loop, newest = asyncio.get_running_loop(), asyncio.Queue[Sequence[int]]()
        self._newest = newest

        def listener(ids: Sequence[int]) -> None:
            loop.call_soon_threadsafe(newest.put_nowait, ids)

        return listener

    async def result(self) -> Written:
        """The completion. Raises: APIError."""
        if self.written is None:
            assert self.future is not None
            try:
                generated = await asyncio.wrap_future(self.future)
            except APIError:  # of the budget
                raise
            except ValueError as error:
                self.session.drop(self)
                raise _too_long(error) from None
            except asyncio.CancelledError:
                self.session.drop(self)
                task = asyncio.current_task()
                if not self.future.cancelled() or (task is not None and task.cancelling()):
                    raise  # of a deadline, say
                raise APIError(503, "The session or the endpoint has been closed.") from None
            except Exception as error:
                self.session.drop(self)
                raise APIError(503, f"The engine has ended ({type(error).__name__}: {error}).") from None
            if self.written is None:  # else another request with this turn was faster
                self.session.finish(self, generated)
        assert self.written is not None
        return self.written

    async def deltas(self) -> AsyncIterator[str]:
        """The text in parts, as it comes; held back where it may become a call, half a character or a stop string."""
        if self.written is None and self._newest is not None and not self.history.tools:
            ids: list[int] = []
            sent = ""
            stops = (*self.session.sampling.stop_strings, *self.history.stops)
            hold = max((len(stop) for stop in stops), default=1) - 1
            while not (self.future is not None and self.future.done() and self._newest.empty()):
                try:
                    ids += await asyncio.wait_for(self._newest.get(), 0.2)
                except TimeoutError:
                    continue
                while not self._newest.empty():
                    ids += self._newest.get_nowait()
                text = self.session.text_of(ids, stops)
                ready = text[: len(text) - hold] if hold else text
                if ready.startswith(sent) and len(ready) > len(sent) and not ready.endswith("\ufffd"):
                    yield ready[len(sent) :]
                    sent = ready
                await asyncio.sleep(_PAUSE_S)  # the text is decoded anew each time
            rest = (await self.result()).text
            if rest[len(sent) :]:
                yield rest[len(sent) :]
        elif text := (await self.result()).text:
            yield text

    @property
    def message(self) -> Message:
        """The completion as the next prompt would have it."""
        assert self.written is not None
        written = {"content": self.written.text, "tool_calls": self.written.tool_calls}
        return readable({"role": "assistant", **written})

    def cancel(self) -> None:
        """Give it up, if it has not ended."""
        if self.written is None and self.future is not None:
            self.future.cancel()
            self.session.drop(self)


class ScoredTurn:
    """A prompt's log-probs, and its completion; None for no completion."""

    def __init__(self, session: Session, turn: Turn | None, prompt: list[int], body: CompletionBody) -> None:
        self.turn, self.prompt, self.as_ids = turn, prompt, body.return_tokens_as_token_ids
        self.tokenizer = session.chats.tokenizer
        self.future = session.broker.call(partial(prompt_logps, prompt=prompt, count=body.scored or 0))

    async def result(self) -> Written:
        """The completion, with its scored prompt. Raises: APIError."""
        try:
            found = await asyncio.wrap_future(self.future)
        except ValueError as error:
            raise APIError(400, f"prompt: {error}", param="prompt") from None
        except Exception as error:
            raise APIError(503, f"The engine has ended ({type(error).__name__}: {error}).") from None
        text, used = self.tokenizer.decode(self.prompt), {*self.prompt}.union(*found.best)
        texts = {
            token: f"token_id:{token}" if self.as_ids else self.tokenizer.decode([token]) for token in used
        }
        written = Written("", [], "length", [], len(self.prompt), 0)
        if self.turn is not None:
            written = await self.turn.result()
        return replace(written, prompt=ScoredPrompt(found, text, texts))

    async def deltas(self) -> AsyncIterator[str]:
        """Nothing: scored prompts are not streamed."""
        for part in ():
            yield part

    def cancel(self) -> None:
        """Give it up."""
        self.future.cancel()
        if self.turn is not None:
            self.turn.cancel()


@dataclass(frozen=True, slots=True)
class _History:
    """What a turn's prompt was made of: its messages, with digests (`states`) of those up to each one, or the text of a completion's prompt."""

    messages: tuple[Message, ...] = ()
    states: tuple[bytes, ...] = ()
    text: str | None = None
    tools: tuple[Any, ...] = ()
    stops: tuple[str, ...] = ()


class Session:
    """The turns of one API key.

    `sampling` are the settings of its completions. With `fixed` other values of temperature and truncation are refused, because
    the policy is trained on what it samples. A turn's random stream depends on the session's `stream` and on the turn's prompt,
    so it does not depend on the order in which turns or sessions run. Without `keeps` turns are forgotten when they end.
    """

    def __init__(
        self,
        chats: Chats,
        broker: Broker,
        sampling: Sampling,
        *,
        stream: int = 0,
        fixed: bool = True,
        keeps: bool = True,
        budget: Budget | None = None,
        version: int = 0,
    ) -> None:
        self.chats, self.broker, self.sampling = chats, broker, sampling
        self.stream, self.fixed, self.keeps = stream, fixed, keeps
        self.budget, self.version = budget or Budget(), version
        self.turns: list[Turn] = []
        self.cut: str | None = None  # the budget that was spent
        self.started = time.monotonic()
        self._states: dict[bytes, Turn] = {}
        self._asked: dict[tuple[int, ...], list[Turn]] = {}
        self._running: dict[Turn, Request | None] = {}  # with the requests that wait for the budget
        self._requests = itertools.count()

    # ---- requests

    def chat(self, body: ChatBody, *, is_retry: bool) -> list[Turn]:
        """Begin `n` answers to a conversation. Raises: APIError."""
        tools = [] if body.tool_choice == "none" else body.tools or []
        messages = [readable(message) for message in body.messages]
        seed = _digest(b"", ["tools", tools, self.chats.template_kwargs])
        states = tuple(_rolling(seed, map(_meaning, messages)))
        parent, rest = self._longest(states, messages)
        try:
            shown = self.chats.shown(messages, rest, tools, parent)
        except TemplateRefusal as error:
            raise APIError(400, f"messages: {error}", param="messages") from None
        limit = body.max_completion_tokens or body.max_tokens
        history = _History(tuple(messages), states, tools=tuple(tools), stops=body.stops)
        return self._begin([(parent, shown, history)], body, limit=limit, is_retry=is_retry)

    def complete(self, body: CompletionBody, *, is_retry: bool) -> Sequence[Turn | ScoredTurn]:
        """Begin `n` completions of each prompt. Raises: APIError."""
        given: list[Any] = (
            [body.prompt] if not body.prompt or not _is_several(body.prompt) else list(body.prompt)
        )
        begun = []
        for prompt in given:
            if not prompt:
                raise APIError(400, "prompt must not be empty.", param="prompt")
            parent, shown = self._of_text(prompt) if isinstance(prompt, str) else self._of_ids(prompt)
            history = _History(text=prompt if isinstance(prompt, str) else None, stops=body.stops)
            begun.append((parent, shown, history))
        turns: list[Any] = [None] * len(begun)
        if body.max_tokens != 0:
            turns = self._begin(begun, body, limit=body.max_tokens or 16, is_retry=is_retry)
        if body.scored is None:
            return turns
        prompts = [[*([] if parent is None else parent.tokens), *shown] for parent, shown, _ in begun]
        return [ScoredTurn(self, *pair, body) for pair in zip(turns, prompts, strict=True)]

    def extend(
        self, parent: Turn | None, messages: Sequence[Message], held: int, tools: Sequence[Any]
    ) -> Turn:
        """Begin the answer to a conversation of which `parent` holds the first `held` messages, its own among them.

        Raises: APIError, TemplateRefusal.
        """
        shown = self.chats.shown(messages, held, tools, parent)
        history = _History(tuple(messages), tools=tuple(tools))
        return self._begin([(parent, shown, history)], Body(), limit=None, is_retry=False)[0]  # type: ignore[call-arg]

    def _longest(self, states: tuple[bytes, ...], messages: Sequence[Message]) -> tuple[Turn | None, int]:
        """The turn that wrote the longest prefix of the messages, and the number of messages in it."""
        for count in range(len(states) - 1, 0, -1):  # something has to follow
            if (turn := self._states.get(states[count - 1])) is not None:
                return turn, count
        return None, 0

    def _of_text(self, prompt: str) -> tuple[Turn | None, list[int]]:
        held = [turn for turn in self.turns if turn.history.text is not None and turn.written is not None]
        best, length = None, 0
        for turn in held:
            ids = turn.generated.ids if turn.generated is not None else []
            text = f"{turn.history.text}{self.chats.whole_text(ids)}"  # without an end token, only
            if len(text) > length and prompt.startswith(text):
                best, length = turn, len(text)
        tokenizer = self.chats.tokenizer
        if best is None:
            return None, list(tokenizer(prompt)["input_ids"])
        return best, list(tokenizer(prompt[length:], add_special_tokens=False)["input_ids"])

    def _of_ids(self, prompt: Sequence[int]) -> tuple[Turn | None, list[int]]:
        best, length, known = None, 0, len(self.chats.tokenizer)
        if not all(0 <= token < known for token in prompt):
            raise APIError(400, f"prompt: token ids must be from 0 to {known - 1}.", param="prompt")
        for turn in self.turns:
            tokens = turn.tokens
            if (
                turn.generated is not None
                and length < len(tokens) <= len(prompt)
                and list(prompt[: len(tokens)]) == tokens
            ):
                best, length = turn, len(tokens)
        return best, list(prompt[length:])

    def _begin(
        self,
        begun: Sequence[tuple[Turn | None, list[int], _History]],
        body: Body,
        *,
        limit: int | None,
        is_retry: bool,
    ) -> list[Turn]:
        """Begin `n` turns of each prompt, or none."""
        for parent, shown, _ in begun:
            length = len(shown) + (0 if parent is None else len(parent.tokens))
            if length >= self.chats.context_length:
                raise _too_long(f"{length} tokens")
        found: list[Turn] = []
        try:
            for parent, shown, history in begun:
                for number in range(body.n):
                    turn = Turn(self, parent, shown, history)
                    asked = self._asked.get(tuple(turn.context), [])
                    if is_retry and len(asked) >= body.n - number:  # the answer was lost on its way
                        turn = asked[len(asked) - body.n + number]
                    else:
                        self._start(turn, asked, body, limit)
                    found.append(turn)
        except APIError:
            for turn in found:
                turn.cancel()
            raise
        return found

    def _start(self, turn: Turn, asked: list[Turn], body: Body, limit: int | None) -> None:
        """Send a turn to the engine. Raises: APIError."""
        prompt, sampling = turn.context, self._sampling(body)
        window = self.chats.context_length - len(prompt)
        turn.limit = min(limit or window, window, sampling.new_tokens or window)
        self._room(turn)
        is_new = self.keeps or body.seed is not None
        number = len(asked) if is_new else next(self._requests)
        listener = turn.listen() if body.stream else None
        stream = stream_of(self.stream, prompt, number)
        turn.future = Future()
        self._asked.setdefault(tuple(prompt), asked).append(turn)
        self._running[turn] = Request(prompt, sampling, stream, turn.limit, listener)
        self._admit()

    def _admit(self) -> None:
        """Send turns to the engine, in order, as long as the budget holds even if all that run write up to their limits."""
        while found := next(((turn, each) for turn, each in self._running.items() if each is not None), None):
            turn, request = found
            assert turn.future is not None
            try:
                room = self._room(turn)
            except APIError as error:
                if turn.future.set_running_or_notify_cancel():
                    turn.future.set_exception(error)
                self.drop(turn)
                continue
            limit, most = min(turn.limit, room), self.budget.tokens
            if most is not None and self._sampled + self._promised + limit > most:
                return  # until one of those that run has ended
            turn.limit, self._running[turn] = limit, None
            self.broker.submit(replace(request, limit=limit), turn.future)

    @property
    def _sampled(self) -> int:
        return sum(len(turn.generated.ids) for turn in self.turns if turn.generated is not None)

    @property
    def _promised(self) -> int:
        return sum(turn.limit for turn, waiting in self._running.items() if waiting is None)

    def _room(self, turn: Turn) -> int:
        """Tokens that a turn may have by the budget once those that run have ended. Raises: APIError if it is spent."""
        budget, written, sampled = self.budget, len(turn.context) - turn.opening, self._sampled
        begun = len(self.turns) + len(self._running) - (turn in self._running)
        spent = {
            "turns": budget.turns is not None and begun >= budget.turns,
            "tokens": budget.tokens is not None and sampled >= budget.tokens,
            "seconds": budget.seconds is not None and time.monotonic() - self.started >= budget.seconds,
            "length": budget.length is not None and written >= budget.length,
        }
        if found := [name for name, is_spent in spent.items() if is_spent]:
            self.cut = self.cut or found[0]
            raise APIError(400, f"This session has used up its budget of {found[0]}.", code=BUDGET_EXCEEDED)
        rooms = (budget.tokens, sampled), (budget.length, written)
        return min([self.chats.context_length, *(most - used for most, used in rooms if most is not None)])

    def _sampling(self, body: Body) -> Sampling:
        given = {name: value for name in FIXED if (value := getattr(body, name)) is not None}
        if self.fixed:
            neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
            for name, value in given.items():
                own = getattr(self.sampling, name) or neutral.get(name, 0.0)
                if (max(value, 0) if name == "top_k" else value) != own:
                    raise APIError(
                        400, f"{name}={value:g} differs from this training session's {own:g}. Leave it out.", param=name
                    )  # fmt: skip
            given = {}
        if given.get("top_k", 0) < 0:
            given["top_k"] = 0
        seed = {} if self.fixed or body.seed is None else {"seed": body.seed}
        return replace(
            self.sampling, **given, **seed, stop_strings=(*self.sampling.stop_strings, *body.stops)
        )

    # ---- answers

    def finish(self, turn: Turn, generated: Generated) -> None:
        """Keep what the policy wrote."""
        turn.generated, turn.ended = generated, time.monotonic()
        turn.tokens = [*turn.context, *generated.ids]
        turn.written = self.chats.read(turn, self.sampling.stop_strings)
        if not self.keeps:
            self.drop(turn)
            return
        self._running.pop(turn, None)
        self.turns.append(turn)
        if turn.history.states:
            state = _digest(turn.history.states[-1], _meaning(turn.message))
            self._states[state] = turn
        self._admit()

    def drop(self, turn: Turn) -> None:
        """Forget a turn that was given up."""
        prompt = tuple(turn.context)
        asked = self._asked.get(prompt, [])
        if turn in asked:
            asked.remove(turn)
            if not asked:
                del self._asked[prompt]
        self._running.pop(turn, None)
        self._admit()

    def text_of(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """The text of a completion without its end token, up to a stop string."""
        return self.chats.text(ids, (*self.sampling.stop_strings, *stops))

    def close(self) -> None:
        """End what still runs."""
        running = list(self._running)
        for turn in running:
            if turn.future is not None:
                turn.future.cancel()
        for turn in running:  # all of them cancelled, so that none is sent to the engine
            self.drop(turn)


class Chats:
    """Turns conversations into token ids and what the policy wrote into messages, for all sessions of an endpoint."""

    def __init__(
        self,
        processing_class: ProcessingClass,
        *,
        ends: Sequence[int],
        context_length: int | None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.processing_class, self.ends = processing_class, frozenset(ends)
        self.tokenizer: Any = text_tokenizer(processing_class)
        self.context_length = context_length or 1 << 30
        self.template_kwargs = dict(template_kwargs or {})

    def shown(
        self, messages: Sequence[Message], held: int, tools: Sequence[Any], parent: Turn | None
    ) -> list[int]:
        """The tokens after those of `parent`, which holds the first `held` messages; all without a parent.

        Raises: TemplateRefusal.
        """
        if parent is None or parent.generated is None:
            text = render_prompt(
                self.processing_class, Chat(list(messages), list(tools) or None, self.template_kwargs)
            )
            return list(encode(self.tokenizer, [text])[0])
        writer = ReplyWriter(self.processing_class, list(tools))
        return writer.ids(
            messages[held:],
            last=parent.generated.ids[-1],
            ends=self.ends,
            template_kwargs=self.template_kwargs,
        )

    def whole_text(self, ids: Sequence[int]) -> str:
        """The text of a completion with all its tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """The text of a completion without its end token and special tokens, up to a stop string."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return _cut(text, stops)

    def read(self, turn: Turn, stops: Sequence[str]) -> Written:
        """A completion as the client sees it; calls of tools are read where the request has tools."""
        generated = turn.generated
        assert generated is not None
        calls: list[dict[str, Any]] = []
        if turn.history.tools:
            message = (
                TurnReader(self.processing_class, turn.history.tools)
                .read(generated.ids, context=turn.context, ends=self.ends)
                .message
            )
            text = _cut(message.get("content") or "", (*stops, *turn.history.stops))
            for number, call in enumerate(message.get("tool_calls") or []):
                function = call.get("function", call)
                arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
                name = _name_of(turn, number)
                calls.append({
                    "id": name, "type": "function", "function": {"name": function["name"], "arguments": arguments},
                })  # fmt: skip
        else:
            text = self.text(generated.ids, (*stops, *turn.history.stops))
        tokens = [self.tokenizer.decode([token]) for token in generated.ids]
        reason = "tool_calls" if calls and generated.finish_reason == "stop" else generated.finish_reason
        return Written(
            text, calls, reason, list(zip(tokens, generated.logps.tolist(), strict=True)),
            len(turn.context), len(generated.ids),
        )  # fmt: skip


# ---- What a session is to training


@dataclass(slots=True)
class Chain:
    """Turns one after another: a prompt, and all tokens after it, of which the policy sampled some."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    parts: list[Generated | int] = field(
        default_factory=list
    )  # what was sampled, or the number of tokens shown
    ended: bool = False

    def show(self, ids: Sequence[int]) -> None:
        """Append tokens of the agent."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.parts.append(len(ids))

    def write(self, generated: Generated) -> None:
        """Append tokens of the policy."""
        self.ids += generated.ids
        self.sampled += [True] * len(generated.ids)
        self.parts.append(generated)
        self.ended = generated.finish_reason == "stop"

    def record(self) -> dict[str, Any]:
        """The chain as JSON values."""
        parts = [
            part
            if isinstance(part, int)
            else [str(part.logps.dtype), part.logps.tolist(), _listed(part.kept), part.finish_reason]
            for part in self.parts
        ]
        return {"prompt": self.prompt, "ids": self.ids, "parts": parts}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Chain:
        """The inverse of `record`."""
        chain, rest = cls(record["prompt"]), iter(record["ids"])
        for part in record["parts"]:
            if isinstance(part, int):
                chain.show(list(itertools.islice(rest, part)))
                continue
            dtype = getattr(torch, part[0].removeprefix("torch."))
            logps, kept = (None if each is None else torch.tensor(each, dtype=dtype) for each in part[1:3])
            assert logps is not None
            chain.write(Generated(list(itertools.islice(rest, len(logps))), logps, kept, part[3]))
        return chain


def _listed(values: Tensor | None) -> list[float] | None:
    return None if values is None else values.tolist()


def chains_of(turns: Sequence[Turn]) -> list[Chain]:
    """A session as chains in which each sampled token is once: one for each tree, and one more for each further branch.

    A branch's prompt is all that came before it. Turns after the same one are ordered by their tokens, short prompts first, and
    not by time, which differs from run to run for requests side by side.
    """
    children: dict[int | None, list[Turn]] = {}
    for turn in sorted(turns, key=lambda turn: (len(turn.context), turn.tokens)):
        children.setdefault(None if turn.parent is None else id(turn.parent), []).append(turn)
    found: list[Chain] = []
    first = list(children.get(None, []))
    while first:
        turn: Turn | None = first.pop(0)
        chain = Chain(turn.context)
        found.append(chain)
        while turn is not None:
            assert turn.generated is not None
            chain.write(turn.generated)
            after = children.get(id(turn), [])
            first += after[1:]
            turn = after[0] if after else None
            if turn is not None:
                chain.show(turn.shown)
    return found


def conversations_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The `messages` and `tools` of each conversation of a session that no other one continues."""
    continued = {id(turn.parent) for turn in turns}
    return [
        {"messages": [*turn.history.messages, turn.message], "tools": list(turn.history.tools)}
        for turn in turns
        if id(turn) not in continued and turn.history.messages
    ]


# ---- Meanings


def readable(message: Mapping[str, Any]) -> Message:
    """A message as templates read it: texts instead of lists of text parts, arguments as objects.

    Raises: APIError for a message without a role, and for parts that are not text.
    """
    if not isinstance(message.get("role"), str):
        raise APIError(400, "messages: each needs a role.", param="messages")
    found = {name: value for name, value in message.items() if value is not None and value != []}
    content = found.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise APIError(400, "messages: only text is supported in content.", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise APIError(400, "messages: content must be text.", param="messages")
    found["content"] = content
    if found["role"] == "developer":
        found["role"] = "system"
    calls = found.get("tool_calls")
    if calls is not None:
        functions = [_function(call) for call in calls] if isinstance(calls, list) else [None]
        if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
            raise APIError(400, "messages: tool_calls must be a list of calls with names.", param="messages")
        found["tool_calls"] = [
            {**call, "function": {**_function(call), "arguments": _parsed(_function(call).get("arguments"))}}
            for call in calls
        ]
    return found


def _cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _function(call: Any) -> Any:
    return call.get("function") if isinstance(call, dict) else None


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _meaning(message: Message) -> Any:
    """What tells messages apart: not the order of JSON keys, names of calls, or spaces around the content."""
    calls = [
        [_function(call)["name"], _function(call)["arguments"]] for call in message.get("tool_calls", [])
    ]
    more = [message.get(name) for name in ("name", "reasoning_content")] if message["role"] != "tool" else []
    return [message["role"], message["content"].strip(), calls, more]


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(
        before + json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16
    ).digest()


def _rolling(state: bytes, values: Iterator[Any]) -> Iterator[bytes]:
    for value in values:
        state = _digest(state, value)
        yield state


def _name_of(turn: Turn, number: int) -> str:
    """The id of a call: the same for the same turn."""
    digest = _digest(b"", [turn.session.stream, turn.tokens, number])
    return f"call_{digest.hex()[:24]}"


def _is_several(prompt: Sequence[Any]) -> bool:
    return not isinstance(prompt, str) and not isinstance(prompt[0], int)


def _too_long(reason: object) -> APIError:
    text = str(reason)
    return APIError(
        400, f"The prompt is too long for this model's maximum context length: {text}. Reduce the length of the messages.",
        code=TOO_LONG, param="messages",
    )  # fmt: skip
