"""Direct preference optimisation and its family: pairs against a reference policy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl.methods.method import ALONE, Batch, Outcome, PairMethod, Scoring, Step
from trl.models.packed.layout import STEP_PART, row_count
from trl.models.scoring.causal import Scored, mean_logits
from trl.models.scoring.head import ScoreOptions
from trl.objectives.pairs import PairScores, StepStatistics, step_statistics
from trl.objectives.preference import PAIR_LOSSES, chosen_nll, nll_coefficient, preference_terms
from trl.reporting.metrics import Processes, RunningMean
from trl.tensors.reduce import LossTerms, weighted
from trl.tensors.sequences import (
    alignment_by_sequence,
    length_desensitized,
    split_pairs,
    sum_by_sequence,
    tokens_by_sequence,
    wpo_weights,
)

if TYPE_CHECKING:
    from trl.trainer.dpo_config import DPOConfig


class DPOMethod(PairMethod):
    """The mathematics of DPO and its family, of pairs with the reference's log-probs in `ref_logps`."""

    reference_names: Sequence[str] = ("ref_logps",)
    mean_reward: RunningMean

    def __init__(self, args: "DPOConfig") -> None:
        self.args, self.mean_reward = args, RunningMean()
        self._nll_coefficient = nll_coefficient(args.loss_type, args.loss_weights, args.rpo_alpha)
        losses = [PAIR_LOSSES[name] for name in args.loss_type]
        self._compares_pairs = any(loss.needs_step for loss in losses)
        self.per_token = any(loss.per_token for loss in losses)  # completions are compared by means over their tokens

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        """With the logs of collision probabilities for WPO."""
        return ScoreOptions(collision=self.args.use_weighting, mean_logits=True)

    def plan(self, batches: Sequence[Batch], scoring: Scoring) -> Sequence[Any]:
        """Score a step of several micro-batches without gradient where a loss compares its pairs with each other."""
        if not self._compares_pairs or len(batches) == 1:
            return [None] * len(batches)
        batch_scores = []
        for batch in batches:
            if self.reference_names:
                scoring.reference(batch, self.reference_names)
            batch_scores.append(self._compared(self.pair_scores(batch, scoring.frozen_logps(batch))))
        return self._statistics(batch_scores, scoring.step.processes, batches[-1])

    def _statistics(
        self, batch_scores: Sequence[PairScores], processes: Processes, last: Mapping[str, Any] = {}
    ) -> list[StepStatistics]:
        """What each micro-batch must know of all pairs of the step, on all processes; counts their rewards."""
        columns = [[s.chosen, s.rejected, s.ref_chosen, s.ref_rejected] for s in batch_scores]
        rows = torch.cat([torch.stack(column, dim=1).detach() for column in columns])
        table, first = processes.rows(rows[: len(rows) - last.get(STEP_PART, ALONE).fills_up])
        chosen, rejected, ref_chosen, ref_rejected = table.unbind(dim=1)
        scores = PairScores(chosen, rejected, ref_chosen, ref_rejected)
        self.mean_reward.add(weighted(self.args.beta * torch.cat(scores.ratios)))
        statistics, parts = self.statistics(scores), []
        for part in batch_scores:
            first = min(first, len(table) - len(part.chosen))  # a batch that fills up is not in the table
            parts.append(statistics.rows(slice(first, first + len(part.chosen))))
            first += len(part.chosen)
        return parts

    def count_rewards(self, scores: PairScores, processes: Processes) -> None:
        """Let the rewards of pairs move the run's mean, where a loss takes that. All processes must call it."""
        if self._compares_pairs:
            self._statistics([self._compared(scores)], processes)

    def statistics(self, scores: PairScores) -> StepStatistics:
        """Statistics of pairs, with the mean reward of the run so far as delta (BCO, arXiv:2404.04656)."""
        statistics = step_statistics(scores, self.args.beta)
        if not self.mean_reward.count:
            return statistics
        return replace(statistics, delta=torch.full_like(statistics.delta, self.mean_reward.value))

    def pair_scores(self, batch: Batch, scored: Scored) -> PairScores:
        """Log-probs of policy and reference of a batch's pairs: sums, or means where the loss takes means."""
        policy = self.totals(batch, scored)
        reference = batch["ref_logps"].to(policy) if self.reference_names else torch.zeros_like(policy)
        scores = PairScores(*split_pairs(policy), *split_pairs(reference))
        if not self.per_token:
            return scores
        return scores.per_token(*split_pairs(tokens_by_sequence(scored.positions.sequence, len(policy))))

    def terms(self, batch: Batch, scored: Scored, step: Step) -> Outcome:
        """The losses of a batch's pairs, and the likelihood of their chosen completions if the loss has it."""
        logged = self.pair_scores(batch, scored)
        scores = self._compared(logged)
        if self._compares_pairs:
            known = step.plan
            if known is None and step.training:
                known = self._statistics([scores], step.processes, batch)[0]
            elif known is None:
                known = self.statistics(scores)
            scores = replace(scores, step=known)
        terms = preference_terms(
            scores, self.args.loss_type, self.args.pair_options(), loss_weights=self.args.loss_weights,
            pair_weights=self.pair_weights(scored, len(logged.chosen)) if self.args.use_weighting else None,
            logged=logged,
        )  # fmt: skip
        return self.outcome(terms, logged, scored, nll=self._nll_coefficient)

    def outcome(self, terms: LossTerms, logged: PairScores, scored: Scored, *, nll: float | None) -> Outcome:
        """Terms of pairs with the chosen completions' likelihood, weighted by `nll`; predictions are the rewards."""
        parts = [terms._replace(metrics={**terms.metrics, **mean_logits(scored)})]
        if nll:
            parts.append(chosen_nll(scored.logps, scored.positions.sequence % 2 == 0, coefficient=nll))
        rewards = self.args.beta * torch.stack(logged.ratios, dim=1)
        labels = torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)
        return Outcome(parts, rewards, labels, scored.aux_loss)

    def _compared(self, scores: PairScores) -> PairScores:
        """The scores that the loss sees: with `reference_free`, against a reference of 0."""
        if not self.args.reference_free:
            return scores
        return PairScores.without_reference(scores.chosen, scores.rejected)

    def totals(self, batch: Batch, scored: Scored) -> Tensor:
        """Log-prob of each completion `(2B,)`; tokens past the shorter one's length count `ld_alpha`."""
        sequence, alpha, count = (scored.positions.sequence, self.args.ld_alpha, 2 * row_count(batch, per_row=2))
        if alpha is None:
            return sum_by_sequence(scored.logps, sequence, count)
        return length_desensitized(scored.logps, sequence, count, alpha=alpha)

    def pair_weights(self, scored: Scored, pairs: int) -> Tensor:
        """WPO's weights `(B,)`."""
        assert scored.log_collision is not None
        alignment = alignment_by_sequence(scored.logps, scored.log_collision, scored.positions.sequence, 2 * pairs)
        return wpo_weights(*split_pairs(alignment))
