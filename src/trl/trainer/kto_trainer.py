"""Kahneman-Tversky optimisation: learning from completions that are marked desirable or not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from trl.legacy import KTO_ARGUMENTS, Older
from trl.objectives.unpaired import UnpairedScores, kl_estimate, kl_sum, kto_terms
from trl.tensors.reduce import LossTerms, Weighted
from trl.trainer.kto_config import KTOConfig
from trl.trainer.older_unpaired import rewards_by_kind, scores_by_kind
from trl.trainer.unpaired import UnpairedTrainer


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
    _paper: ClassVar[dict[str, str]] = {
        "title": "KTO: Model Alignment as Prospect Theoretic Optimization",
        "id": "2402.01306",
    }
    _config_class: ClassVar[type] = KTOConfig
    _older_arguments: ClassVar[Mapping[str, Older]] = KTO_ARGUMENTS
    _loss_method: ClassVar[str] = "kto_loss"
    _point: ClassVar[str] = "kl"
    _kls: deque[Tensor] | None = None  # one for each micro-batch of the step that is not judged yet
    args: KTOConfig

    def preparation(self, args: KTOConfig) -> dict[str, Any]:
        """Completions are exchanged among the rows of an optimiser step, which do not depend on how it is cut."""
        weights = (args.desirable_weight, args.undesirable_weight)
        if args.loss_type != "kto":
            return {"weights": weights}
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {"weights": weights, "mismatch_group": step}

    def prepare_step(self, batches: list[Any]) -> None:
        """Estimate the KL of the whole step, on all processes, from its mismatched completions.

        The losses are not linear in it, so it must be known before the first backward pass: the policy scores the
        mismatched completions in passes of their own.
        """
        self._kls = None
        if not self.mismatched or self.overridden("kto_loss"):
            return
        model: Any = self.model_wrapped
        sums = [self.kl_of(model, batch) for batch in batches]
        total = Weighted(*(torch.stack(part).sum() for part in zip(*sums, strict=True)))
        self._kls = deque([kl_estimate(self.over_processes(total))] * len(batches))

    def kl_of(self, model: nn.Module, batch: dict[str, Any]) -> Weighted:
        """Sum and count of the log-ratios of a batch's mismatched completions; those of the reference stay in it."""
        self.ask_reference(model, batch)
        logps = self.policy_logps(model, batch, 1)
        return kl_sum(logps, batch["ref_kl_logps"].to(logps))

    def judge(self, model: nn.Module, batch: dict[str, Any], scores: UnpairedScores) -> LossTerms:
        """KTO's loss of each completion, compared with the KL of its step or, in an evaluation, of its batch."""
        if not self.mismatched:
            kl = torch.zeros_like(scores.logps[0])
        elif self.mode == "train" and self._kls:
            kl = self._kls.popleft()
        else:
            kl = self._kl_of_batch(model, batch)
        return kto_terms(scores, self.args.kto_options(), kl=kl)

    def _kl_of_batch(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The KL estimate of a batch, with those of the other processes; rows that accelerate repeats do not count."""
        own = self.kl_of(model, batch)
        if self.mode == "eval":
            counts = 1.0 if self.own_rows() else 0.0
            own = self.over_processes(Weighted(own.total * counts, own.count * counts))
        return kl_estimate(own)

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

        Log-probs are sums `(C,)`, `(R,)`, and `(B,)` of mismatched completions, which loss_type "apo_zero_unpaired" does
        not read.
        """
        scores = scores_by_kind(
            policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps
        )
        kl = scores.logps.new_zeros(())
        if self.mismatched:
            assert policy_KL_logps is not None and reference_KL_logps is not None
            kl = kl_estimate(kl_sum(policy_KL_logps, reference_KL_logps))
        losses = kto_terms(scores, self.args.kto_options(), kl=kl).values
        return losses, *rewards_by_kind(scores, self.args.beta), kl

    def call_loss_method(self, model: nn.Module, batch: dict[str, Any], policy: Any, reference: Any) -> Any:
        """What an overridden `kto_loss` gives for a batch, with the mismatched completions of that batch."""
        logps = self.policy_logps(model, batch, 1) if self.mismatched else None
        return cast(Any, self.kto_loss)(*policy, logps, *reference, batch.get("ref_kl_logps"))
