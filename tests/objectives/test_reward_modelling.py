import math

import pytest
import torch

from tests.objectives.pair_cases import s, tensor
from trl.objectives.reward_modelling import bradley_terry, step_classification
from trl.tensors.reduce import count_units, reduce_terms


def test_bradley_terry_by_hand():
    """Gaps 1 and -2; with margins 0.5 and 1: 0.5 and -3."""
    chosen, rejected = tensor([2.0, -1.0]), tensor([1.0, 1.0])
    terms = bradley_terry(chosen, rejected)
    assert terms.per == "pair" and terms.values.tolist() == pytest.approx([-math.log(s(1)), -math.log(s(-2))])
    wider = bradley_terry(chosen, rejected, margin=tensor([0.5, 1.0]))
    assert wider.values.tolist() == pytest.approx([-math.log(s(0.5)), -math.log(s(-3))])


def test_centering_by_hand():
    """0.1 (2 + 1)^2 = 0.9 on top; (-1 + 1)^2 adds nothing."""
    chosen, rejected = tensor([2.0, -1.0]), tensor([1.0, 1.0])
    for margin in (None, tensor([0.5, 1.0])):
        plain = bradley_terry(chosen, rejected, margin=margin).values
        centred = bradley_terry(chosen, rejected, margin=margin, center_coefficient=0.1).values
        assert (centred - plain).tolist() == pytest.approx([0.9, 0.0])


def test_chosen_goes_up_and_rejected_goes_down():
    chosen, rejected = tensor([1.0], grad=True), tensor([1.0], grad=True)
    found = torch.autograd.grad(bradley_terry(chosen, rejected).values.sum(), (chosen, rejected))
    assert [gradient.item() for gradient in found] == [-0.5, 0.5]


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_gaps_are_finite(gap):
    chosen = torch.tensor([gap], requires_grad=True)
    values = bradley_terry(chosen, -chosen.detach()).values
    assert torch.isfinite(values).all() and torch.isfinite(torch.autograd.grad(values.sum(), chosen)[0]).all()


def test_metrics_by_their_documented_names():
    terms = bradley_terry(tensor([2.0, -1.0]), tensor([1.0, 1.5]))
    means = {name: metric.mean.item() for name, metric in terms.metrics.items()}
    assert means == pytest.approx({"mean_reward": 3.5 / 4, "accuracy": 0.5, "margin": -0.75})


def test_no_pairs_no_extremes():
    terms = bradley_terry(tensor([]), tensor([]))
    assert terms.values.shape == (0,) and "min_reward" not in terms.metrics


def test_steps_by_hand():
    """Logit gaps of 2 for the right class and against it; the middle position is not the end of a step."""
    logits = tensor([[0.0, 2.0], [math.inf, 0.0], [0.0, 2.0]], grad=True)
    terms = step_classification(logits, torch.tensor([1, -100, 0]))
    assert terms.per == "token" and count_units(terms).item() == 2
    loss = reduce_terms(terms, 2)
    assert loss.item() == pytest.approx(-(math.log(s(2)) + math.log(s(-2))) / 2)
    gradient = torch.autograd.grad(loss, logits)[0]
    assert gradient[1].tolist() == [0.0, 0.0]
    assert gradient[0].tolist() == pytest.approx([s(-2) / 2, -s(-2) / 2])


def test_errors():
    with pytest.raises(ValueError, match=r"one shape \(B,\), got \[\(2,\), \(1,\)\]"):
        bradley_terry(tensor([1.0, 2.0]), tensor([1.0]))
    with pytest.raises(ValueError, match="rewards and margins"):
        bradley_terry(tensor([1.0]), tensor([1.0]), margin=tensor([[1.0]]))
    with pytest.raises(ValueError, match=r"got \(2,\), \(3, 2\)"):
        step_classification(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))


def test_equal_rewards_are_no_success():
    metrics = bradley_terry(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])).metrics
    assert metrics["accuracy"].mean.item() == 0.5
