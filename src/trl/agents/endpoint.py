"""An OpenAI-style endpoint in front of an engine: any agent that is given its address and a key talks to the policy."""

import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trl.agents.chats import Chats
from trl.agents.sessions import Session
from trl.data.rendering import Fields, ProcessingClass, text_tokenizer
from trl.generation.engine import Engine, Sampling
from trl.generation.live import Broker, opened
from trl.generation.transformers.engine import context_length_of, without_wrappers
from trl.generation.transformers.requests import fresh_seed, stop_tokens
from trl.options.generation import AgentSampling
from trl.reporting.deadlines import start

if TYPE_CHECKING:  # environments need no server
    from trl.generation.serving.app import HTTPServer

logger = logging.getLogger(__name__)
MOST_SESSIONS = 1024
_STARTING_S = 30.0


class Endpoint:
    """Serves an engine over HTTP on this machine, with the weights at the block's begin and in eval mode.

    Inside the block, `session(row)` gives an address and a key. The engine runs in a thread of its own, or, with
    `threaded=False`, where `run` is called. `sampling` are the settings of all sessions; other values of temperature
    and truncation in requests are ignored with a warning (`agent_sampling="own"`), taken ("agent") or refused
    ("strict"). Clients may call the model by any name. Without `http` only this process can use the sessions.

    Example:
        >>> with Endpoint(engine, tokenizer) as endpoint:  # doctest: +SKIP
        ...     session = endpoint.session()
        ...     client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)

    Raises: OSError if the address cannot be bound.
    """

    def __init__(
        self, engine: Engine, processing_class: ProcessingClass, *, sampling: Sampling | None = None,
        agent_sampling: AgentSampling = "own", template_kwargs: Fields | None = None, host: str = "127.0.0.1",
        port: int = 0, model_name: str = "policy", most_sessions: int = MOST_SESSIONS, threaded: bool = True,
        server: "HTTPServer | None" = None, http: bool = True, warned: set[str] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.agent_sampling, self.model_name = engine, agent_sampling, model_name
        self.warned = set[str]() if warned is None else warned
        self.most_sessions, self.threaded = most_sessions, threaded
        model: Any = getattr(engine, "model", None)
        window = getattr(engine, "context_length", None)  # of vLLM
        if model is not None:
            model = without_wrappers(model)
            window = context_length_of(model, window)
        sampling = sampling or Sampling(max_new_tokens=window or 1 << 30)
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        tokenizer: Any = text_tokenizer(processing_class)
        ends = sampling.stop_token_ids
        if ends is None:
            ends = tuple(stop_tokens(model, tokenizer) if model is not None else [tokenizer.eos_token_id])
        self.sampling = replace(sampling, seed=seed, stop_token_ids=ends)
        self.chats = Chats(processing_class, frozenset(ends), window or 1 << 30, dict(template_kwargs or {}))
        self._threads = list[threading.Thread]()
        self._server = server
        if http and server is None:
            from trl.generation.serving.app import HTTPServer

            self._server = HTTPServer(host, port)
        self._open: dict[str, Session] = {}
        self._closing = threading.Event()
        self._numbers = itertools.count()
        self.broker = Broker()

    @property
    def base_url(self) -> str:
        """The address for clients; "" without a server. One that listens everywhere has this machine's address."""
        if self._server is None:
            return ""
        host = address_of_machine() if self._server.host in ("0.0.0.0", "::") else self._server.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/v1"

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.port

    def session(self, row: Fields | None = None, *, key: str | None = None, **options: Any) -> Session:
        """Open a session on a row; `options` (`stream`, `budget`, `keeps`, `version`) are those of `Session`.

        Its tokens depend on the seed, `stream` (default: its number) and requests. Raises: RuntimeError for too many.
        """
        if len(self._open) >= self.most_sessions:
            raise RuntimeError(f"There are {len(self._open)} open sessions, the maximum. Close some.")
        key = key or secrets.token_urlsafe(24)
        shared = {"warned": self.warned, "agent_sampling": self.agent_sampling}
        options = {"stream": next(self._numbers), **shared, **options}
        parts = self.chats, self.broker, self.sampling, self.base_url, key, row or {}
        session = self._open[key] = Session(*parts, **options)
        return session

    def session_of(self, key: str) -> Session | None:
        return self._open.get(key)

    def close_session(self, session: Session) -> None:
        """End a session; its key is unknown from now on."""
        self._open.pop(session.api_key, None)
        session.close()

    def __enter__(self) -> "Endpoint":
        if (server := self._server) is not None:
            from trl.agents.openai_app import openai_app

            server.listen()
            app = openai_app(self.model_name, self.session_of, lambda: self.broker.failure)
            self._start(lambda: server.run(app))
        if self.threaded:
            self._start(lambda: self.run(self._closing.is_set))
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        for session in list(self._open.values()):  # agents that end close theirs, too
            session.close()
        self._open.clear()
        self.broker.wake()
        if self._server is not None:
            self._server.shutdown()
        self.broker.fail(RuntimeError("the endpoint is closing."))
        for thread in self._threads:
            thread.join(_STARTING_S)
        if self._server is not None:
            self._server.close()

    def run(self, until: Callable[[], bool]) -> None:
        """Run the engine in this thread until a condition holds (`threaded=False`). Raises: what the engine raises."""
        with opened(self.engine) as live:
            self.broker.run(live, until)

    def _start(self, function: Callable[[], None]) -> None:
        pending = start(function, "agent-endpoint")
        pending.future.add_done_callback(self._ended)
        self._threads.append(pending.thread)

    def _ended(self, thread: Future[None]) -> None:
        if (error := thread.exception()) is not None:  # which the requests are given
            logger.error("A thread of the endpoint has ended.", exc_info=error)
            self.broker.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def address_of_machine() -> str:
    """The address by which other machines reach this one; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # chooses a route and sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def check_host(host: str) -> None:
    """Raise ValueError for an address on which no endpoint of this machine can listen."""
    from trl.generation.serving.app import HTTPServer

    try:
        HTTPServer(host, 0).close()
    except OSError as error:
        fault = f"agent_host must be an address of this machine, got {host!r} ({error})"
        raise ValueError(f"{fault}. Use 127.0.0.1, or 0.0.0.0 for all.") from None
