"""PPO's advantages and losses, of both PPO trainers.

Tensors are of one shape, `(B, T)` or (losses only) `(K,)`, one entry per response token; the mask is not 0 on tokens that
the policy chose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from trl.objectives.advantages import Estimates, gae
from trl.objectives.policy_gradient import clipped_surrogate, with_value_loss
from trl.objectives.value import clipped_value_loss
from trl.options.policy_gradient import PPOOptions
from trl.tensors.moments import Moments, moments, whiten_by
from trl.tensors.reduce import LossTerms


def whitened_estimates(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    options: PPOOptions,
    *,
    of_all: Callable[[Moments], Moments],
) -> Estimates:
    """Advantages, whitened over the batch of all processes, and returns; with `whiten_rewards` of rewards of unit variance.

    `of_all` merges the moments of all processes. Fewer than two tokens are not whitened.
    """

    def whitened(given: Tensor, *, shift_mean: bool = True) -> Tensor:
        measured = of_all(moments(given, mask))
        return whiten_by(given, measured, shift_mean=shift_mean) if int(measured.count) > 1 else given

    if options.whiten_rewards:
        rewards = whitened(rewards, shift_mean=False)
    found = gae(rewards, values, mask, gamma=options.gamma, lam=options.lam)
    return found._replace(advantages=whitened(found.advantages) * (mask != 0).to(values.dtype))


class Losses(NamedTuple):
    """The clipped losses of policy and value function, and `policy + vf_coef * value` with the metrics of both."""

    policy: LossTerms
    value: LossTerms
    total: LossTerms


def ppo_losses(
    logps: Tensor,
    values: Tensor,
    mask: Tensor,
    options: PPOOptions,
    *,
    old_logps: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    entropies: Tensor | None = None,
) -> Losses:
    """The losses of tokens, given what the rollout's policy and value function estimated for them."""
    rollout = old_logps.to(logps.dtype), advantages.to(logps.dtype)
    policy = clipped_surrogate(logps, *rollout, mask, cliprange=options.cliprange, entropies=entropies)
    estimated = old_values.to(values.dtype), returns.to(values.dtype)
    value = clipped_value_loss(values, *estimated, mask, cliprange_value=options.cliprange_value)
    value = value._replace(values=value.values.to(policy.values.dtype))
    return Losses(policy, value, with_value_loss(policy, value, vf_coef=options.vf_coef))
