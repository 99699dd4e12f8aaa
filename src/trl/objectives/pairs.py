"""What the losses over pairs share: the scores of a batch, their settings, divergences and metrics.

Throughout, `c` and `r` are the log-ratios of policy over reference, `log pi/pi_ref`, of the chosen and the rejected
completion; beta times a log-ratio is the completion's implicit reward.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from trl.tensors.reduce import Weighted, weighted
from trl.tensors.statistics import get_exp_cap


@dataclass(frozen=True, slots=True)
class PairScores:
    """Log-probabilities of B pairs, in nats, `(B,)` each: of the policy (with gradient) and of the reference.

    Sums over the completion's tokens, except for `ipo` of DPO and CPO, which takes means (`per_token`). Without a
    reference, the reference's are 0. `step` holds what `aot`, `aot_pair` and `bco_pair` need to know about the other
    pairs; None says that these pairs are the whole step.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    step: "StepStatistics | None" = None

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.chosen, self.rejected, self.ref_chosen, self.ref_rejected)]
        if len(set(shapes)) > 1 or len(shapes[0]) != 1:
            raise ValueError(f"log-probs of pairs must be four tensors of one shape (B,), got {shapes}.")

    @classmethod
    def without_reference(cls, chosen: Tensor, rejected: Tensor) -> "PairScores":
        """Pairs of a policy that is compared with nothing: the reference's log-probs are 0."""
        return cls(chosen, rejected, torch.zeros_like(chosen), torch.zeros_like(rejected))

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """Log-ratios of policy over reference, of chosen and rejected, `(B,)` each."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def per_token(self, chosen_lengths: Tensor, rejected_lengths: Tensor) -> "PairScores":
        """Means over the tokens of each completion, from sums and lengths `(B,)`."""
        policy = self.chosen / chosen_lengths, self.rejected / rejected_lengths
        reference = self.ref_chosen / chosen_lengths, self.ref_rejected / rejected_lengths
        return PairScores(*policy, *reference, self.step)


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Settings of the pair losses.

    `beta` >= 0 scales log-ratios to rewards. `label_smoothing` in [0, 0.5) is the probability that a pair's label is
    wrong. `discopop_tau` > 0 is the temperature of DiscoPOP's modulation. `simpo_gamma` is the target margin of rewards
    (SimPO, AlphaPO); `alpha` changes the reward to `(1 - p^-alpha) / alpha`, 0 leaves it `log p` (AlphaPO).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 1.0
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    alpha: float = 0.0


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

    def rows(self, part: slice) -> "StepStatistics":
        """The statistics of a part of the pairs."""
        partners = (self.margin_partner, self.rejected_partner, self.chosen_partner)
        return StepStatistics(self.delta, *(partner[part] for partner in partners))


def step_statistics(scores: PairScores, beta: float) -> StepStatistics:
    """Statistics of the pairs of a whole optimiser step, `(N,)`; hand each micro-batch its `rows`.

    Where a running mean of the rewards is kept, put it in with `dataclasses.replace(statistics, delta=...)`.
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


def power_ratio(log_ratio: Tensor, alpha: float) -> Tensor:
    """`(1 - u^-alpha) / alpha` of `u = exp(log_ratio)`, elementwise; `log u` for alpha 0.

    The power is cut at the square root of what the dtype can hold, so that it and its gradient stay finite.

    >>> power_ratio(torch.tensor([0.5, 2.0]).log(), alpha=1.0)
    tensor([-1.0000,  0.5000])
    """
    if alpha == 0:
        return log_ratio
    exponent = -alpha * log_ratio
    return -torch.expm1(torch.minimum(exponent, get_exp_cap(exponent) / 2)) / alpha


# The derivatives of `u log u`, of the alpha divergence, and of `u log u - (u + 1) log((u + 1) / 2)`, up to constants.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda log_ratio, alpha: log_ratio,
    "alpha_divergence": power_ratio,
    "js_divergence": lambda log_ratio, alpha: logsigmoid(log_ratio),
}


def margin(scores: PairScores, options: PairOptions) -> Tensor:
    """`f'(pi/pi_ref)` of chosen less that of rejected, `(B,)`: f-DPO (Wang et al. 2024, arXiv:2309.16240)."""
    derivative = F_DIVERGENCES[options.f_divergence]
    chosen, rejected = scores.ratios
    return derivative(chosen, options.f_alpha) - derivative(rejected, options.f_alpha)


def log_loss(logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """`-(1 - e) log sigmoid(x) - e log sigmoid(-x)`, for labels that are wrong with probability e, elementwise.

    >>> log_loss(torch.tensor([0.0]))
    tensor([0.6931])
    """
    return (1 - label_smoothing) * softplus(-logits) + label_smoothing * softplus(logits)


def require_beta(beta: float, *losses: str) -> None:
    """Raises ValueError for a `beta` of 0 with losses that learn from rewards alone."""
    if not beta:
        raise ValueError(f"beta must be > 0 for loss_type {', '.join(map(repr, losses))}, got {beta}.")


def check_loss_weights(loss_weights: Sequence[float] | None, losses: Sequence[str]) -> None:
    """Raises ValueError unless each loss has a finite weight, or none of them has one."""
    if loss_weights is None:
        return
    if len(loss_weights) != len(losses):
        raise ValueError(f"loss_weights must be {len(losses)}, one per loss_type, got {len(loss_weights)}.")
    if not all(isinstance(weight, Real) and math.isfinite(weight) for weight in loss_weights):
        raise ValueError(f"loss_weights must be finite numbers, got {loss_weights!r}.")


def pair_metrics(
    chosen_rewards: Tensor, rejected_rewards: Tensor, *, chosen_logps: Tensor, rejected_logps: Tensor
) -> dict[str, Weighted]:
    """The documented `rewards/*` and `logps/*` means over pairs, from `(B,)` tensors."""
    return {
        "rewards/chosen": weighted(chosen_rewards),
        "rewards/rejected": weighted(rejected_rewards),
        "rewards/accuracies": weighted(chosen_rewards > rejected_rewards),
        "rewards/margins": weighted(chosen_rewards - rejected_rewards),
        "logps/chosen": weighted(chosen_logps),
        "logps/rejected": weighted(rejected_logps),
    }
