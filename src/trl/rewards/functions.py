"""Reward functions: `func(prompts=, completions=, completion_ids=, trainer_state=, **columns)`, plain or async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trl.rewards.inputs import RewardInputs

_ON_REQUEST = {"completions_ids": "completion_ids", "prompt_ids": "prompt_ids"}  # argument -> field


class FunctionSource:
    """A reward function as a source.

    Args:
        function: takes keyword arguments and gives one number, or None for no opinion, per completion. One without
            `**kwargs` is given the arguments that it names; `completions_ids` (another name of `completion_ids`) and
            `prompt_ids` are given to functions that name them.
        name: under which its metrics are logged; by default the function's own.
        deadline: seconds after which an answer is not waited for any more; None for that of the trainer.
        on_failure: "error" or "skip"; None for that of the trainer.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        deadline: float | None = None,
        on_failure: str | None = None,
    ) -> None:
        self.function = function
        self.name = name or name_of(function)
        self.deadline = deadline
        self.on_failure = on_failure
        self.is_async = _is_async(function)
        self._parameters = parameters_of(function)

    def ask(self, inputs: RewardInputs) -> Any:
        """What the function gives: its answers, or something to be awaited for them."""
        return self.function(**self._arguments(inputs))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError where the function needs an argument that is neither a column nor given by the trainer."""
        given = {"prompts", "completions", "completion_ids", "trainer_state", *_ON_REQUEST, *columns}
        missing = [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and name not in given
        ]
        if missing:
            raise ValueError(
                f"reward function {self.name!r} needs {missing}, the data set has the columns {sorted(columns)}. Add "
                "them to the data set, or give the argument a default."
            )

    def _arguments(self, inputs: RewardInputs) -> dict[str, Any]:
        """Lists of its own, so that a function which changes them changes nothing for the next one."""
        every: dict[str, Any] = {
            "prompts": _copied(inputs.prompts),
            "completions": _copied(inputs.completions),
            "completion_ids": _rows(inputs.completion_ids),
            "trainer_state": inputs.trainer_state,
            **{name: _copied(values) for name, values in inputs.columns.items()},
        }
        asked_for = {
            argument: field for argument, field in _ON_REQUEST.items() if argument in self._parameters
        }
        every |= {argument: _rows(getattr(inputs, field)) for argument, field in asked_for.items()}
        return accepted(every, self._parameters)


def _rows(ids: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(row) for row in ids]


def _copied(value: Any) -> Any:
    """Lists and dicts at any depth (messages, say) anew; what they hold as it is."""
    if isinstance(value, (list, tuple)):
        return [_copied(each) for each in value]
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value


def accepted(every: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Of the arguments that there are, those that a function with these parameters takes; all where it takes any."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(every)
    return {name: value for name, value in every.items() if name in parameters}


def name_of(function: Callable[..., Any]) -> str:
    """What a function, method, partial or callable object is called.

    >>> name_of(functools.partial(len)), name_of([].append), name_of(functools.partial(functools.partial(max)))
    ('len', 'append', 'max')
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    method = inspect.getattr_static(type(function), "__call__", None)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Its parameters by name; any for one that cannot be looked at.

    Raises: TypeError for a function that takes none, or some by position only.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}
    if not parameters:
        raise TypeError(
            f"reward function {name_of(function)!r} takes no arguments, expected keyword arguments. Write it as "
            "`def f(prompts, completions, **kwargs)`."
        )
    if unnamed := [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]:
        raise TypeError(
            f"reward function {name_of(function)!r} takes {unnamed} by position only, expected keyword arguments. Write "
            "it as `def f(prompts, completions, **kwargs)`."
        )
    return parameters
