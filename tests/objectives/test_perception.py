"""PAPO's added loss against numbers worked by hand, its gradients, and what it leaves alone."""

import math

import pytest
import torch

from trl.objectives.group_policy import PerceptionOptions, perception_loss
from trl.objectives.group_ratios import GroupTokens

LOGPS = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
MASKED = torch.tensor([-2.0, -0.5, -1.0], dtype=torch.float64)
OWN_ENTROPY = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
MASKED_ENTROPY = torch.tensor([2.0, 2.5, 4.0], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 0, 1])


def tokens(mask=(1, 1, 1)):
    return GroupTokens(torch.zeros(3), torch.zeros(3), torch.tensor(mask), SEQUENCE, count=2)


def loss(logps=LOGPS, masked=MASKED, *, mask=(1, 1, 1), loss_type="dapo", **weights):
    return perception_loss(
        logps, masked, tokens(mask), PerceptionOptions(**weights), loss_type=loss_type, entropies=OWN_ENTROPY,
        masked_entropies=MASKED_ENTROPY,
    )  # fmt: skip


def test_values_by_hand():
    found = loss(perception_loss_weight=0.5, der_loss_weight1=0.1, der_loss_weight2=0.01)
    kl = [math.exp(-1) - 1 + 1, 0.0, math.exp(1) - 1 - 1]  # r - 1 - log r with log r = -1, 0, 1
    entropies = [0.1 * 1 + 0.01 * 2, 0.1 * 2 + 0.01 * 2.5, 0.1 * 3 + 0.01 * 4]
    expected = [-0.5 * a + b for a, b in zip(kl, entropies, strict=True)]
    assert found.values.tolist() == pytest.approx(expected, abs=1e-12) and found.per == "token"
    assert float(found.metrics["perception_kl"].mean) == pytest.approx(sum(kl) / 3)
    assert float(found.metrics["masked_entropy"].mean) == pytest.approx(8.5 / 3)
    rows = loss(
        perception_loss_weight=0.5,
        der_loss_weight1=0.1,
        der_loss_weight2=0.01,
        loss_type="grpo",
        mask=(1, 0, 1),
    )
    assert rows.values.tolist() == pytest.approx([expected[0], expected[2]]) and rows.per == "sequence"


def test_the_two_are_driven_apart_and_entropies_down():
    logps, masked = LOGPS.clone().requires_grad_(), MASKED.clone().requires_grad_()
    terms = loss(logps, masked, perception_loss_weight=1.0)
    terms.values.sum().backward()
    # d/dl of -(e^(m-l) - 1 - (m-l)) = e^(m-l) - 1: negative (l rises) where the image made the token likelier
    assert logps.grad.tolist() == pytest.approx([math.exp(-1) - 1, 0.0, math.e - 1])
    assert masked.grad.tolist() == pytest.approx([1 - math.exp(-1), 0.0, 1 - math.e])
    entropies = OWN_ENTROPY.clone().requires_grad_()
    options = PerceptionOptions(der_loss_weight1=0.2, der_loss_weight2=0.0)
    found = perception_loss(LOGPS, MASKED, tokens((1, 1, 0)), options, loss_type="dapo", entropies=entropies)
    (found.values * found.weights).sum().backward()
    assert entropies.grad.tolist() == pytest.approx([0.2, 0.2, 0.0])


def test_untrained_tokens_have_no_part_even_where_they_are_no_numbers():
    broken = torch.tensor([-1.0, float("nan"), -2.0], dtype=torch.float64)
    found = loss(broken, MASKED, mask=(1, 0, 1), loss_type="grpo")
    assert found.values.isfinite().all()
    assert found.values[0] == loss(LOGPS, MASKED, mask=(1, 0, 1), loss_type="grpo").values[0]


@pytest.mark.parametrize(("weights", "expected"), [((0, 0), False), ((0.5, 0), True), ((0, 0.5), True)])
def test_entropies_are_needed_where_one_weighs(weights, expected):
    first, second = weights
    assert PerceptionOptions(der_loss_weight1=first, der_loss_weight2=second).needs_entropies is expected
