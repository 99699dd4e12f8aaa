"""Tensors that a loss takes as constants get no gradient, whatever they were computed from."""

import pytest
import torch

from trl.objectives.advantages import token_rewards
from trl.objectives.cross_vocabulary import measure_divergence
from trl.objectives.distillation import discounted_advantages, prefix_weights, sorted_l1
from trl.objectives.group_policy import GroupOptions, group_policy_loss, sequence_policy_loss
from trl.objectives.group_ratios import GroupTokens
from trl.objectives.online_preference import nash_advantages
from trl.objectives.pairs import PairScores, step_statistics
from trl.objectives.ppo import clipped_surrogate, clipped_value_loss
from trl.objectives.unpaired import UnpairedScores, bco_terms
from trl.tensors.sequences import wpo_weights

MASK = torch.ones(2)


def leaf(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def of_groups(loss, logps, advantages, correction, ref_logps):
    sequence = torch.tensor([0, 1])
    tokens = GroupTokens(logps.detach(), advantages, MASK, sequence, 2, ref_logps=ref_logps, correction=correction)
    return loss(logps, tokens, GroupOptions(beta=0.1)).values


LOSSES = {
    "value": lambda x, a, b, c: clipped_value_loss(x, a, b, MASK, cliprange_value=0.2).values,
    "surrogate": lambda x, a, b, c: clipped_surrogate(x, a, b, MASK, cliprange=0.2).values,
    "groups": lambda x, a, b, c: of_groups(group_policy_loss, x, a, b, c),
    "sequences": lambda x, a, b, c: of_groups(sequence_policy_loss, x, a, None, None),
    "bco": lambda x, a, b, c: (
        bco_terms(UnpairedScores(x, 0 * x.detach(), torch.tensor([True, False])), beta=0.3, delta=a.mean()).values
    ),
    "measures": lambda x, a, b, c: measure_divergence(x[None], b[None], beta=0.3),
    "sorted": lambda x, a, b, c: sorted_l1(x[None], a[None]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_constants_get_no_gradient(name):
    learned, *constants = leaf(-0.5, -1.0), leaf(0.1, -0.4), leaf(-0.6, 0.3), leaf(-0.6, -0.9)
    found = torch.autograd.grad(LOSSES[name](learned, *constants).sum(), [learned, *constants], allow_unused=True)
    assert found[0].abs().max() > 0.01
    assert all(gradient is None or not gradient.any() for gradient in found[1:])


def test_statistics_and_rewards_are_detached():
    pair = step_statistics(PairScores(*(leaf(0.3 * n, -0.2) for n in range(4))), beta=0.1)
    assert not any(value.requires_grad for value in (pair.delta, pair.margin_partner, pair.chosen_partner))
    found = token_rewards(torch.tensor([1.0]), leaf(0.2, 0.1)[None], torch.ones(1, 2), kl_coef=0.1)
    assert not found.rewards.requires_grad and not found.non_score.requires_grad
    values, one = leaf(0.3, -0.2), torch.zeros(2, dtype=torch.int64)
    for constants in (
        discounted_advantages(values, one, 1, gamma=0.5, normalize=False),
        prefix_weights(values, one, 1, gamma=0.5, epsilon=1e-6),
        nash_advantages(leaf(0.7), values, one, beta=0.1),
        wpo_weights(leaf(-0.5), leaf(-0.2)),
    ):
        assert not constants.requires_grad
