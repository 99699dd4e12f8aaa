"""Nash-MD: policy gradient on the preference for the policy over a mixture of itself and its reference."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl.methods.method import Batch, Step
from trl.methods.online_dpo import OnlineDPOMethod
from trl.models.packed.layout import ROLLOUT
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf, ScoreOptions
from trl.objectives.kl import probability_ratio
from trl.objectives.online_preference import nash_advantages
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import ADVANTAGE, OLD, REF, SCORES, STOPPED, TRAINED, Experience
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted

if TYPE_CHECKING:
    from trl.trainer.nash_md_config import NashMDConfig

PREFERENCE, OPPONENT_SCORE, OPPONENT_STOPPED = "preference", "opponent_score", "opponent_stopped"


class NashMDMethod(OnlineDPOMethod):
    """Policy gradient with the preference over the opponent, less the divergence of the tokens to come.

    The rows 0, 2, ... are the policy's completions, 1, 3, ... the opponent's, whose columns are NaN: they are not
    trained on.
    """

    args: "NashMDConfig"
    temperature = None  # a policy gradient is that of the distribution that completions come from

    @property
    def reference_share(self) -> float:  # type: ignore[override]
        """`mixture_coef` of the present epoch."""
        return self.of_epoch("mixture_coef")

    def needs_old(self, experience: Experience) -> bool:
        return True

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With the probability that the policy's completion is preferred, NaN where that is not known."""
        experience = super().apply_rewards(experience, scores, inputs, training=training)
        policy, opponent = experience.per_row[SCORES].view(-1, 2).unbind(dim=1)
        preference = policy if self.is_judged else torch.sigmoid(policy - opponent)
        preference = torch.where((policy + opponent).isnan(), torch.nan, preference)
        stopped = experience.per_row[STOPPED].bool().view(-1, 2)[:, 1]
        columns = {PREFERENCE: preference, OPPONENT_SCORE: opponent, OPPONENT_STOPPED: stopped.to(opponent)}
        nothing = torch.full_like(opponent, torch.nan)
        experience = experience.with_rows(
            **{name: torch.stack([value, nothing], dim=1).flatten() for name, value in columns.items()}
        )
        known = ~experience.per_row[PREFERENCE].isnan()[experience.completions.row_index]
        return experience.with_tokens(**{TRAINED: experience.per_token[TRAINED] & known})

    def lacks_variance(self, rows: Mapping[str, Tensor], group_size: int) -> Tensor:
        """Prompts without an answer of the judge; equal completions still have a divergence to learn from."""
        return rows[PREFERENCE].view(-1, 2)[:, 0].isnan()

    def with_penalties(self, experience: Experience) -> Experience:
        """With the advantage of each token."""
        columns, row = experience.per_token, experience.completions.row_index
        gap = where_counted(columns[OLD] - columns[REF], columns[TRAINED])
        preference = experience.per_row[PREFERENCE].to(gap)
        advantages = nash_advantages(preference, gap, row, beta=self.beta)
        return experience.with_tokens(**{ADVANTAGE: where_counted(advantages, columns[TRAINED])})

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        """The scores, and the preference less a half."""
        return rows[SCORES], (rows[PREFERENCE] - 0.5).nan_to_num(0.0)

    def divisor(self, experience: Experience) -> Tensor:
        return (~experience.per_row[PREFERENCE].isnan()).sum()

    def objective(self, experience: Experience, scored: Scored, step: Step) -> list[LossTerms]:
        loss_of, mask = self._token_losses(experience, step), experience.per_token[TRAINED]
        values, metrics = loss_of(scored.logps, slice(None)), self.measured(experience, scored.logps.detach())
        return [LossTerms(values, mask.to(values.dtype), "sequence", metrics)]

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        return replace(super().wants(batch, step), loss_of=self._token_losses(batch[ROLLOUT], step))

    def _token_losses(self, experience: Experience, step: Step) -> LossOf:
        """`-A log p`, times the ratio of the policy to that of the rollout in the later steps on a rollout batch."""
        columns, old = experience.per_token, self.old_logps(experience, step)

        def loss_of(logps: Tensor, rows: slice) -> Tensor:
            mask = columns[TRAINED][rows]
            ratio = 1.0 if old is None else probability_ratio(logps.detach(), old[rows].to(logps), mask)
            return -columns[ADVANTAGE][rows].to(logps) * ratio * where_counted(logps, mask)

        return loss_of

    def measured(self, experience: Experience, logps: Tensor) -> dict[str, Weighted]:
        """Means over the policy's completions whose preference is known."""
        rows = experience.per_row
        known, answered = (~rows[name].isnan() for name in (PREFERENCE, OPPONENT_STOPPED))
        policy, reference = self.sums(experience, logps)
        gap, preference = policy - reference, rows[PREFERENCE]
        columns = {
            "loss/kl": gap,
            "loss/score": (preference - 0.5).to(policy) * policy,
            "objective/entropy": -policy,
            "rewards/probabilities": preference,
            "rewards/margins": gap,  # of policy and reference on the same completion, as in TRL
            "rewards/accuracies": gap > 0,
            "logps/chosen": policy,
            "logps/rejected": reference,
        }
        if not self.is_judged:
            columns |= {"rewards/chosen": rows[SCORES], "rewards/rejected": rows[OPPONENT_SCORE]}
        return {
            **{name: weighted(values, known) for name, values in columns.items()},
            "val/model_contain_eos_token": weighted(rows[STOPPED].bool(), answered),
            "val/ref_contain_eos_token": weighted(rows[OPPONENT_STOPPED], answered),
            **self.schedule_metrics(),
        }
