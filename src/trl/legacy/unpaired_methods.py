"""Methods that programs of 0.8-0.26 call on trainers of unpaired completions, over today's scoring and objectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trl.collators.preference import DPODataCollatorWithPadding
from trl.collators.unpaired import REFERENCE_NAMES
from trl.legacy.pair_methods import IGNORED, sequences_of, with_losses
from trl.models.packed.layout import row_count
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.unpaired import UnpairedScores, unpaired_metrics
from trl.tensors.reduce import LossTerms, weighted
from trl.tensors.sequences import sum_by_sequence
from trl.trainer.method import Outcome


def forward(
    self: Any, model: nn.Module, batch: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probs of chosen and rejected completions, `(C,)` and `(R,)`, their logits `(C, T, V)` and `(R, T, V)`, and the
    log-probs `(B,)` of mismatched ones, without gradient (None where the loss has none).

    Raises: TypeError for an encoder-decoder.
    """
    if self.is_encoder_decoder:
        raise TypeError(
            "forward gives logits over whole sequences, which encoder-decoders do not have. Call "
            "get_batch_loss_metrics, or the model."
        )
    batch = dict(self.take_batch(batch))
    with self.accelerator.autocast():
        scored, logits = self.scorer.score_with_logits(model, self.method.learned(batch), ScoreOptions())
    logps = sum_by_sequence(scored.logps, scored.positions.sequence, row_count(batch))
    mismatched = self.method.mismatched_logps(batch, self.step_of(batch)) if self.mismatched else None
    chosen = batch["label"]
    return logps[chosen], logps[~chosen], logits[chosen], logits[~chosen], mismatched


def compute_reference_log_probs(self: Any, padded_batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The reference's log-probs `(B,)` of a batch's completions and, for loss_type "kto", of its mismatched ones."""
    batch = self.take_batch(padded_batch)
    if "ref_logps" in batch:
        return batch["ref_logps"], batch.get("ref_kl_logps")
    logps = self.reference.score(self.model_wrapped, batch, self.completion_logps)
    logps = logps.view(-1, self.method.completions_per_row)
    return logps[:, 0], logps[:, 1] if self.mismatched else None


def recorded_columns(self: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts, and sequences of prompts and completions with labels, padded; `label` is a list of booleans."""
    step, found = self.method.completions_per_row, sequences_of(batch)
    rows: list[dict[str, Any]] = [{"label": bool(label)} for label in batch["label"]]
    for place, prefix in enumerate(("", "KL_")[:step]):
        for row, (prompt, answer) in zip(rows, found[place::step], strict=True):
            head = [] if self.is_encoder_decoder else prompt
            row[f"{prefix}prompt_input_ids"] = prompt
            row[f"{prefix}completion_input_ids"] = head + answer
            row[f"{prefix}completion_labels"] = [IGNORED] * len(head) + answer
    known = {column: batch[name] for column, name in REFERENCE_NAMES.items() if name in batch}
    return {**DPODataCollatorWithPadding(self.scorer.pad_token_id)(rows), **known}


def recorded_outcome(self: Any, model: nn.Module, batch: dict[str, Any], scored: Scored) -> Outcome:
    """The outcome with losses and rewards of an overridden `kto_loss` or `bco_loss`."""
    scores = self.method.scores(batch, scored)
    kinds = scores.desirable, ~scores.desirable
    policy, reference = ([logps[kind] for kind in kinds] for logps in (scores.logps, scores.ref_logps))
    losses, chosen, rejected, point, *_ = self.call_loss_method(batch, policy, reference)
    if losses.numel() == len(scores.logps):
        losses = in_rows(scores.desirable, losses)
    metrics = {"rewards/chosen": weighted(chosen), "rewards/rejected": weighted(rejected)}
    metrics[self._point] = weighted(torch.as_tensor(point).reshape(-1))
    metrics = unpaired_metrics(scores, self.args.beta) | metrics
    terms = LossTerms(scores.logps, torch.ones_like(scores.logps), "sequence", metrics)
    return self.method.outcome(with_losses(terms, losses), scores, scored)


def scores_by_kind(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> UnpairedScores:
    """The scores of desirable completions, `(C,)` log-probs of policy and reference, followed by the others, `(R,)`."""
    logps, ref_logps = torch.cat([chosen, rejected]), torch.cat([ref_chosen, ref_rejected])
    return UnpairedScores(logps, ref_logps, torch.arange(len(logps), device=logps.device) < len(chosen))


def rewards_by_kind(scores: UnpairedScores, beta: float) -> tuple[Tensor, Tensor]:
    """The implicit rewards of the desirable completions `(C,)` and of the others `(R,)`, without gradient."""
    rewards = (beta * scores.ratios).detach()
    return rewards[scores.desirable], rewards[~scores.desirable]


def in_rows(label: Tensor, values: Tensor) -> Tensor:
    """Values `(B,)` of the desirable completions and then the others, in the order of the rows of `label` `(B,)`."""
    return values[torch.cat([label.nonzero(), (~label).nonzero()])[:, 0].argsort()]
