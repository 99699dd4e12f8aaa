"""Looking a method's name up in its table of functions."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], name: str, what: str) -> Entry:
    """The entry of `table` under `name`; `what` is the option that carried the name.

    Raises ValueError, listing the known names, for any other.

    >>> lookup({"nll": 1, "dft": 2}, "dft", "loss_type")
    2
    >>> lookup({"nll": 1, "dft": 2}, "nl", "loss_type")
    Traceback (most recent call last):
    ValueError: unknown loss_type 'nl'; known are 'dft', 'nll'. Did you mean 'nll'?
    """
    if name in table:
        return table[name]
    close = get_close_matches(str(name), table, n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else "Use one of these."
    raise ValueError(f"unknown {what} {name!r}; known are {', '.join(map(repr, sorted(table)))}. {remedy}")
