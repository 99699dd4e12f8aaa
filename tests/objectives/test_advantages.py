"""Rewards per token, generalised advantage estimation and the statistics of a batch, against numbers worked by hand."""

import pytest
import torch
from accelerate import Accelerator

from trl.objectives.advantages import (
    estimate_statistics,
    gae,
    last_indices,
    rollout_metrics,
    scale_scores,
    token_rewards,
)
from trl.tensors.moments import RunningMoments
from trl.tensors.statistics import masked_whiten

CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def by_hand(rewards, values, gamma, lam):
    """The definition: the sum over l of (gamma lam)^l delta_{t+l}, for one episode."""
    deltas = [r + gamma * following - v for r, v, following in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[start:])) for start in range(len(deltas))]


def test_three_steps_worked_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    found = gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5)
    # deltas: 0.125 - 0.5, 0.0625 - 0.25, 1 - 0.125
    expected = torch.tensor([[-0.375 + 0.25 * (-0.1875 + 0.25 * 0.875), -0.1875 + 0.25 * 0.875, 0.875]])
    torch.testing.assert_close(found.advantages, expected, **CLOSE)
    torch.testing.assert_close(found.returns, expected + values, **CLOSE)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_each_row_is_an_episode_of_its_own_whatever_stands_around_it(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    lengths, width = [5, 1, 3], 9
    rewards, values, mask = (
        torch.full((3, width), torch.nan),
        torch.full((3, width), 7.0),
        torch.zeros(3, width),
    )
    for row, length in enumerate(lengths):
        own = slice(row, row + length)
        rewards[row, own] = torch.randn(length, generator=generator)
        values[row, own] = torch.randn(length, generator=generator)
        mask[row, own] = 1
    found = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row, length in enumerate(lengths):
        own = slice(row, row + length)
        expected = by_hand(rewards[row, own].tolist(), values[row, own].tolist(), gamma, lam)
        torch.testing.assert_close(found.advantages[row, own], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert not found.advantages[mask == 0].any()
    assert not found.returns[mask == 0].any()


def test_a_gap_is_no_step():
    """Masked-out text between two chosen tokens changes nothing: the episode is that of the chosen tokens."""
    rewards, values = torch.tensor([[0.5, 9.0, 9.0, 1.0]]), torch.tensor([[0.25, 9.0, 9.0, 0.75]])
    mask = torch.tensor([[1, 0, 0, 1]])
    without = gae(rewards[:, [0, 3]], values[:, [0, 3]], torch.ones(1, 2), gamma=0.9, lam=0.8)
    found = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.advantages[:, [0, 3]], without.advantages, **CLOSE)
    # The older rule: two steps of value 0 in between.
    steps = gae(rewards, values, mask, gamma=0.9, lam=0.8, gaps="steps")
    expected = by_hand([0.5, 0.0, 0.0, 1.0], [0.25, 0.0, 0.0, 0.75], 0.9, 0.8)
    assert steps.advantages[0, 0].item() == pytest.approx(expected[0], rel=1e-6)


def test_rewards_hold_the_score_on_the_last_chosen_token():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    kl = torch.tensor([[9.0, 0.5, -1.0, torch.nan], [1.0, 9.0, 2.0, 3.0]])
    found = token_rewards(torch.tensor([2.0, -1.0]), kl, mask, kl_coef=0.1)
    expected = torch.tensor([[0.0, -0.05, 2.1, 0.0], [-0.1, 0.0, -0.2, -1.3]])
    torch.testing.assert_close(found.rewards, expected, **CLOSE)
    assert found.non_score[1, 3].item() == pytest.approx(-0.3)
    assert last_indices(mask).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("scores", "mask", "words"),
    [
        ([1.0, 2.0, 3.0], [[1, 1], [1, 1]], r"scores must be \(B,\)"),
        ([1.0, float("nan")], [[1, 1], [1, 1]], r"finite.*rows \[1\]"),
        ([1.0, 2.0], [[0, 0], [1, 1]], r"got none in rows \[0\]"),
    ],
)
def test_bad_scores_and_empty_responses_are_named(scores, mask, words):
    mask = torch.tensor(mask)
    with pytest.raises(ValueError, match=words):
        token_rewards(torch.tensor(scores), torch.zeros(mask.shape), mask, kl_coef=0.1)


def test_scores_are_scaled_then_clipped():
    scores = torch.tensor([-0.6012, -0.7814, 0.4034, 2.1103])
    found = scale_scores(scores, mean=0.282775, std=1.3251765, clip=0.5)
    # recorded for the same scores: mean -0.1022436, standard deviation 0.48869577
    assert found.mean().item() == pytest.approx(-0.1022436, abs=1e-6)
    assert found.std().item() == pytest.approx(0.48869577, abs=1e-6)
    torch.testing.assert_close(scale_scores(scores), scores, rtol=1e-6, atol=1e-6)


def test_scores_without_a_spread_are_not_divided_by_rounding():
    for value in (1.0, 0.1, -3.0, 0.0):
        scores = torch.full((7,), value)
        running = RunningMoments(Accelerator(cpu=True))
        running.update(scores)
        scaled = scale_scores(scores, std=running.std)
        torch.testing.assert_close(scaled, scores)
        centred = scale_scores(scores, mean=running.mean, std=running.std)
        torch.testing.assert_close(centred, torch.zeros(7), atol=1e-6, rtol=0)
    large = torch.tensor([1000.0, 1000.0])
    assert scale_scores(large, std=1e-5).tolist() == [1000.0, 1000.0]  # float32 has no smaller steps here


def test_metrics_are_sums_per_response():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    kl = torch.tensor([[1.0, 2.0, 9.0], [-1.0, 9.0, 9.0]])
    scores = torch.tensor([1.0, 3.0])
    rewards = token_rewards(scores, kl, mask, kl_coef=0.5)
    found = rollout_metrics(rewards, kl, -2 * torch.ones(2, 3), scores, mask)
    means = {name: value.mean.item() for name, value in found.items()}
    assert means == pytest.approx(
        {
            "objective/kl": 1.0,
            "objective/entropy": 3.0,
            "objective/non_score_reward": -0.5,
            "objective/rlhf_reward": 1.5,
            "objective/scores": 2.0,
            "ppo/mean_scores": 2.0,
            "ppo/mean_non_score_reward": -1 / 3,
        }
    )


def test_variances_are_unbiased_and_masked():
    mask = torch.tensor([[1, 1, 1, 0]])
    returns, values = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[0.0, 0.0, 3.0, 99.0]])
    found = estimate_statistics(returns - values, returns, values, mask)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {
            "policy/advantages_mean": 1.0,
            "returns/mean": 2.0,
            "returns/var": 1.0,
            "val/mean": 1.0,
            "val/var": 3.0,
        }
    )


@pytest.mark.parametrize("padding", [1, 6])
def test_whitened_rewards_do_not_depend_on_the_padding(padding):
    """What whitening makes of the zeros behind a response must not flow back into it."""
    rewards, values = torch.tensor([[-0.1, -0.2, 2.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    expected = gae(masked_whiten(rewards, torch.ones(1, 3), shift_mean=False), values, torch.ones(1, 3))
    wide = [torch.nn.functional.pad(tensor, (0, padding)) for tensor in (rewards, values, torch.ones(1, 3))]
    found = gae(masked_whiten(wide[0], wide[2], shift_mean=False), wide[1], wide[2])
    torch.testing.assert_close(found.returns[:, :3], expected.returns, **CLOSE)
