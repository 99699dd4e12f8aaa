"""The mathematics of one chunk of vocabulary rows: log-probability, entropy, and their slopes.

`logprobs.py` uses them for heads whose weight can be read; `wide_scores` is the same by autograd.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Stands in for -inf after the maximum was subtracted: exp of it is 0 in every dtype, and 0 times it is 0.
_LOWEST_SHIFTED = -1e4


@dataclass(frozen=True, slots=True)
class LogitRule:
    """The function from products of hidden states and head to logits: `soft_cap(scale * products) / temperature`.

    `scale` is Cohere's `logit_scale` or the inverse of Granite's `logits_scaling`; `soft_cap` is Gemma 2's
    `final_logit_softcapping`, `cap * tanh(x / cap)`. A head's bias belongs to the products.

    >>> LogitRule(scale=2.0, temperature=0.5).apply_(torch.tensor([[1.0, -1.0]]))
    tensor([[ 4., -4.]])
    """

    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}.")

    def apply_(self, products: Tensor) -> Tensor:
        """Turn head products into logits, in place."""
        if self.soft_cap is None:
            return products if self.scale == self.temperature else products.mul_(self.scale / self.temperature)
        products.mul_(self.scale / self.soft_cap).tanh_()
        return products.mul_(self.soft_cap / self.temperature)

    def logits(self, products: Tensor) -> Tensor:
        """The same out of place, in float32 or wider, for autograd."""
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        if self.soft_cap is None:
            return products * (self.scale / self.temperature)
        return torch.tanh(products * (self.scale / self.soft_cap)) * (self.soft_cap / self.temperature)


class Workspace(NamedTuple):
    """Buffers `(C, V)` for one chunk at a time; two names may share one buffer where the steps allow it."""

    logits: Tensor
    shifted: Tensor
    exps: Tensor


@dataclass(frozen=True, slots=True)
class Statistics:
    """Results of each token beside its log-probability.

    `entropy` of its distribution, in nats; `correct`, whether the target is the arg-max; `collision`, the log of the
    probability that two draws agree, `log sum_v p(v)^2`; `mean_logit` over the vocabulary.
    """

    entropy: bool = False
    correct: bool = False
    collision: bool = False
    mean_logit: bool = False


class TokenScores(NamedTuple):
    """Per token `(N,)`: log-probability and entropy in nats, and whether the arg-max is the target.

    Without gradient: `log_collision`, `log sum_v p(v)^2` in nats, and `mean_logits`, over the vocabulary, of the logits
    before the temperature divides them.
    """

    logps: Tensor
    entropies: Tensor | None = None
    correct: Tensor | None = None
    log_collision: Tensor | None = None
    mean_logits: Tensor | None = None


class RowScores(NamedTuple):
    """Scores of a chunk; `peak` and `total` `(C, 1)` carry the normaliser."""

    scores: TokenScores
    peak: Tensor
    total: Tensor


def score_rows(
    space: Workspace, targets: Tensor, *, rule: LogitRule, wanted: Statistics, ties: bool = False
) -> RowScores:
    """Score `targets` `(C,)` under `space.logits`; leaves `exp(logits - peak)` in `space.exps`.

    `ties`: equal logits are likely (half-precision products, capped logits), and the arg-max is searched instead of
    comparing the target's logit with the maximum.
    """
    index = targets.unsqueeze(1)
    chosen = space.logits.gather(1, index)
    means = space.logits.mean(dim=1).mul_(rule.temperature) if wanted.mean_logit else None
    peak = space.logits.amax(dim=1, keepdim=True)
    hits = None
    if wanted.correct:
        hits = (space.logits.argmax(dim=1, keepdim=True) == index if ties else chosen == peak).squeeze(1)
    shifted = torch.sub(space.logits, peak, out=space.shifted)
    if wanted.entropy:
        shifted.clamp_(min=_LOWEST_SHIFTED)
    exps = torch.exp(shifted, out=space.exps)
    total = exps.sum(dim=1, keepdim=True)
    log_total = total.log()
    collisions = entropies = None
    if wanted.collision:
        squares = torch.bmm(exps.unsqueeze(1), exps.unsqueeze(2)).view(-1, 1)
        collisions = (squares.log() - 2 * log_total).squeeze(1)
    if wanted.entropy:
        weighted = torch.bmm(exps.unsqueeze(1), shifted.unsqueeze(2)).view(-1, 1)
        entropies = (log_total - weighted / total).squeeze(1)
    logps = (chosen - peak - log_total).squeeze(1)
    return RowScores(TokenScores(logps, entropies, hits, collisions, means), peak, total)


def wide_scores(logits: Tensor, targets: Tensor, *, rule: LogitRule, wanted: Statistics) -> TokenScores:
    """Scores of `targets` `(C,)` under logits `(C, V)` that carry a gradient; the backward pass is autograd's."""
    every = logits.log_softmax(dim=1)
    entropies = -(every.exp() * every.clamp(min=_LOWEST_SHIFTED)).sum(dim=1) if wanted.entropy else None
    fixed = logits.detach()
    return TokenScores(
        every.gather(1, targets.unsqueeze(1)).squeeze(1),
        entropies,
        fixed.argmax(dim=1) == targets if wanted.correct else None,
        (2 * every.detach()).logsumexp(dim=1) if wanted.collision else None,
        fixed.mean(dim=1) * rule.temperature if wanted.mean_logit else None,
    )


def row_slopes_(
    space: Workspace, scores: RowScores, targets: Tensor, rule: LogitRule, logps_slope: Tensor,
    entropies_slope: Tensor | None,
) -> Tensor:  # fmt: skip
    """Turn `space.exps` into the loss's slopes over the head products, up to one factor per row.

    `logps_slope` and `entropies_slope` `(C,)` are the loss's slopes over the log-probs and entropies. The factors
    `(C, 1)` belong to the narrow side of the products that follow, which saves a pass over the vocabulary. Per logit,
    d logp = onehot - p and d entropy = -p (log p + entropy).
    """
    index, scale = targets.unsqueeze(1), rule.scale / rule.temperature / scores.total
    along_logps = logps_slope.unsqueeze(1)
    if entropies_slope is None or scores.scores.entropies is None:
        space.exps.scatter_add_(1, index, -scores.total)
        factors = -along_logps * scale
    else:
        along_entropies = entropies_slope.unsqueeze(1)
        offset = scores.scores.entropies.unsqueeze(1) - scores.total.log()
        space.shifted.mul_(-along_entropies).sub_(along_logps + along_entropies * offset)
        space.exps.mul_(space.shifted)
        space.exps.scatter_add_(1, index, along_logps * scores.total)
        factors = scale
    if rule.soft_cap is not None:  # its slope is 1 - tanh^2
        bend = torch.mul(space.logits, rule.temperature / rule.soft_cap, out=space.shifted).square_()
        space.exps.addcmul_(space.exps, bend, value=-1.0)
    return factors
