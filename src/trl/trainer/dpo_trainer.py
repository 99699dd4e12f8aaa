"""Direct preference optimisation and its family: learning from pairs against a reference policy."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import TrainerCallback

from trl._lazy import attach
from trl.collators.images import DataCollatorForVisionPreference
from trl.data.formats import has_images
from trl.data.preference import OWN_PROMPT, REFERENCE_COLUMNS
from trl.data.preference_rows import PAIR_COLUMNS
from trl.legacy.dpo_methods import LegacyDPO
from trl.methods.dpo import DPOMethod
from trl.models.reference import choose_adapters, make_reference
from trl.reporting.model_card import Paper
from trl.trainer import arguments, images
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.preference_trainer import PreferenceTrainer, pair_parts

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

if TYPE_CHECKING:
    from peft import PeftConfig


class DPOTrainer(LegacyDPO, PreferenceTrainer):
    """Trainer of direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the losses that followed.

    Args:
        model: a causal language model or an encoder-decoder, a `PeftModel`, or a name or path.
        ref_model: the policy that the trained one is compared with: a model, a name or a path. None: the model as it is
            now (a frozen copy, or the base of an adapter).
        args: a `DPOConfig`; a plain `TrainingArguments` is taken over into one.
        data_collator: makes batches of tokenised pairs; by default `PairCollator`.
        train_dataset: preference rows (`chosen`, `rejected`, with or without `prompt`), standard or conversational.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer, or the processor of a vision-language model; by default the one saved with the
            model.
        compute_metrics: `EvalPrediction -> dict`; predictions `(N, 2)` are the rewards of chosen and rejected, and
            labels 0.
        peft_config: trains a new adapter with these settings instead of the model.

    The loss is the mean over all pairs of an optimiser step, of all its micro-batches on all processes.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = DPOTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "dpo"]
    _name: ClassVar[str] = "DPO"
    _paper = Paper("Direct Preference Optimization: Your Language Model is Secretly a Reward Model", "2305.18290")
    args: DPOConfig
    method: DPOMethod
    _config_class: ClassVar[type] = DPOConfig
    _columns: tuple[str, ...] = (*PAIR_COLUMNS, *REFERENCE_COLUMNS, OWN_PROMPT)

    def __init__(
        self, model: arguments.AnyModel | None = None, ref_model: arguments.AnyModel | None = None,
        args: DPOConfig | None = None, data_collator: arguments.Collator | None = None,
        train_dataset: arguments.AnyDataset | None = None, eval_dataset: arguments.EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None, compute_metrics: arguments.ComputeMetrics | None = None,
        callbacks: list[TrainerCallback] | None = None, optimizers: arguments.Optimizers = (None, None),
        optimizer_cls_and_kwargs: arguments.OptimizerClass | None = None,
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: "PeftConfig | None" = None, **older: Any,
    ) -> None:  # fmt: skip
        policy, args = self.begin(model, args, processing_class, peft_config, older)
        assert isinstance(args, DPOConfig)
        # Settings that do not fit are refused before a reference is loaded.
        method, sets = DPOMethod(args), None
        self.with_images = isinstance(data_collator, DataCollatorForVisionPreference) or has_images(
            train_dataset, eval_dataset
        )
        if self.with_images:
            self._columns = images.PAIR_COLUMNS
            sets = images.image_pair_sets(data_collator, args, policy)
            data_collator = sets.collator
        parts = pair_parts(args, policy, method, data_collator, sets)
        if args.reference_free and ref_model is None and args.ref_adapter_name is None:
            choose_adapters(policy.model, args)
            method.reference_names = ()
        else:
            reference = make_reference(policy.model, policy.scorer, ref_model, args=args, path=self._path)
            parts = replace(parts, reference=reference)
        super().__init__(
            parts, args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        self.take_reference(REFERENCE_COLUMNS, ld_alpha=args.ld_alpha)

    with_images: bool = False
