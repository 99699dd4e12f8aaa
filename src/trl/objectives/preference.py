"""Losses of learning from pairs against a reference policy: DPO and its family.

`PAIR_LOSSES` maps each `loss_type` to a pure function of sequence log-probs; `preference_terms` weighs one or several of
them (MPO) and adds the metrics. In all of them `c` and `r` are the log-ratios of policy over reference, `log pi/pi_ref`,
of the chosen and the rejected completion, and beta times a log-ratio is the completion's implicit reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, softplus

from trl.objectives.language_modelling import nll
from trl.objectives.tables import lookup
from trl.tensors.reduce import LossTerms, Weighted, weighted
from trl.tensors.statistics import cap_exp


@dataclass(frozen=True, slots=True)
class PairScores:
    """Log-probabilities of B pairs, in nats, `(B,)` each: of the policy (with gradient) and of the reference.

    Sums over the completion's tokens, except for `ipo`, which takes means (`per_token`). Without a reference, the
    reference's are 0. `step` holds what `aot`, `aot_pair` and `bco_pair` need to know about the other pairs; None says
    that these pairs are the whole step.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    step: StepStatistics | None = None

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.chosen, self.rejected, self.ref_chosen, self.ref_rejected)]
        if len(set(shapes)) > 1 or len(shapes[0]) != 1:
            raise ValueError(
                f"log-probs of pairs must be four tensors of one shape (B,), got {shapes}. "
                "Sum the token log-probs of each completion."
            )

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """Log-ratios of policy over reference, of chosen and rejected, `(B,)` each."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def per_token(self, chosen_lengths: Tensor, rejected_lengths: Tensor) -> PairScores:
        """Means over the tokens of each completion, from sums and lengths `(B,)`."""
        return replace(
            self,
            chosen=self.chosen / chosen_lengths,
            rejected=self.rejected / rejected_lengths,
            ref_chosen=self.ref_chosen / chosen_lengths,
            ref_rejected=self.ref_rejected / rejected_lengths,
        )


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Settings of the pair losses. Raises ValueError for one outside its range.

    `beta` >= 0 scales log-ratios to rewards. `label_smoothing` in [0, 0.5) is the probability that a pair's label is
    wrong. `f_divergence` and `f_alpha` choose what the policy is regularised with. `discopop_tau` > 0 is the temperature
    of DiscoPOP's modulation.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 1.0
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_label_smoothing(self.label_smoothing)
        lookup(F_DIVERGENCES, self.f_divergence, "f_divergence_type")
        if self.discopop_tau <= 0:
            raise ValueError(f"discopop_tau must be > 0, got {self.discopop_tau}. The paper uses 0.05.")


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What a pair's loss needs to know about all pairs of its optimiser step; detached.

    `delta` 0-dim: the mean reward. The partners `(B,)` are, for each pair, the value of equal rank on the other side:
    of the reference's margin, of the rejected and of the chosen log-ratio.
    """

    delta: Tensor
    margin_partner: Tensor
    rejected_partner: Tensor
    chosen_partner: Tensor

    def rows(self, part: slice) -> StepStatistics:
        """The statistics of a part of the pairs."""
        return StepStatistics(
            self.delta, self.margin_partner[part], self.rejected_partner[part], self.chosen_partner[part]
        )


def step_statistics(scores: PairScores, beta: float) -> StepStatistics:
    """Statistics of the pairs of a whole optimiser step, `(N,)`; hand each micro-batch its `rows`.

    Where a running mean of the rewards is kept, put it in with `dataclasses.replace(found, delta=...)`.
    """
    chosen, rejected = (ratio.detach() for ratio in scores.ratios)
    policy, reference = (scores.chosen - scores.rejected).detach(), scores.ref_chosen - scores.ref_rejected
    return StepStatistics(
        delta=beta * torch.cat([chosen, rejected]).mean(),
        margin_partner=_of_equal_rank(policy, reference.detach()),
        rejected_partner=_of_equal_rank(chosen, rejected),
        chosen_partner=_of_equal_rank(rejected, chosen),
    )


