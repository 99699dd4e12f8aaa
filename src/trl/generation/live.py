"""Requests that come and go: they join and leave between the steps of an engine."""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trl.generation.engine import Engine, Generated, Sampling

_WAIT_S = 0.5  # after which a thread that waits for requests looks for signals

Listener = Callable[[Sequence[int]], None]
"""Is given the newest tokens of a request, in the thread that runs the engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """A completion of `prompt`, by `sampling`, the random `stream` and its own `limit` of new tokens."""

    prompt: Sequence[int]
    sampling: Sampling
    stream: int = 0
    limit: int | None = None
    listener: Listener | None = None


Scored = list[tuple[int, float, int]]
"""The most likely tokens at a place of a prompt, and then its own, each with log-prob (temperature 1, nats) and rank
(from 1).
"""


class Live(Protocol):
    """An engine whose weights do not change while it is open. One thread calls its methods."""

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        ...

    def submit(self, request: Request) -> int:
        """Begin a completion, and return the request's number.

        Raises: ValueError for an invalid prompt, or one that leaves no room for a completion.
        """
        ...

    def cancel(self, request: int) -> None: ...

    def step(self) -> dict[int, Generated]:
        """Draw at least one token for a request that runs; the completions that ended, by request."""
        ...


def check_alone(engine: Engine) -> None:
    """Raise ValueError for an engine that several processes share."""
    if engine.together:
        fault = f"{type(engine).__name__} generates in several processes at once, whose requests would differ"
        raise ValueError(f"{fault}. Use an engine in each, such as the policy itself or one vLLM per process.")


class LiveCalls:
    """Requests over `engine.generate`, for engines without steps: one call for all that wait with equal settings."""

    def __init__(self, engine: Engine) -> None:
        check_alone(engine)
        self.engine = engine
        self._numbers = itertools.count()
        self._waiting: dict[int, Request] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: Request) -> int:
        number = next(self._numbers)
        self._waiting[number] = request
        return number

    def cancel(self, request: int) -> None:
        self._waiting.pop(request, None)

    def step(self) -> dict[int, Generated]:
        first = next(iter(self._waiting.values()))
        alike = first.sampling, first.limit is None
        together = [n for n, request in self._waiting.items() if (request.sampling, request.limit is None) == alike]
        requests = [self._waiting.pop(number) for number in together]
        limits = [request.limit for request in requests if request.limit is not None]
        completions = self.engine.generate(
            [request.prompt for request in requests], first.sampling,
            streams=[request.stream for request in requests], limits=limits or None,
        )  # fmt: skip
        for request, completion in zip(requests, completions, strict=True):
            if request.listener is not None:
                request.listener(completion.ids)
        return dict(zip(together, completions, strict=True))


@contextmanager
def opened(engine: Engine) -> Iterator[Live]:
    """Inside the block, the engine's own `live`, or its `generate` behind the same interface."""
    steps = getattr(engine, "live", None)
    with nullcontext(LiveCalls(engine)) if steps is None else steps() as live:
        yield live


Answering = Future[Any]


class Asked(NamedTuple):
    """A request of another thread, or a function of the engine; `future` gets the completion or the result.

    A function that is called `alone` waits until no request runs, and what comes after it waits for it.
    """

    request: Any  # a `Request`, what another `Live` takes, or a function
    future: Answering
    alone: bool = False


class Broker:
    """Lets several threads use a `Live` engine that one thread runs; requests wait until it does.

    Requests are of the kind that the engine's `submit` takes, which is no function. `busy_s` and `idle_s` are the
    seconds in which the engine worked and in which it waited for requests.
    """

    def __init__(self) -> None:
        self.busy_s = self.idle_s = 0.0
        self.failure: Exception | None = None
        self._arriving: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._waiting: deque[Asked] = deque()  # in the order of their arrival
        self._running: dict[int, Asked] = {}
        self._answering = threading.Lock()

    def submit(self, request: object, future: Answering | None = None) -> Answering:
        """Begin a completion, from any thread. Cancelling the future takes the request out of the engine.

        The future raises ValueError for an invalid prompt, and what the engine raises.
        """
        return self._added(Asked(request, future or Future()))

    def call(self, function: Callable[..., object], *, alone: bool = False) -> Answering:
        """The result of a function of the `Live` engine, called between two steps, or `alone`; raises as `submit`."""
        return self._added(Asked(function, Future(), alone))

    def _added(self, asked: Asked) -> Answering:
        self._arriving.put(asked)
        if self.failure is not None:
            self.fail(self.failure)
        return asked.future

    def wake(self) -> None:
        """Let `run` look at its condition, from any thread."""
        self._arriving.put(None)

    def run(self, live: Live, until: Callable[[], bool]) -> None:
        """Run an engine in this thread until a condition holds, which is looked at after each step and `wake`.

        Raises: what the engine raises, after all requests were given it.
        """
        try:
            while not until():
                started = time.monotonic()
                self._waiting += self._take(wait=not (self._running or self._waiting))
                self.idle_s += time.monotonic() - started
                started = time.monotonic()
                while self._waiting and not (self._waiting[0].alone and self._running):
                    self._begin(live, self._waiting.popleft())
                self._step(live)
                self.busy_s += time.monotonic() - started
        except Exception as error:
            self.fail(error)
            raise

    def _take(self, *, wait: bool) -> list[Asked]:
        """What arrived; without a running request at least one, or a `wake`."""
        arrived = list[Asked | None]()
        while wait and not arrived:
            with suppress(queue.Empty):  # a signal that another thread receives does not end a wait without a bound
                arrived = [self._arriving.get(timeout=_WAIT_S)]
        with suppress(queue.Empty):  # another thread may take some too
            while True:
                arrived.append(self._arriving.get_nowait())
        return [asked for asked in arrived if asked is not None]

    def _begin(self, live: Live, asked: Asked) -> None:
        future = asked.future
        try:
            if callable(asked.request):
                if future.set_running_or_notify_cancel():
                    future.set_result(asked.request(live))
            elif not future.cancelled():
                self._running[live.submit(asked.request)] = asked
        except Exception as error:
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _step(self, live: Live) -> None:
        """Draw tokens for requests that were not cancelled, and answer those that ended."""
        with self._answering:
            for number in [number for number, asked in self._running.items() if asked.future.cancelled()]:
                live.cancel(number)
                del self._running[number]
        ended = live.step() if self._running else {}
        with self._answering:
            for number, generated in ended.items():
                asked = self._running.pop(number, None)
                if asked is not None and asked.future.set_running_or_notify_cancel():
                    asked.future.set_result(generated)

    def fail(self, error: Exception) -> None:
        """End all requests with an error, those that wait and those that come later too."""
        self.failure = error
        waiting = [*self._waiting, *self._take(wait=False)]
        self._waiting.clear()
        self.wake()  # `run` may have been meant by what was taken
        with self._answering:
            for asked in [*self._running.values(), *waiting]:
                if asked.future.set_running_or_notify_cancel():
                    asked.future.set_exception(error)
            self._running.clear()
