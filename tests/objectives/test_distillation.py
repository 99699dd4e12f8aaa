"""Divergences between student and teacher: closed forms, limits, gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trl.objectives.distillation import (
    Divergence,
    discounted_advantages,
    divergence,
    prefix_weights,
    reverse_kl_advantages,
    sorted_l1,
    top_k_divergence,
)

BETAS = (0.0, 1e-3, 0.3, 0.5, 1 - 1e-3, 1.0)


def logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def by_definition(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    p, q = student.softmax(-1), teacher.softmax(-1)
    if beta == 0:
        return (q * (q.log() - p.log())).sum(-1)
    if beta == 1:
        return (p * (p.log() - q.log())).sum(-1)
    mix = beta * q + (1 - beta) * p
    return (beta * q * (q.log() - mix.log()) + (1 - beta) * p * (p.log() - mix.log())).sum(-1)


@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_are_those_of_the_definition(beta: float) -> None:
    student, teacher = logits(5, 7), logits(5, 7, seed=1)
    slopes = torch.linspace(-1, 2, 5, dtype=torch.float64)
    found, expected = student.clone().requires_grad_(), student.clone().requires_grad_()
    values, reference = divergence(found, teacher, beta=beta), by_definition(expected, teacher, beta)
    torch.testing.assert_close(values, reference, rtol=1e-9, atol=1e-15)
    (values * slopes).sum().backward()
    (reference * slopes).sum().backward()
    assert found.grad is not None and expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-14)


def test_two_tokens_by_hand() -> None:
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    forward = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    middle = 0.5 * (
        0.25 * math.log(0.25 / 0.375)
        + 0.75 * math.log(0.75 / 0.625)
        + 0.5 * math.log(0.5 / 0.375)
        + 0.5 * math.log(0.5 / 0.625)
    )
    found = [divergence(student, teacher, beta=beta).item() for beta in (0.0, 0.5, 1.0)]
    assert found == pytest.approx([forward, middle, reverse], rel=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_finite_differences(beta: float) -> None:
    teacher = logits(3, 4, seed=1)
    assert torch.autograd.gradcheck(lambda x: divergence(x, teacher, beta=beta), logits(3, 4).requires_grad_())


@pytest.mark.parametrize("beta", BETAS)
def test_a_student_like_its_teacher_has_no_loss_and_no_gradient(beta: float) -> None:
    student = logits(4, 9).float().requires_grad_()
    values = divergence(student, student.detach() + 5.0, beta=beta)  # logits that differ by a constant
    values.sum().backward()
    assert student.grad is not None
    assert values.abs().max() < 1e-6 and student.grad.abs().max() < 1e-6


def test_betas_near_the_limits_keep_their_digits_in_float32() -> None:
    student, teacher = logits(6, 11, scale=1.0), logits(6, 11, seed=1, scale=1.0)
    for beta in (1e-6, 2**-20, 1 - 2**-20):
        found = divergence(student.float(), teacher.float(), beta=beta)
        torch.testing.assert_close(found.double(), divergence(student, teacher, beta=beta), rtol=1e-4, atol=0)
    forward, reverse = (divergence(student, teacher, beta=beta) for beta in (0.0, 1.0))
    torch.testing.assert_close(divergence(student, teacher, beta=1e-6) / 1e-6, forward, rtol=1e-4, atol=0)
    torch.testing.assert_close(divergence(student, teacher, beta=1 - 1e-6) / 1e-6, reverse, rtol=1e-4, atol=0)


def test_tokens_that_one_of_them_excludes() -> None:
    student = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[0.0, 0.0, 0.0]])
    assert divergence(student, teacher, beta=0.0).item() == math.inf
    values = divergence(student, teacher, beta=1.0)
    assert values.item() == pytest.approx(math.log(1.5))
    values.sum().backward()
    assert student.grad is not None and torch.equal(student.grad, torch.zeros(1, 3))
    far, teacher = torch.tensor([[0.0, -95.0]], requires_grad=True), torch.tensor([[-95.0, 0.0]])
    values = divergence(far, teacher, beta=0.5)  # exp(95) is infinite in float32, exp(-95) is not 0
    values.sum().backward()
    assert far.grad is not None and far.grad.isfinite().all()
    assert values.item() == pytest.approx(math.log(2))


def test_half_precision_is_summed_in_float32() -> None:
    student, teacher = logits(4, 500).bfloat16().requires_grad_(), logits(4, 500, seed=1).bfloat16()
    values = divergence(student, teacher, beta=0.5)
    values.sum().backward()
    assert values.dtype == torch.float32 and student.grad is not None and student.grad.dtype == torch.bfloat16
    torch.testing.assert_close(values, divergence(student.float(), teacher.float(), beta=0.5), rtol=1e-6, atol=0)
    best = teacher.float().log_softmax(-1).topk(4)
    found, wide = (top_k_divergence(x, best.indices, best.values, beta=0.5) for x in (student, student.float()))
    torch.testing.assert_close(found, wide, rtol=1e-6, atol=0)


@pytest.mark.parametrize("beta", (0.0, 0.5, 1.0))
def test_a_top_k_of_the_whole_vocabulary_is_the_divergence(beta: float) -> None:
    teacher = logits(5, 8, seed=1)
    best = teacher.log_softmax(-1).topk(8)
    found, expected = logits(5, 8).requires_grad_(), logits(5, 8).requires_grad_()
    for tail in (True, False):
        values = top_k_divergence(found, best.indices, best.values, beta=beta, tail=tail)
        reference = divergence(expected, teacher, beta=beta)
        torch.testing.assert_close(values, reference, rtol=1e-10, atol=1e-13)
        (gradient,), (own,) = (torch.autograd.grad(x.sum(), y) for x, y in ((values, found), (reference, expected)))
        torch.testing.assert_close(gradient, own, rtol=1e-10, atol=1e-13)


def test_the_tail_is_one_class() -> None:
    student, teacher = logits(3, 6), logits(3, 6, seed=1).log_softmax(-1)
    best = teacher.topk(2)
    p = student.softmax(-1).gather(1, best.indices)
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, best.values.exp()))
    for beta, expected in ((0.0, (q * (q / p).log()).sum(1)), (1.0, (p * (p / q).log()).sum(1))):
        found = top_k_divergence(student, best.indices, best.values, beta=beta)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: top_k_divergence(x, best.indices, best.values, beta=0.5), student.requires_grad_()
    )


def test_without_a_tail_both_are_renormalised() -> None:
    student, teacher = logits(3, 6), logits(3, 6, seed=1).log_softmax(-1)
    best = teacher.topk(3)
    expected = divergence(student.gather(1, best.indices), best.values, beta=0.3)
    found = top_k_divergence(student, best.indices, best.values, beta=0.3, tail=False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_tail_that_rounds_to_nothing_is_finite() -> None:
    best = torch.tensor([[0.0, -40.0]])
    student = torch.zeros(1, 3, requires_grad=True)
    values = top_k_divergence(student, torch.tensor([[2, 0]]), best, beta=1.0)
    values.sum().backward()
    assert student.grad is not None and values.isfinite().all() and student.grad.isfinite().all()


@pytest.mark.parametrize("beta", (-0.1, 1.1, math.nan))
def test_a_beta_outside_of_its_range_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        divergence(torch.zeros(1, 2), torch.zeros(1, 2), beta=beta)


def test_vocabularies_of_unlike_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 3\)"):
        divergence(torch.zeros(1, 2), torch.zeros(1, 3), beta=0.5)


def test_only_the_common_vocabulary_is_compared() -> None:
    student, teacher = logits(3, 6), logits(3, 8, seed=1)
    loss, expected = Divergence(0.5, tail=False), divergence(student, teacher[:, :6], beta=0.5)
    assert torch.equal(loss.of_logits(student, teacher), expected)
    padded = torch.cat([student, student], dim=1)
    assert torch.equal(loss.of_logits(padded, teacher[:, :6]), expected)
    best = teacher[:, :6].log_softmax(-1).topk(2)
    expected = divergence(student.gather(1, best.indices), best.values, beta=0.5)
    torch.testing.assert_close(loss.of_top_k(student, best.indices, best.values), expected)


def test_sorted_distances() -> None:
    student = torch.tensor([[0.1, 0.6, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=torch.float64)
    found = sorted_l1(student, teacher)
    torch.testing.assert_close(found, torch.tensor([0.1 + 0.2 + 0.1, 0.0], dtype=torch.float64))
    assert torch.equal(sorted_l1(teacher, student.detach()), found.detach())
    found[0].backward()
    assert student.grad is not None and student.grad[0].tolist() == [1.0, 1.0, -1.0]


def test_advantages_are_the_reverse_kl_with_its_sign_changed() -> None:
    p, q = torch.tensor([0.75, 0.25], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    learned = p.log().requires_grad_()
    advantages = reverse_kl_advantages(learned, q.log())
    assert not advantages.requires_grad
    assert (p * advantages).sum().item() == pytest.approx(-divergence(p.log()[None], q.log()[None], beta=1.0).item())


def test_discounted_sums_of_each_sequence() -> None:
    values = torch.tensor([1.0, 10.0, 2.0, 4.0], dtype=torch.float64)
    sequence = torch.tensor([0, 1, 0, 0])
    sums = discounted_advantages(values, sequence, 2, gamma=0.5, normalize=False)
    assert sums.tolist() == [1 + 0.5 * 2 + 0.25 * 4, 10.0, 2 + 0.5 * 4, 4.0]
    means = discounted_advantages(values, sequence, 2, gamma=0.5, normalize=True)
    assert means.tolist() == pytest.approx([3 / 1.75, 10.0, 4 / 1.5, 4.0])
    later = discounted_advantages(values, sequence, 2, gamma=1.0, normalize=True, skip=True)
    assert later.tolist() == pytest.approx([3.0, 0.0, 4.0, 0.0])
    later = discounted_advantages(values, sequence, 2, gamma=0.5, normalize=False, skip=True)
    assert later.tolist() == [0.5 * 2 + 0.25 * 4, 0.0, 0.5 * 4, 0.0]
    assert discounted_advantages(values, sequence, 2, gamma=0.0, normalize=True).tolist() == values.tolist()


def test_prefix_weights_fall_from_the_first_token_on() -> None:
    advantages, sequence = torch.tensor([1.0, 5.0, -1.0, 2.0]), torch.tensor([0, 1, 0, 0])
    found = prefix_weights(advantages, sequence, 2, gamma=0.5, epsilon=1e-6)
    assert found.tolist() == pytest.approx([1.5, 1.5, 1 + 0.5 * 0.75, 1 + 0.5 * 0.5])
    equal = prefix_weights(torch.zeros(2), torch.tensor([0, 0]), 1, gamma=0.5, epsilon=1e-6)
    assert equal.tolist() == [1.5, 1.5]
