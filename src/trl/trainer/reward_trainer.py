"""Reward models: a score for a whole sequence, learned from pairs of which one is preferred."""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import gather_object
from pandas import DataFrame
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl._lazy import attach
from trl.collators.reward import REWARD_COLUMNS, RewardCollator, as_reward_batch
from trl.data.preference import RewardPreparation
from trl.legacy.pair_methods import LegacyReward
from trl.methods.reward import RewardMethod
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.setup import REWARD_MODEL
from trl.models.switches import in_eval_mode
from trl.trainer import arguments
from trl.trainer.loaders import fills_up, left_early
from trl.trainer.preference_trainer import Parts, PreferenceTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.row_sets import row_sets
from trl.trainer.samples import show_table

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

if TYPE_CHECKING:
    from peft import PeftConfig


class RewardTrainer(LegacyReward, PreferenceTrainer):
    """Trainer of reward models on pairs (Bradley-Terry; Ouyang et al. 2022, arXiv:2203.02155).

    Args:
        model: a sequence classifier with one label, a `PeftModel` around one, or a name or path; of a language model's
            files the head is missing and starts at random.
        args: a `RewardConfig`; a plain `TrainingArguments` is taken over into one.
        data_collator: makes batches of tokenised pairs; by default `RewardCollator`.
        train_dataset: preference rows (`chosen`, `rejected`, with or without `prompt`, with or without a `margin`),
            standard or conversational; or tokenised.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; by default the one saved with the model.
        compute_metrics: `EvalPrediction -> dict`; predictions `(N, 2)` are the rewards of chosen and rejected, and
            labels 0.
        peft_config: trains a new adapter with these settings, and the head, instead of the model.

    The loss is the mean over all pairs of an optimiser step, of all its micro-batches on all processes.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = RewardTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "reward-trainer"]
    _name: ClassVar[str] = "Reward"
    args: RewardConfig
    scorer: ClassificationScorer
    _config_class: ClassVar[type] = RewardConfig
    _columns: tuple[str, ...] = (*REWARD_COLUMNS, "margin")

    def __init__(
        self, model: str | PreTrainedModel | None = None, args: RewardConfig | None = None,
        data_collator: arguments.Collator | None = None, train_dataset: arguments.AnyDataset | None = None,
        eval_dataset: arguments.EvalDatasets | None = None, processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: arguments.ComputeMetrics | None = None, callbacks: arguments.Callbacks | None = None,
        optimizers: arguments.Optimizers = (None, None),
        optimizer_cls_and_kwargs: arguments.OptimizerClass | None = None,
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: "PeftConfig | None" = None, **older: Any,
    ) -> None:  # fmt: skip
        policy, args = self.begin(model, args, processing_class, peft_config, older, classifier=REWARD_MODEL)
        assert isinstance(args, RewardConfig)
        shares = shares_prefix(policy.scorer, args.prefix_sharing)
        layout, scorer = partial(as_reward_batch, prefix_sharing=shares), self.scorer
        collator = data_collator or RewardCollator(
            prefix_sharing=shares, packed=scorer.packed, pad_token_id=scorer.pad_token_id,
            pad_to_multiple_of=args.pad_to_multiple_of,
        )  # fmt: skip
        sets = row_sets(RewardPreparation, args, policy)
        super().__init__(
            Parts(policy, RewardMethod(args), sets, collator, layout, shares), args,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip

    def evaluate(self, *args: Any, num_print_samples: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Evaluate, see `transformers.Trainer.evaluate`; with `num_print_samples` `visualize_samples` comes first."""
        if num_print_samples:
            self.visualize_samples(num_print_samples)
        return super().evaluate(*args, **kwargs)

    def visualize_samples(self, num_print_samples: int) -> None:
        """Print the texts and rewards of the first pairs of the evaluation set, and send the table to the trackers.

        Every process must call it.
        """
        dataset = self.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()), None)
        if dataset is None:
            raise ValueError("visualize_samples shows pairs of eval_dataset, got None. Pass one to the trainer.")
        model: Any = self.model
        rows: list[Any] = []
        with torch.no_grad(), in_eval_mode(model), left_early(self.get_eval_dataloader(dataset)) as batches:
            for batch in map(self.take_batch, batches):
                rewards = self.method.score(batch, self.scoring(model))
                pairs = [[round(v, 4) for v in pair] for pair in rewards.double().tolist()]
                padded = self.scorer.padded_inputs(batch)
                real = zip(padded["input_ids"], padded["attention_mask"].bool(), strict=True)
                texts = self._tokenizer.batch_decode([ids[mask].tolist() for ids, mask in real])
                is_extra = fills_up(self.accelerator.gradient_state, self.args)
                rows += gather_object([] if is_extra else list(zip(texts[::2], texts[1::2], pairs, strict=True)))
                if len(rows) >= num_print_samples:
                    break
        columns = ["chosen_text", "rejected_text", "logits"]
        if self.is_world_process_zero():
            show_table(self, "completions", DataFrame(rows[:num_print_samples], columns=columns))
