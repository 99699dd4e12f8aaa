"""Advantages within groups: hand-worked values, scales, rewards without an opinion, and what is logged."""

import math

import pytest
import torch

from trl.objectives.group_advantages import (
    ADVANTAGES,
    OF_SCALE,
    SMALLEST_STD,
    batch_deviation,
    best_of_groups,
    estimated,
    group_moments,
    group_relative,
    has_no_variance,
    leave_one_out,
    normalized,
    reward_statistics,
)
from trl.rewards.result import RewardResult

NAN = float("nan")
REWARDS = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0], dtype=torch.float64)  # two groups of three


def close(found, expected, tolerance=1e-12):
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_moments_divide_by_one_less_than_the_count():
    found = group_moments(REWARDS, 3)
    close(found.mean, [3, 3, 3, 1, 1, 1])
    close(found.std, [math.sqrt(7)] * 3 + [math.sqrt(3)] * 3)
    assert found.count.tolist() == [3] * 6


@pytest.mark.parametrize(
    ("scale", "divisor"),
    [
        ("none", [1.0] * 6),
        ("group", [math.sqrt(7) + 1e-4] * 3 + [math.sqrt(3) + 1e-4] * 3),
        ("batch", [math.sqrt(26 / 5) + 1e-4] * 6),  # mean 2, squares 1 + 0 + 16 + 4 + 4 + 1
    ],
)
def test_group_relative_by_hand(scale, divisor):
    above = torch.tensor([-2.0, -1, 3, -1, -1, 2], dtype=torch.float64)
    close(group_relative(REWARDS, 3, scale=scale), above / torch.tensor(divisor, dtype=torch.float64))


def test_leave_one_out_by_hand():
    # Others of the first: (2 + 6) / 2 = 4; of the third: 1.5; of the last: 0.
    close(leave_one_out(REWARDS, 3), [-3, -1.5, 4.5, -1.5, -1.5, 3])


def test_equal_rewards_leave_no_rounding_behind():
    tenths = torch.full((3,), 0.1, dtype=torch.float64)
    assert not torch.equal(tenths - tenths.mean(), torch.zeros(3, dtype=torch.float64))
    for advantages in (leave_one_out(tenths, 3), group_relative(tenths, 3, scale="none")):
        assert torch.equal(advantages, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_advantages_of_exactly_zero(scale):
    rewards = torch.tensor([0.1] * 3 + [0.7, 0.2, 0.3], dtype=torch.float64)
    assert rewards[:3].sum() / 3 != 0.1
    found = group_relative(rewards, 3, scale=scale)
    assert found[:3].tolist() == [0, 0, 0]
    assert found.isfinite().all()
    assert has_no_variance(rewards, 3).tolist() == [True, False]


@pytest.mark.parametrize("scale", ["group", "none"])
def test_no_opinion_is_as_if_the_completion_were_not_there(scale):
    with_gap = torch.tensor([1.0, NAN, 2.0, 6.0], dtype=torch.float64)
    known = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    found = group_relative(with_gap, 4, scale=scale)
    assert found[1] == 0
    close(found[[0, 2, 3]], group_relative(known, 3, scale=scale))
    close(leave_one_out(with_gap, 4)[[0, 2, 3]], leave_one_out(known, 3))


@pytest.mark.parametrize("method", [group_relative, leave_one_out])
def test_a_group_with_one_opinion_or_none_teaches_nothing(method):
    found = method(torch.tensor([NAN, NAN, 5.0, NAN]), 2)
    assert found.tolist() == [0, 0, 0, 0]
    assert has_no_variance(torch.tensor([NAN, NAN, 5.0, NAN]), 2).all()


def test_normalized():
    found = normalized(torch.tensor([-3.0, 1.0, 2.0], dtype=torch.float64))
    std = math.sqrt((9 + 1 + 4) / 2)
    close(found, [-3 / (std + SMALLEST_STD), 1 / (std + SMALLEST_STD), 2 / (std + SMALLEST_STD)])
    assert normalized(torch.tensor([3.0])).tolist() == [0.0]


def test_logged_numbers_leave_out_rows_without_any_opinion():
    scores = torch.tensor([[1.0, NAN], [0.0, 2.0], [NAN, NAN], [1.0, 1.0]])
    rewards = RewardResult(("a", "b"), scores, torch.tensor([1.0, 0.5]), {}, {}).rewards
    close(rewards, [1.0, 1.0, NAN, 1.5])
    found = {name: value.mean.item() for name, value in reward_statistics(rewards, 2).items()}
    assert found == pytest.approx({"reward": 3.5 / 3, "reward_std": 0.0, "frac_reward_zero_std": 1.0})


def test_statistics_by_scale():
    by_group = {name: value.mean.item() for name, value in reward_statistics(REWARDS, 3).items()}
    assert by_group == pytest.approx(
        {"reward": 2.0, "reward_std": (math.sqrt(7) + math.sqrt(3)) / 2, "frac_reward_zero_std": 0.0}
    )
    equal = torch.tensor([1.0, 1.0, 0.0, 2.0])
    assert reward_statistics(equal, 2)["frac_reward_zero_std"].mean == 0.5
    assert reward_statistics(equal, 2, scale="batch")["frac_reward_zero_std"].mean == 0.0
    by_batch = reward_statistics(REWARDS, 3, scale="batch")["reward_std"].mean.item()
    assert by_batch == pytest.approx(math.sqrt(26 / 5))
    known = reward_statistics(torch.tensor([0.0, 2.0, NAN, NAN]), 2)
    assert known["reward_std"].mean.item() == pytest.approx(math.sqrt(2))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"a multiple of 4, got \(6,\)"):
        group_relative(REWARDS, 4)
    with pytest.raises(ValueError, match=r"got infinity in rows \[1\]"):
        leave_one_out(torch.tensor([0.0, float("inf")]), 2)
    with pytest.raises(ValueError, match=r"unknown scale_rewards 'groups'; .*Did you mean group"):
        group_relative(REWARDS, 3, scale="groups")  # type: ignore[arg-type]


