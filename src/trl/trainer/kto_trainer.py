"""Kahneman-Tversky optimisation: learning from completions that are marked desirable or not."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor

from trl.legacy.pair_methods import rewards_by_kind, scores_by_kind
from trl.methods.kto import KTOMethod
from trl.objectives.unpaired import kl_estimate, kto_terms
from trl.reporting.model_card import Paper
from trl.tensors.reduce import weighted
from trl.trainer.kto_config import KTOConfig
from trl.trainer.unpaired import UnpairedTrainer

RUNNING_NAME = "running.pt"  # the recorded name; no checkpoint has it: KTO keeps nothing from step to step


class KTOTrainer(UnpairedTrainer):
    """Trainer of Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306) and of unpaired APO-zero.

    Args:
        model: a causal language model or an encoder-decoder, a `PeftModel`, or a name or path.
        ref_model: the policy that the trained one is compared with: a model, a name or a path. None: the model as it is
            now (a frozen copy, or the base of an adapter).
        args: a `KTOConfig`; a plain `TrainingArguments` is taken over into one.
        train_dataset: rows of `prompt`, `completion` and `label` (true: desirable), standard or conversational; or
            preference rows, of which the chosen completions become desirable and the rejected ones undesirable.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; by default the one saved with the model.
        data_collator: makes batches of tokenised rows; by default `UnpairedCollator`.
        model_init: called once, without arguments, where no `model` is given.
        peft_config: trains a new adapter with these settings instead of the model.
        compute_metrics: `EvalPrediction -> dict`; predictions `(N,)` are the completions' rewards, labels 1 where a
            completion is desirable.
        model_adapter_name: the adapter of a `PeftModel` that is trained.
        ref_adapter_name: the adapter that is the reference; None: the base model without any.

    The loss is the mean over all completions of an optimiser step, of all its micro-batches on all processes. So is the
    KL estimate that it compares them with; in an evaluation that is one batch's (of all processes).

    Example:
        >>> from datasets import load_dataset
        >>> trainer = KTOTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/kto-mix-14k", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "kto"]
    _name: ClassVar[str] = "KTO"
    _paper = Paper("KTO: Model Alignment as Prospect Theoretic Optimization", "2402.01306")
    _config_class: ClassVar[type] = KTOConfig
    _point: ClassVar[str] = "kl"
    method: KTOMethod
    args: KTOConfig

    def preparation(self, args: KTOConfig) -> dict[str, Any]:
        """Completions are exchanged among the rows of an optimiser step, which do not depend on how it is cut."""
        weights = (args.desirable_weight, args.undesirable_weight)
        if args.loss_type != "kto":
            return {"label_weights": weights}
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {"label_weights": weights, "mismatch_group": step}

    def make_method(self, args: KTOConfig) -> KTOMethod:
        return KTOMethod(args, completions_per_row=2 if self.mismatched else 1)

    def prepare_step(self, batches: list[Any]) -> None:
        """Estimate the KL of the whole step; an overridden `kto_loss` takes that of each batch."""
        if not self.overridden("kto_loss"):
            super().prepare_step(batches)

    # ---- methods of 0.8-0.26

    def kto_loss(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        policy_KL_logps: Tensor | None,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        reference_KL_logps: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Losses of the chosen, then the rejected completions, the rewards of either, and the KL estimate, 0-dim.

        Log-probs are sums `(C,)`, `(R,)`, and `(B,)` of mismatched completions, which loss_type "apo_zero_unpaired"
        does not read.
        """
        scores = scores_by_kind(
            policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps
        )
        kl = scores.logps.new_zeros(())
        if self.mismatched:
            assert policy_KL_logps is not None and reference_KL_logps is not None
            kl = kl_estimate(weighted(policy_KL_logps - reference_KL_logps))
        losses = kto_terms(scores, kl=kl, **self.args.loss_options()).values
        return losses, *rewards_by_kind(scores, self.args.beta), kl

    def call_loss_method(self, batch: dict[str, Any], policy: Any, reference: Any) -> Any:
        """What an overridden `kto_loss` gives for a batch, with the mismatched completions of that batch."""
        logps = self.method.mismatched_logps(batch, self.scoring()) if self.mismatched else None
        return cast(Any, self.kto_loss)(*policy, logps, *reference, batch.get("ref_kl_logps"))
