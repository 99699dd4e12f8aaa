"""Losses of learning from pairs: DPO and its family, and those without a reference policy (CPO, SimPO, AlphaPO, ORPO).

`PAIR_LOSSES` maps each `loss_type` to a pure function of sequence log-probs, `values(scores, options) -> (B,)`;
`preference_terms` weighs one or several of them (MPO) and adds the metrics. In the formulas `s` is the sigmoid, `c` and
`r` are the log-ratios of policy over reference of the chosen and the rejected completion, and `h` is their `margin`:
`c - r`, unless another divergence than the reverse KL regularises the policy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, softplus

from trl.objectives.language_modelling import nll
from trl.objectives.pairs import (
    F_DIVERGENCES,
    PairOptions,
    PairScores,
    StepStatistics,
    check_loss_weights,
    log_loss,
    margin,
    pair_metrics,
    power_ratio,
    step_statistics,
)
from trl.options.checks import lookup
from trl.tensors.reduce import LossTerms, weighted
from trl.tensors.statistics import cap_exp


def sigmoid(scores: PairScores, options: PairOptions) -> Tensor:
    """DPO: `-log s(beta h)`; with label smoothing e, cDPO: `-(1 - e) log s(beta h) - e log s(-beta h)`.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290); Mitchell 2023 (ericmitchell.ai/cdpo.pdf).
    """
    return log_loss(options.beta * margin(scores, options), options.label_smoothing)


def hinge(scores: PairScores, options: PairOptions) -> Tensor:
    """`max(0, 1 - beta h)`. Source: Liu et al. 2023, RSO (arXiv:2309.06657), after SLiC (arXiv:2305.10425)."""
    return relu(1 - options.beta * margin(scores, options))


def ipo(scores: PairScores, options: PairOptions) -> Tensor:
    """`(h - 1 / (2 beta))^2`, h of sums, in DPO of means (Azar et al. 2023, IPO, eq. 17, arXiv:2310.12036)."""
    return (margin(scores, options) - 1 / (2 * options.beta)).square()


def exo_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """Reverse KL of `p = s(beta h)` from the smoothed label: `p log(p / (1 - e)) + (1 - p) log((1 - p) / e)`.

    e is the label smoothing, 1e-3 where that is 0. Source: Ji et al. 2024, EXO, eq. 16 (arXiv:2402.00856).
    """
    smoothing = options.label_smoothing or 1e-3
    logits = options.beta * margin(scores, options)
    right = logits.sigmoid() * (logsigmoid(logits) - math.log1p(-smoothing))
    return right + (-logits).sigmoid() * (logsigmoid(-logits) - math.log(smoothing))


def nca_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s(beta c) - 1/2 [log s(-beta c) + log s(-beta r)]` (Chen et al. 2024, NCA, arXiv:2402.05369)."""
    chosen, rejected = _rewards(scores, options)
    return softplus(-chosen) + 0.5 * (softplus(chosen) + softplus(rejected))


def robust(scores: PairScores, options: PairOptions) -> Tensor:
    """`[-(1 - e) log s(beta h) + e log s(-beta h)] / (1 - 2 e)`, e the label noise: robust DPO (arXiv:2403.00409)."""
    logits, noise = options.beta * margin(scores, options), options.label_smoothing
    return ((1 - noise) * softplus(-logits) - noise * softplus(logits)) / (1 - 2 * noise)


