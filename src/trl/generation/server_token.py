"""The secret that a vLLM server and its clients share: from the environment, or from a file on one machine."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trl.generation.addresses import is_loopback, reachable

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
