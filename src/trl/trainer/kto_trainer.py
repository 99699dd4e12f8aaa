"""Kahneman-Tversky optimisation: learning from completions that are marked desirable or not."""

from typing import ClassVar

from trl.data.rendering import Fields
from trl.legacy.unpaired_methods import LegacyKTO
from trl.methods.kto import KTOMethod
from trl.reporting.model_card import Paper
from trl.trainer.kto_config import KTOConfig
from trl.trainer.unpaired import UnpairedTrainer

RUNNING_NAME = "running.pt"  # the recorded name; no checkpoint has it: KTO keeps nothing from step to step


class KTOTrainer(LegacyKTO, UnpairedTrainer):
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
        model_init: makes the model, in place of `model`; it is called once.
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
    method: KTOMethod
    args: KTOConfig

    def preparation(self, args: KTOConfig) -> Fields:
        """Completions are exchanged among the rows of an optimiser step, which do not depend on how it is cut."""
        weights = (args.desirable_weight, args.undesirable_weight)
        if args.loss_type != "kto":
            return {"label_weights": weights}
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.data_processes
        return {"label_weights": weights, "mismatch_group": step}

    def make_method(self, args: KTOConfig) -> KTOMethod:
        return KTOMethod(args, completions_per_row=2 if self.mismatched else 1)
