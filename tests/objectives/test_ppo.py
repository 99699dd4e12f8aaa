"""The clipped value loss, token by token; whitened advantages."""

from types import SimpleNamespace

import pytest
import torch

from trl.objectives.ppo import clipped_value_loss, explained_variance, whitened_estimates
from trl.tensors.moments import moments


@pytest.mark.parametrize(
    ("prediction", "old", "target", "value", "slope", "clipped"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9, 0),  # within the range
        (0.9, 0.0, 1.0, 0.32, 0.0, 1),  # moved further towards the return than the range allows: no gradient
        (-0.9, 0.0, 1.0, 1.805, -1.9, 0),  # moved away from it: pulled back in full
    ],
)
def test_one_token(prediction, old, target, value, slope, clipped):
    vpreds = torch.tensor([prediction], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([x], dtype=torch.float64) for x in (old, target)]
    terms = clipped_value_loss(vpreds, *others, torch.ones(1), cliprange_value=0.2)
    terms.values.sum().backward()
    assert vpreds.grad is not None
    found = (terms.values.item(), vpreds.grad.item(), terms.metrics["val/clipfrac"].mean.item())
    assert found == pytest.approx((value, slope, clipped))
    assert terms.metrics["val/vpred"].mean.item() == prediction


def test_metrics_leave_out_what_is_masked():
    mask = torch.tensor([[1, 1, 0]])
    predictions, target = torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[0.0, 1.0, torch.nan]])
    metrics = clipped_value_loss(predictions, predictions, target, mask, cliprange_value=0.2).metrics
    means = {name: value.mean.item() for name, value in metrics.items()}
    assert means == {"val/vpred": 2.0, "val/error": 2.5, "val/clipfrac": 0.0, "loss/value": 1.25}


def test_explained_variance():
    assert explained_variance(3.1065202, 2.1896718) == pytest.approx(-0.418715, abs=1e-6)  # as recorded
    assert explained_variance(0.0, 0.0) != explained_variance(0.0, 0.0)  # NaN: nothing to explain


def test_advantages_are_whitened_by_the_tokens_of_all_processes():
    """Advantages 1 and 2 here, 6 elsewhere: mean 3, variance 7. Of two tokens alone: mean 1.5, variance 0.5."""
    rewards, mask = (
        torch.tensor([[1.0, 9.0], [2.0, 9.0]], dtype=torch.float64),
        torch.tensor([[1, 0], [1, 0]]),
    )
    options, zeros = SimpleNamespace(whiten_rewards=False, gamma=1.0, lam=1.0), torch.zeros_like(rewards)
    for others, mean, variance in (([6.0], 3.0, 7.0), ([], 1.5, 0.5)):
        found = whitened_estimates(
            rewards, zeros, mask, options, of_all=lambda own, others=others: own.plus(moments(torch.tensor(others)))
        )  # fmt: skip
        expected = [[(advantage - mean) / variance**0.5, 0.0] for advantage in (1.0, 2.0)]
        torch.testing.assert_close(found.advantages, torch.tensor(expected, dtype=torch.float64))
        assert found.returns.tolist() == [[1.0, 0.0], [2.0, 0.0]]
