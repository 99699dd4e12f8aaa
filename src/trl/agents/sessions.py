"""Sessions of agents with the policy: each turn's tokens as they were shown and sampled.

A turn's prompt is the tokens of the longest history that the session holds, and the newly rendered rest. An agent that
changes its history begins another branch or another tree.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from trl.agents.chats import TOO_LONG, Chats, meaning, readable, readable_all
from trl.agents.tools import ToolCall
from trl.data.prefix_tree import PrefixTree
from trl.data.rendering import Fields, Json, Message, TemplateRefusal
from trl.generation.engine import Generated, Sampling
from trl.generation.live import Broker, Request
from trl.generation.serving.answers import APIError, ScoredPrompt
from trl.options.generation import AgentSampling
from trl.rollouts.schedule import digest, stream_of

if TYPE_CHECKING:  # environments need no server
    from trl.generation.serving.openai_api import Body, ChatBody, CompletionBody

logger = logging.getLogger(__name__)
Read = TypeVar("Read")
PENALTIES = ("frequency_penalty", "presence_penalty")  # which no engine has
FOREIGN = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)  # settings that change what is learned
BUDGET_EXCEEDED = "budget_exceeded"  # the code of an error
MOST_TURNS = 1024  # of a request
LONG = 20_000  # characters of a text that takes milliseconds to read
_PLAIN: Any = SimpleNamespace(n=1, seed=None, stream=False, **dict.fromkeys(FOREIGN))  # without settings
_PAUSE_S = 0.05  # between the events of a stream


@dataclass(frozen=True, slots=True)
class Budget:
    """The most turns, sampled tokens, seconds, and tokens after a first prompt of a session; None: no limit."""

    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    length: int | None = None


@dataclass(eq=False, repr=False)
class Turn:
    """One completion, with what the client is given when it has ended.

    `shown` are the tokens after those of `parent`, `context` all before the completion, `tokens` all with what was
    `generated`. The prompt was made of `messages` (with the digest `state`) and `tools`, or of `prompt_text`.
    """

    session: "Session"
    parent: "Turn | None"
    shown: list[int]
    messages: Sequence[Message] = ()
    tools: Sequence[Json] = ()
    stops: tuple[str, ...] = ()
    may_call: bool = True  # if there are tools
    state: str | None = None
    prompt_text: str | None = None
    generated: Generated | None = None
    prompt: ScoredPrompt | None = None
    future: Future[Generated] | None = None
    scores: Future[ScoredPrompt] | None = None
    text, finish_reason, limit = "", "length", 0
    requests = 1  # that wait for it: a retry may overtake the end of the first connection
    calls: list[ToolCall] = field(default_factory=list)  # also those that cannot be read
    tool_calls: list[Json] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)  # tokens of a stream, written by another thread
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    def __post_init__(self) -> None:
        parent, self.version = self.parent, self.session.version
        self.may_call = self.may_call and len(self.tools) > 0
        self.stops = (*self.session.sampling.stop_strings, *self.stops)
        self.tokens = self.context = [*(parent.tokens if parent else []), *self.shown]
        self.opening: int = parent.opening if parent else len(self.shown)  # tokens of the first prompt

    @property
    def completion_tokens(self) -> int:
        return len(self.generated.ids) if self.generated else 0

    @property
    def logprobs(self) -> list[tuple[str, float]]:
        if self.generated is None:
            return []
        texts = [self.session.chats.tokenizer.decode([token]) for token in self.generated.ids]
        return list(zip(texts, self.generated.logps.tolist(), strict=True))

    @property
    def whole_text(self) -> str | None:
        """The text of prompt and completion, special tokens included; None for prompts that were no text."""
        if self.prompt_text is None or self.generated is None:
            return None
        return self.prompt_text + self.session.chats.text(self.generated.ids, special=True)

    @property
    def message(self) -> Message:
        """The completion as the next prompt would have it."""
        return readable({"role": "assistant", "content": self.text, "tool_calls": self.tool_calls})

    async def result(self) -> "Turn":
        generated = None
        try:
            if self.scores is not None:
                self.prompt = await _ended(self.scores)
            if self.future is not None and self.generated is None:
                most, started = self.session.budget.seconds, self.session.started
                left = None if most is None else started + most - time.monotonic()
                generated = await asyncio.wait_for(_ended(self.future), left)
        except TimeoutError:
            raise self.session.spent("seconds") from None
        except ValueError as error:
            raise APIError(400, str(error), param="prompt" if self.scores is not None else None) from None
        if generated is not None and self.generated is None:  # else another request with this turn was faster
            self.session.finish(self, generated)
        return self

    async def deltas(self) -> AsyncIterator[str]:
        """The text in parts, as it comes; held back where it may become a call, half a character or a stop string."""
        work, sent, seen = asyncio.ensure_future(self.result()), "", 0
        hold = max(map(len, self.stops), default=1) - 1
        try:
            while not (await asyncio.wait({work}, timeout=_PAUSE_S))[0]:
                if self.may_call or len(self.newest) == seen:
                    continue
                seen = len(self.newest)
                text = self.session.chats.text(self.newest[:seen], self.stops)
                ready = text[: max(len(text) - hold, 0)]
                if len(ready) > len(sent) and ready.startswith(sent) and not ready.endswith("\ufffd"):
                    yield ready[len(sent) :]
                    sent = ready
            if rest := work.result().text[len(sent) :]:
                yield rest
        finally:
            work.cancel()

    def cancel(self) -> None:
        """A request gives it up: it ends, unless it has ended or another request waits for it."""
        self.requests -= 1
        if self.requests > 0:
            return
        for future in (self.scores, self.future):
            if future is not None:
                future.cancel()
        if self.generated is None:
            self.session.drop(self)


async def _ended(future: Future[Read]) -> Read:
    """The result of the engine. Raises: APIError, or ValueError for what the engine refuses."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except (APIError, ValueError):
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not future.cancelled() or (task is not None and task.cancelling()):
            raise  # of a deadline, say
        raise APIError(503, "The session or the endpoint has been closed.") from None
    except Exception as error:
        raise APIError(503, f"The engine has ended ({type(error).__name__}: {error}).") from None


