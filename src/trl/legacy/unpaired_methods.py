"""Methods that programs of 0.8-0.26 call on `KTOTrainer` and `BCOTrainer`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from trl.collators.preference import DPODataCollatorWithPadding
from trl.collators.unpaired import REFERENCE_NAMES
from trl.data.formats import RowDict
from trl.legacy.interface import NOT_CALLED, RECORDED, WHOLE, NotCalled, View, call_with, overrides
from trl.legacy.pair_methods import LegacyReference, sequences_of, with_losses
from trl.methods.method import ALONE, Batch, Outcome, StepPart
from trl.models.packed.layout import STEP_PART, row_count
from trl.models.scoring.causal import Scored
from trl.objectives.unpaired import UnpairedScores, bco_terms, kl_estimate, kto_terms, unpaired_metrics
from trl.tensors.padding import IGNORED
from trl.tensors.reduce import LossTerms, weighted
from trl.tensors.sequences import sum_by_sequence


class LegacyUnpaired(LegacyReference):
    """What the trainers of single completions share."""

    _not_called: ClassVar[NotCalled] = {**NOT_CALLED, "forward": WHOLE}
    _point: ClassVar[str]  # the metric of what rewards are compared with
    mismatched: bool
    call_loss_method: Callable[..., Any]  # with a batch, and the log-probs of policy and reference of its two kinds

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Log-probs `(C,)`, `(R,)` and logits `(C, T, V)`, `(R, T, V)` of chosen and rejected completions.

        Then log-probs `(B,)` of mismatched ones, without gradient, or None. Raises: TypeError for an encoder-decoder.
        """
        batch = dict(self.take_batch(batch))
        scored, logits = self.with_logits("forward", model, self.method.learned(batch))
        logps = sum_by_sequence(scored.logps, scored.positions.sequence, row_count(batch))
        mismatched = self.method.mismatched_logps(batch, self.scoring(model, batch)) if self.mismatched else None
        chosen = batch["label"]
        return logps[chosen], logps[~chosen], logits[chosen], logits[~chosen], mismatched

    def compute_reference_log_probs(self, padded_batch: Batch) -> Any:
        """The reference's log-probs `(B,)` of a batch's completions and, for "kto", of its mismatched ones."""
        batch = dict(self.take_batch(padded_batch))
        scoring = replace(self.scoring(), reference_logps=super().reference_logps)
        scoring.reference(batch, self.method.reference_names)
        return batch["ref_logps"], batch.get("ref_kl_logps")

    def reference_logps(self, batch: Batch) -> Tensor:
        """The reference's log-probs of all completions, perhaps those of an overridden method."""
        if not overrides(self, "compute_reference_log_probs"):
            return super().reference_logps(batch)
        logps = self.compute_reference_log_probs(batch.get(RECORDED, batch))
        sides = logps if isinstance(logps, tuple) else (logps,)
        return torch.stack(sides[: self.method.completions_per_row], dim=1).flatten()

    def recorded_columns(self, batch: Batch) -> RowDict:
        """Prompts, and sequences of prompts and completions with labels, padded; `label` is a list of booleans."""
        step, sequences = self.method.completions_per_row, sequences_of(batch)
        rows: list[RowDict] = [{"label": bool(label)} for label in batch["label"]]
        for place, prefix in enumerate(("", "KL_")[:step]):
            for row, (prompt, answer) in zip(rows, sequences[place::step], strict=True):
                head = [] if self.is_encoder_decoder else prompt
                row[f"{prefix}prompt_input_ids"] = prompt
                row[f"{prefix}completion_input_ids"] = head + answer
                row[f"{prefix}completion_labels"] = [IGNORED] * len(head) + answer
        reference = {column: batch[name] for column, name in REFERENCE_NAMES.items() if name in batch}
        return {**DPODataCollatorWithPadding(self.scorer.pad_token_id)(rows), **reference}

    def recorded_outcome(self, batch: RowDict, scored: Scored) -> Outcome:
        """The outcome with losses and rewards of an overridden `kto_loss` or `bco_loss`."""
        scores = self.method.scores(batch, scored)
        kinds = scores.desirable, ~scores.desirable
        policy, reference = ([logps[kind] for kind in kinds] for logps in (scores.logps, scores.ref_logps))
        losses, chosen, rejected, point, *_ = self.call_loss_method(batch, policy, reference)
        if losses.numel() == len(scores.logps):
            order = torch.cat([kind.nonzero() for kind in kinds])[:, 0]  # the desirable ones came first
            losses = losses[order.argsort()]
        metrics = {"rewards/chosen": weighted(chosen), "rewards/rejected": weighted(rejected)}
        metrics[self._point] = weighted(torch.as_tensor(point).reshape(-1))
        metrics = unpaired_metrics(scores, self.args.beta) | metrics
        terms = LossTerms(scores.logps, torch.ones_like(scores.logps), "sequence", metrics)
        return self.method.outcome(with_losses(terms, losses), scores, scored)


