"""Calls that may take too long: on a thread that is left behind at its deadline, or on one event loop for all.

A thread cannot be stopped from outside. What goes on past its deadline is named in the error, and goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

SLOW_SECONDS = 60.0  # after which a call without a deadline is spoken of
GRACE_SECONDS = 1.0  # for an event loop to cancel what is past its deadline
MOST_LEFT_BEHIND = 8
_numbers = itertools.count(1)


class DeadlinePassed(TimeoutError):
    """A call did not end in time."""


class ThreadedCalls:
    """Calls of one function with a deadline, each on a thread of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._left_behind: list[threading.Thread] = []

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """What `function()` gives or raises, if it does within `seconds`.

        Raises: DeadlinePassed if not, with the name of the thread that goes on; RuntimeError where too many do already.
        """
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= MOST_LEFT_BEHIND:
            raise RuntimeError(
                f"{len(self._left_behind)} earlier calls never ended ({', '.join(t.name for t in self._left_behind)}), "
                "expected them to end some day. Give what it waits for a timeout of its own."
            )
        future: Future[Any] = Future()
        run = resolved_by(function, future)
        thread = threading.Thread(target=run, name=f"reward-{self.name}-{next(_numbers)}", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._left_behind.append(thread)
            raise DeadlinePassed(
                f"did not answer within {seconds:g} s ({place_of(thread)}). Its thread {thread.name!r} cannot be stopped and goes "
                "on until it returns"
            )
        return future.result()


def resolved_by(function: Callable[[], Any], future: Future[Any]) -> Callable[[], None]:
    """`function` in the caller's context and grad mode, with its end put into `future`."""
    context, with_grad = contextvars.copy_context(), torch.is_grad_enabled()

    def run() -> None:
        try:
            with torch.set_grad_enabled(with_grad):
                future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    return run


class AsyncCalls:
    """One event loop on a thread of its own, kept from call to call, so that clients which belong to a loop live on."""

    def __init__(self, name: str = "reward") -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, awaitable: Awaitable[Any], seconds: float | None) -> Future[Any]:
        """Start on the loop, beside whatever runs there; cancelled after `seconds`."""
        return asyncio.run_coroutine_threadsafe(_bounded(awaitable, seconds), self._running_loop())

    def result(self, future: Future[Any], seconds: float | None) -> Any:
        """What the call gives or raises; `seconds` are those it has left.

        Raises: DeadlinePassed, also where something blocks the loop: it is left behind, and the next call gets another.
        """
        try:
            return future.result(None if seconds is None else max(seconds, 0.0) + GRACE_SECONDS)
        except CancelledError as error:
            raise DeadlinePassed("was cancelled") from error
        except TimeoutError as error:
            if future.done():
                raise
            thread, self._loop, self._thread = self._thread, None, None
            assert thread is not None
            raise DeadlinePassed(
                f"did not answer in time and blocks its event loop ({place_of(thread)}): something in it waits without "
                f"`await`. Its thread {thread.name!r} cannot be stopped and goes on until it returns"
            ) from error

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            self._loop = loop = asyncio.new_event_loop()
            name = f"{self.name}-event-loop-{next(_numbers)}"
            self._thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
            self._thread.start()
        return self._loop

    @property
    def thread(self) -> threading.Thread | None:
        """The loop's thread, if there is one."""
        return self._thread

    def close(self) -> None:
        """Stop the loop; a later call starts another."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = self._thread = None


async def _bounded(awaitable: Awaitable[Any], seconds: float | None) -> Any:
    started = time.monotonic()
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError as error:
        if seconds is None or time.monotonic() - started < seconds:
            raise  # its own
        raise DeadlinePassed(f"did not answer within {seconds:g} s and was cancelled") from error


@contextmanager
def spoken_of_when_slow(name: str, thread: threading.Thread | None) -> Iterator[None]:
    """Warn, once a call of this source takes longer than a minute, and say what `thread` is doing."""

    def speak() -> None:
        where = f" (at {place_of(thread)})" if thread is not None else ""
        logger.warning(
            "Reward source %r has been answering for %g s%s. A deadline (reward_deadline) would end the wait.",
            name,
            SLOW_SECONDS,
            where,
        )

    timer = threading.Timer(SLOW_SECONDS, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def place_of(thread: threading.Thread) -> str:
    """Where a running thread is in the code: `file:line in function`."""
    frame = sys._current_frames().get(thread.ident or -1)
    if frame is None:
        return "it has just ended"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
