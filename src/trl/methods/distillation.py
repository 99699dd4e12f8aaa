"""On-policy distillation: a teacher's distributions at the tokens of the student's completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl.methods.method import Batch, Scoring, Step
from trl.methods.online import GroupMethod, OnlineMethod
from trl.models.packed.layout import ROLLOUT
from trl.objectives.distillation import Divergence, TeacherLoss
from trl.rollouts.experience import SCORES, TRAINED, Experience
from trl.rollouts.measures import measured_lengths, session_metrics
from trl.tensors.reduce import LossTerms, Weighted, weighted
from trl.tensors.vocabulary_loss import Losses, VocabularyLoss

if TYPE_CHECKING:
    from trl.trainer.distillation_config import DistillationConfig


@dataclass(frozen=True)
class WithEntropy(TeacherLoss):
    """A loss, and beside it the student's entropy, in nats."""

    loss: TeacherLoss

    def of_logits(self, student: Tensor, teacher: Tensor) -> Losses:
        values = self.loss.of_logits(student, teacher)
        return (values, _entropies(student)) if isinstance(values, Tensor) else values

    def of_top_k(self, student: Tensor, tokens: Tensor, teacher_logps: Tensor) -> Losses:
        values = self.loss.of_top_k(student, tokens, teacher_logps)
        return (values, _entropies(student)) if isinstance(values, Tensor) else values


def _entropies(logits: Tensor) -> Tensor:
    """`(C, V) -> (C, 1)`."""
    p = logits.detach().softmax(-1)
    return -torch.xlogy(p, p).sum(-1, keepdim=True)


class DistillationMethod(GroupMethod):
    """The divergence of student and teacher at each completion token, without rewards."""

    args: "DistillationConfig"
    needs_teacher, scores_reference = True, False
    divisor = OnlineMethod.divisor  # tokens

    @property
    def loss(self) -> TeacherLoss:
        """The divergence of a token."""
        return Divergence(self.args.beta)

    def token_weights(self, experience: Experience) -> Tensor:
        """What each completion token counts, `(K,)`."""
        trained = experience.per_token[TRAINED]
        return trained.to(torch.float32 if trained.device.type == "mps" else torch.float64)

    def needs_old(self, experience: Experience) -> bool:
        return False

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        return rows[SCORES], torch.zeros_like(rows[SCORES])

    def signals(self, experience: Experience) -> Tensor:
        return torch.ones(len(experience.completions.values))

    def score(self, batch: Batch, scoring: Scoring) -> VocabularyLoss:
        """The divergence at the completion tokens."""
        return self.from_teacher(batch, scoring, self.token_weights(batch[ROLLOUT]))

    def from_teacher(self, batch: Batch, scoring: Scoring, weights: Tensor) -> VocabularyLoss:
        """The divergence, times the `weights` `(K,)` of the tokens."""
        loss = WithEntropy(self.loss) if scoring.step.statistics else self.loss
        return scoring.divergence(self.learned(batch), loss, weights=weights)

    def objective(self, experience: Experience, scored: VocabularyLoss, step: Step) -> list[LossTerms]:
        trained = experience.per_token[TRAINED]
        metrics: dict[str, Weighted] = {}
        if scored.statistics is not None and scored.statistics.shape[1]:
            metrics["entropy"] = weighted(scored.statistics[:, 0], trained)
        return [LossTerms(scored.values, trained.to(scored.values.dtype), "token", metrics)]

    def metrics(self, rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int) -> dict[str, Weighted]:
        return measured_lengths(rows) | session_metrics(rows)
