"""What CPO and ORPO share: pairs that are scored by the policy alone, and the likelihood of the chosen ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    set_seed,
)

from trl.collators.preference import OWN_PROMPT, PAIR_COLUMNS, as_pair_batch, with_prompts_scored
from trl.methods.reference_free import ReferenceFreeMethod
from trl.models.policy import is_encoder_decoder
from trl.models.scoring.base import shares_prefix
from trl.trainer.preference_trainer import PreferenceTrainer, pair_collator
from trl.trainer.row_sets import pair_sets

AnyDataset = Dataset | IterableDataset


class ReferenceFreeTrainer(PreferenceTrainer):
    """Base of `CPOTrainer` and `ORPOTrainer`."""

    method: ReferenceFreeMethod

    args: Any
    _columns: tuple[str, ...] = (*PAIR_COLUMNS, OWN_PROMPT)
    _method_class: ClassVar[type[ReferenceFreeMethod]]

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: Any | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        **older: Any,
    ) -> None:
        if model_init is not None:
            if model is not None:
                raise ValueError("model and model_init were both given, expected one. Leave out the other.")
            set_seed(42 if args is None else args.seed)
            model = model_init()
        policy, args = self.begin(model, args, processing_class, peft_config, older)
        encodes = is_encoder_decoder(policy.scorer.core, args)
        self.shares_prefix = shares_prefix(policy.scorer, args.prefix_sharing)
        self.method = self._method_class(args)
        pairs = partial(as_pair_batch, prefix_sharing=self.shares_prefix)
        scores_prompts = self.method.scores_prompts and not encodes
        self.layout = (lambda batch: with_prompts_scored(pairs(batch))) if scores_prompts else pairs
        super().__init__(
            policy, args, sets=pair_sets(args, policy, truncation_order="prompt_first"),
            data_collator=data_collator or pair_collator(policy, shares_prefix=self.shares_prefix),
            train_dataset=train_dataset, eval_dataset=eval_dataset, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers, preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
