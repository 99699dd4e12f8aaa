"""Functions as tools: their JSON schemas, checks of arguments, and calls with deadlines."""

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from transformers.utils import get_json_schema

from trl.data.rendering import Fields, Json
from trl.reporting.deadlines import AsyncCalls, DeadlinePassed, Pending, ThreadedCalls

Failure = Literal["malformed", "unknown", "arguments", "raised", "deadline"]
FAILURES: tuple[Failure, ...] = ("malformed", "unknown", "arguments", "raised", "deadline")
MOST_LEFT_BEHIND = 32  # threads of calls that missed their deadline
_ADVICE = "Write a function with type hints and a docstring that describes each argument under 'Args:'."


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, under the name in its `schema`."""

    function: Callable[..., object]
    schema: Json

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def argument_error(self, arguments: object) -> str | None:
        """What is wrong with the arguments of a call; None if they fit the signature and its type hints."""
        if not isinstance(arguments, dict):
            return f"arguments must be an object with one entry per argument, got {_kind(arguments)}"
        parameters = self.schema["function"]["parameters"]
        known = parameters.get("properties", {})
        for name in parameters.get("required", ()):
            if name not in arguments:
                return f"argument {name!r} is missing"
        for name, value in arguments.items():
            if name not in known:
                return f"unknown argument {name!r}, expected {', '.join(known) or 'none'}"
            if error := mismatch(value, known[name]):
                return f"argument {name!r} {error}"
        return None


def tools_of(functions: object) -> dict[str, Tool]:
    """Tools by name. Raises: TypeError for no function, ValueError for equal names, no type hints or no docstring."""
    if not isinstance(functions, (list, tuple)):
        raise TypeError(f"tools must be a list of functions, got {type(functions).__name__}.")
    by_name: dict[str, Tool] = {}
    for index, function in enumerate(functions):
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function) or inspect.isclass(function):
            raise TypeError(f"tools[{index}] is a {name}, expected a function, sync or async. {_ADVICE}")
        try:
            tool = Tool(function, get_json_schema(function))
            parameters = inspect.signature(function).parameters.values()
            if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
                raise TypeError("models give arguments by name, and '/' forbids it")
        except Exception as error:  # signatures that cannot be read raise all kinds of errors
            name = getattr(function, "__qualname__", name)
            raise ValueError(f"tool {name} has no schema: {str(error).rstrip('.!')}. {_ADVICE}") from error
        if tool.name in by_name:
            raise ValueError(f"tools[{index}] is called {tool.name!r}, as another tool. Rename one of them.")
        by_name[tool.name] = tool
    return by_name


_PYTHON: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def mismatch(value: object, schema: Fields) -> str | None:
    """Why a JSON value does not fit a JSON schema (types, enum, items, properties' values, anyOf); None if it does.

    >>> mismatch("3", {"type": "integer"})
    "must be integer, got string '3'"
    """
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        wrong = [mismatch(value, item) for item in schema["anyOf"]]
        return None if None in wrong else f"fits none of its types, got {_kind(value)}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = (isinstance(value, _PYTHON.get(kind, object)) for kind in kinds)  # images, audio: not in JSON
    if kinds and not ("boolean" in kinds if isinstance(value, bool) else any(fits)):
        return f"must be {' or '.join(kinds)}, got {_kind(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {schema['enum']}, got {value!r}"
    parts: list[tuple[str, object, object]] = []
    if isinstance(value, list):
        fixed = schema.get("prefixItems")
        if fixed is not None and len(fixed) != len(value):
            return f"must have {len(fixed)} items, got {len(value)}"
        inner = fixed or [schema.get("items", {})] * len(value)
        parts = [(f"item {n}", item, kind) for n, (item, kind) in enumerate(zip(value, inner, strict=True))]
    elif isinstance(value, dict):
        parts = [(f"entry {n!r}", item, schema.get("additionalProperties", {})) for n, item in value.items()]
    for place, item, kind in parts:
        if isinstance(kind, Mapping) and (error := mismatch(item, kind)):
            return f"{place} {error}"
    return None


def _kind(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else f"{names.get(type(value), type(value).__name__)} {value!r}"


class ToolCall(NamedTuple):
    """A call of a model; `error` says why it cannot be read."""

    name: str
    arguments: Any = None
    error: str | None = None


class Reply(NamedTuple):
    """The answer to a call: the tool's result as text, or an error and its kind."""

    text: str
    failure: Failure | None = None

    def message(self, call: ToolCall) -> Json:
        return {"role": "tool", **({"name": call.name} if call.name else {}), "content": self.text}


class ToolRunner:
    """Runs calls at once: functions on threads, then coroutines on one event loop, each with `deadline` seconds."""

    def __init__(self, tools: Mapping[str, Tool], *, deadline: float | None) -> None:
        self.tools, self.deadline = tools, deadline
        self._loop = AsyncCalls("tool")
        self._threads = ThreadedCalls(most_left_behind=MOST_LEFT_BEHIND)

    def run(self, calls: Sequence[ToolCall]) -> list[Reply]:
        """The reply to each call, in order. Raises: RuntimeError if too many earlier calls are still running."""
        replies = [refusal(call, self.tools) for call in calls]
        ready = [call for call, reply in zip(calls, replies, strict=True) if reply is None]
        started = [(f"tool-{call.name}", partial(self._called, call)) for call in ready]
        outcomes = self._threads.run(started, self.deadline)
        for place, outcome in enumerate(outcomes):
            if inspect.isawaitable(outcome):  # a coroutine function only makes its coroutine on the thread
                outcomes[place] = self._loop.submit(outcome, self.deadline)
        ended = (self._loop.outcome(outcome) if isinstance(outcome, Pending) else outcome for outcome in outcomes)
        return [reply_of(next(ended)) if reply is None else reply for reply in replies]

    def _called(self, call: ToolCall) -> object:
        return self.tools[call.name].function(**copy.deepcopy(call.arguments))


def refusal(call: ToolCall, tools: Mapping[str, Tool]) -> Reply | None:
    """The reply to an invalid call; None for a valid one."""
    if call.error is not None:
        return Reply(f"Error: {call.error}", "malformed")
    if call.name not in tools:
        known = ", ".join(tools)
        return Reply(f"Error: unknown tool {call.name!r}, expected one of {known}.", "unknown")
    if error := tools[call.name].argument_error(call.arguments):
        return Reply(f"Error: {call.name}: {error}.", "arguments")
    return None


def reply_of(outcome: object) -> Reply:
    if isinstance(outcome, DeadlinePassed):
        return Reply("Error: the tool did not answer in time.", "deadline")
    is_error = isinstance(outcome, BaseException)
    try:
        text = f"Error: {type(outcome).__name__}: {outcome}" if is_error else as_text(outcome)
        text = text.encode(errors="replace").decode()  # no tokenizer takes halves of surrogate pairs
        return Reply(text, "raised" if is_error else None)
    except Exception as error:  # of a result, or an exception, that cannot be written
        return Reply(f"Error: {type(error).__name__} where the tool's answer is written.", "raised")


def as_text(answer: object) -> str:
    """A tool's result as text: strings as they are, other values as JSON, else as `str` formats them.

    >>> as_text({"sum": 3}), as_text(None), as_text({1, 2})
    ('{"sum": 3}', 'null', '{1, 2}')
    """
    if isinstance(answer, str):
        return answer
    try:
        return json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(answer)
