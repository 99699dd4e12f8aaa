import math

import pytest
import torch

from tests.objectives.pair_cases import s, tensor
from trl.objectives.unpaired import (
    UnpairedScores,
    apo_zero_unpaired,
    bco_terms,
    kl_estimate,
    kto_terms,
    udm_weights,
)
from trl.tensors.reduce import count_units, reduce_terms, weighted

BETA = 0.5
KL = torch.tensor(1.0, dtype=torch.float64)


def scores_of(ratios=(2.0, -1.0, 3.0), desirable=(True, False, False), dtype=torch.float64) -> UnpairedScores:
    reference = torch.full((len(ratios),), -10.0, dtype=dtype)
    logps = (reference + torch.tensor(ratios, dtype=dtype)).requires_grad_()
    return UnpairedScores(logps, reference, torch.tensor(desirable))


def test_kto_by_hand():
    """beta (x - kl) = 0.5, -1, 1: desirable 1 - s(0.5), the others s(-1) and s(1), each times its weight."""
    terms = kto_terms(scores_of(), beta=BETA, desirable_weight=1.5, undesirable_weight=0.5, kl=KL)
    assert terms.per == "sequence"
    assert terms.values.tolist() == pytest.approx([1.5 * (1 - s(0.5)), 0.5 * s(-1), 0.5 * s(1)])


def test_apo_zero_ignores_the_kl():
    terms = kto_terms(scores_of(), loss_type="apo_zero_unpaired", beta=BETA, kl=KL)
    assert terms.values.tolist() == pytest.approx([1 - s(1), s(-0.5), s(1.5)])
    assert terms.metrics["kl"].mean.item() == 0.0
    scores = scores_of()
    alone = apo_zero_unpaired(scores.ratios, scores.desirable, beta=BETA, kl=KL)
    assert torch.equal(alone, terms.values)


def test_bco_by_hand():
    """Rewards 1, -0.5, 1.5 with delta 0.5: 0.5, -1 and 1 above it; the weights count where undesirable."""
    terms = bco_terms(scores_of(), beta=BETA, delta=KL / 2, undesirable_weights=tensor([7.0, 2.0, 1.0]))
    expected = [-math.log(s(0.5)), -2 * math.log(s(1)), -math.log(s(-1))]
    assert terms.per == "sequence" and terms.values.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("method", ["kto", "apo_zero_unpaired", "bco"])
def test_desirable_goes_up_and_undesirable_goes_down(method):
    scores = scores_of()
    terms = bco_terms(scores, beta=BETA, delta=KL) if method == "bco" else kto_terms(scores, loss_type=method, kl=KL)
    gradient = torch.autograd.grad(terms.values.sum(), scores.logps)[0]
    assert (gradient.sign() == tensor([-1.0, 1.0, 1.0])).all()


def test_the_point_of_comparison_carries_no_gradient():
    kl = KL.clone().requires_grad_()
    assert torch.autograd.grad(kto_terms(scores_of(), kl=kl).values.sum(), kl, allow_unused=True) == (None,)


def test_the_kl_is_a_mean_over_all_batches_of_the_step_and_never_negative():
    """Ratios 1, 2 and -9 in two batches: (1 + 2 - 9) / 3 = -2, cut at 0; without the last, 1.5."""
    first = weighted(tensor([-1.0, -3.0]) - tensor([-2.0, -5.0]))
    second = weighted(tensor([-9.0]))
    assert kl_estimate(first).item() == 1.5 and kl_estimate(first.plus(second)).item() == 0.0


def test_weights_of_kinds_do_not_change_the_count():
    terms = kto_terms(scores_of(), beta=BETA, undesirable_weight=0.0, kl=KL)
    assert count_units(terms).item() == 3
    assert reduce_terms(terms, 3).item() == pytest.approx((1 - s(0.5)) / 3)


def test_metrics_are_means_over_each_kind():
    terms = kto_terms(scores_of(), beta=BETA, kl=KL)
    means = {name: metric.mean.item() for name, metric in terms.metrics.items()}
    assert means == pytest.approx(
        {
            "rewards/chosen": 1.0,
            "rewards/rejected": 0.5,  # 0.5 * (-1 + 3) / 2
            "logps/chosen": -8.0,
            "logps/rejected": -9.0,
            "kl": 1.0,
        }
    )
    assert bco_terms(scores_of(), beta=BETA, delta=KL).metrics["delta"].mean.item() == 1.0


def test_a_kind_that_is_absent_is_not_counted():
    metrics = kto_terms(scores_of(desirable=(True, True, True)), kl=KL).metrics
    assert metrics["rewards/rejected"].count.item() == 0 and metrics["rewards/chosen"].count.item() == 3


def test_density_ratios_are_cut():
    assert udm_weights(tensor([0.0, 0.5, 0.8, 1.0]), min_ratio=0.1, max_ratio=3.0).tolist() == pytest.approx(
        [0.1, 1.0, 3.0, 3.0]
    )


def test_errors():
    with pytest.raises(ValueError, match=r"one shape \(B,\), got \[\(2,\), \(1,\), \(1,\)\]"):
        UnpairedScores(tensor([1.0, 2.0]), tensor([1.0]), torch.tensor([True]))
    with pytest.raises(ValueError, match=r"desirable must be a bool tensor, got torch\.float64"):
        UnpairedScores(tensor([1.0]), tensor([1.0]), tensor([1.0]))