def _of_equal_rank(values: Tensor, others: Tensor) -> Tensor:
    """For each value, the entry of `others` that has its rank, `(N,), (N,) -> (N,)`."""
    rank = values.argsort(stable=True).argsort()
    return others.sort().values[rank]


# Divergences -----------------------------------------------------------------------------------------------


def power_ratio(log_ratio: Tensor, alpha: float) -> Tensor:
    """`(1 - u^-alpha) / alpha` of `u = exp(log_ratio)`, cut where the power would overflow; `log u` for alpha 0.

    >>> power_ratio(torch.tensor([0.0, 2.0]).log(), alpha=1.0)
    tensor([-inf, 0.5000])
    """
    if alpha == 0:
        return log_ratio
    exponent = -alpha * log_ratio
    small = exponent.abs() < 0.1
    near = -torch.expm1(torch.where(small, exponent, 0.0))
    return torch.where(small, near, 1 - cap_exp(torch.where(small, 0.0, exponent))) / alpha


def _reverse_kl(log_ratio: Tensor, alpha: float) -> Tensor:
    """`log u`: the derivative of `u log u`, less 1."""
    return log_ratio


def _js(log_ratio: Tensor, alpha: float) -> Tensor:
    """`log(2u / (1 + u))`, less log 2: the derivative of `u log u - (u + 1) log((u + 1) / 2)`."""
    return logsigmoid(log_ratio)


F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": _reverse_kl,
    "alpha_divergence": power_ratio,
    "js_divergence": _js,
}


def margin(scores: PairScores, options: PairOptions) -> Tensor:
    """`f'(pi/pi_ref)` of chosen less that of rejected, `(B,)`: for the reverse KL, `c - r`.

    Source: Wang et al. 2024, f-DPO, eq. 9 and table 1 (arXiv:2309.16240).
    """
    derivative = F_DIVERGENCES[options.f_divergence]
    chosen, rejected = scores.ratios
    return derivative(chosen, options.f_alpha) - derivative(rejected, options.f_alpha)


# Losses: (scores, options) -> (B,) -------------------------------------------------------------------------


