"""Generalised knowledge distillation: a teacher's distributions at each trained token."""

from typing import TYPE_CHECKING

import torch

from trl.methods.method import Batch, Outcome, Scoring, Step
from trl.methods.sft import SFTMethod, TextScores
from trl.objectives.distillation import Divergence
from trl.tensors.reduce import LossTerms
from trl.tensors.vocabulary_loss import VocabularyLoss

if TYPE_CHECKING:
    from trl.trainer.gkd_config import GKDConfig


class GKDMethod(SFTMethod):
    """The divergence of student and teacher at each trained token (arXiv:2306.13649, eq. 1)."""

    def __init__(self, args: "GKDConfig") -> None:
        super().__init__("nll")
        self.args = args

    @property
    def loss(self) -> Divergence:
        """The loss of a token; `beta` may change during a run."""
        return Divergence(self.args.beta)

    def divergence(self, batch: Batch, scoring: Scoring) -> VocabularyLoss:
        """The divergence from the teacher's distributions."""
        return scoring.divergence(batch, self.loss, temperature=self.args.temperature)

    def score(self, batch: Batch, scoring: Scoring) -> TextScores:
        loss = self.divergence(batch, scoring)
        if not scoring.step.outputs:
            return TextScores(loss)
        with torch.no_grad():
            _, logits = scoring.with_logits(self.learned(batch))
        return TextScores(loss, logits, scoring.scorer.padded_inputs(batch)["labels"])

    def terms(self, batch: Batch, scored: TextScores, step: Step) -> Outcome:
        """The divergence of each trained token."""
        loss: VocabularyLoss = scored.tokens
        terms = LossTerms(loss.values, torch.ones_like(loss.values), "token", {})
        return Outcome([terms], scored.logits, scored.labels, loss.aux_loss, local=loss.total)
