"""Class docstrings of configs, generated from their fields."""

import dataclasses
import inspect
import textwrap
from typing import Any, Literal, TypeVar, get_args, get_origin

Config = TypeVar("Config", bound=type)


def documented(cls: Config) -> Config:
    """Class decorator: append to the docstring one entry per field, with its type, default and help text.

    The hand-written part of the docstring (what the config is for, an example) stays in front. Fields that come from
    outside the library (those of `transformers.TrainingArguments`) are listed only where their default differs.
    """
    head = inspect.cleandoc(cls.__doc__ or "")
    ours = [base for base in cls.__mro__ if _is_ours(base)]
    names = {name for base in ours for name in vars(base).get("__annotations__", {})}
    entries = [_entry(field) for field in dataclasses.fields(cls) if field.name in names]
    parts = [head, "Parameters:", textwrap.indent("\n".join(entries), "    ")]
    outside = [base.__name__ for base in cls.__mro__ if dataclasses.is_dataclass(base) and not _is_ours(base)]
    if outside:
        parts.append(f"All other fields of `{outside[0]}` are accepted too, with their usual defaults.")
    cls.__doc__ = "\n\n".join(parts) + "\n"
    return cls


def _is_ours(base: type) -> bool:
    return base.__module__.split(".")[0] not in ("transformers", "builtins")


def _entry(field: dataclasses.Field) -> str:
    help_text = " ".join(str(field.metadata.get("help", "")).replace("%%", "%").split())
    head = f"{field.name} (`{type_name(field.type)}`, {_default(field)}):"
    return f"{head}\n{textwrap.fill(help_text, 100, initial_indent='    ', subsequent_indent='    ')}"


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"defaults to `{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "required"
    return f"defaults to `{field.default!r}`"


def type_name(annotation: Any) -> str:
    """A field's type as one would write it: `int | None`, `"bfd" or "wrapped"`."""
    if isinstance(annotation, str):
        return annotation
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
