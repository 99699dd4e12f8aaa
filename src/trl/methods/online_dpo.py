"""Online DPO: pairs of the policy's own completions, compared by a judge or by rewards."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl.methods.method import Step
from trl.methods.online import GroupMethod
from trl.models.scoring.causal import Scored
from trl.objectives.online_preference import RankedPairs, by_epoch, ranked_pairs, sequence_metrics
from trl.objectives.pairs import PairScores
from trl.objectives.preference import preference_terms
from trl.rewards.managed_judge import ManagedJudge
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import REF, SCORES, STOPPED, TRAINED, Experience
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted
from trl.tensors.sequences import sum_by_sequence

if TYPE_CHECKING:
    from trl.trainer.online_dpo_config import OnlineDPOConfig


class OnlineDPOMethod(GroupMethod):
    """A loss of `PAIR_LOSSES` on pairs of completions (Guo et al. 2024, arXiv:2402.04792)."""

    args: "OnlineDPOConfig"
    pairs_rows = True
    temperature = 1.0  # the policy's own distribution is compared with the reference's, however it is sampled
    judge: ManagedJudge | None = None
    """Scores are its shares of won comparisons; None: sums of rewards."""
    epoch: Callable[[], float]
    reference_share: float = 1.0
    """Of the opponent, where there is one."""

    @property
    def beta(self) -> float:
        """Of the present epoch."""
        return self.of_epoch("beta")

    def of_epoch(self, name: str) -> float:
        """A setting among the config's `schedules` in the present epoch."""
        return by_epoch(getattr(self.args, name), self.epoch())

    def schedule_metrics(self) -> dict[str, Weighted]:
        """The present values of all `schedules`."""
        return {name: weighted(torch.tensor([self.of_epoch(name)])) for name in self.args.schedules}

    @property
    def is_judged(self) -> bool:
        """Whether the scores are a judge's."""
        return self.judge is not None

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        return {} if self.judge is None else self.judge.agreement()

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With the penalty on completions without an end token; those that are masked for it are in no pair."""
        if self.args.missing_eos_penalty is not None and not self.is_judged:
            scores = scores - self.args.missing_eos_penalty * (~experience.per_row[STOPPED].bool()).to(scores)
        if self.args.mask_truncated_completions:
            scores = torch.where(experience.per_row[STOPPED].bool(), scores, torch.nan)
        return super().apply_rewards(experience, scores, inputs, training=training)

    def needs_old(self, experience: Experience) -> bool:
        return False

    def pairs(self, scores: Tensor) -> RankedPairs:
        """The pairs of whole groups with these scores `(B,)`."""
        return ranked_pairs(scores, self.group_size, selection=self.args.pair_selection, ties=self.args.tie_policy)

    @property
    def group_size(self) -> int:
        return self.args.num_generations or 2

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        """The scores, and the weight of each completion: positive for chosen ones."""
        scores = rows[SCORES]
        pairs, weights = self.pairs(scores), torch.zeros_like(scores)
        weights.index_add_(0, pairs.chosen, pairs.weights).index_add_(0, pairs.rejected, -pairs.weights)
        return scores, weights

    def divisor(self, experience: Experience) -> Tensor:
        return self.pairs(experience.per_row[SCORES]).weights.sum().round().long()

    def objective(self, experience: Experience, scored: Scored, step: Step) -> list[LossTerms]:
        policy, reference = self.sums(experience, scored.logps)
        terms = self.pair_terms(experience, self.pairs(experience.per_row[SCORES]), policy, reference)
        return [terms._replace(metrics={**terms.metrics, **self.row_metrics(experience, policy, reference)})]

    def sums(self, experience: Experience, logps: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of policy and reference of each completion, `(B,)` each; without tools' tokens."""
        mask, row = experience.per_token[TRAINED], experience.completions.row_index
        policy, reference = (
            sum_by_sequence(where_counted(values, mask), row, len(experience))
            for values in (logps, experience.per_token[REF].to(logps))
        )
        return policy, reference

    def pair_terms(self, experience: Experience, pairs: RankedPairs, policy: Tensor, reference: Tensor) -> LossTerms:
        """The loss of each pair, with its metrics; `ipo` compares sums over tokens, as its paper does."""
        scores, (chosen, rejected, weights) = experience.per_row[SCORES], pairs
        pair_scores = PairScores(policy[chosen], policy[rejected], reference[chosen], reference[rejected])
        options = self.args.pair_options(self.beta)
        terms = preference_terms(pair_scores, [self.args.loss_type], options, pair_weights=weights.to(policy))
        metrics = {**terms.metrics, **self.schedule_metrics()}
        if not self.is_judged:
            metrics["objective/scores_margin"] = weighted(scores[chosen] - scores[rejected])
        return terms._replace(metrics=metrics)

    def row_metrics(self, experience: Experience, policy: Tensor, reference: Tensor) -> dict[str, Weighted]:
        """Means over completions."""
        scores = experience.per_row[SCORES]
        metrics = sequence_metrics(policy, reference, scores, beta=self.beta, with_scores=not self.is_judged)
        return {**metrics, "val/contain_eos_token": weighted(experience.per_row[STOPPED].bool())}
