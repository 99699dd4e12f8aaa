"""JSON over HTTP to a server of our own, with errors that say what to do."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

from trl.generation.addresses import reachable
from trl.generation.server_token import VARIABLE, client_token

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
