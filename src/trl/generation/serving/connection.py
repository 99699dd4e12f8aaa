"""Connections to `trl vllm-serve`: addresses, the shared token, and JSON over HTTP."""

import http.client
import ipaddress
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trl.options.secrets import redacted

logger = logging.getLogger(__name__)

VARIABLE = "TRL_VLLM_SERVER_TOKEN"


class Told(BaseException):
    """The process was told to end. No `Exception`, so that vLLM passes it on."""


@contextmanager
def until_told() -> Iterator[None]:
    """Leave the block at SIGTERM or Ctrl-C; further signals change nothing while it ends."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for name in handlers:
            signal.signal(name, signal.SIG_IGN)
        raise Told(signal.Signals(number).name)

    handlers = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    for name in handlers:
        signal.signal(name, end)
    try:
        yield
    except Told as told:
        logger.info("Ended by %s.", told)
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)


@contextmanager
def needing_address(host: str, port: int) -> Iterator[None]:
    """Raises: ValueError if nothing can listen on the address in the block."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"Nothing can listen on {host}:{port}: {reason}. Choose another --port.") from error


def token_file(port: int) -> Path:
    """The file with the token of the server on `port` of this machine, for clients of the same user."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "trl" / f"vllm-serve-{port}.token"


def client_token(host: str, port: int) -> str | None:
    """The token for the server at `host:port`: that of the environment, or of the file of a server on this machine."""
    file = token_file(port)
    if (token := _from_environment()) is not None or not is_loopback(reachable(host)) or not file.is_file():
        return token
    return file.read_text(encoding="utf-8").strip()


def check_token_source(host: str) -> None:
    """Raise ValueError for a server that other machines reach if the environment has no token."""
    if not is_loopback(host) and _from_environment() is None:
        raise ValueError(f"--host {host} needs a secret in {VARIABLE}. Or use --host 127.0.0.1.")


@contextmanager
def server_token(host: str, port: int) -> Iterator[str]:
    """The token of a server on `host:port`: that of the environment, or a new one, in a private file inside the block.

    Raises: ValueError as `check_token_source`, and for a file that cannot be written.
    """
    check_token_source(host)
    if (token := _from_environment()) is not None:
        yield token
        return
    token, file = secrets.token_urlsafe(32), token_file(port)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = file.with_name(f"{file.name}.{os.getpid()}")
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(token)
        aside.replace(file)
    except OSError as error:
        raise ValueError(f"The token cannot be written to {file}: {error}. Set {VARIABLE}.") from error
    try:
        yield token
    finally:
        if file.is_file() and file.read_text(encoding="utf-8") == token:  # it may be a later server's
            file.unlink()


def _from_environment(variable: str = VARIABLE) -> str | None:
    """The token of the environment without line end; None if it is empty."""
    return os.environ.get(variable, "").strip() or None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """The address to connect to for a server on `host`; "all addresses" is this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """The family and address of `host:port`; IPv4 if there are both. Raises: OSError for an unknown name."""
    addresses = [(entry[0], entry[4]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    return next((address for address in addresses if address[0] == socket.AF_INET), addresses[0])


_MOST_CHARACTERS = 2000  # of an error's text
Json = dict[str, Any]
Connected = Callable[[socket.socket], None] | None


class ServerLost(ConnectionError):
    """The server cannot be reached, or was restarted."""


class HangUp:
    """Ends a request from another thread, by its socket: the server gives it up."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._wanted = False

    def connected(self, sock: socket.socket) -> None:
        self._socket = sock
        if self._wanted:
            self()

    def __call__(self) -> None:
        self._wanted = True
        if self._socket is not None:
            with suppress(OSError):  # it has ended
                self._socket.shutdown(socket.SHUT_RDWR)


class ServerConnection:
    """Sends requests to a server at `base_url`, each over a new connection.

    `token=None` is looked up for each request, because a restarted server has another one: for `trl vllm-serve` as
    `client_token` says, for another `kind` in the environment's `variable`. Raises: ValueError for an invalid address.
    """

    def __init__(
        self, base_url: str, token: str | None, *, kind: str = "vLLM server", variable: str = VARIABLE
    ) -> None:
        try:
            parts = urlsplit(base_url)
            port, host = parts.port, parts.hostname
        except ValueError:  # whose text may show a password
            parts = port = host = None
        if parts is None or parts.scheme not in ("http", "https") or not host or parts.username is not None:
            example = "http://localhost:8000 (no user)"
            raise ValueError(f"base_url={redacted(base_url)!r} is no address of a server such as {example}.")
        self.kind, self.variable = kind, variable
        self.base_url, self.token = base_url.rstrip("/"), token
        self.host = reachable(host)
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._path, self._secure = parts.path.rstrip("/"), parts.scheme == "https"

    def get(self, path: str, *, timeout_s: float | None = 60.0) -> Json:
        """The server's answer to a GET request; raises as `post`."""
        return self._request("GET", path, None, timeout_s)

    def post(
        self, path: str, body: Json | None = None, *, timeout_s: float | None = None, connected: Connected = None
    ) -> Json:
        """The server's answer to a POST request; `timeout_s=None` waits while it runs. `connected` gets the socket.

        Raises: ServerLost if it cannot be reached, is shutting down or has no weight channel, PermissionError for a
        wrong token, ValueError for an invalid request, RuntimeError for an error there.
        """
        return self._request("POST", path, json.dumps(body or {}).encode(), timeout_s, connected)

    def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None, connected: Connected = None
    ) -> Json:
        is_ours = self.variable == VARIABLE
        configured = client_token(self.host, self.port) if is_ours else _from_environment(self.variable)
        token = self.token or configured or ""
        if not (token.isascii() and token.isprintable()):  # `http.client` would print it
            raise ValueError(f"{self.variable} of the {self.kind} must be printable ASCII on one line.")
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout_s)
        try:
            connection.connect()
            _notice_a_dead_peer(connection.sock)
            if connected is not None:
                connected(connection.sock)
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            fault = f"The {self.kind} at {self.base_url} does not answer {path}: {reason}"
            raise ServerLost(f"{fault}. Check that it runs, and its log.") from error
        finally:
            connection.close()
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if status == 200 and isinstance(content, dict):
            return content
        message = str(content.get("error", text) if isinstance(content, dict) else text)[:_MOST_CHARACTERS]
        if status == 401:
            source = "that was given" if token else "(none was found)"
            same = "; without it, both must run on one machine as the same user." if is_ours else "."
            message = f"refused the token {source}. Set {self.variable} to the same text here and for the server{same}"
        elif status in (200, 404, 405):
            expected = "a server started with `trl vllm-serve`" if is_ours else "an OpenAI-style server"
            message = f"answers {message!r}, expected {expected}. Check host and port."
        text = f"The {self.kind} at {self.base_url}{path} failed ({status}): {message}"
        raise _ERRORS.get(status, RuntimeError)(text)


_ERRORS: dict[int, type[Exception]] = {
    400: ValueError, 401: PermissionError, 409: ServerLost, 413: ValueError, 422: ValueError,
    429: ServerLost, 502: ServerLost, 503: ServerLost, 504: ServerLost,
}  # fmt: skip


def _notice_a_dead_peer(sock: socket.socket) -> None:
    """Let the system probe a silent peer about every minute, because completions may take long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
