"""Agents over plain HTTP, in a process without torch: reads its settings as JSON from stdin, and prints what it measured."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from typing import Any


async def post(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, key: str, body: bytes
) -> tuple[int, bytes]:
    """The status and body of an answer; the connection stays open."""
    reader, writer = connection
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = int((await reader.readline()).split()[1])
    length = 0
    while (line := await reader.readline()) != b"\r\n":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return status, await reader.readexactly(length)


async def session(settings: Mapping[str, Any], key: str, number: int) -> float:
    """One agent: it asks, waits for its tool, and asks again. Returns its seconds."""
    delays = random.Random(number)
    messages = [
        {"role": "system", "content": "You solve problems step by step."},
        {"role": "user", "content": settings["questions"][number % len(settings["questions"])]},
    ]
    started = time.perf_counter()
    connection = await asyncio.open_connection("127.0.0.1", settings["port"])
    for _ in range(settings["turns"]):
        path, shown = "/v1/chat/completions", {"messages": messages}
        if settings["is_text"]:
            path, shown = "/v1/completions", {"prompt": messages[-1]["content"]}
        body = json.dumps({**shown, "max_tokens": settings["tokens"]}).encode()
        status, answer = await post(connection, path, key, body)
        if status != 200:
            raise ValueError(f"{status}: {answer[:300]!r}")
        choice = json.loads(answer)["choices"][0]
        messages.append(choice.get("message") or {"role": "assistant", "content": choice["text"]})
        messages.append({"role": "user", "content": settings["reply"]})
        if settings["delay"]:
            await asyncio.sleep(delays.uniform(*settings["delay"]))
    connection[1].close()
    return time.perf_counter() - started


async def play(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sessions side by side, `at_once` of them; with one key all are one session."""
    started, gate = time.perf_counter(), asyncio.Semaphore(settings["at_once"])
    keys = settings["keys"]

    async def gated(number: int) -> float:
        async with gate:
            return await session(settings, keys[number % len(keys)], number)

    seconds = await asyncio.gather(*map(gated, settings["numbers"]))
    return {"seconds": time.perf_counter() - started, "each": seconds}


if __name__ == "__main__":
    given = json.loads(sys.stdin.read())
    if given["core"] is not None:
        os.sched_setaffinity(0, {given["core"]})
    print(json.dumps(asyncio.run(play(given))))
