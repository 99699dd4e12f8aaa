"""Losses of learning from pairs without a reference policy: CPO, SimPO, AlphaPO, ORPO.

In the formulas `c` and `r` are the policy's log-probs of the chosen and the rejected completion: sums over tokens, or
means where the loss is normalised by length; `s` is the sigmoid.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trl.objectives.pairs import (
    PairOptions,
    PairScores,
    log_loss,
    pair_metrics,
    power_ratio,
)
from trl.objectives.preference import hinge, ipo, sigmoid
from trl.objectives.tables import lookup
from trl.tensors.reduce import LossTerms, weighted


def simpo(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s(beta (c - r) - gamma)` of means over tokens. Source: Meng et al. 2024, eq. 6 (arXiv:2405.14734)."""
    logits = options.beta * (scores.chosen - scores.rejected) - options.simpo_gamma
    return log_loss(logits, options.label_smoothing)


CPO_LOSSES: dict[str, Callable[[PairScores, PairOptions], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "alphapo": simpo,
}

PER_TOKEN = frozenset({"ipo", "simpo", "alphapo"})
"""Losses of means over tokens: give them `PairScores.per_token`."""


def cpo_terms(scores: PairScores, loss_type: str, options: PairOptions) -> LossTerms:
    """CPO's loss per pair, with the metrics; scores as `PairScores.without_reference` makes them.

    With `options.alpha` not 0, every loss sees the bent reward of AlphaPO in place of `log p`
    (Gupta et al. 2025, arXiv:2501.03884). Add `chosen_nll` with `cpo_alpha`. Raises ValueError for an unknown loss.
    Source: Xu et al. 2024, CPO (arXiv:2401.08417).
    """
    loss = lookup(CPO_LOSSES, loss_type, "loss_type")
    chosen, rejected = (power_ratio(logps, options.alpha) for logps in (scores.chosen, scores.rejected))
    values = loss(PairScores.without_reference(chosen, rejected), options)
    rewards = options.beta * chosen, options.beta * rejected
    metrics = pair_metrics(*rewards, chosen_logps=scores.chosen, rejected_logps=scores.rejected)
    return LossTerms(values, torch.ones_like(values), "pair", metrics)


def log1mexp(x: Tensor) -> Tensor:
    """`log(1 - exp(x))` for x < 0, exact near 0 and far from it; x is cut just below 0, so the result is finite.

    >>> log1mexp(torch.tensor([0.25, 1e-12], dtype=torch.float64).log()).exp()
    tensor([0.7500, 1.0000], dtype=torch.float64)
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -math.log(2)
    of_near = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    of_far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, of_near, of_far)


def log_odds(logps: Tensor) -> Tensor:
    """`log(p / (1 - p))` from `log p`, elementwise. Source: Hong et al. 2024, ORPO, eq. 4 (arXiv:2403.07691)."""
    return logps - log1mexp(logps)


def orpo_terms(scores: PairScores, *, beta: float) -> LossTerms:
    """ORPO's odds-ratio loss per pair, `-beta log s(odds(c) - odds(r))` of means over tokens, with the metrics.

    Add `chosen_nll`, with coefficient 1. `beta` is the paper's lambda.
    Source: Hong et al. 2024, ORPO, eq. 6 and 7 (arXiv:2403.07691).
    """
    ratio = log_odds(scores.chosen) - log_odds(scores.rejected)
    loss = softplus(-ratio)
    rewards = beta * scores.chosen, beta * scores.rejected
    metrics = pair_metrics(*rewards, chosen_logps=scores.chosen, rejected_logps=scores.rejected)
    metrics |= {"log_odds_ratio": weighted(-loss), "log_odds_chosen": weighted(ratio)}
    return LossTerms(beta * loss, torch.ones_like(loss), "pair", metrics)
