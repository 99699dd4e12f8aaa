"""Calls are found in text; whatever goes wrong is told to the model."""

from functools import partial

import pytest

from trl.agents.text_environment import answer, named_tools, parse_call


def double(query):
    """A function."""
    return 2 * float(query)


class Wiki:
    """An object."""

    def __call__(self, query):
        return f"about {query}"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<request><Wiki>Super Bowl XX<call>", ("Wiki", "Super Bowl XX")),
        ("ab <request> <Py>\nif a < b:\n  f()\n<call> ", ("Py", "\nif a < b:\n  f()\n")),
        ("<request><A>1<call>2<response>\nso <request><B>3<call>", ("B", "3")),
        ("<request>13-3<call>", None),
        ("13-3<call>", None),
        ("<request><A>1", None),
    ],
)
def test_calls_are_parsed(text, call):
    assert parse_call(text) == call


def test_answers_and_errors_are_text():
    tools = named_tools([double, Wiki()])
    assert list(tools) == ["double", "Wiki"]
    assert answer(tools, "<request><double>1.5<call>") == "3.0"
    assert answer(tools, "<request><Wiki>oars<call>") == "about oars"
    assert answer(tools, "<request><double>x<call>") == "ValueError: could not convert string to float: 'x'"
    assert answer(tools, "<request><Maps>x<call>") == "Unknown tool Maps. Tools: double, Wiki."
    assert answer({}, "<request>x<call>") == "The request names no tool. Tools: none."


def test_names_of_tools():
    assert list(named_tools({"a b": double})) == ["a b"]
    assert list(named_tools([partial(double)])) == ["double"]
    assert named_tools(None) == {}
    for wrong, error, message in [
        ([lambda query: query], ValueError, "got '<lambda>'. Use a dict"),
        ([double, double], ValueError, "different names without < and >, got 'double'"),
        ({"a": 3}, TypeError, r"tools\['a'\] must be callable with a query, got int"),
    ]:
        with pytest.raises(error, match=message):
            named_tools(wrong)
