"""What KTO and BCO share: completions that are judged one by one, against a reference policy."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

from trl.collators.unpaired import (
    EMBEDDING_COLUMN,
    OWN_PROMPT,
    REFERENCE_NAMES,
    UNPAIRED_COLUMNS,
    UnpairedCollator,
    as_unpaired_batch,
    completion_columns,
)
from trl.data.rendering import Fields
from trl.data.unpaired import UnpairedPreparation
from trl.methods.unpaired import UnpairedMethod
from trl.models.policy import is_encoder_decoder
from trl.models.reference import make_reference
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scorer
from trl.models.setup import pad_token_id
from trl.trainer import arguments
from trl.trainer.preference_trainer import Parts, PreferenceTrainer
from trl.trainer.row_sets import pair_sets

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from peft import PeftConfig


class UnpairedTrainer(PreferenceTrainer):
    """Base of `KTOTrainer` and `BCOTrainer`; a method says how completions are `judged`.

    Rows are visited in their order (`train_sampling_strategy="sequential"`) unless the config says otherwise. With
    `mismatched`, each row also has the completion of another one, for KTO's KL estimate: of sequences 2i and 2i + 1 of
    a batch the first is row i's own.
    """

    method: UnpairedMethod

    _columns: tuple[str, ...] = (
        *UNPAIRED_COLUMNS,
        *completion_columns(mismatched=True)[1:],
        OWN_PROMPT,
        *REFERENCE_NAMES,
        EMBEDDING_COLUMN,
    )
    args: Any
    scorer: Scorer

    def __init__(
        self, model: arguments.AnyModel | None = None, ref_model: arguments.AnyModel | None = None, args: Any = None,
        train_dataset: arguments.AnyDataset | None = None, eval_dataset: arguments.EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None, data_collator: arguments.Collator | None = None,
        model_init: arguments.ModelInit | None = None, callbacks: arguments.Callbacks | None = None,
        optimizers: arguments.Optimizers = (None, None),
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: "PeftConfig | None" = None,
        compute_metrics: arguments.ComputeMetrics | None = None, model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None, **older: Any,
    ) -> None:  # fmt: skip
        model = arguments.initial_model(model, model_init, args)
        policy, args = self.begin(model, args, processing_class, peft_config, older)
        is_encoder_decoder(policy.scorer.core, args)  # raises where args.is_encoder_decoder differs
        self.model_adapter_name, self.ref_adapter_name = model_adapter_name, ref_adapter_name
        adapters = {"model_adapter_name": model_adapter_name, "ref_adapter_name": ref_adapter_name}
        self.reference = make_reference(policy.model, policy.scorer, ref_model, args=args, path=self._path, **adapters)
        settings = self.preparation(args)
        self.mismatched = settings.get("mismatch_group") is not None
        # One completion behind its prompt is a plain sequence: there is nothing to share.
        shares = self.mismatched and shares_prefix(policy.scorer, args.prefix_sharing)
        encoder_pad = pad_token_id(policy.tokenizer) if policy.scorer.core.config.is_encoder_decoder else None
        parts = Parts(
            policy, self.make_method(args), pair_sets(args, policy, UnpairedPreparation, **settings),
            data_collator or UnpairedCollator(shares, self.mismatched, encoder_pad),
            partial(as_unpaired_batch, prefix_sharing=shares, mismatched=self.mismatched), shares, self.reference,
        )  # fmt: skip
        super().__init__(
            parts, args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        _warn_of_blocks(self.train_dataset, args.train_sampling_strategy)
        self.take_reference([*REFERENCE_NAMES][: self.method.completions_per_row])

    def preparation(self, args: Any) -> Fields:
        """What a method adds to how rows are prepared: settings of `UnpairedPreparation`."""
        raise TypeError(f"{type(self).__name__} must override preparation.")

    def make_method(self, args: Any) -> UnpairedMethod:
        """The method; `self.mismatched` is there already."""
        raise TypeError(f"{type(self).__name__} must override make_method.")


def _warn_of_blocks(dataset: object, strategy: str) -> None:
    """Say where rows that are visited in their order have all of one kind before all of the other."""
    if strategy != "sequential" or not isinstance(dataset, Dataset):
        return
    labels = np.asarray(dataset.with_format("numpy")["label"][:])
    if len(labels) > 2 and (labels[1:] != labels[:-1]).sum() == 1:
        logger.warning(
            "train dataset: all %s rows come before all others, and rows are visited in their order, so that steps see "
            "one kind only. With labels set train_sampling_strategy='random'; pairs are always in this order.",
            "desirable" if labels[0] else "undesirable",
        )
