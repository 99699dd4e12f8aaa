"""Several reward sources of one run: weights, deadlines, and what happens if a source fails."""

import inspect
import itertools
import logging
import math
import os
import threading
from collections.abc import Collection, Sequence
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from trl.data.rendering import Fields, ProcessingClass
from trl.options.checks import check_one_of
from trl.options.methods import RewardFailure
from trl.reporting.deadlines import AsyncCalls, DeadlinePassed, Pending, ThreadedCalls, warn_when_slow
from trl.rewards.functions import Function, FunctionSource
from trl.rewards.judge_source import Judge, JudgeSource
from trl.rewards.judges import BaseJudge, BaseRankJudge
from trl.rewards.models import ModelSource
from trl.rewards.result import Answers, RewardError, RewardInputs, RewardResult, read_answers, refusing_exit

logger = logging.getLogger(__name__)

MOST_LEFT_BEHIND = 8  # threads of one source that missed their deadline


class RewardSource(Protocol):
    """Scores completions: a number or None each. `deadline` and `on_failure` replace the run's unless None."""

    name: str
    is_async: bool
    deadline: float | None
    on_failure: str | None

    def score(self, inputs: RewardInputs) -> Any: ...

    def check_columns(self, columns: Collection[str]) -> None: ...


RewardFunc = str | os.PathLike[str] | nn.Module | Function | Judge | RewardSource
ProcessingClasses = ProcessingClass | Sequence[ProcessingClass | None] | None


