"""Bad requests for an endpoint: malformed JSON, wrong types, huge and tiny bodies, half-open connections, clients that leave."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections import Counter
from typing import Any

FIELDS = (
    "model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stream", "stream_options", "tools", "tool_choice", "logprobs", "top_logprobs", "echo", "prompt_logprobs", "user",
    "response_format", "logit_bias", "colour",
)  # fmt: skip
TEXTS = ("", "hi", "\ud800", "\x00", "é" * 50, "<|im_end|>", "{{ 1/0 }}", "{% for x in y %}", "a\n" * 200)
NUMBERS = (0, 1, -1, 2, 7, 10**30, -(10**30), 2**63, 0.5, 1e308, float("nan"), float("inf"), True)
MOST_OPEN = 64


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(4 if depth > 3 else 6)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice((None, True, False, "auto", "none", 3))
    several = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = (
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "arguments",
        "tool_calls",
        "id",
        "parameters",
    )
    return several if kind == 4 else {rng.choice(names): one for one in several}


def body(rng: random.Random, chat: bool) -> dict[str, Any]:
    """A request, with some of its fields replaced."""
    user = {"role": "user", "content": rng.choice(TEXTS)}
    found: dict[str, Any] = {"max_tokens": rng.randrange(1, 4)}
    found |= {"messages": [user]} if chat else {"prompt": rng.choice(("hi", [5, 6], [[5], [6, 7]]))}
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        found[rng.choice(FIELDS)] = value(rng)
    if chat and rng.random() < 0.3:
        role = rng.choice(("system", "assistant", "tool", "user", "", "x"))
        found["messages"] = [user, {"role": role, "content": value(rng), "tool_calls": value(rng)}, user]
    return found


def request(rng: random.Random, key: str) -> bytes:
    """The bytes of a request, which may be broken anywhere."""
    chat = rng.random() < 0.6
    content = json.dumps(body(rng, chat)).encode()
    kind = rng.randrange(12)
    if kind == 0:  # malformed JSON
        place = rng.randrange(len(content))
        content = content[:place] + bytes([rng.randrange(256)]) * rng.randrange(3) + content[place + 1 :]
    elif kind == 1:
        content = rng.choice((b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 50_000, b"{}"))
    elif kind == 2:
        content = json.dumps({"prompt": "hi " * rng.choice((10_000, 300_000))}).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    if kind == 3:
        path = rng.choice(("/v1/models", "/health", "/", "/v1/chat", "/v1/../x", "/%00", "/v1/completions/"))
    method = rng.choice(("GET", "PUT", "DELETE", "HEAD", "BREW")) if kind == 4 else "POST"
    token = rng.choice(("", "x", key + "x", "\u00e9")) if kind == 5 else key
    length = rng.choice((-1, len(content) + 100, "x", 10**12)) if kind == 6 else len(content)
    more = "".join(f"X-{number}: {number}\r\n" for number in range(150)) if kind == 7 else ""
    if kind == 8:
        return rng.randbytes(rng.randrange(1, 300))
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {length}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n".encode() + content


def fuzz(port: int, key: str, count: int, *, seed: int = 0, timeout: float = 30.0) -> tuple[Counter[str], list[Any]]:
    """How often each status came, and the requests that were answered by an error of the server."""
    rng, found, faults = random.Random(seed), Counter[str](), []
    left_open: list[socket.socket] = []
    for _ in range(count):
        sent, fate = request(rng, key), rng.random()
        connection = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        if fate < 0.15:  # a part only; the connection stays open, or is closed at once
            sent = sent[: rng.randrange(len(sent))]
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        if fate < 0.2:
            found["left"] += 1
            if fate < 0.1:
                left_open.append(connection)
                if len(left_open) > MOST_OPEN:
                    left_open.pop(0).close()
            else:
                connection.close()
            continue
        head, _, content = sent.partition(b"\r\n\r\n")
        if b"Content-Length: %d\r\n" % len(content) not in head:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)  # or the server waits for the rest
        answer = _read(connection)
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"
        found[status] += 1
        if status.startswith("5"):
            faults.append((sent[:2000], answer[:2000]))
    for connection in left_open:
        connection.close()
    return found, faults


def _read(connection: socket.socket) -> bytes:
    """An answer up to its end; nothing if the connection broke."""
    parts = []
    with connection, contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
