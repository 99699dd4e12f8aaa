"""Heads that are called, not read: equal to plain logits of what they amount to."""

import pytest
import torch

from tests.tensors.test_local_loss import COUNT, clipped, nll, plain_loss
from tests.tensors.test_logprobs import RULES, LargestTensor, assert_close, gradients, inputs, plain_scores
from trl.tensors.logprobs import local_loss_through, token_scores_through
from trl.tensors.softmax_rows import LogitRule, Statistics


class LowRankHead(torch.nn.Module):
    """A frozen product plus a trained low-rank one, with dropout between: what LoRA makes of a head."""

    def __init__(self, weight, bias, dropout=0.0):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.down = torch.nn.Parameter(torch.linspace(-1, 1, weight.shape[1] * 2, dtype=weight.dtype).view(2, -1))
        self.up = torch.nn.Parameter(torch.linspace(1, -1, len(weight) * 2, dtype=weight.dtype).view(-1, 2))
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, hidden):
        low = self.dropout(hidden) @ self.down.T @ self.up.T
        return torch.nn.functional.linear(hidden, self.weight, self.bias) + low

    def merged(self):
        return self.weight + self.up @ self.down


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk_size", [1, 5, None])
def test_any_head_equals_its_merged_weight(rule, chunk_size):
    hidden, weight, targets, bias = inputs(COUNT)
    head = LowRankHead(weight.requires_grad_(False), bias)
    leaves = (hidden, head.down, head.up, bias)
    expected = plain_loss(clipped, hidden, head.merged(), targets, bias, RULES[rule])
    found = local_loss_through(head, hidden, targets, clipped, rule=RULES[rule], chunk_size=chunk_size)
    assert_close(found.values, expected.detach(), 1e-10)
    for ours, theirs in zip(gradients(found.total, *leaves), gradients(expected.sum(), *leaves), strict=True):
        assert_close(ours, theirs, 1e-10)


def test_any_head_replays_its_dropout_and_bounds_its_memory():
    hidden, weight, targets, bias = inputs(60, 8, 50)
    head = LowRankHead(weight, bias, dropout=0.5)
    with LargestTensor() as seen:
        torch.manual_seed(0)
        token_scores_through(head, hidden, targets, chunk_size=10).logps.sum().backward()
    assert seen.largest <= 10 * 50
    ours = hidden.grad.clone()
    torch.manual_seed(0)
    logps = torch.cat([head(x).log_softmax(-1) for x in hidden.split(10)])
    expected = gradients(logps.gather(1, targets[:, None]).sum(), hidden)[0]
    assert_close(ours, expected, 1e-10)


def test_any_head_without_gradient_and_without_rows():
    hidden, weight, targets, bias = inputs(COUNT)
    head = LowRankHead(weight, bias)
    with torch.no_grad():
        scores = token_scores_through(head, hidden, targets, wanted=Statistics(entropy=True, correct=True))
    assert not scores.logps.requires_grad
    expected = plain_scores(hidden, head.merged(), targets, bias, LogitRule())
    assert_close(scores.logps, expected[0].detach(), 1e-10)
    assert_close(scores.entropies, expected[1].detach(), 1e-10)
    assert scores.correct.tolist() == expected[2].tolist()
    nothing = local_loss_through(head, hidden[:0], targets[:0], nll)
    assert nothing.total.item() == 0.0 and nothing.values.shape == (0,)


def test_any_head_under_autocast_keeps_its_statistics_exact():
    _, _, targets, _ = inputs(COUNT)
    products = torch.randn(COUNT, 37, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores_through(torch.nn.Identity(), products, targets, wanted=Statistics(entropy=True))
        found = gradients(scores.entropies.sum(), products)[0]
    logps = products.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    assert_close(scores.entropies, entropies, 1e-6)
    assert_close(found, gradients(entropies.sum(), products)[0], 1e-6)
