"""Measures of spans and their distances: hand-worked values, limits, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from trl.objectives.cross_vocabulary import Vocabularies, cross_vocabulary, measure_divergence, span_measures
from trl.objectives.distillation import divergence, sorted_l1


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_span_is_its_first_distribution_times_the_tokens_that_follow() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    logits = torch.cat([logits, torch.tensor([[0.5, 0.3, 0.2]])]).log()
    targets = torch.tensor([1, 2, 0, 2, 0])
    first, inside = torch.tensor([1, 0, 0, 1, 0]) == 1, torch.tensor([1, 1, 0, 1, 1]) == 1
    found = span_measures(logits, targets, first, inside).exp()
    torch.testing.assert_close(found, torch.tensor([[0.35, 0.175, 0.175], [0.1, 0.1, 0.3]]))
    assert span_measures(logits.bfloat16(), targets, first, inside).dtype == torch.float32


def test_spans_add_up_to_the_sequence() -> None:
    logits, targets = draw(9, 5), torch.tensor([0, 3, 1, 4, 2, 2, 0, 1, 3])
    first = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 0]) == 1
    found = span_measures(logits, targets, first, torch.ones_like(first))
    whole = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    torch.testing.assert_close(found.gather(1, targets[first][:, None]).sum(), whole, rtol=1e-14, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_of_distributions_it_is_the_divergence(beta: float) -> None:
    p, q = draw(4, 6, seed=1).requires_grad_(), draw(4, 6, seed=2)
    expected = divergence(p, q, beta=beta)
    found = measure_divergence(p.log_softmax(-1), q.log_softmax(-1), beta=beta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    slopes = [torch.autograd.grad(each.sum(), p, retain_graph=True)[0] for each in (found, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_of_measures_it_is_least_where_they_are_equal(beta: float) -> None:
    log_q = draw(3, 4, seed=3) - 2
    log_p = log_q.clone().requires_grad_()
    found = measure_divergence(log_p, log_q, beta=beta)
    assert found.abs().max() < 1e-15
    assert torch.autograd.grad(found.sum(), log_p)[0].abs().max() < 1e-15
    assert (measure_divergence(log_q + draw(3, 4, seed=4), log_q, beta=beta) > 0).all()


def test_values_by_hand() -> None:
    p, q = torch.tensor([[0.25, 0.25]]).double().log(), torch.tensor([[0.5, 0.0]]).double().log()
    assert measure_divergence(p, q, beta=0.0).item() == pytest.approx(0.5 * math.log(2))
    jsd = 0.5 * 0.5 * math.log(0.5 / 0.375) + 0.5 * (0.25 * math.log(0.25 / 0.375) + 0.25 * math.log(2))
    assert measure_divergence(p, q, beta=0.5).item() == pytest.approx(jsd)
    excluded = torch.tensor([[0.5, 0.0]]).log().requires_grad_()
    measure_divergence(excluded, torch.tensor([[0.5, 0.25]]).log(), beta=0.5).sum().backward()
    assert excluded.grad is not None and excluded.grad.isfinite().all()
    parts = Vocabularies(*(torch.tensor(ids) for ids in ([0, 2], [1, 0], [1], [2, 3])))
    log_p, log_q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.5, 0.1, 0.2]]).log()
    matched, rest = cross_vocabulary(log_p, log_q, parts, beta=0.5)
    assert matched is not None and matched.abs().item() < 1e-7
    assert rest.item() == pytest.approx(0.1 + 0.1)
    no_rest = parts._replace(rest=torch.tensor([], dtype=torch.int64))
    assert cross_vocabulary(log_p, log_q, no_rest, beta=0.5)[1].item() == 0.0
    assert cross_vocabulary(log_p, log_q, None, beta=0.5)[0] is None
    torch.testing.assert_close(cross_vocabulary(log_p, log_q, None, beta=0.5)[1], sorted_l1(log_p.exp(), log_q.exp()))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_gradients_reach_all_tokens_of_a_span(beta: float) -> None:
    goal = draw(2, 6, seed=5) - 1
    targets, first = torch.tensor([1, 2, 0, 3]), torch.tensor([True, False, True, False])
    parts = Vocabularies(*(torch.tensor(ids) for ids in ([0, 2], [1, 0], [1, 3, 4], [2, 3, 4, 5])))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        measures = span_measures(logits, targets, first, torch.ones_like(first))
        matched, rest = cross_vocabulary(measures, goal, parts, beta=beta)
        assert matched is not None
        return matched + 0.3 * rest

    logits = draw(4, 5, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(loss, (logits,), atol=1e-7)
    assert (torch.autograd.grad(loss(logits).sum(), logits)[0].abs().amax(1) > 1e-4).all()
