"""Reward sources asked together: who answers, until when, and what becomes of an answer that cannot be used."""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from trl.options.checks import check_one_of
from trl.options.policy_gradient import RewardFailure
from trl.reporting.deadlines import AsyncCalls, DeadlinePassed, Pending, ThreadedCalls, warn_when_slow
from trl.rewards.answers import Answers, RewardError, describe_unusable, read_answers
from trl.rewards.functions import FunctionSource
from trl.rewards.inputs import RewardInputs
from trl.rewards.judge_source import Judge, JudgeSource
from trl.rewards.judges.bases import BaseJudge, BaseRankJudge
from trl.rewards.models import ModelSource
from trl.rewards.result import RewardResult

logger = logging.getLogger(__name__)

MOST_LEFT_BEHIND = 8  # threads of one source that missed their deadline
_IN_OUR_WORDS = (RewardError, DeadlinePassed)


class RewardSource(Protocol):
    """Scores rollouts: `ask` gives one number per row, or None for no opinion; or something to be awaited for them."""

    name: str
    is_async: bool
    deadline: float | None
    on_failure: str | None

    def ask(self, inputs: RewardInputs) -> Any: ...

    def check_columns(self, columns: Collection[str]) -> None: ...


RewardFunc = str | os.PathLike[str] | nn.Module | Callable[..., Any] | Judge | RewardSource


