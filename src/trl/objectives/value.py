"""Losses of the value function, per token."""

from __future__ import annotations

from torch import Tensor

from trl.objectives.policy_gradient import check_shapes
from trl.tensors.reduce import LossTerms, weighted, where_counted
from trl.tensors.statistics import clip_by_value


def clipped_value_loss(
    vpreds: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange_value: float
) -> LossTerms:
    """Half the squared error, of the prediction or of it cut to `old_values +- cliprange_value`, whichever is larger.

    All of one shape, `(B, T)` or `(K,)`, in units of reward; computed in float32 or wider. Metrics: `val/vpred`, `val/error`
    (mean squared error, unclipped), `val/clipfrac`. Source: Schulman et al. 2016, as in baselines' PPO2; Huang et al. 2022,
    detail 9 (iclr-blog-track.github.io/2022/03/25/ppo-implementation-details).

    >>> import torch
    >>> one = torch.ones(1)
    >>> clipped_value_loss(one, 0 * one, one, one, cliprange_value=0.5).values
    tensor([0.1250])
    """
    check_shapes(mask, vpreds=vpreds, old_values=old_values, returns=returns)
    old_values = where_counted(old_values, mask).detach()
    returns, vpreds = where_counted(returns, mask).detach(), where_counted(vpreds, mask)
    cut = clip_by_value(vpreds, old_values - cliprange_value, old_values + cliprange_value)
    plain, clipped = (vpreds - returns).square(), (cut - returns).square()
    values = plain.maximum(clipped) / 2
    metrics = {
        "val/vpred": weighted(vpreds, mask),
        "val/error": weighted(plain, mask),
        "val/clipfrac": weighted(clipped > plain, mask),
        "loss/value": weighted(values, mask),
    }
    return LossTerms(values, (mask != 0).to(values.dtype), "token", metrics)


def explained_variance(error: float, variance: float) -> float:
    """The share of the returns' variance that the value function explains: 1 is all, 0 no more than their mean would.

    `error` is the mean squared error, `variance` that of the returns.

    >>> explained_variance(0.5, 2.0)
    0.75
    """
    return 1 - error / variance if variance else float("nan")
