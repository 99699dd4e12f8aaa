import math

import pytest
import torch

from tests.objectives.pair_cases import one_pair, s, scores_of, tensor
from trl.objectives.pairs import (
    F_DIVERGENCES,
    PairOptions,
    PairScores,
    log_loss,
    margin,
    pair_metrics,
    step_statistics,
)


def test_margins_by_hand():
    """Ratios u_c = 2, u_r = 1/2. Reverse KL: log 4; alpha 1: (1 - 1/2) - (1 - 2); JS: log of (4/3) / (2/3)."""
    scores = one_pair(math.log(2), -math.log(2))
    for name, expected in {
        "reverse_kl": math.log(4),
        "alpha_divergence": 1.5,
        "js_divergence": math.log(2),
    }.items():
        assert margin(scores, PairOptions(f_divergence=name)).item() == pytest.approx(expected)


def test_half_alpha_by_hand():
    """2 (1 - u^-1/2): 2 (1 - 1/2) - 2 (1 - 2) = 3 for u = 4 and 1/4."""
    options = PairOptions(f_divergence="alpha_divergence", f_alpha=0.5)
    assert margin(one_pair(math.log(4), -math.log(4)), options).item() == pytest.approx(3.0)


def test_divergences_are_derivatives_of_theirs():
    """f'(u) up to a constant, for u log u, (u^(1-a) - (1-a) u - a) / (a (a - 1)) and the Jensen-Shannon f."""
    a = 0.3
    generators = {
        "reverse_kl": lambda u: u * u.log(),
        "alpha_divergence": lambda u: (u.pow(1 - a) - (1 - a) * u - a) / (a * (a - 1)),
        "js_divergence": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
    }
    u = tensor([0.2, 1.0, 3.0], grad=True)
    for name, f in generators.items():
        derivative = torch.autograd.grad(f(u).sum(), u)[0]
        found = F_DIVERGENCES[name](u.detach().log(), a)
        torch.testing.assert_close(found - found[1], derivative - derivative[1])


def test_log_loss_with_wrong_labels():
    assert log_loss(tensor([2.0]), 0.25).item() == pytest.approx(-0.75 * math.log(s(2)) - 0.25 * math.log(s(-2)))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"four tensors of one shape \(B,\), got \[\(2,\), \(1,\)"):
        PairScores(tensor([1.0, 2.0]), tensor([1.0]), tensor([1.0]), tensor([1.0]))
    with pytest.raises(ValueError, match="log-probs of pairs"):
        PairScores.without_reference(tensor([[1.0]]), tensor([[1.0]]))


def test_metrics_of_pairs():
    """Equal rewards are no success; margins are differences."""
    zero = torch.zeros(3)
    found = pair_metrics(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 0.0, 3.0]), chosen_logps=zero, rejected_logps=zero)  # fmt: skip
    assert found["rewards/accuracies"].mean.item() == pytest.approx(1 / 3)
    assert found["rewards/margins"].mean.item() == pytest.approx(-1 / 3)


def test_without_a_reference_its_log_probs_are_zero():
    chosen, rejected = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert PairScores.without_reference(chosen, rejected).ratios == (chosen, rejected)


def test_statistics_of_a_step_by_hand():
    """Margins of the policy are -1 and 8, of the reference -3 and -2; log-ratios (-1, 3) and (-3, -7)."""
    scores = PairScores(*(torch.tensor(v) for v in ([0.0, 3.0], [1.0, -5.0], [1.0, 0.0], [4.0, 2.0])))
    found = step_statistics(scores, beta=0.5)
    assert found.delta.item() == 0.5 * (-1 + 3 - 3 - 7) / 4
    assert found.margin_partner.tolist() == [-3.0, -2.0]
    assert found.rejected_partner.tolist() == [-7.0, -3.0] and found.chosen_partner.tolist() == [3.0, -1.0]


def test_per_token_divides_all_four():
    means = scores_of().per_token(tensor([2.0, 4.0, 5.0]), tensor([1.0, 2.0, 4.0]))
    assert means.chosen.tolist() == [-4.0, -5.25, -0.9] and means.ref_chosen.tolist() == [-5.0, -5.0, -1.0]
    assert means.rejected.tolist() == [-11.0, -2.5, -2.5] and means.ref_rejected.tolist() == [
        -12.0,
        -4.0,
        -1.5,
    ]
