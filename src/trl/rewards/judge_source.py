"""Judges as reward sources: verdicts, comparisons and rankings as one number for each completion."""

from collections.abc import Collection, Sequence
from itertools import combinations
from numbers import Real
from typing import Any

from torch import Tensor

from trl.options.checks import warn_caller, warn_unread
from trl.reporting.win_rate import JudgeError, shares_of_first
from trl.rewards.functions import resolve_judge
from trl.rewards.images import as_picture
from trl.rewards.judges import BaseBinaryJudge, BasePairwiseJudge, BaseRankJudge
from trl.rewards.managed_judge import JUDGE_SETTINGS, ManagedJudge, managed
from trl.rewards.ready_made import content_of
from trl.rewards.result import RewardError, RewardInputs, Text, rows_by_prompt

Judge = BaseBinaryJudge | BasePairwiseJudge | BaseRankJudge
GOLD = "gold_completion"


class JudgeSource:
    """A judge as a source.

    A binary judge gives 1 or 0. A pairwise judge compares each completion with the other completions of its prompt; the
    score is the share of comparisons that it wins (two equal texts are half a win for both, without a comparison). A
    rank judge gives 1 to the best completion of a prompt, 0 to the last, with equal steps in between. No answer (-1, or
    an empty ranking) is no score. Messages are formatted as text.

    Args:
        name: of its metrics; by default the judge's class.
        gold_column: the column of reference answers for a binary judge; by default `gold_completion`, if it exists.
        group_size: neighbouring completions that are compared; None for all of a prompt in the batch.
        deadline, on_failure: as in `RewardSource`.
        judge_options: further arguments of its `judge`. With `return_scores=True` a pairwise judge returns
            probabilities that the first completion is better, which are used instead of wins.

    Raises: TypeError for another kind of judge, ValueError for `gold_column` with a judge that compares.
    """

    is_async = False

    def __init__(
        self, judge: Judge, *, name: str | None = None, gold_column: str | None = None, group_size: int | None = None,
        deadline: float | None = None, on_failure: str | None = None, **judge_options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(judge, Judge):
            names = "BaseBinaryJudge, BasePairwiseJudge or BaseRankJudge"
            raise TypeError(f"reward_funcs holds a {type(judge).__name__}, expected a {names}.")
        self.judge, self.name = judge, name or getattr(judge, "name", None) or type(judge).__name__
        self.compares = not isinstance(judge, BaseBinaryJudge)
        self.gold_column, self.deadline, self.on_failure = gold_column, deadline, on_failure
        self.group_size, self.judge_options = group_size, judge_options
        if self.compares and gold_column is not None:
            kind = type(judge).__name__
            raise ValueError(f"gold_column={gold_column!r} is for a BaseBinaryJudge, got a {kind}. Leave it out.")

    def check_columns(self, columns: Collection[str]) -> None:
        if self.gold_column is not None and self.gold_column not in columns:
            needs = f"judge {self.name!r} needs the column {self.gold_column!r}"
            raise ValueError(f"{needs}, the data set has {sorted(columns)}.")

    def score(self, inputs: RewardInputs) -> list[float | None]:
        """One number, or None, each. Raises: RewardError for invalid answers and for a lone completion to compare."""
        texts: Any = [  # or pictures
            as_picture(completion) if isinstance(completion, Tensor) else content_of(completion)
            for completion in inputs.completions
        ]
        if not self.compares:
            gold = inputs.columns.get(self.gold_column or GOLD)
            more = {} if gold is None else {"gold_completions": [content_of(answer) for answer in gold]}
            return list(map(_number, self._answers([as_text(prompt) for prompt in inputs.prompts], texts, **more)))
        groups = rows_by_prompt(inputs.prompts)
        if (size := self.group_size) is not None:
            groups = [list(range(first, first + size)) for first in range(0, len(inputs), size)]
        if alone := [group[0] for group in groups if len(group) == 1]:
            alone_of = f"{len(alone)} of {len(groups)} prompts come with one alone"
            fault = f"compares completions of one prompt, and {alone_of}, the first is {inputs.row_text(alone[0])}"
            raise RewardError(f"{fault}. Sample several for each prompt (GRPO, RLOO), or use a binary judge")
        score = self._win_rates if isinstance(self.judge, BasePairwiseJudge) else self._rank_scores
        return score(inputs, texts, groups)

    def _win_rates(self, inputs: RewardInputs, texts: list[str], groups: list[list[int]]) -> list[float | None]:
        wins: list[list[float]] = [[] for _ in texts]
        pairs = [pair for group in groups for pair in combinations(group, 2)]
        prompts, shown = [as_text(inputs.prompts[a]) for a, _ in pairs], [[texts[a], texts[b]] for a, b in pairs]
        try:
            shares = shares_of_first(self.judge, prompts, shown, **self.judge_options)
        except JudgeError as error:
            raise RewardError(error.text) from None
        for (a, b), first in zip(pairs, shares, strict=True):
            if first is not None:
                wins[a].append(first)
                wins[b].append(1 - first)
        return [sum(shares) / len(shares) if shares else None for shares in wins]

    def _rank_scores(self, inputs: RewardInputs, texts: list[str], groups: list[list[int]]) -> list[float | None]:
        prompts = [as_text(inputs.prompts[group[0]]) for group in groups]
        rankings = self._answers(prompts, [[texts[row] for row in group] for group in groups])
        scores: list[float | None] = [None] * len(inputs)
        for group, ranking in zip(groups, rankings, strict=True):
            if not len(ranking) or -1 in ranking:
                continue
            if sorted(ranking) != list(range(len(group))):
                expected = f"for {len(group)} completions, expected each index once, the best first"
                raise RewardError(f"gave {list(ranking)} {expected}")
            for place, index in enumerate(ranking):
                scores[group[index]] = 1 - place / (len(group) - 1)
        return scores

    def _answers(self, prompts: list[str], completions: list[Any], **more: list[str]) -> Sequence[Any]:
        if not prompts:
            return []
        answers = self.judge.judge(prompts, completions, **more, **self.judge_options)
        if len(answers) != len(prompts):
            raise RewardError(f"gave {len(answers)} answers, expected {len(prompts)}, one for each question")
        return answers


def _number(answer: object) -> float | None:
    if answer is None:
        return None
    if isinstance(answer, Real) and float(answer) in (0.0, 1.0, -1.0):
        return None if answer == -1 else float(answer)
    raise RewardError(f"gave {answer!r}, expected 1, 0 or -1")


def as_text(prompt: Text) -> str:
    """A prompt as text: that of its only message, or of all messages with their roles.

    >>> as_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}])
    'system: Be brief.\\n\\nuser: Why?'
    """
    if isinstance(prompt, str) or len(prompt) == 1:
        return content_of(prompt)
    return "\n\n".join(f"{message.get('role')}: {content_of([message])}" for message in prompt)


def comparison_source(reward_funcs: Any, judge: BasePairwiseJudge | None, args: Any) -> tuple[Any, ManagedJudge | None]:
    """What compares completions: reward functions, or (first) the judge's shares of won comparisons; the judge or None.

    `args` has the settings of `JudgeOptions` and of online DPO. Raises: ValueError without either, TypeError.
    """
    if judge is None and args.judge is not None:
        judge = resolve_judge(args.judge)
    if judge is None:
        reward_funcs = reward_funcs or args.reward_model_path
        if not reward_funcs:
            raise ValueError("Completions are compared by a judge or rewards, got neither. Pass judge or reward_funcs.")
        warn_unread(args, JUDGE_SETTINGS, "without a judge. Leave it out")
        return reward_funcs, None
    for name, value in (("reward_funcs", reward_funcs), ("missing_eos_penalty", args.missing_eos_penalty)):
        if value is not None:
            warn_caller(f"{name} has no effect with a judge, which decides. Leave one of them out.")
    judge = managed(judge, args, on_failure=args.reward_failure)
    return JudgeSource(judge, group_size=args.num_generations, return_scores=True), judge
