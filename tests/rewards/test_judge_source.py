"""Judges as reward sources: one number for each completion, worked out by hand."""

import logging
import math

import pytest

from tests.rewards.judges_for_tests import IsLong, Longer, LongestFirst
from trl.experimental.judges import BaseJudge, BasePairwiseJudge
from trl.rewards import JudgeSource, RewardError, RewardInputs, RewardSources

NONE = math.nan


def inputs(prompts, completions, **columns):
    return RewardInputs(prompts=prompts, completions=completions, columns=columns)


TWO_GROUPS = inputs(["p", "q", "p", "p", "q"], ["aaaa", "b", "a", "aa", "b"])


def scores_of(judge, given=TWO_GROUPS, **options):
    result = RewardSources(judge, **options).score(given)
    return result.scores[:, 0].tolist()


def same(found, expected):
    return found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_a_binary_judge():
    given = inputs(["p"] * 3, ["abcd", "", "ab"])
    assert same(scores_of(IsLong()), [1, 0, 0, 0, 0])
    assert same(scores_of(IsLong(), given), [1, NONE, 0])
    assert RewardSources(IsLong()).names == ("IsLong",)
    result = RewardSources(IsLong()).score(given)
    assert result.metrics()["rewards/IsLong/mean"] == 0.5
    assert result.nones == {"IsLong": 1}


def test_right_answers_come_from_a_column():
    gold = inputs(["p"] * 2, ["abcd", "abcd"], gold_completion=["abc", "abcde"], short=["", ""])
    assert same(scores_of(IsLong(), gold), [1, 0])
    assert same(scores_of(JudgeSource(IsLong(), gold_column="short"), gold), [1, 1])
    with pytest.raises(ValueError, match="needs the column 'answer', the data set has"):
        RewardSources(JudgeSource(IsLong(), gold_column="answer")).check_columns(["short"])
    with pytest.raises(ValueError, match="gold_column='short' is for a BaseBinaryJudge, got a Longer"):
        JudgeSource(Longer(), gold_column="short")


def test_a_pairwise_judge_gives_win_rates():
    judge = Longer()
    # "aaaa" beats both others of p, "aa" beats "a"; the two of q are the same text, which nobody is asked about
    assert same(scores_of(judge), [1, 0.5, 0, 0.5, 0.5])
    assert judge.asked == [("p", ["aaaa", "a"]), ("p", ["aaaa", "aa"]), ("p", ["a", "aa"])]


def test_comparisons_without_an_answer_do_not_count(caplog):
    given = inputs(["p"] * 3 + ["q"] * 2, ["ab", "cd", "abc", "x", "y"])
    assert same(scores_of(Longer(), given), [0, 0, 1, NONE, NONE])
    assert "or the judge gave no verdict (Longer)" in caplog.text
    equal = inputs(["p"] * 3, ["ab", "ab", "c"])
    assert same(scores_of(Longer(), equal), [0.75, 0.75, 0])


class Soft(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True, return_scores=False):
        assert return_scores
        return [-1 if "?" in a + b else len(a) / (len(a) + len(b)) for a, b in completions]


def test_probabilities_count_instead_of_wins():
    source = JudgeSource(Soft(), return_scores=True, name="soft")
    given = inputs(["p"] * 3, ["aaa", "a", "aaaa?"])
    assert same(scores_of(source, given), [0.75, 0.25, NONE])
    assert source.name == "soft"


def test_a_rank_judge():
    assert same(scores_of(LongestFirst()), [1, 1, 0, 0.5, 0])


@pytest.mark.parametrize(("ranking", "expected"), [([], [NONE, NONE]), ([-1, -1], [NONE, NONE]), ([1, 0], [0, 1])])
def test_rankings_that_are_missing(ranking, expected):
    judge = LongestFirst()
    judge.judge = lambda prompts, completions: [ranking]
    assert same(scores_of(judge, inputs(["p"] * 2, ["a", "b"])), expected)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([2] * 3, "gave 2, expected 0, 1, 0.5"),
        (["A"] * 3, "gave 'A', expected 0, 1, 0.5"),
        ([1], "gave 1 answers, expected 3"),
    ],
)
def test_what_is_no_answer_is_an_error(answers, message, caplog):
    judge = Longer()
    judge.judge = lambda prompts, completions: answers
    given = inputs(["p"] * 3, ["a", "bb", "ccc"])
    with pytest.raises(RewardError, match=message):
        scores_of(judge, given)
    with caplog.at_level(logging.WARNING):
        assert same(scores_of(judge, given, on_failure="skip"), [NONE] * 3)
    assert message in caplog.text


def test_other_errors():
    alone = inputs(["p", "p", "q"], ["a", "b", "c"])
    for judge in (Longer(), LongestFirst()):
        with pytest.raises(RewardError, match="1 of 2 prompts come with one alone, the first is 'q' -> 'c'"):
            scores_of(judge, alone)
    wrong = LongestFirst()
    wrong.judge = lambda prompts, completions: [[0, 0]]
    with pytest.raises(RewardError, match=r"gave \[0, 0\] for 2 completions"):
        scores_of(wrong, inputs(["p"] * 2, ["a", "b"]))

    class Other(BaseJudge):
        def judge(self, prompts, completions, shuffle_order=True):
            return []

    with pytest.raises(TypeError, match="expected a BaseBinaryJudge, BasePairwiseJudge or BaseRankJudge"):
        RewardSources(Other())


def test_groups_are_checked_before_the_first_step():
    sources = RewardSources([IsLong(), Longer()])
    sources.check_groups(4, rows=8)
    RewardSources(IsLong()).check_groups(1, rows=3)
    with pytest.raises(ValueError, match=r"2 or more of each .* got 1 and"):
        sources.check_groups(1, rows=8)
    with pytest.raises(ValueError, match="whole groups in a process, got 4 and 6 rows"):
        sources.check_groups(4, rows=6)
