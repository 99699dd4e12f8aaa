"""The clipped surrogate: values, gradients and their signs, metrics, and independence of what is masked out."""

import math

import pytest
import torch

from trl.objectives.ppo import clipped_surrogate, clipped_value_loss, with_value_loss
from trl.tensors.reduce import reduce_terms


def surrogate(ratio, advantage):
    """Value of the loss and slope over the log-prob of one token whose probability ratio is given."""
    logps = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, advantages = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    terms = clipped_surrogate(logps, zero, advantages, torch.ones(1), cliprange=0.2)
    terms.values.sum().backward()
    return terms.values.item(), logps.grad.item(), terms.metrics["policy/clipfrac"].mean.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # more of it
        (1.5, 2.0, -2.4, 0.0, 1),  # far enough: no gradient
        (0.5, 2.0, -1.0, -1.0, 0),  # went the wrong way: still pulled back
        (1.5, -2.0, 3.0, 3.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),
    ],
)
def test_the_five_situations_of_one_token(ratio, advantage, value, slope, clipped):
    assert surrogate(ratio, advantage) == pytest.approx((value, slope, clipped))


def test_metrics_are_the_documented_ones():
    new, old = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, 9.0]])
    mask = torch.tensor([[1, 1, 0]])
    metrics = clipped_surrogate(new, old, torch.tensor([[1.0, -1.0, 5.0]]), mask, cliprange=0.2).metrics
    means = {name: value.mean.item() for name, value in metrics.items()}
    ratios = [math.exp(0.5), math.exp(-1.0)]
    assert means == pytest.approx(
        {
            "policy/clipfrac": 1.0,
            "policy/approxkl": (0.125 + 0.5) / 2,
            "policy/policykl": (-0.5 + 1.0) / 2,
            "policy/ratio": sum(ratios) / 2,
            "loss/policy": (-1.2 + 0.8) / 2,
        },
        rel=1e-6,
    )


def test_entropies_are_averaged_where_they_are_given():
    one, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    terms = clipped_surrogate(one, one, one, mask, cliprange=0.2, entropies=torch.tensor([[1.0, 2.0, 9.0]]))
    assert terms.metrics["policy/entropy"].mean.item() == 1.5


def test_what_is_masked_out_reaches_neither_loss_nor_gradient():
    logps = torch.tensor([[-1.0, torch.nan, -torch.inf]], requires_grad=True)
    mask = torch.tensor([[1, 0, 0]])
    terms = clipped_surrogate(
        logps, torch.tensor([[-1.0, 0.0, 0.0]]), torch.tensor([[1.0, torch.nan, 1.0]]), mask, cliprange=0.2
    )
    loss = reduce_terms(terms, 1)
    loss.backward()
    assert loss.item() == -1.0
    assert logps.grad is not None
    assert logps.grad.tolist() == [[-1.0, 0.0, 0.0]]
    assert all(torch.isfinite(value.total) for value in terms.metrics.values())


def random_batch():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(6)]
    lengths = torch.tensor([5, 3, 1, 4, 2, 5])
    return tensors, (torch.arange(5) < lengths[:, None]).long()


def loss_of(tensors, mask, rows, denominator):
    logps, old, advantages, vpreds, values, returns = (tensor[rows] for tensor in tensors)
    policy = clipped_surrogate(logps, old, advantages, mask[rows], cliprange=0.2)
    value = clipped_value_loss(vpreds, values, returns, mask[rows], cliprange_value=0.2)
    return reduce_terms(with_value_loss(policy, value, vf_coef=0.1), denominator)


def test_total_is_policy_plus_weighted_value():
    tensors, mask = random_batch()
    logps, old, advantages, vpreds, values, returns = tensors
    policy = clipped_surrogate(logps, old, advantages, mask, cliprange=0.2)
    value = clipped_value_loss(vpreds, values, returns, mask, cliprange_value=0.2)
    both = with_value_loss(policy, value, vf_coef=0.5)
    means = {name: both.metrics[name].mean for name in ("loss/policy", "loss/value", "loss/total")}
    torch.testing.assert_close(means["loss/total"], means["loss/policy"] + 0.5 * means["loss/value"])
