"""Losses of learning from pairs without a reference policy: CPO, SimPO, AlphaPO, ORPO.

In the formulas `c` and `r` are the policy's log-probs of the chosen and the rejected completion: sums over tokens, or
means where the loss is normalised by length; `s` is the sigmoid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trl.objectives.pairs import (
    PairOptions,
    PairScores,
    check_beta,
    check_label_smoothing,
    log_loss,
    pair_metrics,
    power_ratio,
)
from trl.objectives.preference import hinge, ipo, sigmoid
from trl.objectives.tables import lookup
from trl.tensors.reduce import LossTerms, weighted


@dataclass(frozen=True, slots=True)
class ReferenceFreeOptions:
    """Settings of CPO's losses. Raises ValueError for one outside its range.

    `beta` >= 0 scales log-probs to rewards; `label_smoothing` in [0, 0.5); `simpo_gamma` is the target margin of rewards
    (SimPO, AlphaPO); `alpha` bends the reward, `(1 - p^-alpha) / alpha`, 0 leaves it `log p` (AlphaPO).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    alpha: float = 0.0

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_label_smoothing(self.label_smoothing)

    @property
    def as_pairs(self) -> PairOptions:
        """The same, for the losses that DPO and CPO share."""
        return PairOptions(beta=self.beta, label_smoothing=self.label_smoothing)


def simpo(scores: PairScores, options: ReferenceFreeOptions) -> Tensor:
    """`-log s(beta (c - r) - gamma)` of means over tokens. Source: Meng et al. 2024, eq. 6 (arXiv:2405.14734)."""
    logits = options.beta * (scores.chosen - scores.rejected) - options.simpo_gamma
    return log_loss(logits, options.label_smoothing)


def _shared(loss: Callable[[PairScores, PairOptions], Tensor]) -> Callable[..., Tensor]:
    """A loss of DPO's family, on scores whose reference is 0."""

    def without_reference(scores: PairScores, options: ReferenceFreeOptions) -> Tensor:
        return loss(scores, options.as_pairs)

    return without_reference


CPO_LOSSES: dict[str, Callable[[PairScores, ReferenceFreeOptions], Tensor]] = {
    "sigmoid": _shared(sigmoid),
    "hinge": _shared(hinge),
    "ipo": _shared(ipo),
    "simpo": simpo,
    "alphapo": simpo,
}

PER_TOKEN = frozenset({"ipo", "simpo", "alphapo"})
"""Losses of means over tokens: give them `PairScores.per_token`."""


def cpo_terms(scores: PairScores, loss_type: str, options: ReferenceFreeOptions) -> LossTerms:
    """CPO's loss per pair, with the metrics; scores as `PairScores.without_reference` makes them.

    With `options.alpha` not 0, every loss sees the bent reward of AlphaPO in place of `log p`
    (Gupta et al. 2025, arXiv:2501.03884). Add `chosen_nll` with CPO's coefficient, as `cpo_nll_coefficient` gives it.
    Raises ValueError for an unknown loss, and for `ipo` with beta 0.
    Source: Xu et al. 2024, CPO (arXiv:2401.08417).
    """
    loss = lookup(CPO_LOSSES, loss_type, "loss_type")
    if loss_type == "ipo" and options.beta == 0:
        raise ValueError("beta must be > 0 for loss_type 'ipo', got 0. It divides by beta.")
    chosen, rejected = (power_ratio(logps, options.alpha) for logps in (scores.chosen, scores.rejected))
    values = loss(PairScores.without_reference(chosen, rejected), options)
    metrics = pair_metrics(
        options.beta * chosen,
        options.beta * rejected,
        chosen_logps=scores.chosen,
        rejected_logps=scores.rejected,
    )
    return LossTerms(values, torch.ones_like(values), "pair", metrics)


def cpo_nll_coefficient(loss_type: str, cpo_alpha: float) -> float:
    """How much of `chosen_nll` is in CPO's loss: `cpo_alpha`, and none with `alphapo`.

    >>> cpo_nll_coefficient("simpo", 0.5), cpo_nll_coefficient("alphapo", 0.5)
    (0.5, 0.0)
    """
    return 0.0 if loss_type == "alphapo" else cpo_alpha


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

    Add `chosen_nll`, with coefficient 1. `beta` is the paper's lambda. Raises ValueError for beta < 0.
    Source: Hong et al. 2024, ORPO, eq. 6 and 7 (arXiv:2403.07691).
    """
    check_beta(beta)
    ratio = log_odds(scores.chosen) - log_odds(scores.rejected)
    loss = softplus(-ratio)
    metrics = pair_metrics(
        beta * scores.chosen,
        beta * scores.rejected,
        chosen_logps=scores.chosen,
        rejected_logps=scores.rejected,
    )
    metrics |= {"log_odds_ratio": weighted(-loss), "log_odds_chosen": weighted(ratio)}
    return LossTerms(beta * loss, torch.ones_like(loss), "pair", metrics)
