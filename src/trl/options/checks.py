"""Checks that option groups share: each returns or passes a good value and raises on a bad one."""

import dataclasses
import json
import numbers
import sys
import warnings
from collections.abc import Iterable
from typing import Any


def check_at_least(name: str, value: Any, *, minimum: int, optional: bool = True, hint: str = "") -> None:
    """Check that `value` is a whole number >= `minimum`, or None where `optional`.

    Raises:
        TypeError: for anything that is not a whole number (booleans included).
        ValueError: for a number below `minimum`.
    """
    if value is None and optional:
        return
    allowed = f"a whole number >= {minimum}" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}). {hint}".rstrip())
    if int(value) < minimum:
        raise ValueError(f"{name} must be {allowed}, got {value}. {hint}".rstrip())


def check_one_of(name: str, value: Any, allowed: Iterable[str], *, optional: bool = False) -> None:
    """Check that `value` is one of `allowed`, or None where `optional`.

    Raises:
        ValueError: naming the value and everything that is allowed.
    """
    names = list(allowed)
    if value in names or (optional and value is None):
        return
    listing = ", ".join(repr(option) for option in names)
    raise ValueError(f"{name} must be one of {listing}{' or None' if optional else ''}, got {value!r}.")


def json_object(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The mapping that `value` holds: itself, or what a JSON string (as a command line passes it) says.

    Raises:
        ValueError: for a string that is not a JSON object.
        TypeError: for any other type.
    """
    if value is None or isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a dict or a JSON object in a string, got {type(value).__name__}.")
    example = f"""--{name} '{{"key": "value"}}'"""
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} must be a JSON object, got {value!r} ({error}). Write it as {example}."
        ) from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r}. Write it as {example}.")
    return parsed


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program: options are checked at any depth inside a config's constructor."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "trl":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_unread(config: Any, names: Iterable[str], reason: str) -> None:
    """Warn of every field among `names` that `config` changes from its default, where nothing reads it.

    `reason` ends the sentence "<field>=<value> has no effect ...", and says what to do.
    """
    for item in dataclasses.fields(config):
        if item.name in names and (value := getattr(config, item.name)) != item.default:
            warn_caller(f"{item.name}={value!r} has no effect {reason}.")
