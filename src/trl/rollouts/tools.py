"""Tools that a model calls by text: `<request><Name>query<call>answer<response>`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REQUEST, CALL, RESPONSE, SUBMIT = "<request>", "<call>", "<response>", "<submit>"
_NAME = re.compile(r"\s*<([^<>]+)>")


def named_tools(tools: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Callable[[str], Any]]:
    """Tools by the names that a model calls them with; those of a list are named by their function or class.

    Raises: TypeError for one that cannot be called, ValueError for a name that cannot be written or is taken.
    """
    pairs = tools.items() if isinstance(tools, Mapping) else [(_own_name(tool), tool) for tool in tools or ()]
    found: dict[str, Callable[[str], Any]] = {}
    for name, tool in pairs:
        if not callable(tool):
            raise TypeError(f"tools[{name!r}] must be callable with a query, got {type(tool).__name__}.")
        if not _NAME.fullmatch(f"<{name}>") or name in found:
            raise ValueError(
                f"tools must have different names without < and >, got {name!r}. Give a dict "
                "of names and tools."
            )
        found[name] = tool
    return found


def _own_name(tool: Any) -> str:
    while isinstance(tool, functools.partial):
        tool = tool.func
    return getattr(tool, "__name__", type(tool).__name__)


def parse_call(text: str) -> tuple[str, str] | None:
    """Tool and query of the last request that a text calls; None where it has none or names no tool.

    >>> parse_call("Let me see. <request><Calculator>13-3<call>")
    ('Calculator', '13-3')
    """
    before, called, _ = text.rpartition(CALL)
    _, requested, request = before.rpartition(REQUEST)
    name = _NAME.match(request)
    return (name[1], request[name.end() :]) if called and requested and name else None


def answer(tools: Mapping[str, Callable[[str], Any]], text: str) -> str:
    """What the tool that a text calls answers; an error of the call or of the tool is the answer's text."""
    call = parse_call(text)
    if call is None or call[0] not in tools:
        wrong = "The request names no tool." if call is None else f"Unknown tool {call[0]}."
        return f"{wrong} Tools: {', '.join(tools) or 'none'}."
    try:
        return str(tools[call[0]](call[1]))
    except Exception as error:  # a tool may raise anything; the model is told
        return f"{type(error).__name__}: {error}"
