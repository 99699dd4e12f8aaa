"""What CPO and ORPO share: pairs that are scored by the policy alone, and the likelihood of the chosen ones."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from trl.collators.preference import OWN_PROMPT, PAIR_COLUMNS, with_prompts_scored
from trl.methods.reference_free import ReferenceFreeMethod
from trl.models.policy import is_encoder_decoder
from trl.trainer import arguments
from trl.trainer.preference_trainer import PreferenceTrainer, pair_parts

if TYPE_CHECKING:
    from peft import PeftConfig


class ReferenceFreeTrainer(PreferenceTrainer):
    """Base of `CPOTrainer` and `ORPOTrainer`."""

    method: ReferenceFreeMethod

    args: Any
    _columns: tuple[str, ...] = (*PAIR_COLUMNS, OWN_PROMPT)
    _method_class: ClassVar[type[ReferenceFreeMethod]]

    def __init__(
        self, model: arguments.AnyModel | None = None, args: Any = None,
        data_collator: arguments.Collator | None = None, train_dataset: arguments.AnyDataset | None = None,
        eval_dataset: arguments.EvalDatasets | None = None, processing_class: arguments.Processor | None = None,
        model_init: arguments.ModelInit | None = None, callbacks: arguments.Callbacks | None = None,
        optimizers: arguments.Optimizers = (None, None),
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: "PeftConfig | None" = None, compute_metrics: arguments.ComputeMetrics | None = None, **older: Any,
    ) -> None:  # fmt: skip
        model = arguments.initial_model(model, model_init, args)
        policy, args = self.begin(model, args, processing_class, peft_config, older)
        method = self._method_class(args)
        parts = pair_parts(args, policy, method, data_collator, truncation_order="prompt_first")
        encodes = is_encoder_decoder(policy.scorer.core, args)
        if method.scores_prompts and not encodes:
            pairs = parts.layout
            parts = replace(parts, layout=lambda batch: with_prompts_scored(pairs(batch)))
        super().__init__(
            parts, args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
