"""Values of options: text is read as on the command line, numbers have bounds, and words are among those allowed."""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from trl.options.checks import check_one_of

Reader = Callable[[str], Any]

KIND_NAMES: dict[Any, str] = {
    string_to_bool: "true or false", int: "a whole number", float: "a number", str: "a plain value"
}  # fmt: skip
_READERS: dict[type, Reader] = {bool: string_to_bool, int: int, float: float}

# Bounds of inherited numbers; the library's own fields declare theirs. Without any: "[0, inf)".
_INHERITED = {
    "max_grad_norm": "[0, inf]",
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), ">= 1"
    ),
}
_SENTINELS = {"max_steps": -1, "local_rank": -1, "top_k": -1}
_INHERITED_NAMES = frozenset(item.name for item in dataclasses.fields(TrainingArguments))


class NumberField(NamedTuple):
    """The reader of a field that holds a number or a boolean, whether the field is a list of them, and may be None."""

    reader: Reader
    is_list: bool
    takes_none: bool


def library_config(config_class: type) -> type:
    """The config of this library that a program's config class extends; the class itself where it extends none."""
    kinds = (kind for kind in config_class.__mro__ if kind.__module__.startswith("trl."))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), config_class)


@functools.cache
def number_fields(config_class: type) -> dict[str, NumberField]:
    """The fields of a dataclass that hold numbers or booleans and no text, by name.

    Those of `library_config` alone where a program's own have a type that is not there at run time.
    """
    try:
        hints = get_type_hints(config_class)
    except NameError:
        config_class = library_config(config_class)
        hints = get_type_hints(config_class)
    found = {item.name: _number_field(hints[item.name]) for item in dataclasses.fields(config_class)}
    return {name: entry for name, entry in found.items() if entry is not None}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _number_field(hint: Any) -> NumberField | None:
    members = get_args(hint) if _is_union(hint) else (hint,)
    takes_none = type(None) in members
    for member in members:
        if get_origin(member) is list and get_args(member)[0] in _READERS:
            return NumberField(_READERS[get_args(member)[0]], True, takes_none)
    has_text = any(member is str or get_origin(member) is Literal for member in members)
    kinds = [] if has_text else [kind for kind in _READERS if kind in members]
    return NumberField(_READERS[kinds[0]], False, takes_none) if kinds else None


def from_text(reader: Any, text: str) -> Any:
    """`text` read by the type function of an option; anything else that argparse takes as a type is called too.

    Raises: ValueError for text that is no such value.
    """
    try:
        return reader(text) if callable(reader) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        raise ValueError(f"must be {KIND_NAMES.get(reader, 'a plain value')}, got {text!r}.") from None


def read_text_values(config: Any) -> None:
    """Replace text in fields of numbers and booleans by the value that the command line reads from it.

    Raises: ValueError naming every field whose text is no such value.
    """
    faults = []
    for name, (reader, is_list, _) in number_fields(type(config)).items():
        value = vars(config).get(name)
        try:
            if isinstance(value, str):
                setattr(config, name, [from_text(reader, value)] if is_list else from_text(reader, value))
            elif is_list and isinstance(value, list) and any(isinstance(item, str) for item in value):
                read = [from_text(reader, item) if isinstance(item, str) else item for item in value]
                setattr(config, name, read)
        except ValueError as error:
            faults.append(f"{name} {error}")
    if faults:
        raise ValueError("\n".join(faults))


