"""Reward functions and models by name, as given on a command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from trl.rewards.judges import BaseJudge, BaseRankJudge

READY_MADE = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
SOFT_OVERLONG = "get_soft_overlong_punishment"
_LENGTHS = re.compile(r"\((?:max_completion_len=)?(\d+),(?:soft_punish_cache=)?(\d+)\)")


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

        lengths = re.sub(r"\s*([(),=])\s*", r"\1", name.removeprefix(SOFT_OVERLONG) or "(1280,256)")
        given = _LENGTHS.fullmatch(lengths)
        if given is None:
            raise ValueError(
                f"reward function {name!r} cannot be read, expected "
                f"{SOFT_OVERLONG}(max_completion_len=1280,soft_punish_cache=256), quoted in the shell."
            )
        return get_soft_overlong_punishment(int(given[1]), int(given[2]))
    if Path(name).expanduser().is_dir():
        return name
    if name.partition(":")[0].endswith(".py"):
        raise ValueError(f"reward function {name!r} is a file. Name a function in it: folder.file.function.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise _unknown(name, " There is no such folder.")
    if "/" in name:
        return name
    if "." in name:
        return _function(name)
    raise _unknown(name)


def _function(path: str) -> Any:
    module_name, _, attribute = path.rpartition(".")
    module = _imported(module_name, path)
    found: Any = getattr(module, attribute, None)
    if isinstance(found, type) and issubclass(found, (BaseJudge, BaseRankJudge)):
        return found()
    if isinstance(found, type) or not callable(found):
        others = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ValueError(
            f"reward function {path!r} is no function, and no class of a judge. Module {module_name!r} has {others}."
        )
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
