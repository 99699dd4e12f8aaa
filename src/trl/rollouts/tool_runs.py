"""Calls of tools, all at once: functions on threads, coroutines on one event loop, each with a deadline."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Literal, NamedTuple

from trl.rewards.calls import AsyncCalls, DeadlinePassed, place_of, resolved_by
from trl.rollouts.tool_schemas import Tool

Failure = Literal["malformed", "unknown", "arguments", "raised", "deadline"]
FAILURES: tuple[Failure, ...] = ("malformed", "unknown", "arguments", "raised", "deadline")

MOST_AT_ONCE = 64  # threads
MOST_LEFT_BEHIND = 32  # threads of calls that never ended
_numbers = itertools.count(1)


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
    """Answers calls of `tools`. What goes wrong in a call becomes its reply; after `deadline` seconds (None: never) a call is
    not waited for any more.

    A thread cannot be stopped from outside: what does not end goes on behind.
    """

    def __init__(self, tools: Mapping[str, Tool], *, deadline: float | None) -> None:
        self.tools, self.deadline = tools, deadline
        self._loop = AsyncCalls("tool")
        self._left_behind: list[threading.Thread] = []

    def run(self, calls: Sequence[ToolCall]) -> list[Reply]:
        """The reply to each call, in order.

        Raises: RuntimeError where too many earlier calls have not ended.
        """
        self._check_left_behind()
        replies = {number: wrong for number, call in enumerate(calls) if (wrong := self._refused(call))}
        ready = {number: call for number, call in enumerate(calls) if number not in replies}
        awaited = {
            number: self._loop.submit(self._begun_later(call), self.deadline)
            for number, call in ready.items()
            if self.tools[call.name].is_async
        }
        started = time.monotonic()
        threads = self._on_threads({n: call for n, call in ready.items() if n not in awaited})
        for number, outcome in threads.items():
            replies[number] = _reply(outcome)
        for number, future in awaited.items():
            replies[number] = _reply(self._awaited(future, started))
        return [replies[number] for number in range(len(calls))]

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

    def _awaited(self, future: Future[Any], started: float) -> Any:
        """What a coroutine gives, or the exception that it raises."""
        left = None if self.deadline is None else self.deadline - (time.monotonic() - started)
        try:
            return self._loop.result(future, left)
        except Exception as error:
            return error

    def _on_threads(self, calls: Mapping[int, ToolCall]) -> dict[int, Any]:
        """What each function gives, or the exception that it raises."""
        waiting, running, found = deque(calls.items()), dict[Future[Any], _Running](), dict[int, Any]()
        while waiting or running:
            while waiting and len(running) < MOST_AT_ONCE:
                number, call = waiting.popleft()
                future, thread = self._begun(call)
                running[future] = _Running(number, thread, time.monotonic())
            done, _ = wait(running, timeout=self._patience(running), return_when=FIRST_COMPLETED)
            for future in done:
                found[running.pop(future).number] = self._outcome(future)
            for future, late in self._late(running):
                del running[future]
                self._left_behind.append(late.thread)
                found[late.number] = DeadlinePassed()
        return found

    def _begun(self, call: ToolCall) -> tuple[Future[Any], threading.Thread]:
        future: Future[Any] = Future()
        name = f"tool-{call.name}-{next(_numbers)}"
        thread = threading.Thread(
            target=resolved_by(lambda: self._started(call), future), name=name, daemon=True
        )
        thread.start()
        return future, thread

    def _outcome(self, future: Future[Any]) -> Any:
        error = future.exception()
        if error is not None:
            return error
        given = future.result()
        if not inspect.isawaitable(given):
            return given
        return self._awaited(
            self._loop.submit(given, self.deadline), time.monotonic()
        )  # of a plain function around it

    def _patience(self, running: Mapping[Future[Any], _Running]) -> float | None:
        """Seconds until the next deadline."""
        if self.deadline is None:
            return None
        first = min(one.started for one in running.values())
        return max(first + self.deadline - time.monotonic(), 0.0)

    def _late(self, running: Mapping[Future[Any], _Running]) -> list[tuple[Future[Any], _Running]]:
        now = time.monotonic()
        limit = math.inf if self.deadline is None else self.deadline
        return [
            (future, one)
            for future, one in running.items()
            if not future.done() and now - one.started >= limit
        ]

    def _check_left_behind(self) -> None:
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= MOST_LEFT_BEHIND:
            last = self._left_behind[-1]
            raise RuntimeError(
                f"{len(self._left_behind)} calls of tools that were given up after tool_deadline={self.deadline:g} s still run "
                f"(the last is {last.name!r}, at {place_of(last)}), expected them to end some day. Give the tool a time limit of "
                "its own, or run what may hang in a process that can be killed."
            )


class _Running(NamedTuple):
    number: int
    thread: threading.Thread
    started: float


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