class LegacyKTO(LegacyUnpaired):
    """Attributes and the loss of `KTOTrainer`."""

    _point: ClassVar[str] = "kl"
    calculate_KL = View("mismatched")

    def prepare_step(self, batches: list[Any]) -> None:
        """Estimate the KL of the whole step; an overridden `kto_loss` takes that of each batch."""
        if not overrides(self, "kto_loss"):
            super().prepare_step(batches)

    def kto_loss(
        self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor, policy_KL_logps: Tensor | None,
        reference_chosen_logps: Tensor, reference_rejected_logps: Tensor, reference_KL_logps: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Losses of the chosen, then the rejected completions, the rewards of either, and the KL estimate, 0-dim.

        Log-probs are sums `(C,)`, `(R,)`, and `(B,)` of mismatched completions (not for "apo_zero_unpaired").
        """
        reference = reference_chosen_logps, reference_rejected_logps
        scores = scores_by_kind(policy_chosen_logps, policy_rejected_logps, *reference)
        kl = scores.logps.new_zeros(())
        if self.mismatched:
            assert policy_KL_logps is not None and reference_KL_logps is not None
            kl = kl_estimate(weighted(policy_KL_logps - reference_KL_logps))
        losses = kto_terms(scores, kl=kl, **self.args.loss_options()).values
        return losses, *rewards_by_kind(scores, self.args.beta), kl

    def call_loss_method(self, batch: RowDict, policy: Any, reference: Any) -> Any:
        """What an overridden `kto_loss` gives for a batch, with the mismatched completions of that batch."""
        logps = self.method.mismatched_logps(batch, self.scoring()) if self.mismatched else None
        return cast(Any, self.kto_loss)(*policy, logps, *reference, batch.get("ref_kl_logps"))


class LegacyBCO(LegacyUnpaired):
    """Attributes and the loss of `BCOTrainer` at 0.11-0.26."""

    _point: ClassVar[str] = "delta"
    clf = View(lambda trainer: getattr(trainer._density, "classifier", None))
    embedding_func = View(lambda trainer: getattr(trainer._density, "embedding_func", None))
    embedding_tokenizer = View(lambda trainer: getattr(trainer._density, "embedding_tokenizer", None))
    match_underlying_distribution = View(lambda trainer: trainer._density is not None)

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Log-probs `(C,)` and `(R,)` of chosen and rejected completions, and their logits `(., T, V)`."""
        return super().forward(model, batch)[:4]

    def compute_reference_log_probs(self, padded_batch: Batch) -> Tensor:
        """The reference's log-probs `(B,)` of a batch's completions."""
        return super().compute_reference_log_probs(padded_batch)[0]

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Batch, do_train: bool = True
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch by itself, with gradient, and its metrics; `do_train`: its rewards move delta."""
        batch = batch if do_train else {**batch, STEP_PART: StepPart("not counted")}
        return super().get_batch_loss_metrics(model, batch)

    def bco_loss(
        self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor, reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor, chosen_embeddings: Tensor | None = None,
        rejected_embeddings: Tensor | None = None, do_train: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Losses of the chosen, then the rejected completions, the rewards of either, and delta, 0-dim.

        Log-probs are sums `(C,)`, `(R,)`, embeddings those of the prompts, `(C, H)` and `(R, H)`, where distributions
        are matched. With `do_train` the rewards move delta, unless they count already as part of a step.
        """
        reference = reference_chosen_logps, reference_rejected_logps
        scores = scores_by_kind(policy_chosen_logps, policy_rejected_logps, *reference)
        if do_train and not self._is_counted:
            self.method.count_rewards(scores, self.processes)
        delta = self.method.delta().to(scores.logps)
        weights = self.method.undesirable_weights(rejected_embeddings)
        if weights is not None:
            weights = torch.cat([weights.new_ones(len(policy_chosen_logps)), weights])
        losses = bco_terms(scores, beta=self.args.beta, delta=delta, undesirable_weights=weights).values
        return losses, *rewards_by_kind(scores, self.args.beta), delta

    def call_loss_method(self, batch: RowDict, policy: Any, reference: Any) -> Any:
        """What an overridden `bco_loss` gives; rewards that already count in a step do not move delta."""
        prompts, kinds = self.method.embeddings(batch), (batch["label"], ~batch["label"])
        embeddings = [None if prompts is None else prompts[kind] for kind in kinds]
        moves = self.mode == "train" and batch.get(STEP_PART, ALONE).plan is None
        return call_with(self.bco_loss, *policy, *reference, *embeddings, do_train=moves)


def scores_by_kind(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> UnpairedScores:
    """The scores of desirable completions, `(C,)` log-probs of policy and reference, followed by the others, `(R,)`."""
    logps, ref_logps = torch.cat([chosen, rejected]), torch.cat([ref_chosen, ref_rejected])
    return UnpairedScores(logps, ref_logps, torch.arange(len(logps), device=logps.device) < len(chosen))


def rewards_by_kind(scores: UnpairedScores, beta: float) -> tuple[Tensor, Tensor]:
    """The implicit rewards of the desirable completions `(C,)` and of the others `(R,)`, without gradient."""
    rewards = (beta * scores.ratios).detach()
    return rewards[scores.desirable], rewards[~scores.desirable]
