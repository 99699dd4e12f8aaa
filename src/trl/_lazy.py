"""Public names that import their module on first use (PEP 562), so that `import trl` costs no torch."""

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def attach(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, for names that live elsewhere.

    `names` maps each public name to `"module.path"`, or to `"module.path:attribute"` where it is called otherwise there.
    Submodules of `package` resolve as attributes, too. A value is looked up once and then kept in the package.
    """

    def resolve(name: str) -> Any:
        if name in names:
            value = _load(name, names[name])
        elif _is_submodule(package, name):
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(_unknown(package, name, names), name=name, obj=sys.modules[package])
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return resolve, listing, list(names)


def _load(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute or name)


def _is_submodule(package: str, name: str) -> bool:
    has_path = "__path__" in vars(sys.modules[package])
    return has_path and not name.startswith("_") and find_spec(f"{package}.{name}") is not None


def _unknown(package: str, name: str, names: Mapping[str, str]) -> str:
    close = get_close_matches(name, names, n=3)
    remedy = f"Did you mean {' or '.join(close)}?" if close else f"`dir({package})` lists what there is."
    return f"{package} has no name {name!r}. {remedy}"
