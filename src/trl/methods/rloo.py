"""REINFORCE leave-one-out: the baseline is the mean reward of the other completions of the prompt."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from trl.methods.method import Step
from trl.methods.online import GroupMethod
from trl.models.scoring.causal import Scored
from trl.objectives.group_advantages import estimated, normalized, reward_statistics
from trl.objectives.group_policy import sequence_policy_loss
from trl.objectives.kl import k1
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import OLD, REF, SCORES, TRAINED, Experience
from trl.rollouts.maker import less_penalty
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted
from trl.tensors.sequences import sum_by_sequence

if TYPE_CHECKING:
    from trl.trainer.rloo_config import RLOOConfig

KL, EQUAL_REWARDS = "kl", "frac_given_reward_zero_std"


class RLOOMethod(GroupMethod):
    """Rewards less the KL penalty, leave-one-out advantages, the clipped surrogate of whole completions."""

    args: "RLOOConfig"
    eos_token_id: int | None = None

    def __init__(self, args: "RLOOConfig") -> None:
        super().__init__(args)
        self.has_reference = self.compares_old = args.beta != 0

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """The score, less `missing_eos_penalty` for a completion without its end token."""
        scores = less_penalty(scores, experience, self.args.missing_eos_penalty, token=self.eos_token_id)
        return super().apply_rewards(experience, scores, inputs, training=training)

    def needs_old(self, experience: Experience) -> bool:
        return self.has_reference

    def with_penalties(self, experience: Experience) -> Experience:
        """With the divergence of each completion from the reference."""
        if not self.has_reference:
            return experience
        gaps = where_counted(_log_ratios(experience), experience.per_token[TRAINED])
        kl = sum_by_sequence(gaps, experience.completions.row_index, len(experience))
        return experience.with_rows(**{KL: kl})

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        rewards = self.given_rewards(rows)
        if self.has_reference:
            rewards = rewards - self.args.beta * rows[KL].to(rewards.dtype)
        advantages = estimated(self.args.advantage_estimator or "leave_one_out", rewards, group_size)
        if self.args.normalize_advantages:
            advantages = normalized(advantages, ~rewards.isnan())
        return rewards, advantages

    def given_rewards(self, rows: Mapping[str, Tensor]) -> Tensor:
        bounds = self.args.reward_clip_range
        return rows[SCORES] if bounds is None else rows[SCORES].clamp(*bounds)

    def objective(self, experience: Experience, scored: Scored, step: Step) -> list[LossTerms]:
        tokens = self.tokens(experience, step)
        return [sequence_policy_loss(scored.logps, tokens, self.args.group_options(), entropies=scored.entropies)]

    def metrics(self, rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int) -> dict[str, Weighted]:
        """With the share of completions whose group was given equal rewards, which differ by the KL penalty alone."""
        metrics = super().metrics(rows, sources, group_size)
        if not self.has_reference:
            return metrics
        equal = reward_statistics(self.given_rewards(rows), group_size)["frac_reward_zero_std"]
        return {**metrics, EQUAL_REWARDS: equal}

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """The divergence per token, `kl`."""
        trained = experience.per_token[TRAINED]
        return {KL: weighted(_log_ratios(experience), trained)} if self.has_reference else {}


def _log_ratios(experience: Experience) -> Tensor:
    return k1(experience.per_token[OLD], experience.per_token[REF])
