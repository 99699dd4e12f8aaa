"""Reward functions: `func(prompts=, completions=, completion_ids=, trainer_state=, **columns)`, plain or async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trl.rewards.result import RewardInputs

_ON_REQUEST = {"completions_ids": "completion_ids", "prompt_ids": "prompt_ids"}  # argument -> field


class FunctionSource:
    """A reward function as a source.

    It takes keyword arguments and returns one number, or None for no score, for each completion. Without `**kwargs` it is
    given the arguments that it names. `completions_ids` (another name of `completion_ids`) and `prompt_ids` are only given to
    functions that name them. `name` (by default the function's) is that of its metrics; `deadline` and `on_failure` as in
    `RewardSource`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        deadline: float | None = None,
        on_failure: str | None = None,
    ) -> None:
        self.function, self.name = function, name or name_of(function)
        self.deadline, self.on_failure = deadline, on_failure
        inner = _without_partial(function)
        called = inspect.getattr_static(type(inner), "__call__", None)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(called)
        self._parameters = parameters_of(function)

    def score(self, inputs: RewardInputs) -> Any:
        """What the function returns. It gets its own copies of lists and messages, so that it can change them."""
        every: dict[str, Any] = {
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
                f"reward function {self.name!r} needs {missing}, the data set has the columns {sorted(columns)}. Add them, or "
                "give the arguments a default."
            )


def _copied(value: Any) -> Any:
    """Copies of lists and dicts at any depth; other values as they are."""
    if isinstance(value, (list, tuple)):
        return [_copied(each) for each in value]
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value


def accepted(every: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The arguments that a function with these parameters accepts; all if it has `**kwargs`."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(every)
    return {name: value for name, value in every.items() if name in parameters}


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, method, partial or callable object.

    >>> name_of(functools.partial(len)), name_of([].append), name_of(functools.partial(functools.partial(max)))
    ('len', 'append', 'max')
    """
    function = _without_partial(function)
    return getattr(function, "__name__", None) or type(function).__name__


def _without_partial(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Its parameters by name; `**columns` if it has no signature.

    Raises: TypeError for a function without parameters, or with positional-only ones.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}
    if not parameters or any(each.kind is each.POSITIONAL_ONLY for each in parameters.values()):
        raise TypeError(
            f"reward function {name_of(function)!r} must take keyword arguments. Write it as "
            "`def f(prompts, completions, **kwargs)`."
        )
    return parameters
