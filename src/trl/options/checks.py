"""Checks of settings: text is read as on the command line, numbers have bounds, and words are among those allowed."""

import argparse
import dataclasses
import functools
import json
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from trl.options.secrets import redacted
from trl.options.spelling import did_you_mean

CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
"""Beginnings of one setting's names: transformers 5.23 renames its fields and methods, and warns of the first name."""

Reader = Callable[[str], object]
Settings = dict[str, Any]  # by name
JSONDict = Settings | str | None
Entry = TypeVar("Entry")

KIND_NAMES: dict[object, str] = {
    string_to_bool: "true or false", int: "a whole number", float: "a number", str: "a plain value"
}  # fmt: skip
_READERS: dict[type, Reader] = {bool: string_to_bool, int: int, float: float}

# Bounds of inherited numbers; the library's own fields declare theirs. Without any: "[0, inf)".
_INHERITED = {
    "max_grad_norm": "[0, inf]",
    "per_device_train_batch_size": ">= 1", "per_device_eval_batch_size": ">= 1", "gradient_accumulation_steps": ">= 1",
}  # fmt: skip
_SENTINELS = {"max_steps": -1, "local_rank": -1, "top_k": -1}
_INHERITED_NAMES = frozenset(item.name for item in dataclasses.fields(TrainingArguments))


def check_at_least(name: str, value: object, *, minimum: int, optional: bool = True, hint: str = "") -> None:
    """Raise TypeError unless `value` is a whole number (or None if `optional`), ValueError below `minimum`."""
    if value is None and optional:
        return
    allowed = f"a whole number >= {minimum}" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}). {hint}".rstrip())
    if int(value) < minimum:
        raise ValueError(f"{name} must be {allowed}, got {value}. {hint}".rstrip())


def check_one_of(name: str, value: object, allowed: Iterable[object], *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is one of `allowed`, or None where `optional`."""
    names = list(allowed)
    if value in names or (optional and value is None):
        return
    listing = ", ".join(repr(option) for option in names)
    raise ValueError(f"{name} must be one of {listing}{' or None' if optional else ''}, got {value!r}.")


def lookup(table: Mapping[str, Entry], name: str, what: str) -> Entry:
    """The entry of `table` under `name`; `what` is the option that carried it. Raises: ValueError for other names.

    >>> lookup({"nll": 1, "dft": 2}, "dft", "loss_type")
    2
    >>> lookup({"nll": 1, "dft": 2}, "nl", "loss_type")
    Traceback (most recent call last):
    ValueError: unknown loss_type 'nl'; known are 'dft', 'nll'. Did you mean nll?
    """
    if name in table:
        return table[name]
    remedy = did_you_mean(str(name), table) or " Use one of these."
    raise ValueError(f"unknown {what} {name!r}; known are {', '.join(map(repr, sorted(table)))}.{remedy}")


def json_object(name: str, value: JSONDict) -> Settings | None:
    """A mapping, or that of a JSON string. Raises: ValueError for other strings, TypeError for other types."""
    if value is None or isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a dict or a JSON object in a string, got {type(value).__name__}.")
    example, shown = f"""--{name} '{{"key": "value"}}'""", redacted(value)
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be a JSON object, got {shown!r} ({error}). Write it as {example}.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must be a JSON object, got {shown!r}. Write it as {example}.")
    return parsed


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program: options are checked at any depth inside a config's constructor."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "trl":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_unread(config: Any, names: Iterable[str], reason: str) -> None:
    """Warn of changed fields among `names`, which have "no effect" for a `reason` that says what to do."""
    for item in dataclasses.fields(config):
        if item.name in names and (value := getattr(config, item.name)) != item.default:
            warn_caller(f"{item.name}={getattr(value, 'value', value)!r} has no effect {reason}.")


def library_config(config_class: type) -> type:
    """The config of this library that a program's config class extends; the class itself where it extends none."""
    kinds = (kind for kind in config_class.__mro__ if kind.__module__.startswith("trl."))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), config_class)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What this library keeps of a field apart from its metadata, as `HfArgumentParser` passes metadata to argparse."""

    bounds: str = ""
    needs: str = ""  # the field without which this one has no effect
    module: str | None = None  # the one that first declares the field
    reason: str | None = None  # of a deprecated field; `moved_to` and `value_of` say where its value goes
    moved_to: str | None = None
    value_of: Callable[[Any, Any], object] | None = None


DECLARATIONS: dict[dataclasses.Field, Declaration] = {}


def declaration(item: dataclasses.Field) -> Declaration:
    """What is declared of a field; nothing of those from outside the library."""
    return DECLARATIONS.get(item, Declaration())


class Kind(NamedTuple):
    """What a field may hold: what `reader` reads, a list of it, one of `choices`, JSON, or anything (None)."""

    item: dataclasses.Field
    reader: Reader | None
    is_list: bool
    takes_none: bool
    choices: Collection[object]
    is_json: bool


@functools.cache
def kinds(config_class: type) -> dict[str, Kind]:
    """The kinds of fields by name; of `library_config` alone where a type of a program's own cannot be resolved."""
    try:
        hints = get_type_hints(config_class)
    except NameError:
        config_class = library_config(config_class)
        hints = get_type_hints(config_class)
    return {item.name: _kind(item, hints[item.name]) for item in dataclasses.fields(config_class)}


