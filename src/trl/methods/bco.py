"""Binary classifier optimisation: the reward as the logit of a classifier of desirable completions."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl.collators.unpaired import EMBEDDING_COLUMN, EMBEDDING_MASK
from trl.methods.method import Batch, Outcome, Scoring, Step, counted
from trl.methods.unpaired import UnpairedMethod
from trl.models.packed.layout import row_count
from trl.models.prompt_density import PromptDensity
from trl.models.scoring.causal import Scored
from trl.objectives.unpaired import UnpairedScores, bco_terms, udm_weights
from trl.reporting.metrics import Processes, RunningMean

if TYPE_CHECKING:
    from trl.trainer.bco_config import BCOConfig


class BCOMethod(UnpairedMethod):
    """The mathematics of BCO; `density` weighs undesirable rows by their prompts."""

    args: "BCOConfig"
    mean_reward: RunningMean

    def __init__(self, args: "BCOConfig", density: PromptDensity | None) -> None:
        super().__init__(args)
        self.density, self.mean_reward = density, RunningMean()

    def plan(self, batches: Sequence[Batch], scoring: Scoring) -> Sequence[Any]:
        """Count the rewards of the whole step, on all processes; those of a single micro-batch come with its loss."""
        if len(batches) == 1:
            return [None]
        sums = []
        for batch in batches:
            scoring.reference(batch, self.reference_names)
            scores = self.scores(batch, scoring.frozen_logps(self.learned(batch)))
            sums.append(counted(batch, self.args.beta * scores.ratios))
        self.mean_reward.add(scoring.step.processes.sum(sums))
        return ["counted"] * len(batches)

    def delta(self) -> Tensor:
        """The mean reward of the run so far, 0-dim."""
        return torch.tensor(self.mean_reward.value, dtype=torch.float64)

    def count_rewards(self, scores: UnpairedScores, processes: Processes, batch: Mapping[str, Any] = {}) -> None:
        """Let the rewards of completions move delta. All processes must call it."""
        self.mean_reward.add(processes.sum([counted(batch, self.args.beta * scores.ratios)]))

    def terms(self, batch: Batch, scored: Scored, step: Step) -> Outcome:
        """The losses of a batch's completions against delta, which evaluations do not move."""
        scores = self.scores(batch, scored)
        if step.training and step.plan is None:
            self.count_rewards(scores, step.processes, batch)
        weights = self.undesirable_weights(self.embeddings(batch))
        delta = self.delta().to(scores.logps)
        terms = bco_terms(scores, beta=self.args.beta, delta=delta, undesirable_weights=weights)
        return self.outcome(terms, scores, scored)

    # ---- underlying-distribution matching

    def embeddings(self, batch: Batch) -> Tensor | None:
        """The embedding `(B, H)` of each row's prompt."""
        if self.density is None:
            return None
        rows = row_count(batch)
        prompts = zip(batch[EMBEDDING_COLUMN][:rows], batch[EMBEDDING_MASK][:rows].bool(), strict=True)
        return self.density.embed([ids[real].tolist() for ids, real in prompts], batch["label"].device)

    def undesirable_weights(self, embeddings: Tensor | None) -> Tensor | None:
        """The density ratio `(B,)` of embedded prompts."""
        if embeddings is None or self.density is None:
            return None
        assert self.density.classifier is not None
        probability = self.density.classifier.probability(embeddings)
        return udm_weights(probability, min_ratio=self.args.min_density_ratio, max_ratio=self.args.max_density_ratio)