class RewardSources:
    """Every source of a run's rewards, with weights.

    Args:
        reward_funcs: one or several of: a function, an async function, a sequence-classification model with one label or
            its name or path, a judge, a source (`FunctionSource`, `ModelSource`, `JudgeSource`, or anything with their methods).
        weights: of the sources in the sum, 1 by default.
        processing_classes: the tokenizers of the models among the sources: one for each source (None for a function, or
            for the tokenizer saved with the model), or one alone for all (trainers take that for one model only).
        deadline: seconds after which an answer is not waited for any more; None waits. A source's own comes first.
        on_failure: what to do where a source raises, misses its deadline or answers what is no reward: "error" raises
            `RewardError`; "skip" counts the rows as failures, on which it has no opinion. A source's own comes first.
        model_options: further arguments of `ModelSource` (`read`, `policy_tokenizer`, `batch_size`, ...).

    All async sources run at the same time on one event loop, beside the others, which run one after another in the
    caller's thread (on a thread of their own where they have a deadline).

    Example:
        >>> def length(completions, **kwargs):
        ...     return [float(len(text)) for text in completions]
        >>> sources = RewardSources([length])
        >>> sources.score(RewardInputs(prompts=["a", "b"], completions=["xy", "z"])).rewards.tolist()
        [2.0, 1.0]
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        *,
        weights: Sequence[float] | None = None,
        processing_classes: Any = None,
        deadline: float | None = None,
        on_failure: RewardFailure = "error",
        **model_options: Any,
    ) -> None:
        given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if not given:
            raise ValueError(
                "reward_funcs is empty, expected at least one. Pass a function or a reward model."
            )
        self.weights = _weights(weights, len(given))
        _check_deadline(deadline)
        check_one_of("reward_failure", on_failure, get_args(RewardFailure))
        classes = _one_each(processing_classes, len(given))
        self.sources: list[RewardSource] = [
            _source(each, processing, model_options) for each, processing in zip(given, classes, strict=True)
        ]
        self.names = _distinct([source.name for source in self.sources])
        self._deadlines = [deadline if s.deadline is None else s.deadline for s in self.sources]
        self._policies = [s.on_failure or on_failure for s in self.sources]
        for seconds, policy in zip(self._deadlines, self._policies, strict=True):
            _check_deadline(seconds)
            check_one_of("reward_failure", policy, get_args(RewardFailure))
        self._threads = [ThreadedCalls(most_left_behind=MOST_LEFT_BEHIND) for _ in self.names]
        self._loop = AsyncCalls("reward")
        self._warned: set[Any] = set()
        self.unscored_rows = 0  # so far

    @property
    def models(self) -> list[ModelSource]:
        """The sources that are models, for a trainer to place on its device."""
        return [source for source in self.sources if isinstance(source, ModelSource)]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError where a function needs an argument that the data set has no column for: before the first step."""
        for source in self.sources:
            source.check_columns(columns)

    def check_groups(self, completions: int, *, rows: int) -> None:
        """Raise ValueError where a judge compares the completions of a prompt, and cannot: before the first step.

        Each prompt has `completions` in a row, and a process has `rows` of them at once.
        """
        for judge in [
            source for source in self.sources if isinstance(source, JudgeSource) and source.compares
        ]:
            if completions < 2:
                raise ValueError(
                    f"judge {judge.name!r} compares completions of one prompt, and each prompt is completed once here, expected "
                    "at least twice. Take a binary judge, or a trainer of groups (GRPO, RLOO)."
                )
            if rows % completions:
                raise ValueError(
                    f"judge {judge.name!r} compares the {completions} completions of a prompt, and a process has {rows} rows at "
                    f"once, expected a multiple of {completions}: it must see all of a prompt. Change the batch size per device or "
                    "the number of completions."
                )

    def score(self, inputs: RewardInputs) -> RewardResult:
        """Every source's scores of every rollout.

        Raises: RewardError where a source fails whose policy is "error", ValueError for a column that a function lacks.
        """
        self.check_columns(inputs.columns)
        pending: dict[int, Pending] = {}
        try:
            for number, source in enumerate(self.sources):
                if source.is_async:
                    pending[number] = self._loop.submit(source.ask(inputs), self._deadlines[number])
            answers: dict[int, Answers] = {}
            for number in range(len(self.sources)):
                if number not in pending:
                    answers[number] = self._read(number, self._called(number, inputs), inputs)
            for number, call in pending.items():
                answers[number] = self._read(number, self._awaited(number, call), inputs)
        finally:
            for call in pending.values():
                call.future.cancel()
        return self._result([answers[number] for number in range(len(self.sources))], inputs)

    def close(self) -> None:
        """End the event loop of the async sources; it comes back with the next call."""
        self._loop.close()

    # ---- one source

    def _called(self, number: int, inputs: RewardInputs) -> Any:
        """What a source returns, or the exception that it raises."""
        source, seconds = self.sources[number], self._deadlines[number]
        try:
            if seconds is not None:
                (given,) = self._threads[number].run(
                    [(f"reward-{self.names[number]}", lambda: source.ask(inputs))], seconds
                )
            else:
                with warn_when_slow(self.names[number], threading.current_thread()):
                    given = source.ask(inputs)
        except Exception as error:
            return error
        if not inspect.isawaitable(given):
            return given
        return self._awaited(number, self._loop.submit(given, seconds))  # of a plain function around it

    def _awaited(self, number: int, pending: Pending) -> Any:
        with warn_when_slow(self.names[number], pending.thread if pending.until is None else None):
            return self._loop.outcome(pending)

    def _read(self, number: int, given: Any, inputs: RewardInputs) -> Answers:
        """The answers in what a source gave; by its policy, none where they cannot be used."""
        try:
            if isinstance(given, BaseException):
                raise given
            answers = read_answers(given, count=len(inputs))
        except Exception as error:
            self._warn_or_raise(number, error)
            return Answers([None] * len(inputs), dict.fromkeys(range(len(inputs)), "nothing"))
        if answers.unusable:
            self._warn_or_raise(number, RewardError(describe_unusable(answers.unusable, inputs.row_text)))
        return answers

    def _warn_or_raise(self, number: int, error: Exception) -> None:
        what = str(error) if isinstance(error, _IN_OUR_WORDS) else f"raised {type(error).__name__}: {error}"
        what = f"Reward source {self.names[number]!r} {what.rstrip('.')}."
        cause = None if isinstance(error, _IN_OUR_WORDS) else error
        if self._policies[number] == "error":
            raise RewardError(f"{what} reward_failure='skip' would go on without its opinion.") from cause
        if (number, type(error)) not in self._warned:
            self._warned.add((number, type(error)))
            logger.warning(
                "%s It has no opinion on these rows (reward_failure='skip'); the like is counted from now on, and not said again.",
                what,
                exc_info=cause,
            )

    # ---- all of them

    def _result(self, answers: Sequence[Answers], inputs: RewardInputs) -> RewardResult:
        columns = [[math.nan if v is None else v for v in each.values] for each in answers]
        scores = torch.tensor(columns, dtype=torch.float64).view(len(columns), len(inputs)).T.contiguous()
        failures = Counter({name: len(each.unusable) for name, each in zip(self.names, answers, strict=True)})
        nones = {
            name: int(column.isnan().sum()) - failures[name]
            for name, column in zip(self.names, scores.unbind(dim=1), strict=True)
        }
        result = RewardResult(self.names, scores, self.weights, nones, dict(failures))
        self._warn_unscored(result.unscored, inputs)
        return result

    def _warn_unscored(self, unscored: Tensor, inputs: RewardInputs) -> None:
        rows = unscored.nonzero()[:, 0].tolist()
        self.unscored_rows += len(rows)
        if rows and "unscored" not in self._warned:
            self._warned.add("unscored")
            logger.warning(
                "%d of %d rollouts got no reward: no source has an opinion on them, the first is %s. Such rows are counted "
                "from now on, and not spoken of again. Let one of %s answer every row.",
                len(rows),
                len(inputs),
                inputs.row_text(rows[0]),
                list(self.names),
            )


