"""Methods that programs of 0.8-0.26 call on a `KTOTrainer`, over the scoring and the objectives of today."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trl.models.reference import DisabledAdapter, NamedAdapter
from trl.models.scored_head import ScoreOptions
from trl.objectives.unpaired import UnpairedScores, kl_estimate, kl_sum, kto_terms
from trl.tensors.sequences import sum_by_sequence
from trl.trainer.older_pairs import OlderPairMethods, get_batch_logps
from trl.trainer.pairs import row_count


class OlderUnpairedMethods:
    """The methods of KTO's trainer at 0.8-0.26 that today's training does not call."""

    get_batch_logps = staticmethod(get_batch_logps)
    store_metrics = OlderPairMethods.store_metrics
    generate_from_model = OlderPairMethods.generate_from_model

    def get_batch_loss_metrics(
        self: Any, model: nn.Module, batch: Mapping[str, Any], train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch by itself, with gradient, and its metrics; names begin with `eval_` for "eval"."""
        return OlderPairMethods.get_batch_loss_metrics(self, model, dict(self.take_batch(batch)), train_eval)

    def kto_loss(
        self: Any,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        policy_KL_logps: Tensor | None,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        reference_KL_logps: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Losses of the chosen, then the rejected completions, the rewards of either, and the KL estimate, 0-dim.

        Log-probs are sums `(C,)`, `(R,)`, and `(B,)` of mismatched completions, which loss_type "apo_zero_unpaired" does
        not read.
        """
        logps = torch.cat([policy_chosen_logps, policy_rejected_logps])
        ref_logps = torch.cat([reference_chosen_logps, reference_rejected_logps])
        desirable = torch.arange(len(logps), device=logps.device) < len(policy_chosen_logps)
        kl = logps.new_zeros(())
        if self.mismatched:
            assert policy_KL_logps is not None and reference_KL_logps is not None
            kl = kl_estimate(kl_sum(policy_KL_logps, reference_KL_logps))
        scores = UnpairedScores(logps, ref_logps, desirable)
        losses = kto_terms(scores, self.args.kto_options(), kl=kl).values
        rewards = (self.args.beta * scores.ratios).detach()
        return losses, rewards[desirable], rewards[~desirable], kl

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
            scored, logits = self.scorer.score_with_logits(model, self.own_completions(batch), ScoreOptions())
        logps = sum_by_sequence(scored.logps, scored.positions.sequence, row_count(batch))
        mismatched = self.policy_logps(model, batch, 1) if self.mismatched else None
        chosen = batch["label"]
        return logps[chosen], logps[~chosen], logits[chosen], logits[~chosen], mismatched

    def compute_reference_log_probs(
        self: Any, padded_batch: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The reference's log-probs `(B,)` of a batch's completions and, for loss_type "kto", of its mismatched ones."""
        batch = dict(self.take_batch(padded_batch))
        self.ask_reference(self.model, batch)
        return batch["ref_logps"], batch.get("ref_kl_logps")

    def null_ref_context(self: Any) -> AbstractContextManager[Any]:
        """A block in which the policy is its own reference: its adapter switched off, or the reference's switched on."""
        lends = isinstance(self.reference, (DisabledAdapter, NamedAdapter))
        return self.reference.active(self.model) if lends else nullcontext(self.model)

    def generate_from_model_and_ref(
        self: Any, model: Any, batch: Mapping[str, Any]
    ) -> tuple[list[str], list[str]]:
        """Prompts with what the policy and what the reference make of them, sampled up to `max_length` tokens, as text.

        `batch` has `prompt_input_ids` and `prompt_attention_mask`, `(B, P)`, padded on the left.
        """

        def generate(_: Any, reference: nn.Module, batch: Mapping[str, Any]) -> list[str]:
            return self.generate_from_model(reference, batch)

        reference: Any = self.reference
        return self.generate_from_model(model, batch), reference.score(model, batch, generate)
