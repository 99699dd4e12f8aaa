"""Supervised fine-tuning: a loss of each trained token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from trl.methods.method import Batch, Method, Outcome, Scoring, Step
from trl.models.packed.layout import scored_sequences
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.language_modelling import LOSS_TYPES
from trl.options.checks import lookup
from trl.tensors.reduce import Unit, weighted


class TextScores(NamedTuple):
    """What is scored of the trained tokens; the logits `(B, T, V)` and labels `(B, T)` of padded rows; a loss of
    these."""

    tokens: Any
    logits: Tensor | None = None
    labels: Tensor | None = None
    loss: Tensor | None = None


class SFTMethod(Method):
    """The mathematics of supervised fine-tuning: a loss of each trained token."""

    units: ClassVar[tuple[Unit, ...]] = ("token",)

    def __init__(self, loss_type: str) -> None:
        self.objective = lookup(LOSS_TYPES, loss_type, "loss_type")

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        """With the accuracy, the entropy of all tokens, and the objective."""
        entropy = "all" if step.statistics else "none"
        return ScoreOptions(
            loss_of=lambda logps, _: self.objective(logps, torch.ones_like(logps)).values, entropy=entropy, correct=True
        )

    def count(self, batch: Batch) -> Tensor:
        """How many tokens a batch trains. Raises ValueError for a batch without labels."""
        if batch.get("labels") is None and not {"scored_sequence", "decoder_labels"} & set(batch):
            names = sorted(name for name, value in batch.items() if value is not None)
            raise ValueError(
                f"a batch has {names}, expected 'labels' too (-100 where nothing is trained). Let the "
                "data_collator add them, or leave data_collator out."
            )
        tokens = scored_sequences(batch)
        return tokens.new_tensor([len(tokens)])

    def score(self, batch: Batch, scoring: Scoring) -> TextScores:
        """The losses, and where predictions are needed the logits."""
        wants = self.wants(batch, scoring.step)
        if not scoring.step.outputs:
            return TextScores(scoring.logps(batch, wants))
        return TextScores(*scoring.with_logits(batch, wants), self.labels(batch, scoring))

    def labels(self, batch: Batch, scoring: Scoring) -> Tensor:
        """Those of the padded rows."""
        return scoring.scorer.padded_inputs(batch)["labels"]

    def terms(self, batch: Batch, scored: TextScores, step: Step) -> Outcome:
        """The loss of each trained token; predictions are the logits."""
        tokens: Scored = scored.tokens
        metrics = {} if tokens.entropy is None else {"entropy": tokens.entropy}
        if tokens.correct is not None:
            metrics["mean_token_accuracy"] = weighted(tokens.correct)
        terms = self.objective(tokens.logps, torch.ones_like(tokens.logps))
        parts = [terms._replace(metrics=metrics)]
        return Outcome(parts, scored.logits, scored.labels, tokens.aux_loss, local=tokens.total)


class LogitsMethod(SFTMethod):
    """A loss of the model's outputs in place of the method's: `compute_loss_func`, or else label smoothing."""

    def __init__(self, loss_type: str, compute_loss_func: Callable[..., Tensor] | None, smoother: Any) -> None:
        super().__init__(loss_type)
        self.compute_loss_func, self.smoother = compute_loss_func, smoother

    def score(self, batch: Batch, scoring: Scoring) -> TextScores:
        """With the loss of the batch, of which the step's number of tokens divides the sum."""
        count, scorer = scoring.step.counts, scoring.scorer
        if count is None:
            return super().score(batch, scoring)
        rows, labels = scorer.padded(batch), self.labels(batch, scoring)
        with scoring.accelerator.autocast():
            outputs = scorer.outputs(scoring.model, rows)
        logits = scorer.row_logits(outputs, rows)
        with torch.no_grad():
            wants = replace(self.wants(batch, scoring.step), loss_of=None)
            tokens = scorer.score_outputs(outputs, rows, wants)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=count[0])
            return TextScores(tokens._replace(aux_loss=None), logits, labels, loss)
        loss = self.smoother({"logits": logits}, labels, shift_labels=True, num_items_in_batch=count[0])
        return TextScores(tokens, logits, labels, loss)

    def terms(self, batch: Batch, scored: TextScores, step: Step) -> Outcome:
        """The loss of the batch, with the metrics of its tokens."""
        outcome, loss = super().terms(batch, scored, step), scored.loss
        if loss is None or step.counts is None:
            return outcome
        total = loss.to(torch.promote_types(loss.dtype, torch.float32)) * step.counts
        return outcome._replace(terms=[outcome.terms[0]._replace(values=total, weights=torch.ones_like(total))])
