"""Losses of learning from single completions that are marked desirable or not: KTO and BCO.

What a completion is compared with, KTO's KL estimate and BCO's running mean reward, belongs to the whole optimiser step
(or run), not to the batch at hand: it is given from outside.
In the formulas `s` is the sigmoid and `x` a completion's log-ratio of policy over reference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trl.tensors.reduce import LossTerms, Weighted, weighted


@dataclass(frozen=True, slots=True)
class UnpairedScores:
    """Log-probabilities of B completions, in nats, sums over tokens, and which are desirable (bool); `(B,)` each."""

    logps: Tensor
    ref_logps: Tensor
    desirable: Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.logps, self.ref_logps, self.desirable)]
        if len(set(shapes)) > 1 or len(shapes[0]) != 1:
            raise ValueError(f"logps, ref_logps and desirable must have one shape (B,), got {shapes}.")
        if self.desirable.dtype != torch.bool:
            raise ValueError(f"desirable must be a bool tensor, got {self.desirable.dtype}.")

    @property
    def ratios(self) -> Tensor:
        """Log-ratios of policy over reference, `(B,)`."""
        return self.logps - self.ref_logps


def kl_estimate(total: Weighted) -> Tensor:
    """KTO's point of comparison: the mean log-ratio of mismatched completions, at least 0; 0-dim, in nats, detached.

    `total` sums the step's log-ratios of another row's completion after a prompt. Source: Ethayarajh et al. 2024, KTO,
    the reference point z_0 (arXiv:2402.01306).

    >>> kl_estimate(Weighted(torch.tensor(-3.0), torch.tensor(2.0)))
    tensor(0.)
    """
    return total.mean.clamp(min=0)


def kto(ratios: Tensor, desirable: Tensor, *, beta: float, kl: Tensor) -> Tensor:
    """`1 - s(beta (x - kl))` where desirable, `1 - s(beta (kl - x))` elsewhere, `(B,)`: KTO (arXiv:2402.01306)."""
    logits = beta * (ratios - kl)
    return torch.where(desirable, -logits, logits).sigmoid()


def apo_zero_unpaired(ratios: Tensor, desirable: Tensor, *, beta: float, kl: Tensor) -> Tensor:
    """`1 - s(beta x)` where desirable, `s(beta x)` elsewhere, `(B,)`: APO-zero (arXiv:2408.06266)."""
    return kto(ratios, desirable, beta=beta, kl=torch.zeros_like(kl))


KTO_LOSSES: dict[str, Callable[..., Tensor]] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


def kto_terms(
    scores: UnpairedScores, *, kl: Tensor, beta: float = 0.1, loss_type: str = "kto", desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossTerms:  # fmt: skip
    """KTO's loss per completion, with the metrics; `kl` 0-dim is the step's `kl_estimate`. Weights scale values."""
    kl = kl.detach() if loss_type == "kto" else torch.zeros_like(kl)
    losses = KTO_LOSSES[loss_type](scores.ratios, scores.desirable, beta=beta, kl=kl)
    values = torch.where(scores.desirable, desirable_weight * losses, undesirable_weight * losses)
    metrics = unpaired_metrics(scores, beta) | {"kl": weighted(kl.reshape(1))}
    return LossTerms(values, torch.ones_like(values), "sequence", metrics)


def bco(ratios: Tensor, desirable: Tensor, *, beta: float, delta: Tensor) -> Tensor:
    """`-log s(z)` where desirable, `-log s(-z)` elsewhere, `z = beta x - delta`, `(B,)`: BCO (arXiv:2404.04656)."""
    logits = beta * ratios - delta
    return softplus(torch.where(desirable, -logits, logits))


def bco_terms(
    scores: UnpairedScores, *, beta: float, delta: Tensor, undesirable_weights: Tensor | None = None
) -> LossTerms:
    """BCO's loss per completion, with the metrics.

    `delta` 0-dim is the running mean reward; `undesirable_weights` `(B,)`, as `udm_weights` gives them, scale the
    values of undesirable completions (others are not read).
    """
    delta = delta.detach()
    values = bco(scores.ratios, scores.desirable, beta=beta, delta=delta)
    if undesirable_weights is not None:
        values = torch.where(scores.desirable, values, values * undesirable_weights)
    metrics = unpaired_metrics(scores, beta) | {"delta": weighted(delta.reshape(1))}
    return LossTerms(values, torch.ones_like(values), "sequence", metrics)


def udm_weights(desirable_prob: Tensor, *, min_ratio: float = 0.5, max_ratio: float = 10.0) -> Tensor:
    """How much likelier each prompt is among desirable than among undesirable rows, `p / (1 - p)`, cut; `(B,) -> (B,)`.

    `desirable_prob` is a classifier's probability that the prompt comes from a desirable row. Source: Jung et al. 2024,
    BCO, underlying distribution matching (arXiv:2404.04656).

    >>> udm_weights(torch.tensor([0.5, 0.75, 1.0, 0.0]))
    tensor([ 1.0000,  3.0000, 10.0000,  0.5000])
    """
    return (desirable_prob / (1 - desirable_prob)).clamp(min=min_ratio, max=max_ratio)


def unpaired_metrics(scores: UnpairedScores, beta: float) -> dict[str, Weighted]:
    """The documented `rewards/*` and `logps/*`, each over its kind's completions; `rewards/margins` follows."""
    kinds = {"chosen": scores.desirable, "rejected": ~scores.desirable}
    rewards = {f"rewards/{kind}": weighted(beta * scores.ratios, mask) for kind, mask in kinds.items()}
    return rewards | {f"logps/{kind}": weighted(scores.logps, mask) for kind, mask in kinds.items()}
