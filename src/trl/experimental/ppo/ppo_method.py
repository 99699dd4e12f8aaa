"""PPO on rollouts: token rewards, whitened advantages, the clipped losses, and their documented metrics."""

from dataclasses import dataclass, replace
from functools import partial

from accelerate import Accelerator
from torch import Tensor

from trl.experimental.ppo.ppo_config import PPOConfig
from trl.methods.method import Batch, Step
from trl.methods.online import OnlineMethod
from trl.models.packed.layout import ROLLOUT
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.advantages import TokenRewards, rollout_metrics, token_rewards
from trl.objectives.kl import kl_penalty, probability_ratio
from trl.objectives.ppo import clipped_surrogate, ppo_losses, whitened_estimates
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import OLD, REF, RETURNS, SCORES, TRAINED, VALUES, Experience
from trl.rollouts.maker import less_penalty
from trl.tensors.moments import over_processes
from trl.tensors.ragged import Ragged
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted

ADVANTAGES = "advantages"

_OBJECTIVE = ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores")
_NAMES = {
    "policy/approxkl": "policy/approxkl_avg", "policy/clipfrac": "policy/clipfrac_avg",
    "policy/entropy": "policy/entropy_avg", "policy/ratio": "val/ratio", "loss/policy": "loss/policy_avg",
    "loss/value": "loss/value_avg", "val/clipfrac": "val/clipfrac_avg",
}  # fmt: skip
RATIO_SQUARE = "val/squared distance of the ratio from 1"


@dataclass(frozen=True)
class PPOMethod(OnlineMethod):
    """The method of a config; `eos_token_id` for `missing_eos_penalty`."""

    args: PPOConfig
    eos_token_id: int | None
    repeats_metrics = True
    needs_values = True

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """The score, less `missing_eos_penalty` for a response without its end token."""
        penalty = self.args.missing_eos_penalty
        scores = less_penalty(scores, experience, penalty, token=self.eos_token_id)
        return super().apply_rewards(experience, scores, inputs, training=training)

    def estimated(self, experience: Experience, accelerator: Accelerator) -> Experience:
        """With `advantages` (whitened over all processes) and `returns` per token."""
        rewards, trained = self._rewards(experience)[0].rewards, experience.ragged(TRAINED).padded().bool()
        values = experience.ragged(VALUES).padded().to(rewards.dtype)
        of_all = partial(over_processes, accelerator=accelerator)
        estimates = whitened_estimates(rewards, values, trained, self.args, of_all=of_all)
        mask = experience.completions.mask
        return experience.with_tokens(**{ADVANTAGES: estimates.advantages[mask], RETURNS: estimates.returns[mask]})

    def _rewards(self, experience: Experience) -> tuple[TokenRewards, Tensor]:
        """Rewards and divergences per token, `(B, T)`."""
        logps, ref = experience.ragged(OLD).padded(), experience.ragged(REF).padded()
        kl = kl_penalty(logps, ref, self.args.kl_estimator)
        scores, mask = experience.per_row[SCORES].to(logps.dtype), experience.completions.mask
        return token_rewards(scores, kl, mask, kl_coef=self.args.kl_coef), kl

    def metrics(self, experience: Experience) -> dict[str, Weighted]:
        """The documented `objective/*` means, over the rows that have a score."""
        scored = Ragged(experience.per_token[TRAINED].long(), experience.completions.lengths).padded().amax(dim=1)
        experience = experience.take(scored.nonzero()[:, 0])
        if not len(experience):
            return {}
        rewards, kl = self._rewards(experience)
        logps, trained = experience.ragged(OLD).padded(), experience.ragged(TRAINED).padded().bool()
        means = rollout_metrics(rewards, kl, logps, experience.per_row[SCORES].to(logps.dtype), trained)
        return {f"objective/{name}": means[f"objective/{name}"] for name in _OBJECTIVE}

    def objective(self, experience: Experience, scored: Scored, step: Step) -> list[LossTerms]:
        """The clipped losses of policy and value function, under the documented names of their metrics."""
        columns, mask = experience.per_token, experience.per_token[TRAINED]
        assert scored.values is not None
        losses = ppo_losses(
            scored.logps, scored.values, mask, self.args, old_logps=columns[OLD], old_values=columns[VALUES],
            advantages=columns[ADVANTAGES], returns=columns[RETURNS], entropies=scored.entropies,
        )  # fmt: skip
        logps = scored.logps.detach()
        ratios = probability_ratio(logps, columns[OLD].to(logps.dtype), mask)
        renamed = {_NAMES[name]: value for name, value in losses.total.metrics.items() if name in _NAMES}
        metrics = {**renamed, RATIO_SQUARE: weighted((ratios - 1).square(), mask)}
        value = losses.value._replace(values=self.args.vf_coef * losses.value.values, metrics={})
        return [losses.policy._replace(metrics=metrics), value]

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """With the variance of the ratio over tokens."""
        square = means.pop(RATIO_SQUARE, None)
        if square is not None:
            means["val/ratio_var"] = max(square - (means["val/ratio"] - 1) ** 2, 0.0)
        return means

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        """With the policy's loss of each token."""
        experience: Experience = batch[ROLLOUT]

        def losses(logps: Tensor, which: slice) -> Tensor:
            old, advantages, mask = (experience.per_token[name][which] for name in (OLD, ADVANTAGES, TRAINED))
            rollout = old.to(logps.dtype), advantages.to(logps.dtype)
            terms = clipped_surrogate(logps, *rollout, mask, cliprange=self.args.cliprange)
            return where_counted(terms.values, terms.weights) * terms.weights

        return replace(super().wants(batch, step), loss_of=losses)
