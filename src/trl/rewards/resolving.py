"""Reward functions and models by name, as given on a command line."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from trl.rewards.judges.bases import BaseJudge, BaseRankJudge

READY_MADE = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
SOFT_OVERLONG = "get_soft_overlong_punishment"
SOFT_OVERLONG_LENGTHS = {"max_completion_len": 1280, "soft_punish_cache": 256}


def __getattr__(name: str) -> Any:
    """`reward_funcs_registry`: the ready-made functions by name, imported on first use."""
    if name != "reward_funcs_registry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return {known: _resolve(known) for known in (*READY_MADE, SOFT_OVERLONG)}


def resolve_reward_funcs(names: Sequence[str]) -> list[Callable[..., Any] | str]:
    """Reward functions and judges by name or dotted path; paths and Hub names of reward models are returned as they are.

    Known names are those of `trl.rewards`; `get_soft_overlong_punishment` takes its lengths in brackets, for example
    `get_soft_overlong_punishment(max_completion_len=512,soft_punish_cache=64)`, by default 1280 and 256. A dotted path is that of a
    function, or of a judge's class (called without arguments), in a module that can be imported, also from the working directory.

    Raises: ValueError for any other name.
    """
    return [_resolve(name) for name in names]


def _resolve(name: str) -> Callable[..., Any] | str:
    if name in READY_MADE:
        return getattr(import_module("trl.rewards"), name)
    if name.partition("(")[0] == SOFT_OVERLONG:
        from trl.rewards.ready_made import get_soft_overlong_punishment

        return get_soft_overlong_punishment(**(_lengths(name) or SOFT_OVERLONG_LENGTHS))
    if Path(name).expanduser().is_dir():
        return name
    file, _, function = name.partition(":")
    if file.endswith(".py"):
        path = Path(file)
        outside = path.is_absolute() or ".." in path.parts
        module = path.stem if outside else ".".join(path.with_suffix("").parts)
        where = f"in the folder '{path.parent}'" if outside else "from here"
        dotted = f"{module}.{function.lstrip(':') or '<function>'}"
        raise ValueError(f"reward function {name!r} is a file. Name a function in it, {where}: {dotted}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"reward function {name!r} looks like a path, and there is no such folder. Give the folder of a reward model, a Hub name "
            "such as 'owner/name', or a function as 'module.function'."
        )
    if "/" in name or os.sep in name:
        return name
    if "." in name:
        return _function(name)
    raise _unknown(name)


def _lengths(call: str) -> dict[str, int]:
    """The arguments of `get_soft_overlong_punishment(...)`, whole numbers."""
    try:
        node: Any = ast.parse(call, mode="eval").body
        if isinstance(node, ast.Name):
            return {}
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        given = dict(zip(SOFT_OVERLONG_LENGTHS, map(ast.literal_eval, node.args), strict=False)) | keywords
        if given and set(given) == set(SOFT_OVERLONG_LENGTHS) and all(type(v) is int for v in given.values()):
            return given  # type: ignore[return-value]
    except (SyntaxError, ValueError, AttributeError):
        pass
    raise ValueError(
        f"reward function {call!r} cannot be read, expected {SOFT_OVERLONG}(max_completion_len=1280,soft_punish_cache=256), with two "
        "whole numbers. Quote it in the shell."
    )


def _function(path: str) -> Any:
    module_name, _, attribute = path.rpartition(".")
    module = _imported(module_name, path)
    found: Any = getattr(module, attribute, None)
    if found is None:
        others = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ValueError(
            f"reward function {path!r}: module {module_name!r} has no {attribute!r}. Name one of {others}."
        )
    if isinstance(found, type) and issubclass(found, (BaseJudge, BaseRankJudge)):
        return found()
    if isinstance(found, type) or not callable(found):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise ValueError(f"reward function {path!r} is a {kind}, expected a function or a judge's class.")
    return found


def _imported(module_name: str, path: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import of the module itself fails
        raise _unknown(path, f" There is no module {error.name!r} here ({here}) or installed.") from error
    finally:
        sys.path.remove(here)


def _unknown(name: str, reason: str = "") -> ValueError:
    known = (*READY_MADE, SOFT_OVERLONG)
    close = get_close_matches(name.rpartition(".")[2], known, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    return ValueError(
        f"reward function {name!r} is unknown.{reason}{guess} Known are {', '.join(known)}; others are given as 'module.function', "
        "reward models as a folder or 'owner/name'."
    )