def _source(given: Any, processing_class: Any, model_options: dict[str, Any]) -> RewardSource:
    if not isinstance(given, type) and callable(getattr(given, "ask", None)):
        return given
    if isinstance(given, type):
        kind = "a judge" if issubclass(given, (BaseJudge, BaseRankJudge)) else "a function or a model"
        raise TypeError(
            f"reward_funcs holds the class {given.__name__}, expected {kind}. Make one: {given.__name__}()."
        )
    if isinstance(given, (BaseJudge, BaseRankJudge)):
        return JudgeSource(given)  # type: ignore[arg-type]
    if isinstance(given, (str, os.PathLike, nn.Module)):
        return ModelSource(given, processing_class, **model_options)
    if callable(given):
        return FunctionSource(given)
    raise TypeError(
        f"reward_funcs holds a {type(given).__name__}, expected functions, judges, reward models, or their names or paths. Pass "
        "what gives the rewards itself."
    )


def _weights(weights: Sequence[float] | None, count: int) -> Tensor:
    if weights is None:
        return torch.ones(count, dtype=torch.float64)
    if len(weights) != count:
        raise ValueError(
            f"reward_weights has {len(weights)} weights for {count} reward functions. Give each of them one."
        )
    found = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
    if not found.isfinite().all():
        raise ValueError(f"reward_weights must be finite, got {list(weights)}. Use 0 to log a reward only.")
    return found


def _one_each(processing_classes: Any, count: int) -> list[Any]:
    if not isinstance(processing_classes, (list, tuple)):
        return [processing_classes] * count
    if len(processing_classes) != count:
        raise ValueError(
            f"reward_processing_classes has {len(processing_classes)} entries for {count} reward functions. Give each of "
            "them one, None for a function."
        )
    return list(processing_classes)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, those that come again with a number: each has metrics of its own.

    >>> _distinct(["f", "g", "f"])
    ('f', 'g', 'f_2')
    """
    seen: Counter[str] = Counter()
    found: list[str] = []
    for name in names:
        seen[name] += 1
        while (own := name if seen[name] == 1 else f"{name}_{seen[name]}") in found:
            seen[name] += 1
        found.append(own)
    return tuple(found)


def _check_deadline(seconds: float | None) -> None:
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"reward_deadline must be > 0 seconds, got {seconds}. Use None to wait without end.")
