import math

import pytest
import torch

from tests.objectives.pair_cases import s, tensor
from trl.objectives.pairs import PairOptions, PairScores
from trl.objectives.preference import CPO_LOSSES, cpo_terms, log1mexp, log_odds, orpo_terms

BETA, GAMMA = 2.0, 0.5
# c = -1, r = -1.5 with beta 2: beta (c - r) = 1. alpha 1: (1 - e^1) and (1 - e^1.5).
BENT = 2 * (math.exp(1.5) - math.exp(1.0))


def pair(chosen: float = -1.0, rejected: float = -1.5) -> PairScores:
    return PairScores.without_reference(tensor([chosen], grad=True), tensor([rejected], grad=True))


@pytest.mark.parametrize(
    ("loss_type", "alpha", "expected"),
    [
        ("sigmoid", 0.0, -math.log(s(1))),
        ("hinge", 0.0, 0.0),
        ("ipo", 0.0, (0.5 - 0.25) ** 2),
        ("simpo", 0.0, -math.log(s(1 - GAMMA))),
        ("alphapo", 0.0, -math.log(s(1 - GAMMA))),
        ("alphapo", 1.0, -math.log(s(BENT - GAMMA))),
        ("simpo", 1.0, -math.log(s(BENT - GAMMA))),
        ("sigmoid", 1.0, -math.log(s(BENT))),
        ("ipo", 1.0, (BENT / 2 - 0.25) ** 2),
    ],
)
def test_values_by_hand(loss_type, alpha, expected):
    options = PairOptions(beta=BETA, simpo_gamma=GAMMA, alpha=alpha)
    terms = cpo_terms(pair(), loss_type, options)
    assert terms.per == "pair" and terms.values.tolist() == pytest.approx([expected], abs=1e-14)


@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo"])
def test_label_smoothing(loss_type):
    x = 1 - (GAMMA if loss_type == "simpo" else 0)
    options = PairOptions(beta=BETA, simpo_gamma=GAMMA, label_smoothing=0.2)
    expected = -0.8 * math.log(s(x)) - 0.2 * math.log(s(-x))
    assert cpo_terms(pair(), loss_type, options).values.item() == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.25])
@pytest.mark.parametrize("loss_type", sorted(set(CPO_LOSSES) - {"ipo"}))
def test_chosen_goes_up_and_rejected_goes_down(loss_type, alpha):
    scores = pair()
    values = cpo_terms(scores, loss_type, PairOptions(beta=0.1, alpha=alpha)).values
    chosen, rejected = torch.autograd.grad(values.sum(), (scores.chosen, scores.rejected))
    assert chosen.item() < 0 < rejected.item()


@pytest.mark.parametrize("loss_type", CPO_LOSSES)
def test_impossible_completions_are_finite(loss_type):
    for alpha in (0.0, 0.5, -0.5):
        chosen = torch.tensor([-60.0 if loss_type == "ipo" else -2e3], requires_grad=True)
        scores = PairScores.without_reference(chosen, torch.tensor([-1e-6]))
        values = cpo_terms(scores, loss_type, PairOptions(alpha=alpha)).values
        assert torch.isfinite(values).all() and torch.isfinite(torch.autograd.grad(values.sum(), chosen)[0]).all()


def test_metrics_show_the_bent_reward():
    """alpha 1: 2 (1 - e) and 2 (1 - e^1.5); the log-probs are logged as they are."""
    terms = cpo_terms(pair(), "alphapo", PairOptions(beta=BETA, alpha=1.0))
    means = {name: metric.mean.item() for name, metric in terms.metrics.items()}
    assert means["rewards/chosen"] == pytest.approx(2 * (1 - math.e))
    assert means["rewards/margins"] == pytest.approx(BENT) and means["logps/chosen"] == -1.0
    assert means["rewards/accuracies"] == 1.0 and means["logps/rejected"] == -1.5


def test_orpo_by_hand():
    """p = 1/2 and 1/4: odds 1 and 1/3, odds ratio 3, -log s(log 3) = -log(3/4)."""
    scores = pair(math.log(0.5), math.log(0.25))
    terms = orpo_terms(scores, beta=0.1)
    assert terms.per == "pair" and terms.values.item() == pytest.approx(-0.1 * math.log(0.75))
    means = {name: metric.mean.item() for name, metric in terms.metrics.items()}
    assert means["log_odds_chosen"] == pytest.approx(math.log(3))
    assert means["log_odds_ratio"] == pytest.approx(math.log(0.75))
    assert means["rewards/chosen"] == pytest.approx(0.1 * math.log(0.5))
    chosen, rejected = torch.autograd.grad(terms.values.sum(), (scores.chosen, scores.rejected))
    # d log odds / d log p = 1 / (1 - p); the rest is -beta s(-log 3) = -0.1 / 4.
    assert (chosen.item(), rejected.item()) == pytest.approx((-0.025 / 0.5, 0.025 / 0.75))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_sure_and_impossible_completions_are_finite(dtype):
    logps = torch.tensor([0.0, -1e-30, -1e-5, -80.0, -1e4], dtype=dtype, requires_grad=True)
    odds = log_odds(logps)
    assert torch.isfinite(odds).all() and (odds.diff() <= 0).all()
    assert torch.isfinite(torch.autograd.grad(odds.sum(), logps)[0]).all()


def test_log1mexp_is_exact_on_both_sides():
    """log(1 - e^x): near 0 it is log(-x) + x / 2, far from 0 it is -e^x."""
    found = log1mexp(tensor([-1e-9, -math.log(2), -40.0]))
    expected = [math.log(1e-9) - 0.5e-9, -math.log(2), -math.exp(-40)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=0)


def test_errors():
    with pytest.raises(
        ValueError, match="unknown loss_type 'simp'; known are 'alphapo', 'hinge', 'ipo', 'sigmoid', 'simpo'"
    ):
        cpo_terms(pair(), "simp", PairOptions())


def test_orpo_rewards_and_weights_of_pairs():
    scores = PairScores.without_reference(torch.tensor([-1.0]), torch.tensor([-3.0]))
    terms = orpo_terms(scores, beta=0.5)
    assert terms.metrics["rewards/chosen"].mean == -0.5 and terms.metrics["rewards/rejected"].mean == -1.5
    assert terms.weights.tolist() == [1.0]
    assert cpo_terms(scores, "sigmoid", PairOptions()).weights.tolist() == [1.0]
