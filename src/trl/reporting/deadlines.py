"""Calls with deadlines: functions on daemon threads, coroutines on one event loop.

A call that misses its deadline is abandoned, as no thread can be stopped, and delays not even the program's exit.
"""

import asyncio
import contextvars
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import finalize

import torch

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

SLOW_SECONDS = 60.0  # after which a call without a deadline is warned about
BLOCKED_SECONDS = 5.0  # of an event loop, which is warned about then
GRACE_SECONDS = 1.0  # for the event loop to cancel a call after its deadline
MOST_AT_ONCE = 64  # threads
_numbers = itertools.count(1)
_call_until: contextvars.ContextVar[float | None] = contextvars.ContextVar("call_until", default=None)


class DeadlinePassed(TimeoutError):
    """A call did not end in time."""


class Pending(NamedTuple):
    """A call that was started; `until` is its deadline by `time.monotonic`, None for none."""

    future: Future[Any]
    thread: threading.Thread
    until: float | None


def start(function: Callable[[], object], name: str, seconds: float | None = None) -> Pending:
    """Call `function` on a daemon thread, in the caller's context and grad mode."""
    context, with_grad, future = contextvars.copy_context(), torch.is_grad_enabled(), Future[Any]()
    future.set_running_or_notify_cancel()
    until = _until(seconds)
    if until is not None:
        context.run(_call_until.set, until)

    def run() -> None:
        try:
            with torch.set_grad_enabled(with_grad):
                future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=f"{name}-{next(_numbers)}", daemon=True)
    thread.start()
    return Pending(future, thread, until)


class DaemonThreads(Executor):
    """Calls of functions on daemon threads, `max_workers` at a time. The program may end before they do."""

    def __init__(self, max_workers: int) -> None:
        self._free = threading.Semaphore(max_workers)

    def submit(self, fn: Callable[..., Result], /, *args: object, **kwargs: object) -> Future[Result]:
        """Start `fn(*args, **kwargs)` as soon as a thread is free."""

        def run() -> Result:
            with self._free:
                return fn(*args, **kwargs)

        return start(run, "worker").future


def is_abandoned() -> bool:
    """Whether the call of `start` that runs this code has missed its deadline."""
    return _left(_call_until.get()) == 0


class ThreadedCalls:
    """Calls of functions, each on a thread of its own; at most `most_left_behind` threads may be left behind."""

    def __init__(self, *, most_left_behind: int) -> None:
        self.most_left_behind = most_left_behind
        self._left_behind: list[threading.Thread] = []

    def check(self) -> None:
        """Raise RuntimeError if too many earlier calls are still running."""
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= self.most_left_behind:
            last = self._left_behind[-1]
            late = f"{len(self._left_behind)} earlier calls missed their deadline and still run"
            remedy = "Set a timeout in what they wait for, or run it in a process that can be killed"
            raise RuntimeError(f"{late} (the last is {last.name!r}, at {place_of(last)}). {remedy}.")

    async def call(self, function: Callable[[], Result], name: str, seconds: float | None) -> Result:
        """What a function returns on its thread, awaited. Raises: DeadlinePassed, RuntimeError as `check`."""
        self.check()
        pending = start(function, name)
        try:
            return await bounded(asyncio.wrap_future(pending.future), seconds)
        finally:
            if not pending.future.done():
                self._left_behind.append(pending.thread)

    def run(
        self, functions: Sequence[tuple[str, Callable[[], Result]]], seconds: float | None
    ) -> list[Result | BaseException]:
        """What each function returns or raises in time, else `DeadlinePassed`. Raises: RuntimeError, see `check`."""
        self.check()
        outcomes: list[Any] = [None] * len(functions)
        waiting, running = deque(enumerate(functions)), dict[Future[Any], tuple[int, Pending]]()
        while waiting or running:
            while waiting and len(running) < MOST_AT_ONCE:
                number, (name, function) = waiting.popleft()
                pending = start(function, name, seconds)
                running[pending.future] = number, pending
            first = next(iter(running.values()))[1]  # all have the same time
            wait(running, timeout=_left(first.until), return_when=FIRST_COMPLETED)
            for number, pending in list(running.values()):
                if pending.future.done():
                    outcomes[number] = _outcome(pending.future)
                elif _left(pending.until) == 0:
                    self._left_behind.append(pending.thread)
                    outcomes[number] = DeadlinePassed(
                        f"did not answer within {seconds:g} s ({place_of(pending.thread)}). Its thread "
                        f"{pending.thread.name!r} cannot be stopped and runs until it returns"
                    )
                else:
                    continue
                del running[pending.future]
        return outcomes


