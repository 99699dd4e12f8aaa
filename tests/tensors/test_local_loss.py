"""Gradients taken in the scoring pass against autograd through plain logits."""

import pytest
import torch

from tests.tensors.test_logprobs import RULES, LargestTensor, assert_close, gradients, inputs, plain_scores
from trl.tensors.logprobs import local_loss
from trl.tensors.softmax_rows import LogitRule, Statistics

COUNT = 13
WEIGHTS = torch.linspace(0.0, 1.0, COUNT, dtype=torch.float64)
OLD_LOGPS = torch.linspace(-9.0, -0.5, COUNT, dtype=torch.float64)
ADVANTAGES = torch.linspace(-1.0, 1.0, COUNT, dtype=torch.float64)


def nll(logps, rows):
    return -logps * WEIGHTS[rows]


def dft(logps, rows):
    return -logps.detach().exp() * logps * WEIGHTS[rows]


def clipped(logps, rows):
    ratio = (logps - OLD_LOGPS[rows]).exp()
    return -torch.min(ratio * ADVANTAGES[rows], ratio.clamp(0.8, 1.2) * ADVANTAGES[rows])


LOSSES = {"nll": nll, "dft": dft, "clipped": clipped}


def plain_loss(loss_of, hidden, weight, targets, bias, rule):
    return loss_of(plain_scores(hidden, weight, targets, bias, rule)[0], slice(0, COUNT))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk_size", [1, 5, None])
def test_equals_plain_logits(loss, rule, chunk_size):
    hidden, weight, targets, bias = inputs(COUNT)
    values = plain_loss(LOSSES[loss], hidden, weight, targets, bias, RULES[rule])
    expected = gradients(3.0 * values.sum(), hidden, weight, bias)
    found = local_loss(
        hidden,
        weight,
        targets,
        LOSSES[loss],
        bias=bias,
        rule=RULES[rule],
        wanted=Statistics(correct=True),
        chunk_size=chunk_size,
    )
    assert_close(found.values, values.detach(), 1e-10)
    assert_close(found.total, values.sum(), 1e-10)
    assert not found.values.requires_grad and not found.scores.logps.requires_grad
    for ours, theirs in zip(gradients(3.0 * found.total, hidden, weight, bias), expected, strict=True):
        assert_close(ours, theirs, 1e-10)


@pytest.mark.parametrize("rule", ["plain", "all"])
def test_never_builds_tokens_times_vocabulary(rule):
    hidden, weight, targets, bias = inputs(60, 8, 50)
    with LargestTensor() as seen:
        local_loss(
            hidden, weight, targets, lambda x, rows: -x, bias=bias, rule=RULES[rule], chunk_size=10
        ).total.backward()
    assert seen.largest <= 10 * 50


def test_second_backward_and_summed_losses_are_refused():
    hidden, weight, targets, _ = inputs(COUNT, bias=False)
    found = local_loss(hidden, weight, targets, nll)
    found.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="local_loss goes backward once"):
        found.total.backward()
    with pytest.raises(ValueError, match=r"loss_of must return \(13,\), got \(\)"):
        local_loss(hidden, weight, targets, lambda x, rows: x.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_survive_a_small_share(dtype):
    """Slopes of 1e-7 per token, as in a mean over a large step, must not vanish in the head's sums."""
    hidden, weight, targets, _ = inputs(64, 32, 101, dtype=dtype, bias=False)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = gradients(-plain_scores(wide[0], wide[1], targets, None, LogitRule())[0].sum(), *wide)
    total = local_loss(hidden, weight, targets, lambda x, rows: -1e-7 * x).total
    for ours, theirs in zip(gradients(1e7 * total, hidden, weight), expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() / theirs.norm() < 0.05
