"""Judges as reward sources: verdicts, comparisons and rankings as one number for each completion."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from itertools import combinations
from numbers import Real
from typing import Any

from trl.rewards.answers import RewardError
from trl.rewards.formats import content_of
from trl.rewards.inputs import RewardInputs, rows_by_prompt
from trl.rewards.judges.bases import BaseBinaryJudge, BasePairwiseJudge, BaseRankJudge

Judge = BaseBinaryJudge | BasePairwiseJudge | BaseRankJudge
GOLD = "gold_completion"


class JudgeSource:
    """A judge as a source.

    A binary judge gives 1 or 0. A pairwise judge compares each completion with every other one of its prompt, and gives the
    share of these comparisons that it wins; equal texts are half a win for both, and nobody is asked. A rank judge gives
    1 to the best completion of a prompt, 0 to the last, and even steps between. Where a judge has no answer (-1, or a
    ranking that is empty) there is no opinion. Prompts and completions of messages are shown as text.

    Args:
        judge: what answers.
        name: under which its metrics are logged; by default the judge's class.
        gold_column: the column of right answers for a binary judge; by default `gold_completion`, if there is one.
        deadline: seconds after which an answer is not waited for any more; None for that of the trainer.
        on_failure: "error" or "skip"; None for that of the trainer.
        judge_options: further arguments of its `judge`: `shuffle_order`, or those of its own. With `return_scores=True` a
            pairwise judge's answers are the probabilities of the first completion, which count instead of wins.

    Raises: TypeError for a judge of no kind above.
    """

    is_async = False

    def __init__(
        self,
        judge: Judge,
        *,
        name: str | None = None,
        gold_column: str | None = None,
        deadline: float | None = None,
        on_failure: str | None = None,
        **judge_options: Any,
    ) -> None:
        scored = {
            BaseBinaryJudge: self._verdicts,
            BasePairwiseJudge: self._win_rates,
            BaseRankJudge: self._rank_scores,
        }
        self._ask = next((ask for kind, ask in scored.items() if isinstance(judge, kind)), None)
        if self._ask is None:
            raise TypeError(
                f"reward_funcs holds a {type(judge).__name__}, expected a judge that is binary, pairwise or ranks. Derive it from "
                "BaseBinaryJudge, BasePairwiseJudge or BaseRankJudge, or wrap it in a reward function."
            )
        self.judge, self.name = judge, name or type(judge).__name__
        self.compares = not isinstance(judge, BaseBinaryJudge)
        self.gold_column, self.deadline, self.on_failure = gold_column, deadline, on_failure
        self.judge_options = judge_options
        if self.compares and gold_column is not None:
            raise ValueError(
                f"gold_column={gold_column!r} is for a binary judge, got a {type(judge).__name__}. Leave it out."
            )

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError where the data set lacks the column of right answers that was asked for."""
        if self.gold_column is not None and self.gold_column not in columns:
            raise ValueError(
                f"judge {self.name!r} needs the column {self.gold_column!r}, the data set has {sorted(columns)}. Add it, or leave "
                "gold_column out."
            )

    def ask(self, inputs: RewardInputs) -> list[float | None]:
        """One number, or None, for each completion.

        Raises: RewardError for answers of another number or kind, and for prompts with a single completion.
        """
        assert self._ask is not None
        return self._ask(inputs)

    # ---- one completion

    def _verdicts(self, inputs: RewardInputs) -> list[float | None]:
        gold = inputs.columns.get(self.gold_column or GOLD)
        given = self._answers(
            [as_text(prompt) for prompt in inputs.prompts],
            [content_of(completion) for completion in inputs.completions],
            **({} if gold is None else {"gold_completions": [content_of(answer) for answer in gold]}),
        )
        return [_number(answer, "1, 0 or -1", self.name) for answer in given]

    # ---- several completions of a prompt

    def _win_rates(self, inputs: RewardInputs) -> list[float | None]:
        texts = [content_of(completion) for completion in inputs.completions]
        wins: list[list[float]] = [[] for _ in texts]
        pairs = [pair for group in self._groups(inputs) for pair in combinations(group, 2)]
        for a, b in pairs:
            if texts[a] == texts[b]:
                wins[a].append(0.5)
                wins[b].append(0.5)
        asked = [(a, b) for a, b in pairs if texts[a] != texts[b]]
        given = self._answers(
            [as_text(inputs.prompts[a]) for a, _ in asked], [[texts[a], texts[b]] for a, b in asked]
        )
        for (a, b), answer in zip(asked, given, strict=True):
            first = self._share_of_first(answer)
            if first is not None:
                wins[a].append(first)
                wins[b].append(1 - first)
        return [sum(own) / len(own) if own else None for own in wins]

    def _share_of_first(self, answer: Any) -> float | None:
        """What a comparison's first completion gains by it."""
        if not self.judge_options.get("return_scores"):
            second = _number(answer, "0, 1 or -1", self.name)
            return None if second is None else 1 - second
        if isinstance(answer, Real) and 0 <= float(answer) <= 1:
            return float(answer)
        return _number(answer, "a probability, or -1", self.name)

    def _rank_scores(self, inputs: RewardInputs) -> list[float | None]:
        groups = self._groups(inputs)
        given = self._answers(
            [as_text(inputs.prompts[group[0]]) for group in groups],
            [[content_of(inputs.completions[row]) for row in group] for group in groups],
        )
        scores: list[float | None] = [None] * len(inputs)
        for group, ranking in zip(groups, given, strict=True):
            if not len(ranking) or -1 in ranking:
                continue
            if sorted(ranking) != list(range(len(group))):
                raise RewardError(
                    f"gave {list(ranking)} for {len(group)} completions of {inputs.row_text(group[0])}, expected each index from 0 to "
                    f"{len(group) - 1} once, the best one's first. Correct what it returns"
                )
            for place, index in enumerate(ranking):
                scores[group[index]] = 1 - place / (len(group) - 1)
        return scores

    def _groups(self, inputs: RewardInputs) -> list[list[int]]:
        groups = rows_by_prompt(inputs.prompts)
        alone = [group[0] for group in groups if len(group) == 1]
        if alone:
            raise RewardError(
                f"compares completions of one prompt, and {len(alone)} of {len(groups)} prompts come with one alone, the first is "
                f"{inputs.row_text(alone[0])}. Draw several of each prompt (GRPO, RLOO), or take a binary judge"
            )
        return groups

    def _answers(self, prompts: list[str], completions: list[Any], **more: Any) -> Sequence[Any]:
        if not prompts:
            return []
        given = self.judge.judge(prompts, completions, **more, **self.judge_options)
        if inspect.isawaitable(given) or len(given) != len(prompts):
            what = "something to be awaited" if inspect.isawaitable(given) else f"{len(given)} answers"
            raise RewardError(
                f"gave {what}, expected {len(prompts)} answers, one for each question. Correct what it returns"
            )
        return given


def _number(answer: Any, allowed: str, name: str) -> float | None:
    """A verdict as a number, None for -1 and None."""
    if answer is None:
        return None
    if isinstance(answer, Real) and float(answer) in (0.0, 1.0, -1.0):
        return None if answer == -1 else float(answer)
    raise RewardError(f"gave {answer!r}, expected {allowed}. Correct what {name} returns")


def as_text(prompt: Any) -> str:
    """A prompt as a judge reads it: its text, what its only message says, or all messages with their roles.

    >>> as_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}])
    'system: Be brief.\\n\\nuser: Why?'
    """
    if isinstance(prompt, str) or len(prompt) == 1:
        return content_of(prompt)
    return "\n\n".join(f"{message.get('role')}: {content_of([message])}" for message in prompt)
