"""Names that import their module on first use (PEP 562), and import paths without a file of their own.

`import trl` costs no torch that way. Both read the table in `trl._names`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trl._names import NAMES, places

_ROOT = os.path.dirname(__file__)


def attach(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a module, for the names that `trl._names` has for it.

    Submodules of a package resolve as attributes, too. A value is looked up once and then kept in the module.
    """
    names = places(module)

    def resolve(name: str) -> Any:
        if name in names:
            home, _, at_home = names[name].partition(":")
            value = getattr(import_module(home), at_home)
        elif _is_submodule(module, name):
            value = import_module(f"{module}.{name}")
        else:
            raise AttributeError(_unknown(module, name, names), name=name, obj=sys.modules[module])
        setattr(sys.modules[module], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module]), *names})

    return resolve, listing, list(names)


class TableFinder:
    """Finds the modules of `trl._names` that have no file; such a module is empty but for its lazy names."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for every other module, and for those that have a file."""
        if fullname not in NAMES or _has_file(fullname):
            return None
        is_package = any(other.startswith(f"{fullname}.") for other in NAMES)
        spec = ModuleSpec(fullname, cls, origin=_path(fullname) + ".py", is_package=is_package)  # pyright: ignore
        spec.has_location = True
        return spec

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """The usual module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Give the module its names."""
        module.__doc__ = f"Known import path. The names of {module.__name__} live elsewhere, see `trl._names`."
        module.__getattr__, module.__dir__, module.__all__ = attach(module.__name__)  # type: ignore[attr-defined]

    @staticmethod
    def get_source(fullname: str) -> str:
        """The imports that the module stands for, as `inspect.getsource` and tracebacks show them."""
        entries = ([*place.split(":"), name] for name, place in places(fullname).items())
        return "".join(f"from {home} import {at_home} as {name}\n" for home, at_home, name in entries)


def install() -> None:
    """Let imports find the paths of the table; before other finders, as a folder left over would win otherwise."""
    if TableFinder not in sys.meta_path:
        sys.meta_path.insert(0, TableFinder)


def _path(module: str) -> str:
    return os.path.join(_ROOT, *module.split(".")[1:])


def _has_file(module: str) -> bool:
    path = _path(module)
    return os.path.exists(f"{path}.py") or os.path.exists(os.path.join(path, "__init__.py"))


def _is_submodule(module: str, name: str) -> bool:
    has_path = "__path__" in vars(sys.modules[module]) and not name.startswith("_")
    return has_path and find_spec(f"{module}.{name}") is not None


def _unknown(module: str, name: str, names: Sequence[str] | dict[str, str]) -> str:
    close = get_close_matches(name, names, n=3)
    remedy = f"Did you mean {' or '.join(close)}?" if close else f"`dir({module})` lists what there is."
    return f"{module} has no name {name!r}. {remedy}"
