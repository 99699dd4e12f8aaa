"""An OpenAI-style endpoint in front of an engine: any agent that is given its address and a key talks to the policy."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl.data.rendering import text_tokenizer
from trl.generation.engine import Engine, Sampling
from trl.generation.live import Broker, opened
from trl.generation.serving.app import HTTPServer
from trl.generation.serving.openai_api import openai_app
from trl.generation.transformers.engine import context_length_of, without_wrappers
from trl.generation.transformers.requests import fresh_seed, stop_tokens
from trl.rollouts.sessions import Budget, Chats, Session

logger = logging.getLogger(__name__)
MOST_SESSIONS = 1024
_STARTING_S = 30.0


class OpenSession:
    """A session of an endpoint: `base_url` and `api_key` for any client of OpenAI's API; `turns` are what it made."""

    def __init__(self, session: Session, *, base_url: str, api_key: str, row: Mapping[str, Any]) -> None:
        self.session, self.base_url, self.api_key, self.row = session, base_url, api_key, row

    @property
    def turns(self) -> list[Any]:
        return self.session.turns


class Endpoint:
    """Serves an engine over HTTP on this machine, with the engine's present weights.

    Inside the block, `session(row)` gives an address and a key. The engine runs in a thread of its own, or, with
    `threaded=False`, where `run` is called. `sampling` are the settings of all sessions; with `fixed` other values of temperature
    and truncation are refused. `model_name` is what clients may call the model. `server` is one that has its address already.

    Example:
        >>> with Endpoint(engine, tokenizer) as endpoint:  # doctest: +SKIP
        ...     session = endpoint.session()
        ...     client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)

    Raises: OSError if the address cannot be bound.
    """

    def __init__(
        self,
        engine: Engine,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        sampling: Sampling | None = None,
        fixed: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "policy",
        most_sessions: int = MOST_SESSIONS,
        threaded: bool = True,
        server: HTTPServer | None = None,
    ) -> None:
        self.engine, self.fixed, self.model_name = engine, fixed, model_name
        self.host, self.most_sessions, self.threaded = host, most_sessions, threaded
        model: Any = getattr(engine, "model", None)
        window = getattr(engine, "context_length", None)  # of vLLM
        if model is not None:
            model = without_wrappers(model)
            window = context_length_of(model, window)
        self.sampling = sampling or Sampling(max_new_tokens=window or 1 << 30)
        if self.sampling.seed is None:
            self.sampling = replace(self.sampling, seed=fresh_seed())
        ends = self.sampling.stop_token_ids
        tokenizer: Any = text_tokenizer(processing_class)
        if ends is None:
            ends = stop_tokens(model, tokenizer) if model is not None else [tokenizer.eos_token_id]
        self.chats = Chats(
            processing_class, ends=ends, template_kwargs=template_kwargs,
            context_length=window,
        )  # fmt: skip
        self._port, self._threads = port, list[threading.Thread]()
        self._server = server
        self._open: dict[str, Session] = {}
        self._closing = threading.Event()
        self._sessions_so_far = 0
        self.broker = Broker()

    # ---- the service of the HTTP app

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine."""
        return self.broker.failure

    def session_of(self, key: str) -> Session | None:
        """The open session of a key."""
        return self._open.get(key)

    # ---- sessions

    @property
    def base_url(self) -> str:
        """The address for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    @property
    def port(self) -> int:
        """The port, once the endpoint is open."""
        assert self._server is not None
        return self._server.port

    def session(
        self,
        row: Mapping[str, Any] | None = None,
        *,
        stream: int | None = None,
        budget: Budget | None = None,
        key: str | None = None,
        keeps: bool = True,
        version: int = 0,
    ) -> OpenSession:
        """Open a session. Its tokens depend on the seed, its `stream` (default: its number) and its requests.

        Without `keeps` its turns are forgotten. `version` of the weights is noted on each turn.

        Raises: RuntimeError for too many open sessions.
        """
        if len(self._open) >= self.most_sessions:
            raise RuntimeError(
                f"There are {len(self._open)} open sessions, the most are {self.most_sessions}. Close some."
            )
        key = key or secrets.token_urlsafe(24)
        stream = self._sessions_so_far if stream is None else stream
        self._sessions_so_far += 1
        session = Session(
            self.chats,
            self.broker,
            self.sampling,
            stream=stream,
            fixed=self.fixed,
            keeps=keeps,
            budget=budget,
            version=version,
        )
        self._open[key] = session
        return OpenSession(session, base_url=self.base_url, api_key=key, row=row or {})

    def close_session(self, session: OpenSession) -> None:
        """End a session; its key is unknown from now on."""
        self._open.pop(session.api_key, None)
        session.session.close()

    # ---- the engine

    def __enter__(self) -> Endpoint:
        if self._server is None:
            self._server = HTTPServer(self.host, self._port)
        server = self._server
        server.listen()
        if self.threaded:
            self._start(self._run_engine)
        self._start(lambda: server.run(openai_app(self)))
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        for session in self._open.values():
            session.close()
        self._open.clear()
        self.broker.wake()
        assert self._server is not None
        self._server.shutdown()
        self.broker.fail(RuntimeError("the endpoint is closing."))
        for thread in self._threads:
            thread.join(_STARTING_S)
        self._server.close()

    def run(self, until: Callable[[], bool]) -> None:
        """Run the engine in this thread until a condition holds (`threaded=False`). Raises: what the engine raises."""
        with opened(self.engine) as live:
            self.broker.run(live, until)

    def _run_engine(self) -> None:
        try:
            self.run(self._closing.is_set)
        except Exception as error:  # its requests were given it
            logger.exception("The engine of the endpoint has ended.")
            self.broker.fail(error)

    def _start(self, function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function, name="agent-endpoint", daemon=True)
        thread.start()
        self._threads.append(thread)