def log_loss(logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """`-(1 - e) log sigmoid(x) - e log sigmoid(-x)`, for labels that are wrong with probability e, elementwise.

    >>> log_loss(torch.tensor([0.0]))
    tensor([0.6931])
    """
    return (1 - label_smoothing) * softplus(-logits) + label_smoothing * softplus(logits)


def sigmoid(scores: PairScores, options: PairOptions) -> Tensor:
    """DPO: `-log sigmoid(beta (c - r))`; with label smoothing, cDPO.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290); Mitchell 2023, eq. 3 (cDPO).
    """
    return log_loss(options.beta * margin(scores, options), options.label_smoothing)


def hinge(scores: PairScores, options: PairOptions) -> Tensor:
    """`max(0, 1 - beta (c - r))`: 1 / beta is the margin. Source: Liu et al. 2023, RSO, eq. 10 (arXiv:2309.06657)."""
    return relu(1 - options.beta * margin(scores, options))


def ipo(scores: PairScores, options: PairOptions) -> Tensor:
    """`((c - r) - 1 / (2 beta))^2`, on means over tokens. Source: Azar et al. 2023, eq. 17 (arXiv:2310.12036)."""
    return (margin(scores, options) - 1 / (2 * options.beta)).square()


def exo_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """Reverse KL of `p = sigmoid(beta (c - r))` from the smoothed label: `p log(p/(1-e)) + (1-p) log((1-p)/e)`.

    e is the label smoothing, 1e-3 where that is 0. Source: Ji et al. 2024, EXO, eq. 16 (arXiv:2402.00856).
    """
    smoothing = torch.tensor(options.label_smoothing or 1e-3, dtype=torch.float64)
    logits = options.beta * margin(scores, options)
    right = logits.sigmoid() * (logsigmoid(logits) - float(torch.log1p(-smoothing)))
    return right + (-logits).sigmoid() * (logsigmoid(-logits) - float(smoothing.log()))


def nca_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s(beta c) - 1/2 [log s(-beta c) + log s(-beta r)]`. Source: Chen et al. 2024, NCA, eq. 11 (arXiv:2402.05369)."""
    chosen, rejected = _rewards(scores, options)
    return softplus(-chosen) + 0.5 * (softplus(chosen) + softplus(rejected))


def robust(scores: PairScores, options: PairOptions) -> Tensor:
    """Unbiased DPO loss under label noise e: `[-(1-e) log s(x) + e log s(-x)] / (1 - 2e)`, `x = beta (c - r)`.

    Source: Chowdhury et al. 2024, robust DPO, eq. 12 (arXiv:2403.00409).
    """
    logits, noise = options.beta * margin(scores, options), options.label_smoothing
    return ((1 - noise) * softplus(-logits) - noise * softplus(logits)) / (1 - 2 * noise)


def bco_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """`-log s(beta c - delta) - log s(-(beta r - delta))`, delta the step's mean reward.

    Source: Jung et al. 2024, BCO, eq. 9 (arXiv:2404.04656).
    """
    chosen, rejected = _rewards(scores, options)
    delta = _step(scores, options).delta
    return softplus(delta - chosen) + softplus(rejected - delta)


def sppo_hard(scores: PairScores, options: PairOptions) -> Tensor:
    """`(c - 1/(2 beta))^2 + (r + 1/(2 beta))^2`: hard win probabilities of 1 and 0.

    Source: Wu et al. 2024, SPPO, eq. 4.8 (arXiv:2405.00675).
    """
    (chosen, rejected), goal = scores.ratios, 1 / (2 * options.beta)
    return (chosen - goal).square() + (rejected + goal).square()


def aot(scores: PairScores, options: PairOptions) -> Tensor:
    """Log-loss of beta times (policy's margin less the reference's margin of the same rank in the step).

    Source: Melnyk et al. 2024, AOT paired, eq. 8 and algorithm 1 (arXiv:2406.05882).
    """
    reference = _step(scores, options).margin_partner
    return log_loss(options.beta * (scores.chosen - scores.rejected - reference), options.label_smoothing)


def aot_pair(scores: PairScores, options: PairOptions) -> Tensor:
    """Log-loss of beta times (c less the r of the same rank in the step); summed over the step, a loss of c and of r.

    A pair's value is half of its chosen's and half of its rejected's comparison; its gradient is that of both, because
    in each the partner may be another pair's and is held fixed.
    Source: Melnyk et al. 2024, AOT unpaired, eq. 6 and algorithm 2 (arXiv:2406.05882).
    """
    (chosen, rejected), step = scores.ratios, _step(scores, options)
    of_chosen = log_loss(options.beta * (chosen - step.rejected_partner), options.label_smoothing)
    of_rejected = log_loss(options.beta * (step.chosen_partner - rejected), options.label_smoothing)
    both = of_chosen + of_rejected
    return both - both.detach() / 2


def apo_zero(scores: PairScores, options: PairOptions) -> Tensor:
    """`(1 - s(beta c)) + s(beta r)`: chosen up, rejected down. Source: D'Oosterlinck et al. 2024, eq. 7 (arXiv:2408.06266)."""
    chosen, rejected = _rewards(scores, options)
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(scores: PairScores, options: PairOptions) -> Tensor:
    """`s(beta c) + (1 - s(beta (c - r)))`: both down, rejected more. Source: D'Oosterlinck et al. 2024, eq. 8 (arXiv:2408.06266)."""
    chosen, rejected = _rewards(scores, options)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop(scores: PairScores, options: PairOptions) -> Tensor:
    """`(1 - m) (-log s(x)) + m exp(-x)` with `x = beta (c - r)` and `m = s(x / tau)`, in log space.

    Source: Lu et al. 2024, log-ratio modulated loss, eq. 5 (arXiv:2406.08414).
    """
    logits = options.beta * margin(scores, options)
    modulation = logits / options.discopop_tau
    return (-modulation).sigmoid() * softplus(-logits) + cap_exp(logsigmoid(modulation) - logits)


def sft(scores: PairScores, options: PairOptions) -> Tensor:
    """0 per pair: the likelihood of the chosen completions is counted in tokens, by `chosen_nll`."""
    return torch.zeros_like(scores.chosen)


PAIR_LOSSES: dict[str, Callable[[PairScores, PairOptions], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_pair": aot_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sft": sft,
}