class RewardSources:
    """All reward sources of a run: functions (plain or async), models with one label (or their names or paths), judges.

    Async sources run at the same time on one event loop. Meanwhile the others run one after another in the caller's
    thread, or on a thread of their own if they have a deadline.

    Args:
        weights: of the sources in the sum, 1 by default.
        processing_classes: the tokenizer of the only reward model, or a list with an entry for each source (None: the
            one saved with the model, else the policy's).
        deadline: maximum time of one call of a source in seconds; None for no limit.
        on_failure: if a source raises, misses its deadline or returns an invalid value: "error" raises `RewardError`,
            "skip" counts the rows as failures without a score of this source.
        model_options: further arguments of `ModelSource`.

    Example:
        >>> def length(completions, **kwargs):
        ...     return [float(len(text)) for text in completions]
        >>> sources = RewardSources([length])
        >>> sources.score(RewardInputs(prompts=["a", "b"], completions=["xy", "z"])).rewards.tolist()
        [2.0, 1.0]
    """

    def __init__(
        self, reward_funcs: RewardFunc | Sequence[RewardFunc], *, weights: Sequence[float] | None = None,
        processing_classes: ProcessingClasses = None, deadline: float | None = None,
        on_failure: RewardFailure = "error", **model_options: Any,
    ) -> None:  # fmt: skip
        funcs: Any = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if not funcs:
            raise ValueError("reward_funcs is empty. Pass at least one function, reward model or judge.")
        _check_limits(deadline, on_failure)  # before reward models are loaded
        factors = [1.0] * len(funcs) if weights is None else [*weights]
        if len(factors) != len(funcs):
            wrong = f"reward_weights has {len(factors)} weights for {len(funcs)} reward functions"
            raise ValueError(f"{wrong}. Give one for each.")
        self.weights = torch.tensor([float(factor) for factor in factors], dtype=torch.float64)
        if not self.weights.isfinite().all():
            raise ValueError(f"reward_weights must be finite, got {factors}. Use 0 to only log a reward.")
        classes = _one_each(processing_classes, funcs)
        self.sources: list[RewardSource] = [
            _source(func, processing, model_options) for func, processing in zip(funcs, classes, strict=True)
        ]
        self.names = _distinct([source.name for source in self.sources])
        self._deadlines = [deadline if s.deadline is None else s.deadline for s in self.sources]
        self._policies = [s.on_failure or on_failure for s in self.sources]
        for seconds, policy in zip(self._deadlines, self._policies, strict=True):
            _check_limits(seconds, policy)
        self._threads = [ThreadedCalls(most_left_behind=MOST_LEFT_BEHIND) for _ in self.names]
        self._loop = AsyncCalls("reward")
        self._warned: set[object] = set()

    @property
    def models(self) -> list[ModelSource]:
        return [source for source in self.sources if isinstance(source, ModelSource)]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if a source needs a column that the dataset does not have."""
        for source in self.sources:
            source.check_columns(columns)

    def check_groups(self, completions: int, *, rows: int) -> None:
        """Raise ValueError if a judge compares groups of `completions` and a process has no whole groups in `rows`."""
        judges = [source for source in self.sources if isinstance(source, JudgeSource) and source.compares]
        if judges and (completions < 2 or rows % completions):
            expected = "2 or more of each and whole groups in a process"
            fault = f"judge {judges[0].name!r} compares completions of one prompt, expected {expected}"
            remedy = "Use a binary judge or a trainer with groups (GRPO, RLOO), or change the batch size per device"
            raise ValueError(f"{fault}, got {completions} and {rows} rows. {remedy}.")

    def score(self, inputs: RewardInputs, *, lost: Tensor | None = None) -> RewardResult:
        """Scores by all sources, none of `lost` rows. Raises: RewardError, ValueError for a missing column."""
        self.check_columns(inputs.columns)
        kept = torch.ones(len(inputs), dtype=torch.bool) if lost is None else ~lost
        some = inputs if kept.all() else inputs.take(kept.nonzero()[:, 0].tolist())
        # Models that are sharded, and judges that compare, need the same rows in any case.
        rows_of = [some if isinstance(source, FunctionSource) else inputs for source in self.sources]
        pending: dict[int, Pending] = {}
        try:
            for number, source in enumerate(self.sources):
                if source.is_async and len(rows_of[number]):
                    pending[number] = self._loop.submit(source.score(rows_of[number]), self._deadlines[number])
            answers: dict[int, Answers] = {}
            for number in sorted(range(len(self.sources)), key=pending.__contains__):  # those that wait are last
                call, rows = pending.get(number), rows_of[number]
                answer = self._call(number, rows) if call is None else self._await(number, call)
                answers[number] = self._read(number, answer, rows)
        finally:
            for call in pending.values():
                call.future.cancel()
        return self._result([answer for _, answer in sorted(answers.items())], inputs, kept)

    def _call(self, number: int, inputs: RewardInputs) -> object:
        """What a source returns, or the exception that it raises."""
        source, seconds = self.sources[number], self._deadlines[number]
        if not len(inputs):
            return []
        try:
            if seconds is None:
                with refusing_exit(), warn_when_slow(self.names[number], threading.current_thread()):
                    answer = source.score(inputs)
            else:
                name = f"reward-{self.names[number]}"
                (answer,) = self._threads[number].run([(name, lambda: source.score(inputs))], seconds)
        except Exception as error:
            return error
        # A plain function may return a coroutine.
        return self._await(number, self._loop.submit(answer, seconds)) if inspect.isawaitable(answer) else answer

    def _await(self, number: int, pending: Pending) -> object:
        with warn_when_slow(self.names[number], pending.thread if pending.until is None else None):
            return self._loop.outcome(pending)

    def _read(self, number: int, answer: object, inputs: RewardInputs) -> Answers:
        """The scores that a source returned; with "skip", None for rows without a valid one."""
        try:
            if isinstance(answer, BaseException):
                with refusing_exit():
                    raise answer
            answers = read_answers(answer, count=len(inputs))
        except Exception as error:
            self._warn_or_raise(number, error)
            return Answers([None] * len(inputs), dict.fromkeys(range(len(inputs)), "nothing"))
        if answers.unusable:
            row = min(answers.unusable)
            more = f" and for {len(answers.unusable) - 1} more rows" if len(answers.unusable) > 1 else ""
            text = f"gave {answers.unusable[row]} for row {row} ({inputs.row_text(row)}){more}"
            self._warn_or_raise(number, RewardError(f"{text}, expected a finite number, or None for no score"))
        return answers

    def _warn_or_raise(self, number: int, error: Exception) -> None:
        is_ours = isinstance(error, (RewardError, DeadlinePassed))
        text = str(error).rstrip(".") if is_ours else f"raised {type(error).__name__}: {error}".rstrip(".")
        text, cause = f"Reward source {self.names[number]!r} {text}.", None if is_ours else error
        if self._policies[number] == "error":
            raise RewardError(f"{text} reward_failure='skip' continues without its scores.") from cause
        if (number, type(error)) not in self._warned:
            self._warned.add((number, type(error)))
            skipped = "These rows have no score of it (reward_failure='skip'; logged once, then counted)."
            logger.warning("%s %s", text, skipped, exc_info=cause)

    def _result(self, answers: Sequence[Answers], inputs: RewardInputs, kept: Tensor) -> RewardResult:
        scores = torch.full((len(inputs), len(answers)), math.nan, dtype=torch.float64)
        for column, source_answers in enumerate(answers):
            values = torch.tensor([math.nan if v is None else v for v in source_answers.values], dtype=scores.dtype)
            scores[kept, column] = values[kept] if len(values) == len(kept) else values
        failures = {name: len(of_source.unusable) for name, of_source in zip(self.names, answers, strict=True)}
        missing = zip(self.names, scores[kept].isnan().sum(dim=0).tolist(), strict=True)
        nones = {name: count - failures[name] for name, count in missing}
        result = RewardResult(self.names, scores, self.weights, nones, failures)
        rows = (result.unscored & kept).nonzero()[:, 0].tolist()
        if rows and "unscored" not in self._warned:
            self._warned.add("unscored")
            logger.warning(
                "%d of %d rollouts got no reward: every reward function returned None, or the judge gave no verdict "
                "(%s). The first is %s. They are not trained on. Logged once.",
                len(rows), len(inputs), ", ".join(self.names), inputs.row_text(rows[0]),
            )  # fmt: skip
        return result


def _source(func: RewardFunc, processing_class: ProcessingClass | None, options: Fields) -> RewardSource:
    if isinstance(func, type):
        raise TypeError(f"reward_funcs holds the class {func.__name__}. Make one: {func.__name__}().")
    if callable(getattr(func, "check_columns", None)):
        return func  # type: ignore[return-value]
    if isinstance(func, (BaseJudge, BaseRankJudge)):
        return JudgeSource(func)  # type: ignore[arg-type]
    if isinstance(func, (str, os.PathLike, nn.Module)):
        return ModelSource(func, processing_class, **options)
    if callable(func):
        return FunctionSource(func)
    allowed = "functions, judges, reward models, or their names or paths"
    raise TypeError(f"reward_funcs holds a {type(func).__name__}, expected {allowed}.")


def _check_limits(deadline: float | None, on_failure: str) -> None:
    if deadline is not None and not (deadline > 0 and math.isfinite(deadline)):
        raise ValueError(f"reward_deadline must be > 0 seconds, got {deadline}. Use None for no limit.")
    check_one_of("reward_failure", on_failure, get_args(RewardFailure))


def _one_each(classes: ProcessingClasses, sources: Sequence[RewardFunc]) -> list[ProcessingClass | None]:
    if not isinstance(classes, Sequence):
        models = sum(isinstance(source, (nn.Module, str, os.PathLike)) for source in sources)
        classes = [classes] * (len(sources) if classes is None or models < 2 else 1)
    if len(classes) != len(sources):
        fault = f"reward_processing_classes has {len(classes)} entries for {len(sources)} reward functions"
        raise ValueError(f"{fault}. Give one for each; None is the tokenizer saved with the model.")
    return list(classes)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number for those that repeat.

    >>> _distinct(["f", "g", "f"])
    ('f', 'g', 'f_2')
    """
    distinct: list[str] = []
    for name in names:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        distinct.append(next(candidate for candidate in candidates if candidate not in distinct))
    return tuple(distinct)
