"""Option groups: how a field is declared with its bounds, and how a config takes a field from elsewhere."""

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

from trl.options.checks import (
    DECLARATIONS,
    Declaration,
    check_choices,
    check_numbers,
    declaration,
    read_json,
    read_text_values,
    warn_caller,
)
from trl.options.spelling import OF_COMMANDS, OTHER_NAMES, did_you_mean

Config = TypeVar("Config", bound=type)
Parameters = ParamSpec("Parameters")


def option(
    default: object, help: str, bounds: str = "", *, needs: str = "", flag: bool = False, **metadata: object
) -> Any:
    """A dataclass field with help text; `metadata` goes to argparse.

    `bounds` limits a number: ">= 1", "> 0", or an interval such as "(0, 1]" (default: "[0, inf)"). A value without the
    field that it `needs`, or without that field's value ("name=value"), warns. A `flag` may stand alone on a command
    line although None is its default. Lists and dicts are copied for every instance; a function makes the default.
    """
    return _field(default, Declaration(bounds, needs), {"help": help, **_switch(flag), **metadata})


def same(owner: type, name: str, *default: object, **metadata: object) -> Any:
    """The field `name` of `owner` in another config, with another default if given; `metadata` replaces parts."""
    original = next(field for field in dataclasses.fields(owner) if field.name == name)
    is_made = original.default_factory is not dataclasses.MISSING
    (value,) = default or ((original.default_factory if is_made else original.default),)
    declared = dataclasses.replace(declaration(original), module=owner.__module__)
    return _field(value, declared, {**original.metadata, **metadata})


def moved(
    reason: str = "", bounds: str = "", *, to: str | None = None, default: object = None,
    value_of: Callable[[Any, Any], object] | None = None, flag: bool = False, **metadata: object,
) -> Any:  # fmt: skip
    """A deprecated field: its value moves `to` another field, as `value_of` gives it (None: not), or has no effect."""
    help = f"Deprecated: {reason or f'now {to}.'}"
    declared = Declaration(bounds, reason=reason.rstrip("."), moved_to=to, value_of=value_of)
    return _field(default, declared, {"help": help, **_switch(flag), **metadata})


def _switch(flag: bool) -> dict[str, object]:
    return {"nargs": "?", "const": True} if flag else {}


def _field(default: object, declared: Declaration, metadata: dict[str, object]) -> Any:
    if isinstance(default, (list, dict)):
        item: Any = dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    elif callable(default):
        item = dataclasses.field(default_factory=default, metadata=metadata)
    else:
        item = dataclasses.field(default=default, metadata=metadata)
    DECLARATIONS[item] = declared
    return item


