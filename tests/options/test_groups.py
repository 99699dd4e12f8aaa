from dataclasses import dataclass, field
from typing import Literal

import pytest

from trl.options.groups import OptionGroup, documented, same, type_name


@dataclass
class Base(OptionGroup):
    rate: float = field(default=0.5, metadata={"help": "Steps per second."})
    names: list[str] | None = field(default=None, metadata={"help": "Names."})


@documented
@dataclass
class Derived(Base):
    """What it is for.

    Example:
        >>> Derived()
    """

    rate: float = same(Base, "rate", 2.0)
    items: list[int] = field(default_factory=list, metadata={"help": "Items."})


def test_docstring_keeps_its_head_and_lists_every_field():
    text = Derived.__doc__ or ""
    assert text.startswith("What it is for.\n\nExample:\n    >>> Derived()\n\nParameters:\n")
    assert "    rate (`float`, defaults to `2.0`):\n        Steps per second." in text
    assert "    names (`list[str] | None`, defaults to `None`):" in text
    assert "    items (`list[int]`, defaults to `[]`):" in text


def test_same_keeps_the_help_text_and_the_place():
    assert Derived().rate == 2.0 and Base().rate == 0.5
    assert list(Derived.__dataclass_fields__) == ["rate", "names", "items"]
    assert Derived.__dataclass_fields__["rate"].metadata["help"] == "Steps per second."


def test_same_copies_containers():
    @dataclass
    class WithList(Base):
        names: list[str] | None = same(Base, "names", ["a"])

    first, second = WithList(), WithList()
    assert first.names == second.names == ["a"]
    assert first.names is not second.names


@pytest.mark.parametrize(
    ("annotation", "name"),
    [(int, "int"), (int | None, "int | None"), (Literal["a", "b"], '"a" or "b"'), ("Later", "Later")],
)
def test_type_name(annotation, name):
    assert type_name(annotation) == name
