"""Every public name resolves, says the same to type checkers as at run time, and has the recorded signature of TRL 0.26."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trl._names import NAMES, places

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "trl"
SIGNATURES: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "recorded_signatures.json").read_text())
"""{path: signature, fields with defaults, members, or the path it is the `same_as`}: the surface of TRL 0.26.2."""


RECORDED = json.loads((ROOT / "tests" / "recorded_names.json").read_text(encoding="utf-8"))
"""{module: names} that programs of 0.4-0.26 import: what this library has of them must stay."""


def lacks(module: str, name: str) -> bool:
    """Whether `from module import name` fails."""
    if hasattr(importlib.import_module(module), name):
        return False
    return find_module(f"{module}.{name}") is None


@pytest.mark.parametrize("module", RECORDED)
def test_recorded_names_resolve(module):
    missing = [name for name in RECORDED[module].split() if lacks(module, name)]
    assert not missing


@pytest.mark.parametrize("module", NAMES)
def test_the_table_names_what_exists(module):
    loaded = importlib.import_module(module)
    for name in places(module):
        assert getattr(loaded, name) is not None


def test_type_checkers_see_the_names_of_trl():
    """The imports under `if TYPE_CHECKING:` in `trl/__init__.py` are those of the table, from the same modules."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == places("trl")


METHODS = [
    "alignprop",
    "bco",
    "cpo",
    "ddpo",
    "distillation",
    "dpo",
    "gfpo",
    "gkd",
    "gold",
    "grpo",
    "grpo_with_replay_buffer",
    "iterative_sft",
    "kto",
    "minillm",
    "nash_md",
    "online_dpo",
    "orpo",
    "papo",
    "ppo",
    "prm",
    "reward",
    "rloo",
    "sdft",
    "sdpo",
    "sft",
    "xpo",
]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_path_of_its_own_in_experimental(method):
    """As in 0.26 and 1.x: `trl.experimental.<method>` and its two modules have the config and the trainer that `trl` has, if any."""
    path = f"trl.experimental.{method}"
    package = importlib.import_module(path)
    kinds = [name for name in places(path) if name.endswith(("Config", "Trainer"))]
    assert sorted(re.sub(r".*(Config|Trainer)", r"\1", name) for name in kinds) == ["Config", "Trainer"]
    for name in kinds:
        module = importlib.import_module(f"{path}.{method}_{'config' if name.endswith('Config') else 'trainer'}")
        value = getattr(package, name)
        assert getattr(module, name) is value
        if method != "ppo" and name in places("trl"):
            assert getattr(importlib.import_module("trl"), name) is value


def test_import_trl_loads_nothing_heavy():
    probe = "import sys, trl; print([m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- the table of the 0.26 surface ---------------------------------------------------------------------------------


def find_module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def split(text: str, separator: str) -> list[str]:
    """Parts of `text` between separators that stand outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{<":
            depth += 1
        elif char in ")]}>" and text[at - 1] != "-":
            depth -= 1
        elif depth == 0 and text.startswith(separator, at):
            parts.append(text[start:at])
            start = at + len(separator)
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def closing_bracket(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    raise ValueError(f"no closing bracket in {text!r}")


def documented_parameters(signature: str) -> dict[str, str | None]:
    """Parameter names, with their stars, and the text of their defaults: `f(a, *b, c: int = 3) -> d`."""
    start = signature.index("(") + 1
    inside = signature[start : closing_bracket(signature, start)]
    parameters = {}
    for part in split(inside, ","):
        declaration, *default = split(part, " = ")
        parameters[declaration.split(":")[0].strip()] = default[0] if default else None
    return {name: default for name, default in parameters.items() if name not in ("*", "/", "self", "cls")}


def actual_parameters(function: Callable) -> dict[str, str | None]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return {
        stars.get(parameter.kind, "") + name: None
        if parameter.default is inspect.Parameter.empty
        else repr(parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "cls")
    }


def assert_signature(function: Callable, signature: str) -> None:
    """Documented parameters come first, in order, with their defaults; what we add has a default or is starred."""
    expected, actual = documented_parameters(signature), actual_parameters(function)
    if list(expected) in (["*args", "**kwargs"], ["*args", "**kwds"]):
        return  # a wrapper in the reference: says nothing about its parameters
    ours = [name for name in actual if name in expected]
    assert ours == list(expected)
    required = {name for name, default in expected.items() if default is None}  # may have a default here
    assert {name: None if name in required else actual[name] for name in expected} == expected
    extra = [name for name in actual if name not in expected]
    assert all(actual[name] is not None or name.startswith("*") for name in extra), extra


def assert_fields(cls: type, defaults: dict[str, str]) -> None:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, default in defaults.items():
        assert name in fields, f"{cls.__name__} has no field {name}"
        if not default.startswith("<"):  # enums and objects, whose repr is not their value
            assert default_of(fields[name]) == default, f"{cls.__name__}.{name}"


def default_of(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else repr(field.default_factory())


def assert_members(cls: type, members: list[str]) -> None:
    for member in members:
        kind, signature = re.fullmatch(r"(static |classmethod |property )?(.*)", member).groups()
        name = re.match(r"\w+", signature).group(0)
        assert hasattr(cls, name), f"{cls.__name__} has no {name}"
        raw: Any = inspect.getattr_static(cls, name)
        if kind == "property ":
            assert inspect.isdatadescriptor(raw)
        else:
            assert kind != "static " or isinstance(raw, staticmethod)
            assert_signature(getattr(cls, name), signature)


def value_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# Two levels of the reference disagree about these; `trl.PPOTrainer` is the step-level class.
LEVELS_DISAGREE = {"trl.PPOConfig", "trl.PPOTrainer"}


@pytest.mark.parametrize("path", sorted(SIGNATURES.keys() - LEVELS_DISAGREE))
def test_signature_is_the_recorded_one(path):
    value, recorded = value_at(path), SIGNATURES[path]
    if "same_as" in recorded:
        assert value is value_at(recorded["same_as"])
    elif "signature" in recorded:
        assert_signature(value, recorded["signature"])
    else:
        if "fields" in recorded:
            assert_fields(value, recorded["fields"])
        assert_members(value, recorded.get("members", []))