def check_numbers(config: Any) -> None:
    """Check every number against the bounds of its field; a program's own fields have none.

    Raises: ValueError naming every field that is out of bounds. TypeError for a field with declared bounds that holds
    no (whole) number, or None where that is not allowed.
    """
    kind, faults = library_config(type(config)), []
    items = {item.name: item for item in dataclasses.fields(kind)}
    for name, field in number_fields(kind).items():
        value, item = vars(config).get(name), items[name]
        is_unbounded = "bounds" not in item.metadata
        if (value is None and (field.takes_none or is_unbounded)) or (
            "moved_to" in item.metadata and is_unbounded
        ):
            continue
        numbers = value if isinstance(value, list) else [value]
        default = "(-inf, inf)" if field.is_list else _INHERITED.get(name, "[0, inf)")
        bounds = item.metadata.get("bounds", default)
        for number in numbers:
            is_number = isinstance(number, int if field.reader is int else (int, float))
            if not is_unbounded and (isinstance(number, bool) or not is_number):
                raise TypeError(_refusal(item, field, bounds, number))
            if (
                isinstance(number, (int, float))
                and number != _SENTINELS.get(name)
                and not _is_within(number, bounds)
            ):
                faults.append(_refusal(item, field, bounds, number))
    if faults:
        raise ValueError("\n".join(faults))


def _interval(bounds: str) -> tuple[float, float, bool, bool]:
    """Lower and upper end of bounds, and whether each of them is allowed."""
    if bounds.startswith(">"):
        sign, _, low = bounds.partition(" ")
        return float(low), math.inf, sign == ">=", False
    low, high = bounds[1:-1].split(",")
    return float(low), float(high), bounds[0] == "[", bounds[-1] == "]"


def _is_within(number: float, bounds: str) -> bool:
    low, high, has_low, has_high = _interval(bounds)
    return low < number < high or (has_low and number == low) or (has_high and number == high)


def _refusal(item: dataclasses.Field, field: NumberField, bounds: str, given: Any) -> str:
    low, high, has_low, has_high = _interval(bounds)
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    kind = "a whole number" if field.reader is int and bounds != "[0, inf)" else ""
    if not kind and not (is_number and math.isfinite(given)):
        kind = "a number" if has_high and math.isinf(high) else "a finite number"
    limits = "" if math.isinf(low) else f"{'>=' if has_low else '>'} {low:g}"
    allowed = f"{kind} {limits if math.isinf(high) else f'in {bounds}'}".strip()
    others = [str(_SENTINELS[item.name])] if item.name in _SENTINELS else []
    others += ["None"] if field.takes_none and "bounds" in item.metadata else []
    shown = f"{given}" if is_number else f"{given!r} ({type(given).__name__})"
    text = f"{item.name} must be {' or '.join([allowed, *others])}, got {shown}."
    return f"{text} {item.metadata['help']} Default: {item.default}." if "bounds" in item.metadata else text


@functools.cache
def json_fields(config_class: type) -> tuple[str, ...]:
    """Fields of the library that take a dict or, as text, a JSON object."""
    hints = get_type_hints(config_class)
    names = [item.name for item in dataclasses.fields(config_class) if item.name not in _INHERITED_NAMES]
    members = {name: get_args(hints[name]) for name in names}
    return tuple(
        name
        for name in names
        if str in members[name] and any(get_origin(each) is dict for each in members[name])
    )


@functools.cache
def _choices(config_class: type) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """The values that each of the library's fields may have, and whether None is one more."""
    hints, found = get_type_hints(config_class), {}
    for item in dataclasses.fields(config_class):
        if "help" not in item.metadata or item.name in _INHERITED_NAMES:
            continue
        members = get_args(hints[item.name]) if _is_union(hints[item.name]) else (hints[item.name],)
        allowed = next((get_args(each) for each in members if get_origin(each) is Literal), None)
        allowed = item.metadata.get("choices", None if str in members else allowed)
        if allowed:
            found[item.name] = (tuple(allowed), type(None) in members)
    return found


def check_choices(config: Any) -> None:
    """Check every field that takes one of several values; "true" and "false" become booleans where those are among them.

    Raises: ValueError naming the value and everything that is allowed.
    """
    for name, (allowed, takes_none) in _choices(library_config(type(config))).items():
        if True in allowed:
            words: dict[str, Any] = {"true": True, "false": False}
            setattr(config, name, words.get(str(getattr(config, name)).lower(), getattr(config, name)))
        check_one_of(name, getattr(config, name), allowed, optional=takes_none)