class AsyncCalls:
    """One event loop on a daemon thread, kept from call to call, so that clients that belong to a loop stay usable.

    It ends with this object.
    """

    def __init__(self, name: str) -> None:
        self.name, self._warned = name, False
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, awaitable: Awaitable[object], seconds: float | None) -> Pending:
        """Start on the loop, beside what already runs there; cancelled after `seconds`."""
        with self._starting:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None or not thread.is_alive():
                self._loop = loop = asyncio.new_event_loop()
                finalize(self, _stop, loop).atexit = False
                name = f"{self.name}-event-loop-{next(_numbers)}"
                self._thread = thread = threading.Thread(target=_run, args=[loop], name=name, daemon=True)
                thread.start()
        return Pending(asyncio.run_coroutine_threadsafe(bounded(awaitable, seconds), loop), thread, _until(seconds))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the block, warn once if something blocks the loop, and all that runs on it, for some seconds."""
        ended = threading.Event()

        def watch() -> None:
            while not (self._warned or ended.wait(BLOCKED_SECONDS)):
                beat = self.submit(asyncio.sleep(0), None)
                if wait([beat.future], BLOCKED_SECONDS).not_done:
                    self._warned = True
                    logger.warning(
                        "One %s blocks all others for more than %g s (at %s): it waits without `await`. Use async "
                        "clients there, or asyncio.to_thread.", self.name, BLOCKED_SECONDS, place_of(beat.thread),
                    )  # fmt: skip

        threading.Thread(target=watch, name=f"{self.name}-watch", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def outcome(self, pending: Pending) -> Any:
        """What the call returns or raises; `DeadlinePassed`, too, if its loop is blocked, which is then abandoned."""
        left = _left(pending.until)
        wait([pending.future], timeout=None if left is None else left + GRACE_SECONDS)
        if pending.future.done():
            return _outcome(pending.future)
        if self._thread is pending.thread:
            self._loop = self._thread = None
        return DeadlinePassed(
            f"did not answer in time and blocks its event loop ({place_of(pending.thread)}): something in it waits "
            f"without `await`. Its thread {pending.thread.name!r} cannot be stopped and runs until it returns"
        )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; a call that exits the program ends alone, with that as its result."""
    with closing(loop):
        while True:
            try:
                loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt):
                continue
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


async def bounded(awaitable: Awaitable[Result], seconds: float | None) -> Result:
    """What the call returns or raises within `seconds`; it is cancelled after them. Raises: DeadlinePassed."""
    started = time.monotonic()
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError as error:
        if seconds is None or time.monotonic() - started < seconds:
            raise  # its own
        raise DeadlinePassed(f"did not answer within {seconds:g} s and was cancelled") from error


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.result()
    except CancelledError:
        return DeadlinePassed("was cancelled")
    except BaseException as error:
        return error


def _until(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


@contextmanager
def warn_when_slow(name: str, thread: threading.Thread | None) -> Iterator[None]:
    """Warn, with the place where `thread` is, once a call of the reward source `name` takes more than a minute."""

    def warn() -> None:
        where = f" (at {place_of(thread)})" if thread is not None else ""
        logger.warning(
            "Reward source %r has been running for %g s%s. Set reward_deadline to limit the wait.",
            name, SLOW_SECONDS, where,
        )  # fmt: skip

    timer = threading.Timer(SLOW_SECONDS, warn)
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
