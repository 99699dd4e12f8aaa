import math

import pytest
import torch

from trl.tensors.reduce import LossTerms, Weighted, count_units, reduce_terms, weighted

NAN = math.nan


def terms(values, weights, per="token"):
    return LossTerms(torch.tensor(values, requires_grad=True), torch.tensor(weights), per, {})


@pytest.mark.parametrize("per", ["token", "sequence", "pair", "group", "constant"])
def test_weighted_sum_over_the_denominator(per):
    loss_terms = terms([[1.0, 2.0], [4.0, 8.0]], [[1.0, 0.5], [0.0, 2.0]], per)
    assert count_units(loss_terms).item() == 3
    loss = reduce_terms(loss_terms, denominator=6)
    assert loss.item() == 3.0
    loss.backward()
    torch.testing.assert_close(loss_terms.values.grad, torch.tensor([[1 / 6, 1 / 12], [0.0, 1 / 3]]))


def test_micro_batches_add_up_to_the_step():
    values, weights = torch.arange(12.0).view(4, 3), (torch.arange(12).view(4, 3) % 5 != 0).float()
    count = count_units(weights)
    whole = reduce_terms(LossTerms(values, weights, "token", {}), count)
    parts = [reduce_terms(LossTerms(values[i : i + 1], weights[i : i + 1], "token", {}), count) for i in range(4)]
    assert whole.item() == pytest.approx((values * weights).sum().item() / count.item(), rel=1e-6)
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("denominator", [0, 0.0, torch.tensor(0)])
def test_nothing_to_count_is_zero_with_zero_gradient(denominator):
    loss_terms = terms([1.0, 2.0], [0.0, 0.0])
    loss = reduce_terms(loss_terms, denominator)
    assert loss.item() == 0.0
    loss.backward()
    assert loss_terms.values.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("hidden", [NAN, math.inf, -math.inf])
def test_untrained_values_do_not_leak(hidden):
    loss_terms = terms([1.0, hidden], [1.0, 0.0])
    loss = reduce_terms(loss_terms, 1)
    assert loss.item() == 1.0
    loss.backward()
    assert loss_terms.values.grad.tolist() == [1.0, 0.0]
    assert weighted(loss_terms.values, loss_terms.weights).total.item() == 1.0


def test_a_trained_nan_shows():
    assert math.isnan(reduce_terms(terms([NAN, 1.0], [1.0, 1.0]), 2).item())


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"one shape, got \(2,\) and \(1,\)"):
        reduce_terms(terms([1.0, 2.0], [1.0]), 1)


def test_weighted_metrics_by_hand():
    first = weighted(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [True, True]]))
    assert (first.total.item(), first.count.item()) == (8.0, 3.0)
    both = first.plus(weighted(torch.tensor([True, False])))
    assert (both.total.item(), both.count.item(), both.mean.item()) == (9.0, 5.0, pytest.approx(1.8))
    assert math.isnan(Weighted(torch.tensor(0.0), torch.tensor(0.0)).mean.item())
    assert not weighted(torch.ones(2, requires_grad=True)).total.requires_grad


def test_sums_keep_their_precision_and_units_of_weight_one_count():
    assert weighted(torch.ones(2, dtype=torch.float64)).total.dtype == torch.float64
    assert weighted(torch.tensor([True, False])).total.dtype == torch.float32
    assert count_units(torch.tensor([1.0, 1.0, 0.0])).item() == 2
