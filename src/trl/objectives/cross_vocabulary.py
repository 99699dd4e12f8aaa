"""Distillation across tokenizers: spans of tokens of two vocabularies that stand for the same bytes.

A span's measure over the first token is p(v) prod_j p(y_j): the distribution at its first position times the
probabilities of the tokens that follow in the span. It sums to less than 1 where the span has several tokens; its value
at the first token is the probability of the span, so that spans add up to the log-probability of the sequence.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trl.objectives.distillation import check_beta, sorted_l1


class Vocabularies(NamedTuple):
    """Ids of the tokens that two vocabularies share, in one order, and of the others of each."""

    shared: Tensor
    other: Tensor
    rest: Tensor
    other_rest: Tensor


def span_measures(logits: Tensor, targets: Tensor, first: Tensor, inside: Tensor) -> Tensor:
    """The log-measure of each span, `(C, V) -> (G, V)`, of the distributions that predict the tokens `targets (C,)`.

    `first` and `inside`, bool `(C,)`: the first token of each of G spans, and all tokens of spans. Gradients reach the
    probabilities of the further tokens too. In float32 or wider.

    >>> logits, targets = torch.zeros(2, 4), torch.tensor([1, 2])
    >>> span_measures(logits, targets, torch.tensor([True, False]), torch.tensor([True, True])).exp().sum()
    tensor(0.2500)
    """
    logps = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    chosen = logps.gather(-1, targets[:, None])[:, 0]
    further, measures = inside & ~first, logps[first]
    rest = torch.zeros_like(measures[:, 0]).index_add(0, (first.cumsum(0) - 1)[further], chosen[further])
    return measures + rest[:, None]


def measure_divergence(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """`divergence` of measures that need not sum to 1, `(G, M), (G, M) -> (G,)`, in nats; 0 where they are equal.

    `beta=0` is `sum q log(q / p) - q + p`, `beta=1` the same with p and q exchanged; the generalised Jensen-Shannon
    divergence needs no such terms. Of distributions it is `divergence`. Only `log_p` gets a gradient.

    >>> measure_divergence(torch.tensor([[0.25, 0.25]]).log(), torch.tensor([[0.5, 0.25]]).log(), beta=0.0)
    tensor([0.0966])
    """
    values, excess = divergence_entries(log_p, log_q, beta=beta), log_p.exp() - log_q.detach().exp()
    if beta in (0, 1):
        values = values + excess if beta == 0 else values - excess
    return values.sum(-1)


def divergence_entries(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """The terms whose sum over the vocabulary is `divergence`, `(..., V), (..., V) -> (..., V)`, in nats.

    Of log-probabilities, which need not sum to 1. Only `log_p` gets a gradient.

    >>> divergence_entries(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log(), beta=1.0)
    tensor([ 0.3466, -0.2027])
    """
    check_beta(beta)
    log_q = log_q.detach()
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return _times(q, log_q - log_p)
    if beta == 1:
        return _times(p, log_p - log_q)
    mix = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * _times(q, log_q - mix) + (1 - beta) * _times(p, log_p - mix)


def _times(weights: Tensor, values: Tensor) -> Tensor:
    nothing = weights == 0
    return torch.where(nothing, 0.0, weights * torch.where(nothing, 0.0, values))


def cross_vocabulary(
    log_p: Tensor, log_q: Tensor, vocabularies: Vocabularies | None, *, beta: float
) -> tuple[Tensor | None, Tensor]:
    """Distances of two log-measures, `(G, V), (G, V') -> (G,), (G,)`: on the tokens of both vocabularies, on others.

    The first is `measure_divergence`, None without `vocabularies`; the second `sorted_l1` of the other tokens (without
    `vocabularies` of all), 0 where a side has none: Boizard et al. 2024, eq. 5 (arXiv:2402.12030).
    """
    if vocabularies is None:
        return None, sorted_l1(log_p.exp(), log_q.exp())
    shared, other, rest, other_rest = vocabularies
    matched = measure_divergence(log_p[:, shared], log_q[:, other], beta=beta)
    if not (len(rest) and len(other_rest)):
        return matched, torch.zeros_like(matched)
    return matched, sorted_l1(log_p[:, rest].exp(), log_q[:, other_rest].exp())
