"""Connections to `trl vllm-serve`: addresses, the token that server and clients share, and JSON over HTTP."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

VARIABLE = "TRL_VLLM_SERVER_TOKEN"


def token_file(port: int) -> Path:
    """Where the server on `port` of this machine leaves its token, for clients of the same user."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "trl" / f"vllm-serve-{port}.token"


def client_token(host: str, port: int) -> str | None:
    """The token for the server at `host:port`; None if there is none to be found.

    It is that of the environment, or for a server of this machine ("0.0.0.0" means it too) that of its file.
    """
    given = _from_environment()
    if given is not None:
        return given
    file = token_file(port)
    if not is_loopback(reachable(host)) or not file.is_file():
        return None
    return file.read_text(encoding="utf-8").strip()


def check_token_source(host: str) -> None:
    """Raise ValueError if clients of a server on `host` could have no token."""
    if not is_loopback(host) and _from_environment() is None:
        raise ValueError(
            f"--host {host} lets other machines in, and they need a token. Set {VARIABLE} to the same secret here and where "
            "the training runs, or use --host 127.0.0.1 for this machine only."
        )


@contextmanager
def server_token(host: str, port: int) -> Iterator[str]:
    """The token of a server on `host:port`: that of the environment, or a new one that lies in its file meanwhile.

    Raises: ValueError for a server that other machines reach while the environment has no token.
    """
    check_token_source(host)
    given = _from_environment()
    if given is not None:
        yield given
        return
    token, file = secrets.token_urlsafe(32), token_file(port)
    _write_private(file, token)
    try:
        yield token
    finally:
        if file.is_file() and file.read_text(encoding="utf-8") == token:  # not that of a later server
            file.unlink()


def _from_environment() -> str | None:
    """The token of the environment, without the line end that files of secrets have; None where it is empty."""
    return os.environ.get(VARIABLE, "").strip() or None


def _write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    aside.replace(file)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """The address to connect to for a server on `host`: the addresses that mean "all" mean this machine here."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The family and the address that `host:port` stands for, of version 4 where it has one (`localhost` often has both).

    Raises: OSError for a name that nobody knows.
    """
    found = [(each[0], each[4]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    return next((each for each in found if each[0] == socket.AF_INET), found[0])


_WORDS_KEPT = 2000  # of an error's text


class ServerLost(ConnectionError):
    """The server cannot be reached, or is not the one any more that was connected to."""


class ServerConnection:
    """Asks a server at `base_url`, one connection for each question. A `token` of None is looked for each time: a server that is
    started anew has another.

    Raises: ValueError for an address that is none.
    """

    def __init__(self, base_url: str, token: str | None) -> None:
        try:
            parts = urlsplit(base_url)
            port, is_one = parts.port, parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # brackets that are open, a port that is no number
            is_one = False
        if not is_one:
            raise ValueError(
                f"base_url={base_url!r} is no address of a server, expected one such as http://localhost:8000. Give the scheme, the "
                "host and the port."
            )
        if parts.username is not None:  # and is not shown
            raise ValueError(
                f"base_url has a user's name or password in it, expected an address alone. The server's secret comes from {VARIABLE}."
            )
        self.base_url, self.token = base_url.rstrip("/"), token
        self.host = reachable(parts.hostname or "")
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._path, self._secure = parts.path.rstrip("/"), parts.scheme == "https"

    def get(self, path: str, *, timeout_s: float | None = 60.0) -> dict[str, Any]:
        """What the server answers to a question without a body."""
        return self._ask("GET", path, None, timeout_s)

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """What the server answers to a body; `timeout_s` (seconds) None waits for as long as it is alive.

        Raises: ServerLost where it cannot be reached or is about to end, PermissionError for a wrong token, ValueError for what it does not take,
        RuntimeError for what fails there.
        """
        return self._ask("POST", path, json.dumps(body or {}).encode(), timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        token = self.token or client_token(self.host, self.port)
        if token:
            headers["Authorization"] = _bearer(token)
        connection = self._open(timeout_s)
        try:
            connection.connect()
            _notice_a_dead_peer(connection.sock)
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ServerLost(
                f"The vLLM server at {self.base_url} does not answer {path}: {reason}. See whether it still runs, and its log."
            ) from error
        finally:
            connection.close()
        if status == 401:
            given = "that was given" if token else "(none was found)"
            raise PermissionError(
                f"The vLLM server at {self.base_url} did not take the token {given}, expected its own. Set {VARIABLE} to the same text "
                "for the server and for this program; without it, both must run as one user of one machine."
            )
        return self._read(path, status, text)

    def _open(self, timeout_s: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_s)

    def _read(self, path: str, status: int, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if status == 200 and isinstance(found, dict):
            return found
        said = found.get("error", text) if isinstance(found, dict) else text
        where, said = f"The vLLM server at {self.base_url}{path}", str(said)[:_WORDS_KEPT]
        if status == 409:
            raise ServerLost(f"{where} has no weight channel to this program: {said}")
        if status == 503:
            raise ServerLost(f"{where} cannot answer: {said}")
        if status in (400, 413):
            raise ValueError(f"{where} does not take what it was sent: {said}")
        if status in (200, 404, 405):
            raise RuntimeError(
                f"{where} answers {status} {said!r}, expected a server started with `trl vllm-serve`. Check host and port."
            )
        raise RuntimeError(f"{where} failed ({status}): {said}")


def _bearer(token: str) -> str:
    """The header of a token, which `http.client` would show in its error where it is none."""
    if not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the token of the vLLM server ({VARIABLE}) has characters that no header can have, expected ASCII on one line. Choose "
            "another one, for the server too."
        )
    return f"Bearer {token}"


def _notice_a_dead_peer(sock: socket.socket) -> None:
    """Have the system ask, about every minute, whether a silent machine is still there: completions may take long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
