"""Judges as `reward_funcs`: a run learns to the bit what it learns from a function that gives the same numbers."""

import pytest
import torch

from tests.experimental import ppo_runs
from tests.rewards.judges_for_tests import Longer
from tests.trainer import grpo_runs
from trl.experimental.judges import BasePairwiseJudge, BaseRankJudge


def evens(text):
    """Something to judge by: how many of the words, w0 to w63, are even."""
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in text.split())


class MoreEven(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [-1 if evens(a) == evens(b) else int(evens(b) > evens(a)) for a, b in completions]


class MostEvenFirst(BaseRankJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [sorted(range(len(texts)), key=lambda i: -evens(texts[i])) for texts in completions]


def win_rates(prompts, completions, **kwargs):
    """By the definition: over the others of the same prompt that differ in evens, or are the same text."""
    found = []
    for row, (prompt, text) in enumerate(zip(prompts, completions, strict=True)):
        others = [c for i, (p, c) in enumerate(zip(prompts, completions, strict=True)) if p == prompt and i != row]
        shares = [
            0.5 if text == other else float(evens(text) > evens(other))
            for other in others
            if text == other or evens(text) != evens(other)
        ]
        found.append(sum(shares) / len(shares) if shares else None)
    return found


def ranks(prompts, completions, **kwargs):
    found = [0.0] * len(prompts)
    for prompt in set(prompts):
        rows = sorted((i for i, p in enumerate(prompts) if p == prompt), key=lambda i: -evens(completions[i]))
        for place, row in enumerate(rows):
            found[row] = 1 - place / (len(rows) - 1)
    return found


def same_steps(by_judge, by_function, name, twin):
    """Equal gradients of every step, and equal logs under the sources' own names."""
    (judged, kept), (plain, expected) = by_judge, by_function
    assert kept.steps
    for own, other in zip(kept.steps, expected.steps, strict=True):
        assert all(torch.equal(own[parameter], other[parameter]) for parameter in other)
    logs = grpo_runs.logs(judged), grpo_runs.logs(plain)
    for own, other in zip(*logs, strict=True):
        renamed = {key.replace(twin, name): value for key, value in other.items() if "eps" not in key}
        assert {key: own[key] for key in renamed} == pytest.approx(renamed, nan_ok=True)
    return logs[0]


@pytest.mark.parametrize(
    ("method", "judge", "function"), [("grpo", MoreEven(), win_rates), ("rloo", MostEvenFirst(), ranks)]
)
def test_judges_that_compare_in_groups(method, judge, function):
    settings = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4}
    by_judge = grpo_runs.run(method, reward_funcs=judge, **settings)
    by_function = grpo_runs.run(method, reward_funcs=function, **settings)
    name, twin = type(judge).__name__, function.__name__
    logged = same_steps(by_judge, by_function, name, twin)
    assert any(abs(gradient).sum() > 0 for gradient in by_judge[1].steps[0].values())
    assert 0 < logged[0][f"rewards/{name}/mean"] < 1


def test_a_judge_that_compares_needs_groups_before_the_first_step():
    with pytest.raises(ValueError, match="judge 'Longer' compares completions of one prompt"):
        ppo_runs.make(reward_funcs=Longer())
    with pytest.raises(ValueError, match=r"2 or more of each .* got 1 and"):
        grpo_runs.make(
            reward_funcs=Longer(), data=grpo_runs.prompts(), eval_strategy="steps", num_generations_eval=1,
            given={"eval_dataset": grpo_runs.prompts(4)},
        )  # fmt: skip
