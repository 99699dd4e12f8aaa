"""Policy losses per token, from log-probabilities under the policy that learns and the one that sampled."""

from __future__ import annotations

from torch import Tensor

from trl.objectives.kl import LARGEST_LOG_RATIO, k1, k2
from trl.tensors.reduce import LossTerms, weighted, where_counted
from trl.tensors.statistics import cap_exp


def probability_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """`p / p_old` of each token with gradient, 1 outside of the mask; the exponent is cut at `LARGEST_LOG_RATIO`.

    >>> import torch
    >>> probability_ratio(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 0.0]), torch.tensor([1, 0]))
    tensor([1., 1.])
    """
    return cap_exp(where_counted(logps - old_logps, mask), LARGEST_LOG_RATIO)


def clipped_surrogate(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float,
    entropies: Tensor | None = None,
) -> LossTerms:
    """PPO's pessimistic surrogate, `max(-A r, -A clip(r, 1 - c, 1 + c))` per token.

    All of one shape, `(B, T)` or `(K,)`; `cliprange` c > 0. Metrics: `policy/clipfrac` (tokens where the clipped side is the
    larger), `policy/approxkl` (k2) and `policy/policykl` (k1) from the old to the new policy, `policy/ratio`, and
    `policy/entropy` where `entropies` of the positions are given.
    Source: Schulman et al. 2017, eq. 7 (arXiv:1707.06347).

    >>> import torch
    >>> new, old = torch.log(torch.tensor([0.75, 0.25])), torch.log(torch.tensor([0.5, 0.5]))
    >>> clipped_surrogate(new, old, torch.tensor([1.0, 1.0]), torch.ones(2), cliprange=0.2).values
    tensor([-1.2000, -0.5000])
    """
    check_shapes(mask, logps=logps, old_logps=old_logps, advantages=advantages)
    advantages, old_logps = where_counted(advantages, mask).detach(), old_logps.detach()
    ratio = probability_ratio(logps, old_logps, mask)
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    values = plain.maximum(clipped)
    metrics = {
        "policy/clipfrac": weighted(clipped > plain, mask),
        "policy/approxkl": weighted(k2(logps, old_logps), mask),
        "policy/policykl": weighted(k1(old_logps, logps), mask),
        "policy/ratio": weighted(ratio, mask),
        "loss/policy": weighted(values, mask),
    }
    if entropies is not None:
        metrics["policy/entropy"] = weighted(entropies, mask)
    return LossTerms(values, (mask != 0).to(values.dtype), "token", metrics)


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor of another shape than the mask."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} must have the shape of its mask, {tuple(mask.shape)}, got {tuple(tensor.shape)}. Give one entry per "
                "token."
            )
