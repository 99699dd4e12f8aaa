"""Process reward models: is each step of a solution right?"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from trl.methods.method import Batch, Method, Outcome, Scoring, Step
from trl.models.packed.layout import IGNORED
from trl.objectives.reward_modelling import step_classification
from trl.tensors.reduce import Unit, weighted


class StepLogits(NamedTuple):
    """Logits `(K, 2)` and classes `(K,)` of labelled steps; predictions `(..., 2)` and labels `(...)`."""

    logits: Tensor
    classes: Tensor
    predictions: Tensor
    labels: Tensor


class PRMMethod(Method):
    """The mathematics of process reward models."""

    units: ClassVar[tuple[Unit, ...]] = ("token",)

    def count(self, batch: Batch) -> Tensor:
        """How many labelled steps a batch has."""
        return _is_labelled(batch).sum()[None]

    def score(self, batch: Batch, scoring: Scoring) -> StepLogits:
        """Logits of the labelled steps; in evaluations those of every token, which are predictions."""
        if scoring.step.training:
            logits, labels = _token_logits(batch, scoring)
            return StepLogits(logits, labels, logits, labels)
        is_real, is_labelled = batch["attention_mask"].bool(), _is_labelled(batch)
        every, _ = _token_logits({**batch, "labels": torch.where(is_real, 0, IGNORED)}, scoring)
        predictions = every.new_zeros(*is_real.shape, every.shape[-1])
        predictions[is_real] = every
        labels = torch.where(is_labelled, batch["labels"], IGNORED)
        return StepLogits(predictions[is_labelled], labels[is_labelled], predictions, labels)

    def terms(self, batch: Batch, scored: StepLogits, step: Step) -> Outcome:
        """The loss of a batch's labelled steps."""
        terms = step_classification(scored.logits, scored.classes)
        accuracy = weighted(scored.logits.argmax(dim=-1) == scored.classes)
        terms = terms._replace(metrics={**terms.metrics, "accuracy": accuracy})
        return Outcome([terms], scored.predictions, scored.labels)


def _token_logits(batch: Batch, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Logits `(K, 2)`, at least in float32, and classes `(K,)` of the labelled tokens, row by row."""
    with scoring.accelerator.autocast():
        logits, labels = scoring.scorer.score_tokens(scoring.model, batch)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), labels


def _is_labelled(batch: Batch) -> Tensor:
    """Bool `(B, T)`: real tokens that carry the class of a step."""
    return (batch["labels"] != IGNORED) & batch["attention_mask"].bool()
