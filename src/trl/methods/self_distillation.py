"""Self-distillation: the divergence of a student from itself, shown more in its prompt."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trl.methods.distillation import DistillationMethod
from trl.methods.method import Batch, Scoring, Step
from trl.models.packed.layout import ROLLOUT, TEACHER_BATCH
from trl.models.scoring.head import ScoreOptions
from trl.objectives.distillation import Divergence, TeacherLoss, top_k_divergence
from trl.objectives.kl import LARGEST_LOG_RATIO
from trl.rollouts.experience import OLD, TRAINED, Experience
from trl.tensors.reduce import LossTerms, weighted
from trl.tensors.sequences import tokens_by_sequence
from trl.tensors.vocabulary_loss import VocabularyLoss


@dataclass(frozen=True)
class StudentTopK(TeacherLoss):
    """`top_k_divergence` over the student's k most likely tokens; without `tail` both sides are renormalised."""

    beta: float
    k: int
    tail: bool

    def of_logits(self, student: Tensor, teacher: Tensor) -> Tensor:
        shared = min(student.shape[-1], teacher.shape[-1])
        student = student[:, :shared]
        tokens = student.detach().topk(min(self.k, shared), dim=-1).indices
        logps = teacher[:, :shared].log_softmax(-1).gather(-1, tokens)
        return self.of_top_k(student, tokens, logps)

    def of_top_k(self, student: Tensor, tokens: Tensor, teacher_logps: Tensor) -> Tensor:
        return top_k_divergence(student, tokens, teacher_logps, beta=self.beta, tail=self.tail)


class SelfDistillationMethod(DistillationMethod):
    """The mean over completions of the mean divergence of their tokens."""

    args: Any  # with the fields of SelfDistillation and RolloutTraining

    @property
    def loss(self) -> TeacherLoss:
        """The divergence of a token, of the modes that need distributions."""
        args = self.args
        if args.distillation_mode == "topk_logits":
            return StudentTopK(args.distillation_alpha, args.distillation_topk, args.distillation_add_tail)
        return Divergence(args.distillation_alpha)

    def distilled(self, experience: Experience) -> Tensor:
        """The tokens that are learned from the teacher, bool `(K,)`."""
        return experience.per_token[TRAINED]

    def token_weights(self, experience: Experience) -> Tensor:
        experience = experience.with_tokens(**{TRAINED: self.distilled(experience)})
        trained, row = experience.per_token[TRAINED], experience.completions.row_index
        counts = tokens_by_sequence(row[trained], len(experience)).clamp(min=1)
        return super().token_weights(experience) / counts[row]

    def divisor(self, experience: Experience) -> Tensor:
        """Completions with a token that is learned from the teacher."""
        row = experience.completions.row_index[self.distilled(experience)]
        return (tokens_by_sequence(row, len(experience)) > 0).sum()

    def score(self, batch: Batch, scoring: Scoring) -> VocabularyLoss:
        """The divergence; tokens that were sampled by an earlier student have importance weights."""
        experience, clip = batch[ROLLOUT], self.args.distillation_is_clip
        weights = self.token_weights(experience)
        if clip is not None and OLD in experience.per_token and not scoring.step.is_first:
            gaps = scoring.frozen_logps(batch).logps - experience.per_token[OLD]
            ratios = gaps.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=clip)
            weights = weights * ratios
        if self.args.distillation_mode != "sampled_token":
            return self.from_teacher(batch, scoring, weights)
        options, teacher = ScoreOptions(temperature=scoring.temperature), cast(Any, scoring.teacher)
        teacher_logps = teacher.reference.score(
            scoring.model,
            batch[TEACHER_BATCH],
            lambda scorer, reference, rows: scorer.score(reference, rows, options).logps,
        )

        def losses(logps: Tensor, which: slice) -> Tensor:
            return weights[which] * (logps.detach() - teacher_logps[which]) * logps

        scored = scoring.logps(batch, ScoreOptions(loss_of=losses))
        values = weights * (scored.logps.detach() - teacher_logps)
        total = (values * scored.logps).sum() if scored.total is None else scored.total
        return VocabularyLoss(total, values, scored.aux_loss)

    def objective(self, experience: Experience, scored: VocabularyLoss, step: Step) -> list[LossTerms]:
        (terms,) = super().objective(experience, scored, step)
        weights, name = self.token_weights(experience), "self_distillation/distillation_loss"
        values = weighted(torch.where(weights > 0, scored.values / weights, 0.0), weights)
        return [terms._replace(metrics={**terms.metrics, name: values})]