def bco_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s(beta c - delta) - log s(-(beta r - delta))`, delta the step's mean reward: BCO (arXiv:2404.04656)."""
    chosen, rejected = _rewards(scores, options)
    delta = _step(scores, options).delta
    return softplus(delta - chosen) + softplus(rejected - delta)


def sppo_hard(scores: PairScores, options: PairOptions) -> Tensor:
    """`(c - 1/(2 beta))^2 + (r + 1/(2 beta))^2`. Source: Wu et al. 2024, SPPO, hard labels (arXiv:2405.00675)."""
    (chosen, rejected), goal = scores.ratios, 1 / (2 * options.beta)
    return (chosen - goal).square() + (rejected + goal).square()


def aot(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s` of beta times (the policy's `c - r` less the reference's of the same rank among the step's pairs).

    Here `c` and `r` are plain log-probs: the policy's margins are to dominate the reference's at every quantile.
    Source: Melnyk et al. 2024, AOT for paired data (arXiv:2406.05882).
    """
    reference = _step(scores, options).margin_partner
    return log_loss(options.beta * (scores.chosen - scores.rejected - reference), options.label_smoothing)


def aot_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s` of beta times (`c` less the `r` of the same rank among the step's pairs).

    A comparison's two ends may lie in two pairs, so each pair has half the value of its two comparisons, and from each
    the whole gradient of its own end: over the step, values and gradients add up to those of the sorted lists.
    Source: Melnyk et al. 2024, AOT for unpaired data (arXiv:2406.05882).
    """
    (chosen, rejected), step = scores.ratios, _step(scores, options)
    of_chosen = log_loss(options.beta * (chosen - step.rejected_partner), options.label_smoothing)
    of_rejected = log_loss(options.beta * (step.chosen_partner - rejected), options.label_smoothing)
    both = of_chosen + of_rejected
    return both - both.detach() / 2


def apo_zero(scores: PairScores, options: PairOptions) -> Tensor:
    """`1 - s(beta c) + s(beta r)`: chosen up, rejected down. Source: D'Oosterlinck et al. 2024 (arXiv:2408.06266)."""
    chosen, rejected = _rewards(scores, options)
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(scores: PairScores, options: PairOptions) -> Tensor:
    """`s(beta c) + 1 - s(beta (c - r))`: both down, rejected more. Source: D'Oosterlinck et al. (arXiv:2408.06266)."""
    chosen, rejected = _rewards(scores, options)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop(scores: PairScores, options: PairOptions) -> Tensor:
    """`-(1 - m) log s(x) + m exp(-x)` with `x = beta h` and `m = s(x / tau)`, the second part in log space.

    Source: Lu et al. 2024, the log-ratio modulated loss (arXiv:2406.08414).
    """
    logits = options.beta * margin(scores, options)
    modulation = logits / options.discopop_tau
    return (-modulation).sigmoid() * softplus(-logits) + cap_exp(logsigmoid(modulation) - logits)


def sft(scores: PairScores, options: PairOptions) -> Tensor:
    """0 per pair: the likelihood of the chosen completions is counted in tokens, by `chosen_nll`."""
    return torch.zeros_like(scores.chosen)


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A loss `(scores, options) -> (B,)`, and what it needs.

    `takes_divergence`: it is one of the margin, which any f-divergence may define (`sft` has neither). `smoothed`:
    `label_smoothing` acts on it. `per_token`: of means over tokens (`PairScores.per_token`), as are all losses in its
    list. `needs_step`: it compares a pair with the others of its optimiser step (`StepStatistics`).
    `divides_by_beta`: beta must not be 0.
    """

    values: Callable[[PairScores, PairOptions], Tensor]
    takes_divergence: bool = False
    smoothed: bool = False
    per_token: bool = False
    needs_step: bool = False
    divides_by_beta: bool = False


PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(sigmoid, takes_divergence=True, smoothed=True),
    "hinge": PairLoss(hinge, takes_divergence=True),
    "ipo": PairLoss(ipo, takes_divergence=True, per_token=True, divides_by_beta=True),
    "exo_pair": PairLoss(exo_pair, takes_divergence=True, smoothed=True),
    "nca_pair": PairLoss(nca_pair),
    "robust": PairLoss(robust, takes_divergence=True, smoothed=True),
    "bco_pair": PairLoss(bco_pair, needs_step=True),
    "sppo_hard": PairLoss(sppo_hard, divides_by_beta=True),
    "aot": PairLoss(aot, smoothed=True, needs_step=True),
    "aot_pair": PairLoss(aot_pair, smoothed=True, needs_step=True),
    "apo_zero": PairLoss(apo_zero),
    "apo_down": PairLoss(apo_down),
    "discopop": PairLoss(discopop, takes_divergence=True),
    "sft": PairLoss(sft, takes_divergence=True),
}


def check_losses(losses: Sequence[str], loss_weights: Sequence[float] | None, options: PairOptions) -> None:
    """Raises ValueError for names, weights or settings that do not go together."""
    if not losses:
        raise ValueError("loss_type must name at least 1 loss, got none.")
    rows = {name: lookup(PAIR_LOSSES, name, "loss_type") for name in losses}
    lookup(F_DIVERGENCES, options.f_divergence, "f_divergence_type")
    check_loss_weights(loss_weights, losses)
    elsewhere = [name for name, loss in rows.items() if not loss.takes_divergence]
    if options.f_divergence != "reverse_kl" and elsewhere:
        divergence = f"f_divergence_type {options.f_divergence!r}"
        raise ValueError(f"{divergence} does not go with loss_type {elsewhere[0]!r}. Use 'reverse_kl'.")
    dividing = [name for name, loss in rows.items() if loss.divides_by_beta]
    if options.beta == 0 and dividing:
        raise ValueError(f"beta must be > 0 for loss_type {dividing[0]!r}, got 0. It divides by beta.")


def preference_terms(
    scores: PairScores, losses: Sequence[str], options: PairOptions, *, loss_weights: Sequence[float] | None = None,
    pair_weights: Tensor | None = None, logged: PairScores | None = None,
) -> LossTerms:  # fmt: skip
    """Weighted sum of the named losses per pair, with the metrics.

    `loss_weights` (None: 1 each) mix the losses, as in MPO (Wang et al. 2024, arXiv:2411.10442); `pair_weights`
    `(B,)` scale each pair, as in WPO. Neither changes what the mean is over. `logged` are the scores that the logged
    rewards are taken from, where those are not the loss's own (`reference_free` with a reference). Where `sft` is named
    or `rpo_alpha` set, add `chosen_nll`.
    """
    mixing = [1.0] * len(losses) if loss_weights is None else [float(weight) for weight in loss_weights]
    values = torch.zeros_like(scores.chosen)
    for name, weight in zip(losses, mixing, strict=True):
        values = values + weight * PAIR_LOSSES[name].values(scores, options)
    if pair_weights is not None:
        values = values * pair_weights
    # Kept for compatibility: in a mixture, the logged rewards are those of its losses, weighted and added.
    chosen, rejected = (sum(mixing) * reward for reward in _rewards(logged or scores, options))
    metrics = pair_metrics(chosen, rejected, chosen_logps=scores.chosen, rejected_logps=scores.rejected)
    return LossTerms(values, torch.ones_like(values), "pair", metrics)


def chosen_nll(logps: Tensor, mask: Tensor, *, coefficient: float = 1.0) -> LossTerms:
    """`-coefficient log p` of each chosen token, `(K,)`, where `mask` is not 0, and the mean as `nll_loss`.

    With coefficient 0 the logged `nll_loss` is 0 too: it is the part of the loss, before its coefficient. It is a mean
    over tokens; in RPO, per sequence (Pang et al. 2024, arXiv:2404.19733).
    """
    terms = nll(logps, mask)
    part = terms.values if coefficient else torch.zeros_like(terms.values)
    return terms._replace(values=coefficient * part, metrics={"nll_loss": weighted(part, terms.weights)})


def nll_coefficient(
    losses: Sequence[str], loss_weights: Sequence[float] | None = None, rpo_alpha: float | None = None
) -> float:
    """How much of `chosen_nll` is in a mixture: the weight of its `sft`, plus RPO's.

    >>> nll_coefficient(["sigmoid", "sft"], [0.8, 0.5], rpo_alpha=1.0)
    1.5
    """
    mixing = [1.0] * len(losses) if loss_weights is None else loss_weights
    weights = [weight for name, weight in zip(losses, mixing, strict=True) if name == "sft"]
    return sum(weights) + (rpo_alpha or 0.0)


def _rewards(scores: PairScores, options: PairOptions) -> tuple[Tensor, Tensor]:
    """Implicit rewards `beta c` and `beta r`, `(B,)` each."""
    chosen, rejected = scores.ratios
    return options.beta * chosen, options.beta * rejected


def _step(scores: PairScores, options: PairOptions) -> StepStatistics:
    return step_statistics(scores, options.beta) if scores.step is None else scores.step


# Without a reference: CPO, SimPO, AlphaPO, ORPO. `c` and `r` are the policy's log-probs of the two completions.


def simpo(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s(beta (c - r) - gamma)` of means over tokens. Source: Meng et al. 2024, eq. 6 (arXiv:2405.14734)."""
    logits = options.beta * (scores.chosen - scores.rejected) - options.simpo_gamma
    return log_loss(logits, options.label_smoothing)


CPO_LOSSES: dict[str, PairLoss] = {
    **{name: PAIR_LOSSES[name] for name in ("sigmoid", "hinge", "ipo")},
    "simpo": PairLoss(simpo, smoothed=True, per_token=True),
    "alphapo": PairLoss(simpo, smoothed=True, per_token=True),
}


def cpo_terms(scores: PairScores, loss_type: str, options: PairOptions) -> LossTerms:
    """CPO's loss per pair, with the metrics; scores as `PairScores.without_reference` makes them.

    With `options.alpha` not 0, every loss sees the bent reward of AlphaPO in place of `log p`
    (Gupta et al. 2025, arXiv:2501.03884). Add `chosen_nll` with `cpo_alpha`. Raises ValueError for an unknown loss.
    Source: Xu et al. 2024, CPO (arXiv:2401.08417).
    """
    loss = lookup(CPO_LOSSES, loss_type, "loss_type")
    chosen, rejected = (power_ratio(logps, options.alpha) for logps in (scores.chosen, scores.rejected))
    values = loss.values(PairScores.without_reference(chosen, rejected), options)
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
