"""Functions as tools: their schemas, what cannot be one, and which arguments fit."""

import functools
from typing import Literal

import pytest

from tests.agents.tool_words import add, echo, fail
from trl.agents.tools import mismatch, tools_of


def no_docstring(a: int) -> int:
    return a


def no_hints(a, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def undescribed(a: int) -> int:
    """Says a number."""
    return a


def pick(kind: Literal["up", "down"], counts: list[int], ratio: float | None = None) -> str:
    """Picks.

    Args:
        kind: Where.
        counts: How many.
        ratio: How much.
    """
    return kind


async def by_place(a: int, /) -> int:
    """Takes a number.

    Args:
        a: One.
    """
    return a


class Box:
    """A thing with a tool."""

    def hold(self, word: str) -> str:
        """Keeps a word.

        Args:
            word: The word.
        """
        return word


def test_a_schema_says_names_types_and_descriptions():
    tools = tools_of([add, echo, fail, Box().hold])
    assert list(tools) == ["add", "echo", "fail", "hold"]
    function = tools["add"].schema["function"]
    assert function["description"] == "Adds two numbers."
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "The one."}
    assert function["parameters"]["required"] == ["a", "b"]
    assert list(tools["hold"].schema["function"]["parameters"]["properties"]) == ["word"]


@pytest.mark.parametrize(
    ("tools", "error", "words"),
    [
        (add, TypeError, "must be a list of functions, got function"),
        ([3], TypeError, r"tools\[0\] is a int"),
        ([add, Box], TypeError, r"tools\[1\] is a Box"),
        ([no_docstring], ValueError, r"tool no_docstring has no schema.*no docstring\. Write a function"),
        ([no_hints], ValueError, r"Argument a is missing a type hint"),
        ([undescribed], ValueError, "no description for the argument 'a'"),
        ([lambda: 1], ValueError, "no docstring"),
        ([by_place], ValueError, "models give arguments by name"),
        ([functools.partial(add, b=1)], ValueError, "has no schema"),
        ([add, echo, add], ValueError, r"tools\[2\] is called 'add'"),
    ],
)
def test_what_cannot_be_a_tool(tools, error, words):
    with pytest.raises(error, match=words):
        tools_of(tools)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "up", "counts": [1, 2]}, None),
        ({"kind": "up", "counts": [], "ratio": 2}, None),
        ({"kind": "up", "counts": [], "ratio": None}, None),
        ({"kind": "left", "counts": []}, "argument 'kind' must be one of"),
        ({"kind": "up"}, "argument 'counts' is missing"),
        ({"kind": "up", "counts": [1, "2"]}, "argument 'counts' item 1 must be integer, got string '2'"),
        ({"kind": "up", "counts": [True]}, "must be integer, got boolean True"),
        ({"kind": "up", "counts": [], "size": 1}, "unknown argument 'size', expected kind, counts, ratio"),
        ({"kind": "up", "counts": [], "ratio": "big"}, "argument 'ratio' must be number, got string"),
        ([1], "arguments must be an object"),
        ("up", "arguments must be an object"),
    ],
)
def test_arguments_fit_or_the_model_reads_why_not(arguments, words):
    found = tools_of([pick])["pick"].argument_error(arguments)
    assert (found is None) if words is None else words in (found or "")


@pytest.mark.parametrize(
    ("value", "schema", "fits"),
    [
        (3, {"type": ["integer", "string"]}, True),
        (3.5, {"type": ["integer", "string"]}, False),
        ({"a": 1}, {"type": "object", "additionalProperties": {"type": "integer"}}, True),
        ({"a": "1"}, {"type": "object", "additionalProperties": {"type": "integer"}}, False),
        ([1, "a"], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, True),
        ([1], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, False),
        ([1], {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, True),
        (1, {"anyOf": [{"type": "string"}, {"type": "array"}]}, False),
        ("x", {}, True),
        ("x", {"type": "image"}, True),
    ],
)
def test_json_schemas(value, schema, fits):
    assert (mismatch(value, schema) is None) == fits