def _kind(item: dataclasses.Field, hint: object) -> Kind:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = next((get_args(member) for member in members if get_origin(member) is Literal), ())
    lists = [get_args(member)[0] for member in members if get_origin(member) is list]
    number = next((member for member in lists if member in _READERS), None)
    is_list = number is not None
    if not (is_list or words or str in members):
        number = next((member for member in _READERS if member in members), None)
    choices = item.metadata.get("choices", () if str in members else words)
    is_ours = item.name not in _INHERITED_NAMES
    choices = choices if is_ours and choices and "help" in item.metadata else ()
    is_json = is_ours and str in members and not lists and any(get_origin(member) is dict for member in members)
    return Kind(item, None if number is None else _READERS[number], is_list, type(None) in members, choices, is_json)


def from_text(reader: object, text: str) -> object:
    """`text` read by an option's type function. Raises: ValueError for text that is no such value."""
    try:
        return reader(text) if callable(reader) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        raise ValueError(f"must be {KIND_NAMES.get(reader, 'a plain value')}, got {text!r}.") from None


def read_text_values(config: object) -> None:
    """Read the text in fields of numbers and booleans. Raises: ValueError naming every unreadable field."""
    faults = []
    for name, kind in kinds(type(config)).items():
        value = vars(config).get(name)
        items = value if kind.is_list and isinstance(value, list) else [value]
        try:
            if kind.reader is not None and any(isinstance(item, str) for item in items):
                read = [from_text(kind.reader, item) if isinstance(item, str) else item for item in items]
                setattr(config, name, read if kind.is_list else read[0])
        except ValueError as error:
            faults.append(f"{name} {error}")
    if faults:
        raise ValueError("\n".join(faults))


def check_numbers(config: object) -> None:
    """Check numbers against the bounds of their fields. Raises: ValueError, TypeError for what is no number."""
    faults = []
    for name, kind in kinds(library_config(type(config))).items():
        value, declared = vars(config).get(name), declaration(kind.item)
        is_moved = declared.reason is not None and not declared.bounds
        is_single = declared.bounds or name not in _INHERITED_NAMES
        is_single = is_single and not kind.is_list and kind.reader in (int, float)
        if kind.reader is None or is_moved or (value is None and (kind.takes_none or not is_single)):
            continue
        default = "(-inf, inf)" if kind.is_list else _INHERITED.get(name, "[0, inf)")
        bounds = declared.bounds or default
        low, high, has_low, has_high = _interval(bounds)
        for number in value if isinstance(value, list) and not is_single else [value]:
            is_number = isinstance(number, int if kind.reader is int else (int, float))
            is_wrong = is_single and (number is None or isinstance(number, (list, tuple, dict)))
            if is_wrong or (declared.bounds and (isinstance(number, bool) or not is_number)):
                raise TypeError(_refusal(kind, bounds, number))
            if not isinstance(number, (int, float)) or number == _SENTINELS.get(name):
                continue
            if not (low < number < high or (has_low and number == low) or (has_high and number == high)):
                faults.append(_refusal(kind, bounds, number))
    if faults:
        raise ValueError("\n".join(faults))


def _interval(bounds: str) -> tuple[float, float, bool, bool]:
    if bounds.startswith(">"):
        sign, _, low = bounds.partition(" ")
        return float(low), math.inf, sign == ">=", False
    low, high = bounds[1:-1].split(",")
    return float(low), float(high), bounds[0] == "[", bounds[-1] == "]"


def _refusal(field: Kind, bounds: str, value: Any) -> str:
    item = field.item
    low, high, has_low, has_high = _interval(bounds)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = "a whole number" if field.reader is int and bounds != "[0, inf)" else ""
    if not kind and not (is_number and math.isfinite(value)):
        kind = "a number" if has_high and math.isinf(high) else "a finite number"
    limits = "" if math.isinf(low) else f"{'>=' if has_low else '>'} {low:g}"
    allowed = f"{kind} {limits if math.isinf(high) else f'in {bounds}'}".strip()
    others = [str(_SENTINELS[item.name])] if item.name in _SENTINELS else []
    others += ["None"] if field.takes_none and declaration(item).bounds else []
    shown = f"{value}" if is_number else f"{value!r} ({type(value).__name__})"
    text = f"{item.name} must be {' or '.join([allowed, *others])}, got {shown}."
    return f"{text} {item.metadata['help']} Default: {item.default}." if declaration(item).bounds else text


def check_choices(config: object) -> None:
    """Check fields that take one of several values; "true" and "false" may be booleans. Raises: ValueError."""
    for name, kind in kinds(library_config(type(config))).items():
        if True in kind.choices:
            words: dict[str, object] = {"true": True, "false": False}
            setattr(config, name, words.get(str(getattr(config, name)).lower(), getattr(config, name)))
        if kind.choices:
            check_one_of(name, getattr(config, name), kind.choices, optional=kind.takes_none)


def read_json(config: object) -> None:
    """Replace the text of JSON objects by their dicts. Raises: ValueError, TypeError for anything else."""
    for name, kind in kinds(library_config(type(config))).items():
        if kind.is_json:
            setattr(config, name, json_object(name, getattr(config, name)))
