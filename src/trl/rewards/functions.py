"""Reward functions, `func(prompts=, completions=, completion_ids=, **columns)`, plain or async, also by their names."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trl.data.validation import COMPLETIONS
from trl.options.secrets import without_partial
from trl.options.spelling import did_you_mean
from trl.rewards.judges import BaseJudge, BasePairwiseJudge, BaseRankJudge
from trl.rewards.result import RewardInputs

Function = Callable[..., Any]  # of keyword arguments; returns a number, or None, for each completion

READY_MADE = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
SOFT_OVERLONG = "get_soft_overlong_punishment"
_LENGTHS = re.compile(r"\((?:max_completion_len=)?(\d+),(?:soft_punish_cache=)?(\d+)\)")
_SWAPPED = re.compile(r"\((soft_punish_cache=\d+),(max_completion_len=\d+)\)")
_ON_REQUEST = {"completions_ids": "completion_ids", "prompt_ids": "prompt_ids"}  # argument -> field


class FunctionSource:
    """A reward function as a source: it takes keyword arguments and returns a number, or None, for each completion.

    Without `**kwargs` it is given the arguments that it names, `completions_ids` and `prompt_ids` only then. `name` is
    that of its metrics (by default the function's); `deadline` and `on_failure` as in `RewardSource`.
    """

    def __init__(
        self, function: Function, *, name: str | None = None, deadline: float | None = None,
        on_failure: str | None = None,
    ) -> None:  # fmt: skip
        self.function, self.name = function, name or name_of(function)
        self.deadline, self.on_failure = deadline, on_failure
        inner = without_partial(function)
        called = inspect.getattr_static(type(inner), "__call__", None)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(called)
        self._parameters = parameters_of(function)

    def score(self, inputs: RewardInputs) -> Any:
        """What the function returns. It gets its own copies of lists and messages, so that it can change them."""
        every: dict[str, object] = {
            "prompts": _copied(inputs.prompts),
            "completions": _copied(inputs.completions),
            "completion_ids": _copied(inputs.completion_ids),
            "trainer_state": inputs.trainer_state,
            **{name: _copied(values) for name, values in inputs.columns.items()},
        }
        for argument, field in _ON_REQUEST.items():
            if argument in self._parameters:
                every[argument] = _copied(getattr(inputs, field))
        return self.function(**accepted(every, self._parameters))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if the function needs an argument that is neither a column nor given by the trainer."""
        available = {"prompts", "completions", "completion_ids", "trainer_state", *_ON_REQUEST, *columns}
        required = [parameter for parameter in self._parameters.values() if parameter.default is parameter.empty]
        named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        missing = [one.name for one in required if one.kind in named and one.name not in available]
        if missing:
            remedy = "Add them, or give the arguments a default."
            if missing == ["solution"] and (answers := [name for name in COMPLETIONS if name in columns]):
                remedy = f"Rename one: --column_mapping {answers[0]}=solution."
            needs = f"reward function {self.name!r} needs {missing}"
            raise ValueError(f"{needs}, the data set has the columns {sorted(columns)}. {remedy}")


def column_reward(name: str) -> FunctionSource:
    """The source of rewards that stand in a column of this name."""
    return FunctionSource(lambda **columns: list(columns[name]), name=name)


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def accepted(every: Mapping[str, object], parameters: Mapping[str, inspect.Parameter]) -> dict[str, object]:
    """The arguments that a function with these parameters accepts; all if it has `**kwargs`."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(every)
    return {name: value for name, value in every.items() if name in parameters}


def name_of(function: Function) -> str:
    """The name of a function, method, partial or callable object.

    >>> name_of(functools.partial(len)), name_of([].append), name_of(functools.partial(functools.partial(max)))
    ('len', 'append', 'max')
    """
    inner = without_partial(function)
    return getattr(inner, "__name__", None) or type(inner).__name__


def parameters_of(function: Function) -> Mapping[str, inspect.Parameter]:
    """Its parameters by name; `**columns` if unknown. Raises: TypeError for none, and for positional-only ones."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}
    if not parameters or any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters.values()):
        example = "`def f(prompts, completions, **kwargs)`"
        raise TypeError(f"reward function {name_of(function)!r} must take keyword arguments. Write it as {example}.")
    return parameters


# --- by name, as given on a command line


