"""Kahneman-Tversky optimisation: completions that are marked desirable or not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trl.collators.unpaired import single_completions
from trl.methods.method import Batch, Outcome, Scoring, Step, counted
from trl.methods.unpaired import UnpairedMethod
from trl.models.packed.layout import row_count
from trl.models.scoring.causal import Scored
from trl.objectives.unpaired import kl_estimate, kto_terms
from trl.tensors.reduce import Weighted
from trl.tensors.sequences import sum_by_sequence

if TYPE_CHECKING:
    from trl.trainer.kto_config import KTOConfig


class KTOMethod(UnpairedMethod):
    """The mathematics of KTO; with two completions per row, losses are compared with the KL of the mismatched ones."""

    args: "KTOConfig"

    def plan(self, batches: Sequence[Batch], scoring: Scoring) -> Sequence[Any]:
        """Estimate the KL of the whole step, on all processes, from its mismatched completions.

        The losses are not linear in it, so it must be known before the first backward pass: the policy scores the
        mismatched completions in passes of their own.
        """
        if self.completions_per_row == 1:
            return [None] * len(batches)
        total = scoring.step.processes.sum([self._kl_sum(batch, scoring) for batch in batches])
        return [kl_estimate(total)] * len(batches)

    def mismatched_logps(self, batch: Batch, scoring: Scoring) -> Tensor:
        """The policy's log-probs `(B,)` of the mismatched completions, without gradient."""
        scored = scoring.frozen_logps(single_completions(batch, 1, of=2))
        return sum_by_sequence(scored.logps, scored.positions.sequence, row_count(batch))

    def _kl_sum(self, batch: Batch, scoring: Scoring) -> Weighted:
        scoring.reference(batch, self.reference_names)
        logps = self.mismatched_logps(batch, scoring)
        return counted(batch, logps - batch["ref_kl_logps"].to(logps))

    def score(self, batch: Batch, scoring: Scoring) -> tuple[Scored, Tensor]:
        """What is scored, and the KL of the step or, in an evaluation, of the batch (of all processes)."""
        scored, kl, step = super().score(batch, scoring), scoring.step.plan, scoring.step
        if self.completions_per_row == 1:
            kl = scored.logps.new_zeros(())
        elif kl is None:
            total = self._kl_sum(batch, scoring)
            kl = kl_estimate(total if step.training else step.processes.sum([total]))
        return scored, kl

    def terms(self, batch: Batch, scored: tuple[Scored, Tensor], step: Step) -> Outcome:
        """The losses of a batch's completions against the KL."""
        policy, kl = scored
        scores = self.scores(batch, policy)
        return self.outcome(kto_terms(scores, kl=kl, **self.args.loss_options()), scores, policy)
