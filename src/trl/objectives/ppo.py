"""PPO's advantages and losses, of both PPO trainers.

Tensors are of one shape, `(B, T)` or (losses) `(K,)`, one entry per response token; the mask is not 0 on the policy's.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from trl.objectives.advantages import Estimates, gae
from trl.objectives.kl import check_shapes, k1, k2, probability_ratio
from trl.options.methods import PPOOptions
from trl.tensors.moments import Moments, moments, whiten_by
from trl.tensors.reduce import LossTerms, weighted, where_counted
from trl.tensors.statistics import clip_by_value


def whitened_estimates(
    rewards: Tensor, values: Tensor, mask: Tensor, options: PPOOptions, *, of_all: Callable[[Moments], Moments]
) -> Estimates:
    """Advantages, whitened over the batch of all processes, and returns (`whiten_rewards`: of whitened rewards).

    `of_all` merges the moments of all processes. Fewer than two tokens are not whitened.
    """

    def whitened(column: Tensor, *, shift_mean: bool = True) -> Tensor:
        measured = of_all(moments(column, mask))
        return whiten_by(column, measured, shift_mean=shift_mean) if int(measured.count) > 1 else column

    if options.whiten_rewards:
        rewards = whitened(rewards, shift_mean=False)
    estimates = gae(rewards, values, mask, gamma=options.gamma, lam=options.lam)
    return estimates._replace(advantages=whitened(estimates.advantages) * (mask != 0).to(values.dtype))


def clipped_surrogate(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, cliprange: float,
    entropies: Tensor | None = None,
) -> LossTerms:  # fmt: skip
    """PPO's pessimistic surrogate, `max(-A r, -A clip(r, 1 - c, 1 + c))` per token.

    All of one shape, `(B, T)` or `(K,)`; `cliprange` c > 0. Metrics: `policy/clipfrac` (tokens where the clipped side
    is the larger), `policy/approxkl` (k2) and `policy/policykl` (k1) from the old to the new policy, `policy/ratio`,
    and `policy/entropy` if `entropies` are given. Source: Schulman et al. 2017, eq. 7 (arXiv:1707.06347).

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


class Losses(NamedTuple):
    """The clipped losses of policy and value function, and `policy + vf_coef * value` with the metrics of both."""

    policy: LossTerms
    value: LossTerms
    total: LossTerms


def ppo_losses(
    logps: Tensor, values: Tensor, mask: Tensor, options: PPOOptions, *, old_logps: Tensor, old_values: Tensor,
    advantages: Tensor, returns: Tensor, entropies: Tensor | None = None,
) -> Losses:  # fmt: skip
    """The losses of tokens, given what the rollout's policy and value function estimated for them."""
    rollout = old_logps.to(logps.dtype), advantages.to(logps.dtype)
    policy = clipped_surrogate(logps, *rollout, mask, cliprange=options.cliprange, entropies=entropies)
    estimated = old_values.to(values.dtype), returns.to(values.dtype)
    value = clipped_value_loss(values, *estimated, mask, cliprange_value=options.cliprange_value)
    value = value._replace(values=value.values.to(policy.values.dtype))
    return Losses(policy, value, with_value_loss(policy, value, vf_coef=options.vf_coef))


def with_value_loss(policy: LossTerms, value: LossTerms, *, vf_coef: float) -> LossTerms:
    """`policy + vf_coef * value` per token, with the metrics of both and `loss/total`; both count the same tokens."""
    values = policy.values + vf_coef * value.values
    total = {"loss/total": weighted(values, policy.weights)}
    return LossTerms(values, policy.weights, policy.per, {**policy.metrics, **value.metrics, **total})


def clipped_value_loss(
    vpreds: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange_value: float
) -> LossTerms:
    """Half the squared error, of the prediction or of it cut to `old_values +- cliprange_value`, whichever is larger.

    All of one shape, `(B, T)` or `(K,)`, in units of reward; computed in float32 or wider. Metrics: `val/vpred`,
    `val/error` (mean squared error, unclipped), `val/clipfrac`. Source: Schulman et al. 2016, as in baselines' PPO2;
    Huang et al. 2022, detail 9 (iclr-blog-track.github.io/2022/03/25/ppo-implementation-details).

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
