"""Contrastive preference optimisation and its variants: SimPO, CPO-SimPO, AlphaPO."""

from typing import ClassVar

from trl.legacy.pair_methods import LegacyCPO
from trl.methods.cpo import CPOMethod
from trl.methods.reference_free import ReferenceFreeMethod
from trl.reporting.model_card import Paper
from trl.trainer.cpo_config import CPOConfig
from trl.trainer.reference_free_trainer import ReferenceFreeTrainer


class CPOTrainer(LegacyCPO, ReferenceFreeTrainer):
    """Trainer of contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417), SimPO and AlphaPO.

    Args:
        model: a causal language model or an encoder-decoder, a `PeftModel`, or a name or path.
        args: a `CPOConfig`; a plain `TrainingArguments` is taken over into one.
        data_collator: makes batches of tokenised pairs; by default `PairCollator`.
        train_dataset: preference rows (`chosen`, `rejected`, with or without `prompt`), standard or conversational.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; by default the one saved with the model.
        model_init: makes the model, in place of `model`; it is called once.
        peft_config: trains a new adapter with these settings instead of the model.
        compute_metrics: `EvalPrediction -> dict`; predictions `(N, 2)` are beta times the log-probs of chosen and
            rejected, labels 0.

    The loss is a mean over all pairs of an optimiser step, and the likelihood of the chosen completions a mean over all
    their tokens in it, of all micro-batches on all processes.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = CPOTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "cpo"]
    _name: ClassVar[str] = "CPO"
    _paper = Paper(
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
        "2401.08417",
    )
    _method_class: ClassVar[type[ReferenceFreeMethod]] = CPOMethod
    _config_class: ClassVar[type] = CPOConfig
    args: CPOConfig
