"""Calls of tools: at once, with deadlines, and what a model reads of those that fail."""

import asyncio
import functools
import threading
import time

import pytest

from tests.agents.tool_words import TOOLS
from trl.agents import tools
from trl.agents.tools import Reply, ToolCall, ToolRunner, tools_of

RELEASE = threading.Event()


def nap(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"slept {seconds}"


async def doze(seconds: float) -> str:
    """Sleeps too.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"dozed {seconds}"


def hang() -> str:
    """Waits for ever."""
    RELEASE.wait()
    return ""


def leave() -> str:
    """Ends the program, or so it thinks."""
    raise SystemExit(3)


def wrapped(seconds: float) -> str:
    """A plain function around an async one.

    Args:
        seconds: How long.
    """
    return doze(seconds)  # type: ignore[return-value]


def meddle(items: list) -> dict:
    """Changes what it is given.

    Args:
        items: A list.
    """
    items.append(1)
    return {"items": items, "odd": {1, 2} if len(items) > 3 else None}


class Unsayable(Exception):
    def __str__(self):
        raise ValueError("no words")


def stammer(how: str) -> object:
    """Answers what cannot be written.

    Args:
        how: In which way.
    """
    if how == "raises":
        raise Unsayable
    return chr(0xD800) if how == "half" else Unsayable()


async def by_place(*arguments):
    return await doze(*arguments)


by_place = functools.wraps(doze)(by_place)  # as a careless decorator makes it: it takes no names


def runner(*tools, deadline=5.0):
    return ToolRunner(tools_of(list(tools)), deadline=deadline)


def test_all_calls_run_at_once_and_answer_in_order():
    calls = [ToolCall(name, {"seconds": 0.3}) for name in ("nap", "doze", "wrapped") * 20]
    started = time.monotonic()
    found = runner(nap, doze, wrapped).run(calls)
    assert time.monotonic() - started < 60 * 0.3 / 2
    expected = {"nap": "slept 0.3", "doze": "dozed 0.3", "wrapped": "dozed 0.3"}
    assert found == [Reply(expected[call.name]) for call in calls]


def test_what_fails_is_told_and_named():
    found = runner(*TOOLS, leave).run(
        [
            ToolCall("fail", {}),
            ToolCall("leave", {}),
            ToolCall("fly", {}),
            ToolCall("add", {"a": 1}),
            ToolCall("", error="the call is not JSON."),
            ToolCall("add", {"a": 1, "b": 2}),
        ]
    )
    assert [reply.failure for reply in found] == [
        "raised",
        "raised",
        "unknown",
        "arguments",
        "malformed",
        None,
    ]
    assert found[0].text == "Error: OSError: no such luck" and found[1].text == "Error: SystemExit: 3"
    assert found[2].text == "Error: unknown tool 'fly', expected one of add, echo, fail, leave."
    assert found[3].text == "Error: add: argument 'b' is missing." and found[4].text == "Error: the call is not JSON."
    assert found[5].text == "3"


def test_an_async_function_may_raise_when_it_is_called():
    (found,) = runner(by_place).run([ToolCall("doze", {"seconds": 0.0})])
    assert found.failure == "raised" and found.text.startswith("Error: TypeError: doze() got an unexpected")


def test_a_tool_that_hangs_is_given_up(monkeypatch):
    RELEASE.clear()
    monkeypatch.setattr(tools, "MOST_LEFT_BEHIND", 3)
    some = runner(hang, doze, nap, deadline=0.4)
    started = time.monotonic()
    calls = [
        ToolCall("hang", {}),
        ToolCall("doze", {"seconds": 30.0}),
        ToolCall("nap", {"seconds": 0.0}),
        ToolCall("hang", {}),
    ]
    found = some.run(calls)
    assert time.monotonic() - started < 20
    assert [reply.failure for reply in found] == ["deadline", "deadline", None, "deadline"]
    assert found[0].text == "Error: the tool did not answer in time."
    some.run(calls[:1])
    with pytest.raises(RuntimeError, match=r"3 earlier calls .* still run \(the last is 'tool-hang-"):
        some.run(calls[:1])
    RELEASE.set()
