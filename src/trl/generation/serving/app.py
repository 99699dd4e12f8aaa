"""The HTTP side of `trl vllm-serve`: routes, token and errors, over whatever does the generating."""

from __future__ import annotations

import hmac
import json
import logging
import socketserver
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Protocol

from trl.generation.serving.bodies import (
    ChatBody,
    CompleteBody,
    EmptyBody,
    GenerateBody,
    JoinBody,
    LeaveBody,
    WeightBody,
    WeightsBody,
    read,
)
from trl.generation.serving.connection import resolved

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 512 * 1024**2
_DRAINED_BYTES = 16 * 1024**2  # of a refused body, so that the client gets to read why
_IDLE_S = 120.0  # after which a connection on which nothing comes is closed


class Backend(Protocol):
    """What generates. Methods raise ValueError for what cannot be asked for, and may be called from any thread."""

    world_size: int  # how many workers receive weights
    channel: str | None  # names the weight channel that is open, another one each time; None where none is

    def check(self) -> None:
        """Raise BackendDied where what generates is gone; does not wait for what it is at."""
        ...

    def about(self) -> dict[str, Any]:
        """Model, dtype, max_model_len, vocab_size and device."""
        ...

    def complete(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One completion for each request, with its log-probs and why it ended."""
        ...

    def generate(self, asked: GenerateBody) -> dict[str, Any]:
        """Completions of prompts."""
        ...

    def chat(self, asked: ChatBody) -> dict[str, Any]:
        """Completions of conversations."""
        ...

    def join(
        self, *, host: str, port: int, size: int, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> None:
        """Join a weight channel with all workers, after leaving the one before."""
        ...

    def load(self, weights: Sequence[WeightBody], *, whole: bool) -> list[str]:
        """Receive these weights over the channel, load them, and forget what was computed with the old ones. Returns which of its
        own weights the model kept, where these should be all.

        Raises: NoChannel where none is open. A failure closes it.
        """
        ...

    def leave(self, channel: str | None = None) -> None:
        """Leave the weight channel, if one was joined; a `channel` of another name is left alone."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for prompts."""
        ...


class NoChannel(RuntimeError):
    """Weights cannot be received: no channel has been joined, or it broke."""


class BackendDied(RuntimeError):
    """What generates is gone for good: the server ends."""


class Refused(Exception):
    """A request that is answered with a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GenerationServer(ThreadingHTTPServer):
    """Takes the address at once, so that it cannot be lost to another, and requests once `serve` has a backend.

    Nobody's token is right as long as `token` is None.

    Raises: OSError if the address cannot be had.
    """

    daemon_threads = True

    def __init__(
        self, host: str, port: int, *, token: str | None = None, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self.host, self.token, self.max_body_bytes = host, token, max_body_bytes
        self.backend: Backend | None = None
        self.died: BackendDied | None = None
        self.address_family = resolved(host, port)[0]
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except OSError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        """Bind, without asking a name server who we are (as `HTTPServer` does)."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self, backend: Backend) -> None:
        """Answer requests until `shutdown` is called from another thread.

        Raises: BackendDied if what generates is gone.
        """
        self.backend = backend
        self.server_activate()
        self.serve_forever()
        if self.died is not None:
            raise self.died

    def end(self, died: BackendDied) -> None:
        """Let `serve` raise this, from the thread of a request."""
        self.died = died
        threading.Thread(target=self.shutdown, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Route:
    """One address: which body it takes, and the answer to it."""

    body: type[Any]
    answer: Callable[[GenerationServer, Backend, Any], dict[str, Any]]


def _complete(server: GenerationServer, backend: Backend, body: CompleteBody) -> dict[str, Any]:
    return {"completions": backend.complete(body.requests), "channel": backend.channel}


def _join(server: GenerationServer, backend: Backend, body: JoinBody) -> dict[str, Any]:
    if body.world_size != backend.world_size + 1:
        raise ValueError(
            f"world_size must be {backend.world_size + 1}, this server's {backend.world_size} workers and the client, got "
            f"{body.world_size}."
        )
    if body.port == server.server_port:
        raise ValueError(f"port {body.port} is that of this server itself. Choose another group_port.")
    backend.join(
        host=server.host, port=body.port, size=body.world_size, backend=body.kind, timeout_s=body.timeout_s
    )
    return {"status": "joined", "channel": backend.channel}


def _about(server: GenerationServer, backend: Backend, body: EmptyBody) -> dict[str, Any]:
    return backend.about() | {"channel": backend.channel}


def _load_whole(server: GenerationServer, backend: Backend, body: WeightsBody) -> dict[str, Any]:
    kept = backend.load(body.entries(), whole=True)
    return {"loaded": len(body.weights), "kept": kept}


def _health(server: GenerationServer, backend: Backend, body: EmptyBody) -> dict[str, Any]:
    backend.check()
    return {"status": "ok"}


def _leave(server: GenerationServer, backend: Backend, body: LeaveBody) -> dict[str, Any]:
    backend.leave(body.channel)
    return {"status": "ok"}


def _reset(server: GenerationServer, backend: Backend, body: EmptyBody) -> dict[str, Any]:
    backend.reset_prefix_cache()
    return {"status": "ok"}


def _load_one(server: GenerationServer, backend: Backend, body: WeightBody) -> dict[str, Any]:
    backend.load([body], whole=False)
    return {"loaded": 1}


ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/health"): Route(EmptyBody, _health),
    ("GET", "/get_world_size"): Route(
        EmptyBody, lambda server, backend, body: {"world_size": backend.world_size}
    ),
    ("GET", "/model"): Route(EmptyBody, _about),
    ("POST", "/complete"): Route(CompleteBody, _complete),
    ("POST", "/generate"): Route(GenerateBody, lambda server, backend, body: backend.generate(body)),
    ("POST", "/chat"): Route(ChatBody, lambda server, backend, body: backend.chat(body)),
    ("POST", "/init_communicator"): Route(JoinBody, _join),
    ("POST", "/update_weights"): Route(WeightsBody, _load_whole),
    ("POST", "/update_named_param"): Route(WeightBody, _load_one),
    ("POST", "/reset_prefix_cache"): Route(EmptyBody, _reset),
    ("POST", "/close_communicator"): Route(LeaveBody, _leave),
}
_SENDING = ("/update_weights", "/update_named_param")  # while a client waits to send


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: GenerationServer  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def _respond(self) -> None:
        length = self.headers.get("Content-Length", "")
        self._unread = int(length) if length.isdecimal() else 0
        try:
            status, answer = 200, self._answer()
            text = _json(answer)
        except NoChannel as error:
            status, answer = 409, {"error": str(error)}
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
        except (ValueError, TypeError) as error:
            status, answer = 400, {"error": str(error)}
        except BackendDied as error:
            status, answer = 503, {"error": str(error)}
            self.server.end(error)
        except Exception as error:
            logger.exception("%s %s failed", self.command, self.path)
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        self._send(status, text if status == 200 else _json(answer))

    def _answer(self) -> dict[str, Any]:
        path = self.path.partition("?")[0].rstrip("/")
        backend = self.server.backend
        if backend is None:
            raise Refused(503, "The model is not loaded yet. Ask again later.")
        if path != "/health":
            self._check_token()
        route = ROUTES.get((self.command, path))
        if route is None:
            known = ", ".join(f"{method} {address}/" for method, address in ROUTES)
            raise Refused(404, f"{self.command} {self.path} is not known. Known: {known}.")
        try:
            return route.answer(self.server, backend, read(route.body, self._body()))
        except ValueError:
            if path in _SENDING:
                backend.leave()  # the client would wait for this server to receive
            raise

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "")
        token = self.server.token
        if token is None or not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refused(
                401,
                "The token is missing or another one. Set TRL_VLLM_SERVER_TOKEN to the server's, here and there; on one "
                "machine the client reads it from the file that the server wrote.",
            )

    def _body(self) -> Any:
        if self.command == "GET":
            return {}
        if not self.headers.get("Content-Length", "").isdecimal():
            raise Refused(411, "A body needs a Content-Length.")
        if self._unread > self.server.max_body_bytes:
            raise Refused(
                413,
                f"The body has {self._unread} bytes, and {self.server.max_body_bytes} are allowed. Ask for less at a time.",
            )
        text = self.rfile.read(self._unread)
        self._unread = 0
        try:
            return json.loads(text or b"{}")
        except ValueError as error:
            raise ValueError(f"The body is no JSON: {error}.") from None

    def _send(self, status: int, body: bytes) -> None:
        refused_unread = self._unread > 0
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if refused_unread:
            self.send_header("Connection", "close")  # sets close_connection too
        self.end_headers()
        self.wfile.write(body)
        if refused_unread:
            self._drain()

    def _drain(self) -> None:
        left = min(self._unread, _DRAINED_BYTES)
        while left > 0:
            chunk = self.rfile.read(min(left, 1 << 16))
            if not chunk:
                return
            left -= len(chunk)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s %s", self.address_string(), format % args)


def _json(answer: dict[str, Any]) -> bytes:
    """Raises: FloatingPointError for log-probs that no JSON has."""
    try:
        return json.dumps(answer, allow_nan=False).encode()
    except ValueError:
        raise FloatingPointError(
            "the completions' log-probs must be finite, got NaN or infinity: the weights that the server was sent are not finite, or "
            "too large for its dtype. Look for a run that diverged, or start the server with a wider --dtype."
        ) from None
