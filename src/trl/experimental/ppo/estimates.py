"""PPO's numbers for the tokens of a batch of rollouts: rewards, advantages, returns, and what is logged of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trl.models.scoring.head import LossOf
from trl.objectives.advantages import TokenRewards, gae, rollout_metrics, token_rewards
from trl.objectives.kl import k1, kl_penalty
from trl.objectives.policy_gradient import clipped_surrogate, probability_ratio, with_value_loss
from trl.objectives.value import clipped_value_loss
from trl.rollouts.columns import OLD, REF, SCORES, TRAINED
from trl.rollouts.experience import Experience
from trl.tensors.moments import moments, over_processes, whiten_by
from trl.tensors.ragged import Ragged
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted

VALUES = "values"
ADVANTAGES, RETURNS = "advantages", "returns"

_OBJECTIVE = ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores")
_NAMES = {
    "policy/approxkl": "policy/approxkl_avg",
    "policy/clipfrac": "policy/clipfrac_avg",
    "policy/entropy": "policy/entropy_avg",
    "policy/ratio": "val/ratio",
    "loss/policy": "loss/policy_avg",
    "loss/value": "loss/value_avg",
    "val/clipfrac": "val/clipfrac_avg",
}
RATIO_SQUARE = "val/squared distance of the ratio from 1"


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """How scores and KL become rewards, and rewards advantages."""

    kl_coef: float
    kl_estimator: str
    gamma: float
    lam: float
    whiten_rewards: bool


def estimated(experience: Experience, shaping: RewardShaping, accelerator: Any) -> Experience:
    """With `advantages` (whitened) and `returns` per token; means and variances are those over all processes."""
    tables = _Tables.of(experience, shaping)
    rewards = tables.rewards.rewards
    if shaping.whiten_rewards:
        rewards = _whitened(rewards, tables.trained, accelerator, shift_mean=False)
    values = experience.ragged(VALUES).padded().to(rewards.dtype)
    found = gae(rewards, values, tables.trained, gamma=shaping.gamma, lam=shaping.lam)
    advantages = _whitened(found.advantages, tables.trained, accelerator)
    mask = experience.completions.mask
    return experience.with_tokens(
        **{ADVANTAGES: (advantages * tables.trained)[mask], RETURNS: found.returns[mask]}
    )


def _whitened(values: Tensor, mask: Tensor, accelerator: Any, *, shift_mean: bool = True) -> Tensor:
    """By the moments over all processes; fewer than two values are left as they are."""
    measured = over_processes(moments(values, mask), _on(accelerator))
    return whiten_by(values, measured, shift_mean=shift_mean) if int(measured.count) > 1 else values


@dataclass(frozen=True, slots=True)
class _Tables:
    """Padded `(B, T)` columns of a batch of rollouts."""

    trained: Tensor
    kl: Tensor
    logps: Tensor
    scores: Tensor
    rewards: TokenRewards

    @classmethod
    def of(cls, experience: Experience, shaping: RewardShaping) -> _Tables:
        mask = experience.completions.mask
        logps, ref = experience.ragged(OLD).padded(), experience.ragged(REF).padded()
        kl = kl_penalty(logps, ref, shaping.kl_estimator)
        scores = experience.per_row[SCORES].to(logps.dtype)
        rewards = token_rewards(scores, kl, mask, kl_coef=shaping.kl_coef)
        return cls(experience.ragged(TRAINED).padded().bool(), kl, logps, scores, rewards)


def measured_rollouts(experience: Experience, shaping: RewardShaping) -> dict[str, Weighted]:
    """The documented `objective/*` means, over the rows that have a score."""
    scored = Ragged(experience.per_token[TRAINED].long(), experience.completions.lengths).padded().amax(dim=1)
    experience = experience.take(scored.nonzero()[:, 0])
    if not len(experience):
        return {}
    tables = _Tables.of(experience, shaping)
    found = rollout_metrics(tables.rewards, tables.kl, tables.logps, tables.scores, tables.trained)
    return {f"objective/{name}": found[f"objective/{name}"] for name in _OBJECTIVE}


def kl_of_tokens(experience: Experience) -> Weighted:
    """The log-ratios of policy to reference, summed over all tokens."""
    return weighted(k1(experience.per_token[OLD], experience.per_token[REF]))


def ppo_terms(
    experience: Experience,
    logps: Tensor,
    values: Tensor,
    entropies: Tensor | None,
    *,
    cliprange: float,
    cliprange_value: float,
    vf_coef: float,
) -> LossTerms:
    """The clipped losses of policy and value function per token, under the names that the documents give their metrics."""
    columns, mask = experience.per_token, experience.per_token[TRAINED]
    policy = _policy_terms(experience, logps, slice(None), cliprange=cliprange, entropies=entropies)
    value = clipped_value_loss(
        values,
        columns[VALUES].to(values.dtype),
        columns[RETURNS].to(values.dtype),
        mask,
        cliprange_value=cliprange_value,
    )
    value = value._replace(values=value.values.to(policy.values.dtype))
    terms = with_value_loss(policy, value, vf_coef=vf_coef)
    ratios = probability_ratio(logps.detach(), columns[OLD].to(logps.dtype), mask)
    square = weighted((ratios - 1).square(), mask)
    renamed = {_NAMES[name]: found for name, found in terms.metrics.items() if name in _NAMES}
    return terms._replace(metrics={**renamed, RATIO_SQUARE: square})


def policy_losses(experience: Experience, *, cliprange: float) -> LossOf:
    """What each token adds to the sum of the clipped losses of the policy."""

    def losses(logps: Tensor, which: slice) -> Tensor:
        terms = _policy_terms(experience, logps, which, cliprange=cliprange)
        return where_counted(terms.values, terms.weights) * terms.weights

    return losses


def _policy_terms(
    experience: Experience, logps: Tensor, which: slice, *, cliprange: float, entropies: Tensor | None = None
) -> LossTerms:
    columns = {name: experience.per_token[name][which] for name in (OLD, ADVANTAGES, TRAINED)}
    old, advantages = (columns[name].to(logps.dtype) for name in (OLD, ADVANTAGES))
    return clipped_surrogate(
        logps, old, advantages, columns[TRAINED], cliprange=cliprange, entropies=entropies
    )


class _on:
    """An accelerator that gathers what stands on the CPU."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.num_processes = accelerator, accelerator.num_processes

    def gather(self, tensor: Tensor) -> Tensor:
        return self.accelerator.gather(tensor.to(self.accelerator.device)).cpu()
