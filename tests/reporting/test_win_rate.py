"""Win rates: shares of judges' answers, Wilson's interval, and lengths taken out."""

import math

import pytest
import torch

from trl.experimental.judges import BasePairwiseJudge
from trl.reporting.win_rate import length_controlled, win_rate, win_shares


class Fixed(BasePairwiseJudge):
    def __init__(self, answers):
        self.answers, self.seen = answers, []

    def judge(self, prompts, completions, shuffle_order=True):
        self.seen += list(zip(prompts, completions, strict=True))
        return self.answers


class Soft(Fixed):
    def judge(self, prompts, completions, shuffle_order=True, return_scores=False):
        return super().judge(prompts, completions)


PAIRS = [["a", "b"], ["c", "c"], ["d", "e"], ["f", "g"]]


def test_shares_of_the_second_text():
    judge = Fixed([1, 0, -1])
    assert win_shares(judge, list("pqrs"), PAIRS) == [1.0, 0.5, 0.0, None]
    assert [prompt for prompt, _ in judge.seen] == ["p", "r", "s"]  # equal texts are no question
    assert win_shares(Soft([0.9, 0.5, None]), list("pqrs"), PAIRS, return_scores=True) == [
        pytest.approx(0.1), 0.5, 0.5, None,
    ]  # fmt: skip


@pytest.mark.parametrize("answers", [[2, 0, 1], [1, 0], ["1", 0, 1], [math.nan, 0, 1]])
def test_other_answers_are_errors(answers):
    with pytest.raises(ValueError, match="Fixed"):
        win_shares(Fixed(answers), list("pqrs"), PAIRS)
    with pytest.raises(TypeError, match="return_scores"):
        win_shares(Fixed([1, 0, 1]), list("pqrs"), PAIRS, return_scores=True)


def test_wilson_interval():
    """15 of 20: 0.5313 to 0.8881 (Agresti and Coull 1998, formula of the score interval)."""
    found = win_rate([1.0] * 15 + [0.0] * 5 + [None])
    assert found[:3] == pytest.approx((0.75, 0.5313, 0.8881), abs=1e-4)
    assert (found.answered, found.unanswered) == (20, 1)
    assert math.isnan(win_rate([None]).rate)


def test_length_is_taken_out():
    """A judge that only looks at the length: half of the pairs at equal lengths; one that never does: its own rate."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(100, 100 + gap) for gap in torch.randint(-60, 90, (400,), generator=generator).tolist()]
    by_length = [1 / (1 + math.exp((first - second) / 20)) for first, second in lengths]
    assert win_rate(by_length).rate > 0.6
    assert length_controlled(by_length, lengths) == pytest.approx(0.5, abs=0.03)
    fair = torch.bernoulli(torch.full((400,), 0.7), generator=generator).tolist()
    assert length_controlled(fair, lengths) == pytest.approx(win_rate(fair).rate, abs=0.03)
