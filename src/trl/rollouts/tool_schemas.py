"""Functions as tools: what a model is told of them, and whether the arguments that it gives fit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

_ADVICE = (
    "Write a function with a type hint for every argument and a docstring that describes what it does and, under 'Args:', "
    "each argument."
)


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, under the name in its `schema`."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        """By which it is called."""
        return self.schema["function"]["name"]

    @property
    def is_async(self) -> bool:
        """Whether calling it gives something to be awaited."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (of an object whose class defines it)
        )

    def argument_error(self, arguments: Any) -> str | None:
        """What is wrong with the arguments of a call, in words; None where they fit the signature and its type hints."""
        if not isinstance(arguments, dict):
            return f"arguments must be an object with one entry per argument, got {_kind(arguments)}"
        wanted = self.schema["function"]["parameters"]
        known = wanted.get("properties", {})
        for name in wanted.get("required", ()):
            if name not in arguments:
                return f"argument {name!r} is missing"
        for name, value in arguments.items():
            if name not in known:
                return f"unknown argument {name!r}, expected {', '.join(known) or 'none'}"
            if error := mismatch(value, known[name]):
                return f"argument {name!r} {error}"
        return None


def tools_of(functions: Sequence[Callable[..., Any]] | Any) -> dict[str, Tool]:
    """Tools by name.

    Raises: TypeError for what cannot be called, ValueError for a function without type hints or a docstring, and for a name
    that is taken.
    """
    if not isinstance(functions, (list, tuple)):
        raise TypeError(
            f"tools must be a list of functions, got {type(functions).__name__}. Put it in a list."
        )
    found: dict[str, Tool] = {}
    for index, function in enumerate(functions):
        tool = _tool(index, function)
        if tool.name in found:
            raise ValueError(
                f"tools[{index}] is called {tool.name!r}, which another tool is too, expected different names. Rename one of them."
            )
        found[tool.name] = tool
    return found


def _tool(index: int, function: Any) -> Tool:
    if not callable(function) or inspect.isclass(function):
        given = function.__name__ if inspect.isclass(function) else type(function).__name__
        raise TypeError(f"tools[{index}] is a {given}, expected a function, sync or async. {_ADVICE}")
    try:
        schema = get_json_schema(function)
        _check_named(function)
    except Exception as error:  # the parts of a signature that cannot be read raise all kinds of errors
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"tools[{index}] ({name}) cannot be described to the model: {type(error).__name__}: {error}. {_ADVICE}"
        ) from error
    return Tool(function, schema)


def _check_named(function: Any) -> None:
    """Raise TypeError for a parameter that cannot be given by name, as models give them."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"argument {name!r} cannot be given by name (it stands before '/')")


_PYTHON: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Why a JSON value is not of a JSON schema (types, enum, items, properties' values, anyOf), in words; None where it is.

    >>> mismatch("3", {"type": "integer"})
    "must be integer, got string '3'"
    """
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        wrong = [mismatch(value, each) for each in schema["anyOf"]]
        return None if None in wrong else f"fits none of its types, got {_kind(value)}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"must be {' or '.join(kinds)}, got {_kind(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {schema['enum']}, got {value!r}"
    return _part_mismatch(value, schema)


def _part_mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """The same of the parts of a list or an object."""
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(value, list):
        fixed = schema.get("prefixItems")
        if fixed is not None and len(fixed) != len(value):
            return f"must have {len(fixed)} items, got {len(value)}"
        kinds = fixed or [schema.get("items", {})] * len(value)
        parts = [(f"item {n}", each, kind) for n, (each, kind) in enumerate(zip(value, kinds, strict=True))]
    elif isinstance(value, dict):
        parts = [(f"entry {n!r}", each, schema.get("additionalProperties", {})) for n, each in value.items()]
    for place, each, kind in parts:
        if isinstance(kind, Mapping) and (error := mismatch(each, kind)):
            return f"{place} {error}"
    return None


def _is(value: Any, kind: str) -> bool:
    known = _PYTHON.get(kind)
    if known is None:  # images, audio: nothing that JSON has
        return True
    return isinstance(value, known) and (kind == "boolean" or not isinstance(value, bool))


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else f"{names.get(type(value), type(value).__name__)} {value!r}"
