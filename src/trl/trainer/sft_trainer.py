"""Supervised fine-tuning of causal language models."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from trl._lazy import attach
from trl.collators.images import DataCollatorForVisionLanguageModeling
from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.data.formats import has_images
from trl.legacy.interface import LegacySFT, takes
from trl.methods.method import Method, Step
from trl.methods.sft import LogitsMethod, SFTMethod
from trl.models.parts import check_decoder_only
from trl.models.policy import Policy
from trl.models.scoring.causal import Scorer
from trl.trainer import arguments
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.images import TEXT_COLUMNS, image_sets
from trl.trainer.row_sets import SFTSets, check_collator, sft_sets
from trl.trainer.sft_config import SFTConfig

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from peft import PeftConfig


class SFTTrainer(LegacySFT, BaseTrainer):
    """Trainer of next-token prediction on text, conversations, or prompts with completions.

    Args:
        model: a causal language model, a `PeftModel` (whose adapter goes on training), or a name or path.
        args: an `SFTConfig`; a plain `TrainingArguments` is taken over into one.
        data_collator: makes batches of prepared rows; by default `DataCollatorForLanguageModeling`, and for rows with
            images, which stay as they are, `DataCollatorForVisionLanguageModeling`.
        train_dataset: rows of any language-modelling or prompt-completion type, standard or conversational, or
            tokenised (`input_ids`); a `datasets.Dataset` or a stream. An `images` or `image` column takes a
            vision-language model.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer, or the processor of a vision-language model; by default the one saved with the
            model.
        compute_loss_func: your own `(outputs, labels, num_items_in_batch) -> loss`; it is given the model's logits.
        compute_metrics: `EvalPrediction -> dict`; it is given logits and labels of padded rows.
        peft_config: trains a new adapter with these settings instead of the model.
        formatting_func: `row -> text` for rows of any other shape.

    The loss is the mean over all trained tokens of an optimiser step: of all its micro-batches on all processes.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = SFTTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/Capybara", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "sft"]
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss", "entropy", "mean_token_accuracy")
    _name: ClassVar[str] = "SFT"
    _config_class: ClassVar[type[SFTConfig]] = SFTConfig
    _columns: tuple[str, ...] = (
        "input_ids", "labels", "seq_lengths", "completion_mask", "assistant_masks", "attention_mask", "position_ids"
    )  # fmt: skip
    _predictions: ClassVar[str] = "logits"
    shares_tokens: ClassVar[bool] = True
    args: SFTConfig
    scorer: Scorer

    def __init__(
        self, model: arguments.AnyModel | None = None, args: SFTConfig | TrainingArguments | None = None,
        data_collator: arguments.Collator | None = None, train_dataset: arguments.AnyDataset | None = None,
        eval_dataset: arguments.EvalDatasets | None = None, processing_class: arguments.Processor | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None, compute_metrics: arguments.ComputeMetrics | None = None,
        callbacks: arguments.Callbacks | None = None, optimizers: arguments.Optimizers = (None, None),
        optimizer_cls_and_kwargs: arguments.OptimizerClass | None = None,
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: "PeftConfig | None" = None,
        formatting_func: arguments.FormattingFunction | None = None, **older: Any,
    ) -> None:  # fmt: skip
        policy, args = self.begin(model, args, processing_class, peft_config, older, data="rows")
        assert isinstance(args, SFTConfig)
        self.method = SFTMethod(args.loss_type)
        _check_one_loss(args, compute_loss_func, takes_step=takes(self.outcome, "step"))
        self.check_model(policy.scorer.core)
        self._padding_free = args.padding_free or (args.packing and args.packing_strategy == "bfd")
        self.with_images = isinstance(data_collator, DataCollatorForVisionLanguageModeling) or has_images(
            train_dataset, eval_dataset
        )
        if self.with_images:
            self._columns += (*TEXT_COLUMNS, args.dataset_text_field)
            sets = image_sets(data_collator, args, policy, formatting_func)
            data_collator = sets.collator
        else:
            sets = self.make_sets(args, policy, formatting_func)
            data_collator = data_collator or self.make_collator(args)
        super().__init__(
            model=policy.model, args=args, sets=sets, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=policy.processing_class, compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        check_collator(self.data_collator, self.train_dataset, args, self._columns)

    def trained_method(self, step: Step) -> Method:
        """The method of a batch: a loss of logits where the trainer has one, perhaps set after its constructor."""
        has_loss = self.compute_loss_func is not None or self.label_smoother is not None
        if not has_loss or type(self.method) is not SFTMethod:
            return self.method
        return LogitsMethod(self.args.loss_type, self.compute_loss_func, self.label_smoother)

    # ---- what a variant may do otherwise

    def check_model(self, core: PreTrainedModel) -> None:
        """Raise TypeError for a model of a kind that is not trained here."""
        check_decoder_only(core)

    def make_sets(
        self, args: SFTConfig, policy: Policy, formatting_func: arguments.FormattingFunction | None
    ) -> SFTSets:
        """The data sets, of which rows are tokenised."""
        return sft_sets(args, policy, formatting_func, SFTSets)

    def make_collator(self, args: SFTConfig) -> arguments.Collator:
        """What makes batches of prepared rows where the user gives nothing else; `self.scorer` is there already."""
        return DataCollatorForLanguageModeling(
            pad_token_id=self.scorer.pad_token_id,
            completion_only_loss=args.completion_only_loss is not False,
            padding_free=self._padding_free,
            pad_to_multiple_of=args.pad_to_multiple_of,
        )


def _check_one_loss(args: SFTConfig, compute_loss_func: Callable[..., Tensor] | None, *, takes_step: bool) -> None:
    """Refuse settings of which each is a loss of its own."""
    needs_step = compute_loss_func is not None or bool(args.label_smoothing_factor)
    losses = {
        "compute_loss_func": compute_loss_func is not None,
        f"label_smoothing_factor={args.label_smoothing_factor}": bool(args.label_smoothing_factor),
        f"loss_type={args.loss_type!r}": args.loss_type != "nll",
        "an outcome without **kwargs": needs_step and not takes_step,
    }
    settings = [name for name, is_set in losses.items() if is_set]
    if len(settings) > 1:
        raise ValueError(f"{' and '.join(settings)} are two losses, expected one. Leave out all but one of them.")
