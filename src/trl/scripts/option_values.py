"""From a value in a YAML file to the value of an option, as the command line would have read it."""

import argparse
import dataclasses
from enum import Enum
from typing import Any, get_args, get_origin

from transformers.hf_argparser import string_to_bool

from trl.options.values import KIND_NAMES, from_text
from trl.scripts.suggestions import did_you_mean


def option_value(action: argparse.Action, value: Any, *, hint: Any = None) -> Any:
    """`value` in the type of the option `action`; `hint` is the type of its dataclass field.

    Text becomes a number where the option is a number (YAML reads `2e-5` as text), a mapping becomes `key=value` items
    where the option is a list of strings, entries of a list become dataclasses where the option holds those.

    Raises:
        ValueError: if the value is no value of this option.
    """
    if value is None:
        return None
    if action.nargs in ("+", "*"):
        return [_single(action, item) for item in _items(action, value)]
    if isinstance(value, (dict, list)):
        if hint is None or type(value) in _containers(hint):
            return value
        raise ValueError(f"must be {_kind_name(action)}, got {value!r}.")
    return _single(action, value)


def _items(action: argparse.Action, value: Any) -> list[Any]:
    if isinstance(value, dict) and action.type is str:
        return [f"{key}={item}" for key, item in value.items()]
    return value if isinstance(value, list) else [value]


def _containers(hint: Any) -> set[type]:
    """The containers (dict, list) that a field's type allows."""
    members = get_args(hint) if get_origin(hint) not in (dict, list) else (hint,)
    return {get_origin(member) or member for member in (*members, hint)} & {dict, list}


def _single(action: argparse.Action, value: Any) -> Any:
    kind = action.type
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _entry(kind, value) if isinstance(value, dict) else _entry(kind, {_first_field(kind): value})
    if action.choices is not None:
        return _choice(action, value)
    if isinstance(value, str):
        return from_text(action.type, value)
    fits = {
        string_to_bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
    }
    if not fits.get(kind, True):  # pyright: ignore[reportArgumentType, reportCallIssue]
        raise ValueError(f"must be {_kind_name(action)}, got {value!r}.")
    if kind is str:
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def _choice(action: argparse.Action, value: Any) -> Any:
    choices = list(action.choices or ())
    if isinstance(value, bool) and ("no" if value is False else "yes") in choices:
        return "no" if value is False else "yes"  # YAML reads a bare `no` as false
    plain = value.value if isinstance(value, Enum) else value
    if plain in choices:
        return plain
    listing = ", ".join(str(choice) for choice in choices)
    near = did_you_mean(str(value), [str(choice) for choice in choices])
    raise ValueError(f"must be one of {listing}; got {value!r}.{near}")


def _entry(kind: type, value: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    for name in value:
        if name not in known:
            raise ValueError(f"has an entry with an unknown key `{name}`.{did_you_mean(str(name), known)}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in value
    ]
    if missing:
        raise ValueError(f"has an entry without {', '.join(f'`{name}`' for name in missing)}: {value!r}.")
    return kind(**value)


def _first_field(kind: type) -> str:
    return dataclasses.fields(kind)[0].name


def _kind_name(action: argparse.Action) -> str:
    return KIND_NAMES.get(action.type, "a plain value")
