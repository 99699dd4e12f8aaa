"""Calls of tools, all at once: functions on threads, coroutines on one event loop, each with a deadline."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from trl.reporting.deadlines import AsyncCalls, DeadlinePassed, ThreadedCalls
from trl.rollouts.tool_schemas import Tool

Failure = Literal["malformed", "unknown", "arguments", "raised", "deadline"]
FAILURES: tuple[Failure, ...] = ("malformed", "unknown", "arguments", "raised", "deadline")

MOST_LEFT_BEHIND = 32  # threads of calls that missed their deadline


class ToolCall(NamedTuple):
    """A call as a model wrote it; `error` says why it could not be read, where it could not."""

    name: str
    arguments: Any = None
    error: str | None = None


class Reply(NamedTuple):
    """What a model is told for a call: the tool's answer, or what went wrong and how."""

    text: str
    failure: Failure | None = None


class ToolRunner:
    """Runs the calls of `tools` all at once; a call that fails, or takes longer than `deadline` seconds (None: no limit), becomes a
    reply that says so."""

    def __init__(self, tools: Mapping[str, Tool], *, deadline: float | None) -> None:
        self.tools, self.deadline = tools, deadline
        self._loop = AsyncCalls("tool")
        self._threads = ThreadedCalls(most_left_behind=MOST_LEFT_BEHIND)

    def run(self, calls: Sequence[ToolCall]) -> list[Reply]:
        """The reply to each call, in order.

        Raises: RuntimeError if too many earlier calls are still running.
        """
        self._threads.check()
        replies = {number: wrong for number, call in enumerate(calls) if (wrong := self._refused(call))}
        ready = {number: call for number, call in enumerate(calls) if number not in replies}
        awaited = {
            number: self._loop.submit(self._begun_later(call), self.deadline)
            for number, call in ready.items()
            if self.tools[call.name].is_async
        }
        plain = [number for number in ready if number not in awaited]
        started = [(f"tool-{ready[n].name}", partial(self._started, ready[n])) for n in plain]
        outcomes = dict(zip(plain, self._threads.run(started, self.deadline), strict=True))
        for number, given in outcomes.items():
            if inspect.isawaitable(given):  # of a plain function around a coroutine
                awaited[number] = self._loop.submit(given, self.deadline)
        outcomes |= {number: self._loop.outcome(pending) for number, pending in awaited.items()}
        return [replies[n] if n in replies else _reply(outcomes[n]) for n in range(len(calls))]

    def close(self) -> None:
        """End the event loop; it comes back with the next call."""
        self._loop.close()

    def _refused(self, call: ToolCall) -> Reply | None:
        """The reply to a call that cannot be made."""
        if call.error is not None:
            return Reply(f"Error: {call.error}", "malformed")
        if call.name not in self.tools:
            return Reply(
                f"Error: unknown tool {call.name!r}, expected one of {', '.join(self.tools)}.", "unknown"
            )
        if error := self.tools[call.name].argument_error(call.arguments):
            return Reply(f"Error: {call.name}: {error}.", "arguments")
        return None

    def _started(self, call: ToolCall) -> Any:
        """What the function gives: an answer, or something to be awaited."""
        return self.tools[call.name].function(**copy.deepcopy(call.arguments))

    async def _begun_later(self, call: ToolCall) -> Any:
        """What a coroutine function gives; what it raises when it is called is raised here, too."""
        return await self._started(call)


def _reply(outcome: Any) -> Reply:
    """What a model reads of an answer, or of an exception."""
    if isinstance(outcome, DeadlinePassed):
        return Reply("Error: the tool did not answer in time.", "deadline")
    try:
        if isinstance(outcome, BaseException):
            return Reply(_whole(f"Error: {type(outcome).__name__}: {outcome}"), "raised")
        return Reply(_whole(as_text(outcome)))
    except Exception as error:  # of an answer, or an exception, that cannot be written
        return Reply(f"Error: {type(error).__name__} where the tool's answer is written.", "raised")


def _whole(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which no tokenizer takes.

    >>> _whole("a" + chr(0xD800))
    'a?'
    """
    return text.encode(errors="replace").decode()


def as_text(answer: Any) -> str:
    """A tool's answer as text: text as it is, else as JSON, else as Python prints it.

    >>> as_text({"sum": 3}), as_text(None), as_text({1, 2})
    ('{"sum": 3}', 'null', '{1, 2}')
    """
    if isinstance(answer, str):
        return answer
    try:
        return json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(answer)
