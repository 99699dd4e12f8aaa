"""Nash-MD: policy gradient on the preference for the policy over a mixture of itself and its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl._lazy import attach
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf
from trl.objectives.kl import probability_ratio
from trl.objectives.online_preference import by_epoch, nash_advantages
from trl.reporting.model_card import Paper
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import ADVANTAGE, OLD, REF, SCORES, STOPPED, TRAINED, Experience
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted
from trl.trainer.grpo_config import GroupTraining
from trl.trainer.nash_md_config import NashMDConfig
from trl.trainer.online_dpo_trainer import OnlineDPOMethod, OnlineDPOTrainer
from trl.trainer.online_method import GroupMethod, StepContext

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

PREFERENCE, OPPONENT_SCORE, OPPONENT_STOPPED = "preference", "opponent_score", "opponent_stopped"


class NashMDMethod(OnlineDPOMethod):
    """Policy gradient with the preference over the opponent, less the divergence of the tokens to come.

    The rows 0, 2, ... are the policy's completions, 1, 3, ... the opponent's, whose columns are NaN: they are not
    trained on.
    """

    args: NashMDConfig

    @property
    def reference_share(self) -> float:  # type: ignore[override]
        """`mixture_coef` of the present epoch."""
        return by_epoch(self.args.mixture_coef, self.epoch())

    def needs_old(self, experience: Experience) -> bool:
        return True

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With the probability that the policy's completion is preferred, NaN where that is not known."""
        found = super().apply_rewards(experience, scores, inputs, training=training)
        own, other = found.per_row[SCORES].view(-1, 2).unbind(dim=1)
        preference = own if self.is_judged else torch.sigmoid(own - other)
        preference = torch.where((own + other).isnan(), torch.nan, preference)
        stopped = found.per_row[STOPPED].bool().view(-1, 2)[:, 1]
        columns = {PREFERENCE: preference, OPPONENT_SCORE: other, OPPONENT_STOPPED: stopped.to(other)}
        nothing = torch.full_like(other, torch.nan)
        found = found.with_rows(
            **{name: torch.stack([value, nothing], dim=1).flatten() for name, value in columns.items()}
        )
        known = ~found.per_row[PREFERENCE].isnan()
        return found.with_tokens(**{TRAINED: found.per_token[TRAINED] & known[found.completions.row_index]})

    def lacks_variance(self, rows: Mapping[str, Tensor], group_size: int) -> Tensor:
        """Prompts without an answer of the judge; equal completions still have a divergence to learn from."""
        return rows[PREFERENCE].view(-1, 2)[:, 0].isnan()

    def with_penalties(self, experience: Experience) -> Experience:
        """With the advantage of each token."""
        columns, row = experience.per_token, experience.completions.row_index
        gap = where_counted(columns[OLD] - columns[REF], columns[TRAINED])
        preference = experience.per_row[PREFERENCE].to(gap)
        found = nash_advantages(preference, gap, row, beta=self.beta)
        return experience.with_tokens(**{ADVANTAGE: where_counted(found, columns[TRAINED])})

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        """The scores, and the preference less a half."""
        return rows[SCORES], (rows[PREFERENCE] - 0.5).nan_to_num(0.0)

    def divisor(self, experience: Experience) -> Tensor:
        return (~experience.per_row[PREFERENCE].isnan()).sum()

    def objective(self, experience: Experience, scored: Scored, context: StepContext) -> list[LossTerms]:
        loss_of, mask = self.token_losses(experience, context), experience.per_token[TRAINED]
        values, metrics = loss_of(scored.logps, slice(None)), self.measured(experience, scored.logps.detach())
        return [LossTerms(values, mask.to(values.dtype), "sequence", metrics)]

    def token_losses(self, experience: Experience, context: StepContext) -> LossOf:
        """`-A log p`, times the ratio of the policy to that of the rollout in the later steps on a rollout batch."""
        columns, old = experience.per_token, self.old_logps(experience, context)

        def loss_of(logps: Tensor, rows: slice) -> Tensor:
            mask = columns[TRAINED][rows]
            ratio = 1.0 if old is None else probability_ratio(logps.detach(), old[rows].to(logps), mask)
            return -columns[ADVANTAGE][rows].to(logps) * ratio * where_counted(logps, mask)

        return loss_of

    def measured(self, experience: Experience, logps: Tensor) -> dict[str, Weighted]:
        """Means over the policy's completions whose preference is known."""
        rows = experience.per_row
        known, own = (~rows[name].isnan() for name in (PREFERENCE, OPPONENT_STOPPED))
        policy, reference = self.sums(experience, logps)
        gap, preference = policy - reference, rows[PREFERENCE]
        found = {
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
            found |= {"rewards/chosen": rows[SCORES], "rewards/rejected": rows[OPPONENT_SCORE]}
        settings = {"beta": self.beta, "mixture_coef": self.reference_share}
        return {
            **{name: weighted(values, known) for name, values in found.items()},
            "val/model_contain_eos_token": weighted(rows[STOPPED].bool(), own),
            "val/ref_contain_eos_token": weighted(rows[OPPONENT_STOPPED], own),
            **{name: weighted(torch.tensor([value])) for name, value in settings.items()},
        }


class NashMDTrainer(OnlineDPOTrainer):
    """Trainer of Nash-MD (Munos et al. 2023, arXiv:2312.00886): learns to be preferred to a mixture of policy and
    reference.

    Takes what `OnlineDPOTrainer` takes. The gradient is that of the preference less `beta` times the divergence of
    whole sequences from the reference; rewards give preferences by `sigmoid(r - r')`.

    Example:
        >>> trainer = NashMDTrainer(
        ...     "Qwen/Qwen3-0.6B", judge=judge, args=NashMDConfig("nash"), train_dataset=dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "nash-md"]
    _name: ClassVar[str] = "Nash-MD"
    _paper = Paper("Nash Learning from Human Feedback", "2312.00886")
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss", "rewards/probabilities")
    args: NashMDConfig
    method_type: ClassVar[type[GroupMethod]] = NashMDMethod
    config_type: ClassVar[type[GroupTraining]] = NashMDConfig
    has_opponent: ClassVar[bool] = True

    @property
    def mixture_coef(self) -> float:
        """Share of the reference in the opponent in the present epoch."""
        return self.method.reference_share

    @property
    def scoring_temperature(self) -> float:
        """That of sampling: a policy gradient is that of the distribution that completions come from."""
        return self.sampling.temperature

    def rows_of_step(self, step: int, sizes: Any = None) -> list[Tensor]:
        """The policy's completions alone."""
        return [rows[::2] for rows in super().rows_of_step(step, sizes)]
