"""Numbers and booleans of options: text is read as on the command line, and numbers are held to one table of bounds."""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from transformers.hf_argparser import string_to_bool

Reader = Callable[[str], Any]

KIND_NAMES: dict[Any, str] = {
    string_to_bool: "true or false", int: "a whole number", float: "a number", str: "a plain value"
}  # fmt: skip
_READERS: dict[type, Reader] = {bool: string_to_bool, int: int, float: float}

# Numbers are finite and >= 0, except for these.
_SENTINELS = {"max_steps": -1, "local_rank": -1}
_SIGNED = {"alpha", "f_alpha_divergence_coef", "label_pad_token_id", "padding_value"}
_MAY_BE_INFINITE = {  # limits, where infinity is no limit
    "cliprange", "cliprange_value", "ratio_threshold", "score_clip", "target_kl", "reward_clip_range", "max_density_ratio",
    "max_grad_norm", "max_kl_per_token", "reward_deadline", "tool_deadline", "vllm_server_timeout",
    "vllm_importance_sampling_cap", "epsilon_high", "delta",
}  # fmt: skip


class NumberField(NamedTuple):
    """The reader of a field that holds a number or a boolean, and whether the field is a list of them."""

    reader: Reader
    is_list: bool


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


def _number_field(hint: Any) -> NumberField | None:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for member in members:
        if get_origin(member) is list and get_args(member)[0] in _READERS:
            return NumberField(_READERS[get_args(member)[0]], is_list=True)
    has_text = any(member is str or get_origin(member) is Literal for member in members)
    kinds = [] if has_text else [kind for kind in _READERS if kind in members]
    return NumberField(_READERS[kinds[0]], is_list=False) if kinds else None


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
    for name, (reader, is_list) in number_fields(type(config)).items():
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
    """Check that every number is finite and not negative, but for the documented exceptions and a program's own fields.

    Raises: ValueError naming every field that is not.
    """
    faults = []
    for name, (_, is_list) in number_fields(library_config(type(config))).items():
        value = vars(config).get(name)
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, (int, float)) or number == _SENTINELS.get(name):
                continue
            signed = is_list or name in _SIGNED
            if math.isnan(number) or (math.isinf(number) and name not in _MAY_BE_INFINITE):
                faults.append(f"{name} must be a finite number{'' if signed else ' >= 0'}, got {number}.")
            elif number < 0 and not signed:
                sentinel = f" or {_SENTINELS[name]}" if name in _SENTINELS else ""
                faults.append(f"{name} must be >= 0{sentinel}, got {number}.")
    if faults:
        raise ValueError("\n".join(faults))
