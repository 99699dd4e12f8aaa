"""PAPO's perception loss: the policy should answer differently when its images are masked.

Everything per token is flat, `(K,)`: the tokens of completions, scored with their images and with masked images.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trl.objectives.group_policy import terms_of_tokens
from trl.objectives.group_ratios import GroupTokens
from trl.objectives.kl import k3
from trl.objectives.policy_gradient import check_shapes
from trl.tensors.reduce import LossTerms, weighted, where_counted


@dataclass(frozen=True, slots=True)
class PerceptionOptions:
    """The weights of the terms, under the names of the config, which checks them."""

    perception_loss_weight: float = 0.1
    der_loss_weight1: float = 0.03
    der_loss_weight2: float = 0.03

    @property
    def needs_entropies(self) -> bool:
        """Whether entropies are part of the loss."""
        return self.der_loss_weight1 > 0 or self.der_loss_weight2 > 0


def perception_loss(
    logps: Tensor,
    masked_logps: Tensor,
    tokens: GroupTokens,
    options: PerceptionOptions,
    *,
    loss_type: str,
    entropies: Tensor | None = None,
    masked_entropies: Tensor | None = None,
) -> LossTerms:
    """`-gamma KL(p || p_masked) + eta_1 H(p) + eta_2 H(p_masked)`, as the terms that `loss_type`'s mean is over.

    `logps` and `masked_logps` `(K,)`: of one policy, with the images and with masked images, both with gradient, so the loss
    falls as the two part. The divergence is the k3 estimate from tokens of p. Entropies `(K,)` in nats, with gradient; needed
    where their weight is not 0. Metrics: `perception_kl`, `masked_entropy`.

    Source: Wang et al. 2025, PAPO (arXiv:2507.06448): the implicit perception loss and the double entropy loss. Entropies are
    those of the whole distributions; k3 takes the ratio p_masked / p, which is the estimate without bias for tokens of p.

    >>> import torch
    >>> tokens = GroupTokens(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.tensor([0, 0]), count=1)
    >>> masked = torch.tensor([-1.0, -2.0])
    >>> options = PerceptionOptions(perception_loss_weight=1.0, der_loss_weight1=0.0, der_loss_weight2=0.0)
    >>> perception_loss(torch.tensor([-1.0, -1.0]), masked, tokens, options, loss_type="grpo").values
    tensor([-0.1839], dtype=torch.float64)
    """
    mask = tokens.mask
    check_shapes(mask, logps=logps, masked_logps=masked_logps)
    divergence = k3(where_counted(logps, mask), where_counted(masked_logps, mask))
    values = -options.perception_loss_weight * divergence
    metrics = {"perception_kl": weighted(divergence, mask)}
    if masked_entropies is not None:
        metrics["masked_entropy"] = weighted(masked_entropies, mask)
    weights = (options.der_loss_weight1, entropies), (options.der_loss_weight2, masked_entropies)
    for weight, own in ((weight, own) for weight, own in weights if weight):
        if own is None:
            raise ValueError(
                f"an entropy weight of {weight} needs entropies, got None. Score the tokens with them."
            )
        values = values + weight * where_counted(own, mask)
    return terms_of_tokens(values, tokens, loss_type, metrics)
