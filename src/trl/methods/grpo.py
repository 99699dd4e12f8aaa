"""Group relative policy optimisation: advantages relative to the other completions of the prompt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trl.methods.method import Batch, Step
from trl.methods.online import Corrected, GroupMethod
from trl.models.packed.layout import ROLLOUT
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.distillation import reverse_kl_advantages
from trl.objectives.group_advantages import estimated
from trl.objectives.group_policy import LOSS_TYPES, divisor_share, group_policy_loss, token_losses
from trl.objectives.sampler_correction import correction, correction_extremes, correction_metrics
from trl.rollouts.experience import (
    ADVANTAGE,
    CORRECTION,
    FIRST_OLD,
    MEAN_LENGTH,
    OLD,
    SAMPLING_KEPT,
    SAMPLING_LOGPS,
    SCORES,
    STUDENT,
    TEACHER,
    TRAINED,
    Experience,
)
from trl.rollouts.token_counts import token_advantages
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig


class GRPOMethod(GroupMethod):
    """Advantages relative to the group, the loss of `loss_type`, and the correction of the sampler's mismatch."""

    args: "GRPOConfig"

    def __init__(self, args: "GRPOConfig") -> None:
        super().__init__(args)
        self.reward_scale, self.estimator = args.reward_scale, args.estimator
        self.needs_teacher = self.scores_teacher = args.teacher_kl_coef != 0

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        return rows[SCORES], estimated(self.estimator, rows[SCORES], group_size)

    def with_teacher(self, experience: Experience) -> Experience:
        """With an advantage of each token, to which the teacher's and the policy's log-probs add."""
        gaps = from_teacher(experience)
        advantages = token_advantages(experience) + self.teacher_advantages(experience, gaps)
        return experience.with_tokens(**{ADVANTAGE: advantages})

    def teacher_advantages(self, experience: Experience, gaps: Tensor) -> Tensor:
        """Of `gaps (K,)`, log q - log p, which are 0 where nothing is trained."""
        return self.args.teacher_kl_coef * gaps

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """With a teacher, `teacher_kl`: the estimate of the policy's divergence from it, in nats per token."""
        if not self.scores_teacher:
            return {}
        return {"teacher_kl": weighted(-from_teacher(experience), experience.per_token[TRAINED])}

    def needs_old(self, experience: Experience) -> bool:
        return self.scores_teacher or self._corrects(experience)

    def _corrects(self, experience: Experience) -> bool:
        return self.args.vllm_importance_sampling_correction and SAMPLING_LOGPS in experience.per_token

    def corrected(self, experience: Experience, *, is_exact: bool, counted: Tensor) -> Corrected | None:
        """With importance weights, or, where sequences are weighted, the sampler's log-probs as the old ones."""
        if is_exact or not self._corrects(experience) or OLD not in experience.per_token:
            return None
        row, old = experience.completions.row_index, experience.per_token[OLD]
        mask = experience.per_token[TRAINED] & counted[row]
        sampling = experience.per_token[SAMPLING_LOGPS] + experience.per_token.get(SAMPLING_KEPT, 0.0)
        sampling = sampling.to(old.dtype)
        mode: Any = self.args.vllm_importance_sampling_mode
        cap = self.args.vllm_importance_sampling_cap
        mismatch = correction(old, sampling, mask, row, len(experience), mode=mode, cap=cap)
        has_sequence_weights = LOSS_TYPES[self.args.loss_type].ratios is not None  # VESPO
        columns = {OLD: sampling, FIRST_OLD: sampling} if has_sequence_weights else {CORRECTION: mismatch.factors}
        measured = correction_metrics(mismatch, mask), correction_extremes(mismatch, mask)
        return Corrected(experience.with_tokens(**columns), *measured)

    def objective(self, experience: Experience, scored: Scored, step: Step) -> list[LossTerms]:
        tokens = self.tokens(experience, step)
        return [group_policy_loss(scored.logps, tokens, self.args, entropies=scored.entropies)]

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        losses = token_losses(self.tokens(batch[ROLLOUT], step), self.args)
        return replace(super().wants(batch, step), loss_of=losses)

    def divisor(self, experience: Experience) -> Tensor:
        return divisor_share(
            self.args.loss_type, experience.per_token[TRAINED], len(experience),
            rollout_tokens=experience.per_row[MEAN_LENGTH][0], longest=self.args.max_completion_length or 0,
        )  # fmt: skip


def from_teacher(experience: Experience) -> Tensor:
    """`log q - log p` `(K,)` of teacher q and policy p for each sampled token; 0 where nothing is trained."""
    columns = experience.per_token
    gaps = reverse_kl_advantages(columns.get(STUDENT, columns[OLD]), columns[TEACHER])
    return where_counted(gaps, columns[TRAINED])