def __getattr__(name: str) -> dict[str, Function | str]:
    """`reward_funcs_registry`: the ready-made functions by name, imported on first use."""
    if name != "reward_funcs_registry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return {known: _resolve(known) for known in (*READY_MADE, SOFT_OVERLONG)}


def resolve_reward_funcs(names: Sequence[str]) -> list[Function | str]:
    """Reward functions and judges by name or dotted path; folders and Hub names of reward models stay as they are.

    Names are those of `trl.rewards`; lengths may follow in brackets, as in
    `get_soft_overlong_punishment(max_completion_len=512,soft_punish_cache=64)` (default: 1280 and 256). Dotted paths
    name functions or judges' classes, also in the working directory. Raises: ValueError for any other name.
    """
    return [_resolve(name) for name in names]


def resolve_judge(name: str) -> BasePairwiseJudge:
    """A pairwise judge: pair_rm, openai, hf, random or a dotted path. Raises: ValueError for another name."""
    from trl.rewards import judges

    known = {
        "pair_rm": judges.PairRMJudge,
        "openai": functools.partial(judges.OpenAIPairwiseJudge, max_requests=None),  # judge_max_calls limits them
        "hf": judges.HfPairwiseJudge,
        "random": judges.RandomPairwiseJudge,
    }
    if name in known:
        return known[name]()

    def refused(reason: str = "") -> ValueError:
        others = f"{', '.join(known)}, or a path such as my_module.MyJudge"
        return ValueError(f"judge must be one of {others}, got {name!r}.{reason}")

    if "." not in name:
        raise refused()
    module, judge = _imported(name, refused)
    if not _is_judge(judge):
        there = sorted(n for n, v in vars(module).items() if _is_judge(v))
        raise refused(f" It is no class of a judge. Module {module.__name__!r} has {there}.")
    return judge()


def _resolve(name: str) -> Function | str:
    if name in READY_MADE:
        return getattr(import_module("trl.rewards"), name)
    if name.partition("(")[0] == SOFT_OVERLONG:
        from trl.rewards.ready_made import get_soft_overlong_punishment

        lengths = re.sub(r"\s*([(),=])\s*", r"\1", name.removeprefix(SOFT_OVERLONG) or "(1280,256)")
        match = _LENGTHS.fullmatch(_SWAPPED.sub(r"(\2,\1)", lengths))
        if match is None:
            example = f"{SOFT_OVERLONG}(max_completion_len=1280,soft_punish_cache=256)"
            raise ValueError(f"reward function {name!r} cannot be read, expected {example}, quoted in the shell.")
        return get_soft_overlong_punishment(int(match[1]), int(match[2]))
    if Path(name).expanduser().is_dir():
        return name
    if name.partition(":")[0].endswith(".py"):
        raise ValueError(f"reward function {name!r} is a file. Name a function in it: folder.file.function.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise _unknown(name, " There is no such folder.")
    if "/" in name:
        return name
    if "." not in name:
        raise _unknown(name)
    module, function = _imported(name, functools.partial(_unknown, name))
    if _is_judge(function):
        return function()
    if isinstance(function, type) or not callable(function):
        others = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        wrong = f"reward function {name!r} is no function, and no class of a judge"
        raise ValueError(f"{wrong}. Module {module.__name__!r} has {others}.")
    return function


def _is_judge(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, (BaseJudge, BaseRankJudge))


def _imported(path: str, refused: Callable[[str], ValueError]) -> tuple[ModuleType, Any]:
    """The module of a dotted path, also from the working directory, and what the path names in it (or None)."""
    (module_name, _, attribute), here = path.rpartition("."), os.getcwd()
    sys.path.insert(0, here)
    try:
        module = import_module(module_name)
        return module, getattr(module, attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import of the module itself fails
        raise refused(f" There is no module {error.name!r} here ({here}) or installed.") from error
    finally:
        sys.path.remove(here)


def _unknown(name: str, reason: str = "") -> ValueError:
    known = (*READY_MADE, SOFT_OVERLONG)
    guess = did_you_mean(name.rpartition(".")[2], known)
    return ValueError(
        f"reward function {name!r} is unknown.{reason}{guess} Known are {', '.join(known)}; others are given as "
        "'module.function', reward models as a folder or 'owner/name'."
    )
