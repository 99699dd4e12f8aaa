"""A pairwise judge within a run: both orders, answers on disk, further attempts, a deadline, a budget, and the cost."""

import dataclasses
import hashlib
import inspect
import json
import logging
import os
import sqlite3
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from trl.options.checks import check_at_least, check_one_of, warn_caller
from trl.options.methods import JudgeOptions, RewardFailure
from trl.reporting.deadlines import ThreadedCalls, is_abandoned
from trl.reporting.win_rate import JudgeError, shares_of_first
from trl.rewards.judges import BasePairwiseJudge
from trl.tensors.reduce import Weighted

logger = logging.getLogger(__name__)

LONGEST_WAIT = 30.0  # seconds between two attempts
JUDGE_SETTINGS = {field.name: field.default for field in dataclasses.fields(JudgeOptions)}

Question = tuple[str, str, str]
"""A prompt and two completions."""


class ManagedJudge(BasePairwiseJudge):
    """A pairwise judge around another one, with a cache, both orders, further attempts, a deadline and a budget.

    Args:
        cache: file (SQLite) of its answers, by the judge's `cache_key` (default: its class), options, prompt and
            completions. Several processes and runs can use it at the same time. Pairs without an answer are not stored.
        swap_positions: show each pair in both orders. The share of a completion is the mean of both, so a disagreement
            of 0 and 1 is a tie. A pair with one answer has none.
        retries: further attempts after an exception or a missed deadline, and for pairs without an answer.
        deadline: maximum time of an attempt, in seconds; None for no limit, here and below.
        max_calls: maximum number of comparisons sent to the judge, two for each pair with `swap_positions`.
        max_tokens: tokens (the judge's `num_tokens`) after which no comparison is sent.
        on_failure: if the last attempt fails, or the budget is spent: "error" raises, "skip" answers -1 (logged once).

    `cost`, since the start of the process, has comparisons sent (`calls`) and read from the cache (`cached`), those
    without an answer (`unanswered`), failed attempts (`failures`), `tokens`, and `seconds` in the judge. After
    `reward_deadline` no attempt begins, and all pairs of the batch are unanswered. Raises: TypeError for another kind
    of judge, ValueError for limits out of range and for a file that is no cache.

    Example:
        >>> from trl.rewards.judges import RandomPairwiseJudge
        >>> judge = ManagedJudge(RandomPairwiseJudge(), max_calls=1, on_failure="skip")
        >>> judge.judge(["2 + 2?"] * 2, [["4", "5"], ["four", "five"]])[1], judge.cost["calls"]
        (-1, 1.0)
    """

    def __init__(
        self, judge: BasePairwiseJudge, *, cache: str | os.PathLike[str] | None = None, swap_positions: bool = False,
        retries: int = 0, deadline: float | None = None, max_calls: int | None = None, max_tokens: int | None = None,
        on_failure: RewardFailure = "error",
    ) -> None:  # fmt: skip
        if not isinstance(judge, BasePairwiseJudge):
            raise TypeError(f"judge must be a BasePairwiseJudge, got a {type(judge).__name__}.")
        check_at_least("retries", retries, minimum=0, optional=False)
        check_at_least("max_calls", max_calls, minimum=0)
        check_at_least("max_tokens", max_tokens, minimum=0)
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline must be > 0 seconds, got {deadline}. Use None for no limit.")
        check_one_of("on_failure", on_failure, get_args(RewardFailure))
        self.inner, self.name = judge, type(judge).__name__
        self.cache, self.swap_positions, self.retries = cache, swap_positions, retries
        self.deadline, self.max_calls, self.max_tokens = deadline, max_calls, max_tokens
        self.on_failure = on_failure
        self.cost = dict.fromkeys(("calls", "cached", "unanswered", "failures", "tokens", "seconds"), 0.0)
        self._agreed = self._both = 0  # pairs answered in both orders
        self._threads = ThreadedCalls(most_left_behind=8)
        self._warned: set[str] = set()
        if swap_positions and not self._takes_order():
            warn_caller(
                f"judge of a {self.name} has no shuffle_order, so an order of its own is not turned off for "
                "swap_positions. Add it if the judge shuffles."
            )
        if cache is not None:
            Path(cache).parent.mkdir(parents=True, exist_ok=True)
            self._stored(())  # raises now for a file that cannot be used

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True, return_scores: bool = False
    ) -> list[int | float]:
        """0 or 1 for each pair, 0.5 for a tie, -1 for no answer; or how far the first completion wins, in [0, 1]."""
        options: dict[str, bool] = {}
        if self._takes_order():
            options["shuffle_order"] = shuffle_order and not self.swap_positions
        if return_scores and "return_scores" in inspect.signature(self.inner.judge).parameters:
            options["return_scores"] = True
        questions = [(prompt, first, second) for prompt, (first, second) in zip(prompts, completions, strict=True)]
        if self.swap_positions:
            turned = [(prompt, second, first) for prompt, first, second in questions]
            shares = self._shares([*questions, *turned], options)
            halves = shares[: len(questions)], shares[len(questions) :]
            shares = [self._mean(*pair) for pair in zip(*halves, strict=True)]
        else:
            shares = self._shares(questions, options)
        if return_scores:
            return [-1 if share is None else share for share in shares]
        return [-1 if share is None else 0.5 if share == 0.5 else int(share < 0.5) for share in shares]

    def _takes_order(self) -> bool:
        parameters = inspect.signature(self.inner.judge).parameters
        return "shuffle_order" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def _mean(self, share: float | None, of_second: float | None) -> float | None:
        """The share of the first completion, of its shares in both orders."""
        if share is None or of_second is None:
            return None
        other = 1 - of_second
        self._agreed += share == other or (share - 0.5) * (other - 0.5) > 0
        self._both += 1
        return (share + other) / 2

    def agreement(self) -> dict[str, Weighted]:
        """`judge/agreement`: how often both orders agreed since the last call; empty without `swap_positions`."""
        agreement = Weighted(*(torch.tensor(float(count), dtype=torch.float64) for count in (self._agreed, self._both)))
        self._agreed = self._both = 0
        return {"judge/agreement": agreement} if self.swap_positions else {}

    def _shares(self, questions: Sequence[Question], options: Mapping[str, bool]) -> list[float | None]:
        """How far the first completion of each question wins; None without an answer."""
        keys: list[Hashable] = list(range(len(questions)))
        known: dict[Hashable, float] = {}
        if self.cache is not None:
            kind = type(self.inner)
            judge = getattr(self.inner, "cache_key", None) or f"{kind.__module__}.{kind.__qualname__}"
            texts = (json.dumps([judge, sorted(options.items()), question]) for question in questions)
            keys = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
            known = self._stored(keys)
        missing = {key: asked for key, asked in zip(keys, questions, strict=True) if key not in known}
        self.cost["cached"] += len(questions) - len(missing)
        error: Exception | None = None
        for attempt in range(self.retries + 1):
            left = [key for key in missing if key not in known]
            room = self._room(len(left))
            if not room:
                break
            if error is not None:
                time.sleep(min(2.0 ** (attempt - 1), LONGEST_WAIT))
            if is_abandoned():
                break
            try:
                shares = self._attempt([missing[key] for key in left[:room]], options)
            except Exception as failure:
                error = failure
                self.cost["failures"] += 1
                continue
            error = None
            answered = {key: share for key, share in zip(left, shares, strict=False) if share is not None}
            known |= answered if self.cache is None else self._stored(answered, answered.items())
        self.cost["unanswered"] += len(missing if is_abandoned() else missing.keys() - known.keys())
        if error is not None:
            self._fail(error)
        return [known.get(key) for key in keys]

    def _room(self, wanted: int) -> int:
        calls, tokens = int(self.cost["calls"]), int(self.cost["tokens"])
        room = wanted if self.max_calls is None else min(wanted, self.max_calls - calls)
        if self.max_tokens is not None and tokens >= self.max_tokens:
            room = 0
        if room < wanted:
            spent = f"{calls} calls (max_calls={self.max_calls}), {tokens} tokens (max_tokens={self.max_tokens})"
            text = f"has {wanted} comparisons left, and its budget is spent: {spent}. Raise the limit"
            self._fail(JudgeError(self.inner, text), "budget")
        return room

    def _attempt(self, questions: Sequence[Question], options: Mapping[str, bool]) -> list[float | None]:
        prompts, pairs = [prompt for prompt, *_ in questions], [pair for _, *pair in questions]
        call = partial(shares_of_first, self.inner, prompts, pairs, **options)
        tokens, started = getattr(self.inner, "num_tokens", 0), time.monotonic()
        self.cost["calls"] += len(questions)
        try:
            if self.deadline is None:
                return call()
            (outcome,) = self._threads.run([(f"judge-{self.name}", call)], self.deadline)
        finally:
            self.cost["seconds"] += time.monotonic() - started
            self.cost["tokens"] += getattr(self.inner, "num_tokens", 0) - tokens
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _fail(self, error: Exception, kind: str | None = None) -> None:
        if self.on_failure == "error":
            raise error
        if (kind := kind or type(error).__name__) not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "Judge %s failed: %s (%s). Its pairs have no answer (on_failure='skip'; logged once, then counted).",
                self.name, error, type(error).__name__,
            )  # fmt: skip

    def _stored(self, keys: Iterable[Hashable], new: Iterable[tuple[Hashable, float]] = ()) -> dict[Hashable, float]:
        """The answers on disk under these keys, after adding `new` ones; an answer that is there already stays."""
        try:
            with closing(sqlite3.connect(str(self.cache), timeout=60.0)) as opened, opened:
                opened.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, share REAL)")
                opened.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", new)
                select = "SELECT share FROM answers WHERE key = ?"
                rows = [(key, opened.execute(select, (key,)).fetchone()) for key in keys]
        except sqlite3.Error as error:
            fault = f"judge cache '{self.cache}' cannot be used ({error})"
            raise ValueError(f"{fault}. Name another file, or one that does not exist.") from error
        return {key: row[0] for key, row in rows if row is not None}


def managed(judge: BasePairwiseJudge, settings: object, *, on_failure: RewardFailure = "error") -> ManagedJudge:
    """The judge with the settings of `JudgeOptions`. Raises: ValueError for a `ManagedJudge` beside other settings."""
    values = {name: getattr(settings, name) for name in JUDGE_SETTINGS}
    if not isinstance(judge, ManagedJudge):
        options = {name.removeprefix("judge_"): value for name, value in values.items()}
        return ManagedJudge(judge, **options, on_failure=on_failure)
    if changed := {name: value for name, value in values.items() if value != JUDGE_SETTINGS[name]}:
        raise ValueError(f"{changed} was given with a ManagedJudge, which has its own. Set them there.")
    return judge