class OptionGroup:
    """Base of all option groups: dataclass mixins that hold related fields and check them.

    `settle`, called once for each config, checks what fields declare; `check`, which calls `super().check()`, the rest.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]

    def __new__(cls, *values: object, **options: object) -> Self:
        """An instance before `__init__`, which has the options. Raises: TypeError for names that it does not take."""
        if unknown := [name for name in options if name not in cls.__dataclass_fields__]:
            _refuse_unknown(cls, cls.__init__, unknown)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.settle()

    def check(self) -> None:
        """Raise on bad values and bring good ones into their final form."""

    def settle(self) -> None:
        """Read texts, move values of older names, check all fields. Raises: ValueError or TypeError for bad values."""
        read_text_values(self)
        check_numbers(self)
        read_json(self)
        _move_legacy(self)
        self.check()
        check_choices(self)
        check_numbers(self)
        for needed, names in unread_fields(self).items():
            name = needed.partition("=")[0]
            effect = f"has no effect with {name}={getattr(self, name)}"
            warn_caller(f"{', '.join(names)} {effect}. Set {needed}, or leave it out.")


def names_checked(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """A constructor that refuses unknown keyword arguments by the name of the class of the object, with suggestions."""

    @functools.wraps(init)
    def checked(*values: Parameters.args, **options: Parameters.kwargs) -> None:
        _refuse_unknown(type(values[0]), init, list(options))
        init(*values, **options)

    return checked


def _refuse_unknown(owner: type, init: Callable[..., None], names: list[str]) -> None:
    parameters = inspect.signature(init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    messages = []
    for name in (name for name in names if name not in parameters):
        target = OTHER_NAMES.get(name, name).partition(":")[0]
        hint = did_you_mean(name, parameters)
        if target in OF_COMMANDS and target not in parameters:
            place = "in Python a field of ModelConfig, or an argument of the trainer"
            hint = f" {target} is an option of commands: {place}."
        messages.append(f"{owner.__name__} got an unexpected keyword argument {name!r}.{hint}")
    if messages:
        raise TypeError("\n".join(messages))


def _move_legacy(config: OptionGroup) -> None:
    """Move the values of fields with a successor, and warn once of all of them."""
    places = []
    for item in dataclasses.fields(config):
        declared = declaration(item)
        if declared.reason is None or (value := getattr(config, item.name)) == item.default:
            continue
        target, value_of = declared.moved_to, declared.value_of
        setattr(config, item.name, item.default)
        moved = value if value_of is None else value_of(config, value)
        if target is not None and moved is not None:
            current = getattr(config, target)
            if value_of is None and current not in (getattr(type(config), target, None), moved):
                both = f"{target}={current!r} and {item.name}={value!r}, its older name"
                raise ValueError(f"{both}, disagree. Set {target} only.")
            setattr(config, target, moved)
        places.append(f"{item.name} -> {target or f'nothing, {declared.reason}'}")
    if places:
        warn_caller(f"deprecated settings: {'; '.join(places)}.", FutureWarning)


def unread_fields(config: OptionGroup) -> dict[str, list[str]]:
    """The changed fields that have no effect, as `name=value`, by the field, or its value, that they need."""
    unread: dict[str, list[str]] = {}
    for item in dataclasses.fields(config):
        needed = declaration(item).needs
        name, _, wanted = needed.partition("=")
        lacks = needed and (str(getattr(config, name)) != wanted if wanted else not getattr(config, name))
        if lacks and getattr(config, item.name) != item.default:
            unread.setdefault(needed, []).append(f"{item.name}={getattr(config, item.name)!r}")
    return unread


def documented(cls: Config) -> Config:
    """Class decorator: append to the docstring one entry per field, with its type, default and help text.

    Fields of `transformers.TrainingArguments` are listed only where their default differs.
    """
    head = inspect.cleandoc(cls.__doc__ or "")
    ours = [base for base in cls.__mro__ if _is_ours(base)]
    names = {name for base in ours for name in vars(base).get("__annotations__", {})}
    fields = [field for field in dataclasses.fields(cls) if field.name in names]
    fields.sort(key=lambda field: declaration(field).reason is not None)  # older names last
    entries = []
    for field in fields:
        help_text = " ".join(str(field.metadata.get("help", "")).replace("%%", "%").split())
        make = field.default_factory
        value = field.default if make is dataclasses.MISSING else make()
        default = "required" if value is dataclasses.MISSING else f"defaults to `{value!r}`"
        entries.append(f"{field.name} (`{type_name(field.type)}`, {default}):")
        entries.append(textwrap.fill(help_text, 100, initial_indent="    ", subsequent_indent="    "))
    parts = [head, "Parameters:", textwrap.indent("\n".join(entries), "    ")]
    outside = [base.__name__ for base in cls.__mro__ if dataclasses.is_dataclass(base) and not _is_ours(base)]
    if outside:
        parts.append(f"All other fields of `{outside[0]}` are accepted too, with their usual defaults.")
    cls.__doc__ = "\n\n".join(parts) + "\n"
    return cls


def _is_ours(base: type) -> bool:
    return base.__module__.split(".")[0] not in ("transformers", "builtins")


def type_name(annotation: object) -> str:
    """A field's type as one would write it: `int | None`, `"bfd" or "wrapped"`."""
    if isinstance(annotation, str):
        return annotation
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
