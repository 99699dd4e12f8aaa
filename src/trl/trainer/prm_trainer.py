"""Process reward models: is each step of a solution right? Learned from steps with labels."""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.data.stepwise import StepwisePreparation, tokenize_stepwise_row
from trl.legacy.pair_methods import LegacyJudged
from trl.methods.method import Batch
from trl.methods.prm import PRMMethod
from trl.models.packed.layout import is_packed
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.setup import STEP_CLASSIFIER
from trl.reporting.model_card import Paper
from trl.trainer import arguments
from trl.trainer.preference_trainer import Parts, PreferenceTrainer
from trl.trainer.prm_config import PRMConfig
from trl.trainer.row_sets import row_sets

if TYPE_CHECKING:
    from peft import PeftConfig


class PRMTrainer(LegacyJudged, PreferenceTrainer):
    """Trainer of process reward models (Uesato et al. 2022, arXiv:2211.14275).

    Args:
        model: a token classifier with two labels (0: the step is wrong, 1: it is right), a `PeftModel` around one, or a
            name or path; of a language model's files the head is missing and starts at random.
        args: a `PRMConfig`; a plain `TrainingArguments` is taken over into one.
        data_collator: makes padded batches of `input_ids`, `attention_mask` and `labels`.
        train_dataset: rows of `prompt` (text), `completions` (a list of steps), `labels` (a truth value for each); or
            tokenised, `input_ids` and `labels` (a class at the end of each step, -100 elsewhere).
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; by default the one saved with the model.
        model_init: makes the model, in place of `model`; it is called once.
        compute_metrics: `EvalPrediction -> dict`; predictions `(N, T, 2)` are the logits of every position, 0 or -100
            where there is no token, labels `(N, T)` as in the data, -100 where there is none.
        peft_config: trains a new adapter with these settings, and the head, instead of the model.

    The loss is the mean over all labelled steps of an optimiser step, of all its micro-batches on all processes.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = PRMTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/math_shepherd", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "prm"]
    _name: ClassVar[str] = "PRM"
    _paper = Paper("Solving math word problems with process- and outcome-based feedback", "2211.14275")
    args: PRMConfig
    scorer: ClassificationScorer
    method: PRMMethod = PRMMethod()
    _config_class: ClassVar[type] = PRMConfig
    _columns: tuple[str, ...] = ("input_ids", "labels")

    def __init__(
        self, model: arguments.AnyModel | None = None, args: PRMConfig | None = None,
        data_collator: arguments.Collator | None = None, train_dataset: arguments.AnyDataset | None = None,
        eval_dataset: arguments.EvalDatasets | None = None, processing_class: PreTrainedTokenizerBase | None = None,
        model_init: arguments.ModelInit | None = None, compute_metrics: arguments.ComputeMetrics | None = None,
        callbacks: arguments.Callbacks | None = None, optimizers: arguments.Optimizers = (None, None),
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: "PeftConfig | None" = None, **older: Any,
    ) -> None:  # fmt: skip
        model = arguments.initial_model(model, model_init, args)
        policy, args = self.begin(model, args, processing_class, peft_config, older, classifier=STEP_CLASSIFIER)
        sets = row_sets(StepwisePreparation, args, policy, is_eval=True, training={"is_eval": False})
        collator = data_collator or DataCollatorForLanguageModeling(self.scorer.pad_token_id)
        layout = self.layout or partial(padded_steps, self.scorer)
        super().__init__(
            Parts(policy, self.method, sets, collator, layout), args,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip

    tokenize_row = staticmethod(tokenize_stepwise_row)


def padded_steps(scorer: ClassificationScorer, batch: Batch) -> Batch:
    """A batch as padded rows, with an attention mask.

    Raises: ValueError for a batch without labels.
    """
    if batch.get("labels") is None:
        raise ValueError(
            f"a batch has {sorted(batch)}, expected 'labels' too: a class at the end of each step, -100 elsewhere. Let "
            "the data_collator add them, or leave it out."
        )
    if is_packed(batch):
        return scorer.padded_inputs(batch)
    if batch.get("attention_mask") is None:
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    return batch
