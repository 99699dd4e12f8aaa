"""Binary classifier optimisation: the reward as the logit of a classifier of desirable completions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedTokenizerBase

from trl._lazy import attach
from trl.data.rendering import Fields
from trl.legacy.unpaired_methods import LegacyBCO
from trl.methods.bco import BCOMethod
from trl.models.prompt_density import EmbeddingFunction, PromptDensity
from trl.reporting.model_card import Paper
from trl.tensors.moments import RunningMoments
from trl.trainer import arguments
from trl.trainer.bco_config import BCOConfig
from trl.trainer.unpaired import UnpairedTrainer

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

RUNNING_NAME = "running.json"
"""A checkpoint's file with the mean reward of the run so far, for programs that read it; `std` and `var` are not
known.
"""

if TYPE_CHECKING:
    from peft import PeftConfig


class BCOTrainer(LegacyBCO, UnpairedTrainer):
    """Trainer of binary classifier optimisation (Jung et al. 2024, arXiv:2404.04656).

    Takes what `KTOTrainer` takes, and:

    Args:
        embedding_func: `(input_ids=, attention_mask=) -> (B, H)`, embeds prompts for underlying-distribution matching:
            undesirable rows weigh as much as their prompts are likelier among the desirable ones. Needs scikit-learn.
        embedding_tokenizer: the tokenizer that belongs to it.

    The loss is the mean over all completions of an optimiser step, of all its micro-batches on all processes. The
    reward shift delta is the mean reward of all completions of the run so far, this whole step's included.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = BCOTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/kto-mix-14k", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "bco"]
    _name: ClassVar[str] = "BCO"
    _paper = Paper("Binary Classifier Optimization for Large Language Model Alignment", "2404.04656")
    _config_class: ClassVar[type] = BCOConfig
    method: BCOMethod
    args: BCOConfig

    def __init__(
        self, model: arguments.AnyModel | None = None, ref_model: arguments.AnyModel | None = None,
        args: BCOConfig | None = None, train_dataset: arguments.AnyDataset | None = None,
        eval_dataset: arguments.EvalDatasets | None = None, processing_class: arguments.Processor | None = None,
        data_collator: arguments.Collator | None = None, model_init: arguments.ModelInit | None = None,
        callbacks: arguments.Callbacks | None = None, optimizers: arguments.Optimizers = (None, None),
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: "PeftConfig | None" = None,
        compute_metrics: arguments.ComputeMetrics | None = None, model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None, embedding_func: EmbeddingFunction | None = None,
        embedding_tokenizer: PreTrainedTokenizerBase | None = None, **older: Any,
    ) -> None:  # fmt: skip
        self._density = _prompt_density(embedding_func, embedding_tokenizer, train_dataset)
        super().__init__(
            model, ref_model, args, train_dataset, eval_dataset, processing_class, data_collator, model_init, callbacks,
            optimizers, preprocess_logits_for_metrics, peft_config, compute_metrics, model_adapter_name,
            ref_adapter_name, **older,
        )  # fmt: skip
        if self._density is not None:
            self._density.fit(
                self.train_dataset,  # type: ignore[arg-type]
                sample_size=self.args.prompt_sample_size,
                seed=self.args.seed,
                batch_size=self.args.per_device_train_batch_size,
            )

    def make_method(self, args: BCOConfig) -> BCOMethod:
        return BCOMethod(args, self._density)

    def preparation(self, args: BCOConfig) -> Fields:
        """With matching, rows also hold their prompts under the tokenizer of the embedding model."""
        return {} if self._density is None else {"embedding_tokenizer": self._density.embedding_tokenizer}

    def save_progress(self, folder: Path) -> None:
        """Write into a checkpoint also the running mean of rewards and the density of prompts."""
        super().save_progress(folder)
        if not self.args.should_save:
            return
        mean = self.method.mean_reward
        RunningMoments(None, mean=mean.value, count=mean.count or 1e-24).save_to_json(str(folder / RUNNING_NAME))
        if self._density is not None:
            self._density.save(str(folder))

    def load_progress(self, folder: Path) -> None:
        """Load what `save_progress` wrote, when training begins."""
        super().load_progress(folder)
        if self._density is not None:
            self._density.load(str(folder))


def _prompt_density(
    embedding_func: EmbeddingFunction | None, embedding_tokenizer: Any, train_dataset: object
) -> PromptDensity | None:
    if embedding_func is None and embedding_tokenizer is None:
        return None
    if embedding_func is None:
        raise ValueError(
            "embedding_tokenizer without embedding_func, expected both or neither. Give the function that embeds "
            "prompts, or leave both out."
        )
    if train_dataset is None:
        raise ValueError(
            "embedding_func without train_dataset, expected rows on which to fit the classifier of prompts. Give "
            "train_dataset, or leave embedding_func out."
        )
    return PromptDensity(embedding_func, embedding_tokenizer)