@dataclass(eq=False, repr=False)
class Session:
    """The turns of one API key on one `row`; `base_url` and `api_key` are for any client of OpenAI's API.

    A request's own temperature and truncation are ignored (noted in `warned`), taken or refused, as `agent_sampling`
    says; its seed counts where the session keeps nothing. A turn's random stream depends on the session's `stream` and
    the turn's prompt, not on the order of turns or sessions. Without `keeps` turns are forgotten when they end.
    """

    chats: Chats
    broker: Broker
    sampling: Sampling
    base_url: str
    api_key: str
    row: Fields = field(default_factory=dict)
    stream: int = 0
    agent_sampling: AgentSampling = "own"
    keeps: bool = True
    budget: Budget = field(default_factory=Budget)
    version: int = 0
    warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.turns: list[Turn] = []
        self.cut: str | None = None  # the budget that was spent
        self.started = time.monotonic()
        self._states: dict[str, Turn] = {}
        self._texts, self._tokens = PrefixTree[Turn](), PrefixTree[Turn]()  # of the first `_indexed` turns
        self._indexed = 0
        self._asked: dict[tuple[int, ...], list[Turn]] = {}
        self._drawn = Counter[tuple[int, ...]]()  # random streams of each prompt that were used
        self._running: dict[Turn, Request | None] = {}  # with the requests that wait for the budget
        self._sampled = 0  # tokens
        self.closed = False

    # ---- requests

    async def chat(self, body: "ChatBody", *, is_retry: bool) -> list[Turn]:
        """Begin `n` answers to a conversation. Raises: APIError."""
        tools, messages = body.tools or [], readable_all(body.messages)
        first = digest(["tools", tools, self.chats.template_kwargs])
        states = list(accumulate(map(meaning, messages), _next_state, initial=first))
        held = next((count for count in range(len(messages) - 1, 0, -1) if states[count] in self._states), 0)
        options = {"state": states[-1], "stops": body.stops, "may_call": body.tool_choice != "none"}
        conversation = self._states.get(states[held]), messages, held, tools
        try:
            make = await self._conversation(*conversation, **options)
        except TemplateRefusal as error:
            raise APIError(400, f"messages: {error}", param="messages") from None
        limit = body.max_completion_tokens or body.max_tokens
        return self._begin([make], body, limit=limit, is_retry=is_retry)

    async def complete(self, body: "CompletionBody", *, is_retry: bool) -> list[Turn]:
        """Begin `n` completions of each prompt. Raises: APIError."""
        is_one = isinstance(body.prompt, str) or isinstance(next(iter(body.prompt), 0), int)
        prompts: Any = [body.prompt] if is_one else body.prompt
        if len(prompts) * body.n > MOST_TURNS:
            text = f"{len(prompts)} prompts with n={body.n}: a request has at most {MOST_TURNS} completions."
            raise APIError(400, text, param="prompt")
        for turn in self.turns[self._indexed :]:
            if (text := turn.whole_text) is not None:
                self._texts.add(text, turn)
            self._tokens.add(turn.tokens, turn)
        self._indexed = len(self.turns)
        makers = [partial(await self._continued(prompt), stops=body.stops) for prompt in prompts]
        if body.max_tokens == 0:
            turns = [make() for make in makers]
        else:
            turns = self._begin(makers, body, limit=body.max_tokens or 16, is_retry=is_retry)
        for turn in turns if body.scored is not None else ():
            as_ids = body.return_tokens_as_token_ids
            turn.scores = self.broker.call(partial(self.chats.scored, turn.context, body.scored or 0, as_ids))
        return turns

    async def extend(self, parent: Turn | None, messages: Sequence[Message], held: int, tools: Sequence[Json]) -> Turn:
        """The answer to messages of which `parent` holds the first `held`. Raises: APIError, TemplateRefusal."""
        make = await self._conversation(parent, messages, held, tools)
        (turn,) = self._begin([make], _PLAIN, limit=None, is_retry=False)
        try:
            return await turn.result()
        finally:
            turn.cancel()  # nothing if it has ended

    async def _conversation(
        self, parent: Turn | None, messages: Sequence[Message], held: int, tools: Sequence[Json], **options: Any
    ) -> Callable[[], Turn]:
        read = partial(self.chats.prompt, messages, tools)
        if parent is not None and parent.generated is not None:
            read = partial(self.chats.after, parent.generated.ids[-1], messages[held:], tools)
        shown = await _beside(sum(len(message["content"]) for message in messages[held:]), read)
        return partial(Turn, self, parent, shown, messages=tuple(messages), tools=tuple(tools), **options)

    async def _continued(self, prompt: str | list[int]) -> Callable[..., Turn]:
        """Turns after the longest text, or the most tokens, that the prompt begins with."""
        known = len(self.chats.tokenizer)
        if not prompt or not (isinstance(prompt, str) or all(0 <= token < known for token in prompt)):
            allowed = f"must not be empty, and token ids must be from 0 to {known - 1}"
            raise APIError(400, f"prompt: {allowed}.", param="prompt")
        if not isinstance(prompt, str):
            parent = self._tokens.longest(prompt)
            return partial(Turn, self, parent, prompt[len(parent.tokens) if parent else 0 :])
        parent = self._texts.longest(prompt)
        rest = prompt[len(parent.whole_text or "") if parent else 0 :]
        shown = await _beside(len(rest), partial(self.chats.ids, rest, begins=parent is None))
        return partial(Turn, self, parent, shown, prompt_text=prompt)

    def _begin(
        self, makers: Sequence[Callable[[], Turn]], body: "Body", *, limit: int | None, is_retry: bool
    ) -> list[Turn]:
        started: list[Turn] = []
        try:
            for make in makers:
                turns = [make() for _ in range(body.n)]
                length, most = len(turns[0].context), self.chats.context_length
                if length >= most:
                    text = f"This model's maximum context length is {most} tokens, the prompt has {length}."
                    raise APIError(400, f"{text} Shorten it.", code=TOO_LONG, param="messages")
                begun = self._asked.get(tuple(turns[0].context), [])[-body.n :] if is_retry else []
                for turn in begun:  # whose answers were lost on their way
                    turn.requests += 1
                started += begun
                for number, turn in list(enumerate(turns))[len(begun) :]:
                    self._start(turn, body, number, limit)
                    started.append(turn)
        except APIError:
            for turn in started:
                turn.cancel()
            raise
        return started

    def _start(self, turn: Turn, body: "Body", number: int, limit: int | None) -> None:
        """Send the turn `number` of a request to the engine. Raises: APIError."""
        prompt, sampling = tuple(turn.context), self._sampling(body, turn.stops)
        window = self.chats.context_length - len(prompt)
        turn.limit = min(limit or window, window, sampling.new_tokens or window)
        self._room(turn)
        if self.keeps or body.seed is None:
            key = prompt if self.keeps else ()
            number, self._drawn[key] = self._drawn[key], self._drawn[key] + 1
        listener = turn.newest.extend if body.stream else None
        turn.future = Future()
        self._asked.setdefault(prompt, []).append(turn)
        stream = stream_of(self.stream, prompt, number)
        self._running[turn] = Request(turn.context, sampling, stream, turn.limit, listener)
        if self.closed:  # since the request arrived
            turn.future.cancel()
        self._admit()

    def _admit(self) -> None:
        """Send turns to the engine, in order, as long as the budget holds even if all reach their limits."""
        last = takewhile(lambda entry: entry[1] is not None, reversed(self._running.items()))
        for turn, request in reversed(list(last)):
            assert turn.future is not None and request is not None
            try:
                limit = min(turn.limit, self._room(turn))
            except APIError as error:
                if turn.future.set_running_or_notify_cancel():
                    turn.future.set_exception(error)
                del self._running[turn]
                continue
            if self.budget.tokens is not None:
                running = (entry.limit for entry, waits in self._running.items() if waits is None)
                if self._sampled + sum(running) + limit > self.budget.tokens:
                    return  # until one of those that run has ended
            turn.limit, self._running[turn] = limit, None
            self.broker.submit(replace(request, limit=limit), turn.future)

    def _room(self, turn: Turn) -> int:
        """Tokens that a turn may have by the budget once those that run have ended. Raises: APIError if it is spent."""
        used = {
            "turns": len(self.turns) + len(self._running) - (turn in self._running),
            "tokens": self._sampled,
            "seconds": time.monotonic() - self.started,
            "length": len(turn.context) - turn.opening,
        }
        left = {name: most - used[name] for name in used if (most := getattr(self.budget, name)) is not None}
        for name in left:
            if left[name] <= 0:
                raise self.spent(name)
        rooms = (left[name] for name in ("tokens", "length") if name in left)
        return min([self.chats.context_length, *rooms])

    def spent(self, name: str) -> APIError:
        self.cut = self.cut or name
        return APIError(400, f"This session has used up its budget of {name}.", code=BUDGET_EXCEEDED)

    def _sampling(self, body: "Body", stops: tuple[str, ...]) -> Sampling:
        settings = {name: value for name in FOREIGN if (value := getattr(body, name)) is not None}
        if "top_k" in settings:
            settings["top_k"] = max(settings["top_k"], 0)
        defaults = {"top_p": 1.0}
        known = {name: getattr(self.sampling, name, None) or defaults.get(name, 0.0) for name in settings}
        for name in [name for name, value in settings.items() if value == known[name]]:
            del settings[name]
        refused = () if self.agent_sampling == "own" else PENALTIES
        for name in settings if self.agent_sampling == "strict" else settings.keys() & refused:
            text = f"{name}={settings[name]:g} differs from this session's {known[name]:g}. Leave it out."
            raise APIError(400, text, param=name)
        if self.agent_sampling == "own":
            if new := settings.keys() - self.warned:
                self.warned |= new
                ignored = ", ".join(f"{name}={settings[name]:g}" for name in sorted(new))
                text = "An agent sends %s, which is ignored: completions are sampled with the settings of the run. "
                logger.warning(text + "agent_sampling='agent' takes the agent's, 'strict' refuses them.", ignored)
            settings = {}
        seed = {} if self.keeps or body.seed is None else {"seed": body.seed}
        return replace(self.sampling, **settings, **seed, stop_strings=stops)

    # ---- answers

    def finish(self, turn: Turn, generated: Generated) -> None:
        """Keep what the policy wrote."""
        tools = turn.tools if turn.may_call else ()
        turn.text, turn.calls = self.chats.read(generated.ids, turn.context, tools, turn.stops)
        turn.generated, turn.ended = generated, time.monotonic()  # a turn that cannot be read is given up
        turn.tokens = [*turn.context, *generated.ids]
        for number, call in enumerate(call for call in turn.calls if call.error is None):
            name = digest([self.stream, turn.tokens, number])[:24]  # the same for the same turn
            function = {"name": call.name, "arguments": json.dumps(call.arguments or {}, ensure_ascii=False)}
            turn.tool_calls.append({"id": f"call_{name}", "type": "function", "function": function})
        is_call = turn.tool_calls and generated.finish_reason == "stop"
        turn.finish_reason = "tool_calls" if is_call else generated.finish_reason
        if not self.keeps:
            self.drop(turn)
            return
        self._running.pop(turn, None)
        self.turns.append(turn)
        self._sampled += turn.completion_tokens
        if turn.state is not None:
            contents = [turn.message["content"]]
            if turn.stops:  # which agents may put back
                contents.append(self.chats.text(generated.ids, ()))
            for content in contents:
                self._states[_next_state(turn.state, meaning({**turn.message, "content": content}))] = turn
        self._admit()

    def drop(self, turn: Turn) -> None:
        prompt = tuple(turn.context)
        if turn in (asked := self._asked.get(prompt, [])):
            asked.remove(turn)
            if not asked:
                del self._asked[prompt]
        self._running.pop(turn, None)
        self._admit()

    def close(self) -> None:
        """End what still runs, from any thread: requests that wait for a turn are given an error, and drop it."""
        self.closed = True
        for turn in list(self._running):
            if turn.future is not None:
                turn.future.cancel()


async def _beside(length: int, read: Callable[[], Read]) -> Read:
    """What reading such a text gives; a long one is read on a thread: the event loop serves other sessions."""
    return await asyncio.to_thread(read) if length > LONG else read()


def _next_state(state: str, said: object) -> str:
    return digest([state, said])