def test_deviation_of_few_rewards():
    assert batch_deviation(torch.tensor([1.0, NAN, 3.0])).item() == pytest.approx(math.sqrt(2))
    assert batch_deviation(torch.tensor([NAN, 3.0])).item() == 0


def test_normalized_is_centred():
    std = math.sqrt(2)
    close(normalized(torch.tensor([4.0, 6.0], dtype=torch.float64)), [-1 / (std + 1e-4), 1 / (std + 1e-4)])


def test_best_of_groups_names_rows_without_a_score():
    with pytest.raises(ValueError, match="NaN in row 1"):
        best_of_groups(torch.tensor([0.0, NAN, NAN, 1.0]), 2, 1)


# ---- the table of estimators


def test_each_value_of_scale_rewards_is_a_row():
    for scale, name in OF_SCALE.items():
        assert torch.equal(estimated(name, REWARDS, 3), group_relative(REWARDS, 3, scale=scale))
    assert torch.equal(estimated("leave_one_out", REWARDS, 3), leave_one_out(REWARDS, 3))
    assert set(ADVANTAGES) == {*OF_SCALE.values(), "leave_one_out"}


def test_a_function_is_an_estimator_and_completions_without_a_reward_get_none():
    def above_median(rewards, group_size):
        return rewards - rewards.view(-1, group_size).nanmedian(dim=1).values.repeat_interleave(group_size)

    close(estimated(above_median, REWARDS, 3), [-1, 0, 4, 0, 0, 3])
    close(estimated(above_median, torch.tensor([1.0, NAN, 6.0]), 3), [0, 0, 5])


@pytest.mark.parametrize(
    "function", [lambda rewards, size: rewards.view(-1, size).mean(dim=1), lambda rewards, size: rewards / 0]
)
def test_an_estimator_returns_one_finite_number_per_reward(function):
    with pytest.raises(ValueError, match=r"advantage_estimator must return 6 finite numbers, one per reward, got"):
        estimated(function, REWARDS, 3)
    with pytest.raises(ValueError, match=r"unknown advantage_estimator 'leave_one'; .*Did you mean leave_one_out"):
        estimated("leave_one", REWARDS, 3)
