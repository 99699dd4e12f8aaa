"""Binary classifier optimisation: the reward as the logit of a classifier of desirable completions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl._lazy import attach
from trl.legacy.interface import call_with
from trl.legacy.pair_methods import rewards_by_kind, scores_by_kind
from trl.methods.bco import BCOMethod
from trl.methods.method import CONTEXT, Context
from trl.models.prompt_density import EmbeddingFunction, PromptDensity
from trl.objectives.unpaired import bco_terms
from trl.reporting.metrics import Processes
from trl.reporting.model_card import Paper
from trl.tensors.moments import RunningMoments
from trl.trainer.bco_config import BCOConfig
from trl.trainer.unpaired import AnyDataset, UnpairedTrainer

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

RUNNING_NAME = "running.json"
"""A checkpoint's file with the mean reward of the run so far, for programs that read it; `std` and `var` are not
known.
"""


class BCOTrainer(UnpairedTrainer):
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
    _point: ClassVar[str] = "delta"
    method: BCOMethod
    args: BCOConfig

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | None = None,
        ref_model: PreTrainedModel | nn.Module | str | None = None,
        args: BCOConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        model_init: Callable[[], PreTrainedModel] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: Any | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None,
        embedding_func: EmbeddingFunction | None = None,
        embedding_tokenizer: PreTrainedTokenizerBase | None = None,
        **older: Any,
    ) -> None:
        self._density = _prompt_density(embedding_func, embedding_tokenizer, train_dataset)
        super().__init__(
            model, ref_model, args, train_dataset, eval_dataset, processing_class, data_collator, model_init, callbacks,
            optimizers, preprocess_logits_for_metrics, peft_config, compute_metrics, model_adapter_name, ref_adapter_name,
            **older,
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

    def preparation(self, args: BCOConfig) -> dict[str, Any]:
        """With matching, rows also hold their prompts under the tokenizer of the embedding model."""
        return {} if self._density is None else {"embedding_tokenizer": self._density.embedding_tokenizer}

    # ---- methods of 0.11-0.26

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Log-probs of chosen and rejected completions, `(C,)` and `(R,)`, and their logits `(C, T, V)` and `(R, T,
        V)`.
        """
        return super().forward(model, batch)[:4]

    def compute_reference_log_probs(self, padded_batch: Mapping[str, Any]) -> Tensor:
        """The reference's log-probs `(B,)` of a batch's completions."""
        return super().compute_reference_log_probs(padded_batch)[0]

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Mapping[str, Any], do_train: bool = True
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch by itself, with gradient, and its metrics; with `do_train`, in train mode, its rewards
        move delta."""
        return super().get_batch_loss_metrics(model, batch if do_train else {**batch, CONTEXT: Context("not counted")})

    def bco_loss(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        chosen_embeddings: Tensor | None = None,
        rejected_embeddings: Tensor | None = None,
        do_train: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Losses of the chosen, then the rejected completions, the rewards of either, and delta, 0-dim.

        Log-probs are sums `(C,)`, `(R,)`, embeddings those of the prompts, `(C, H)` and `(R, H)`, where distributions
        are matched. With `do_train` the rewards move delta, unless they count already as part of a step.
        """
        scores = scores_by_kind(
            policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps
        )
        if do_train and not self._is_counted:
            self.method.count_rewards(scores, Processes(self.accelerator))
        delta = self.method.delta().to(scores.logps)
        weights = self.method.undesirable_weights(rejected_embeddings)
        if weights is not None:
            weights = torch.cat([weights.new_ones(len(policy_chosen_logps)), weights])
        losses = bco_terms(scores, beta=self.args.beta, delta=delta, undesirable_weights=weights).values
        return losses, *rewards_by_kind(scores, self.args.beta), delta

    def call_loss_method(self, batch: dict[str, Any], policy: Any, reference: Any) -> Any:
        """What an overridden `bco_loss` gives for a batch; rewards that count already as part of a step do not move
        delta.
        """
        found, kinds = self.method.embeddings(batch), (batch["label"], ~batch["label"])
        embeddings = [None if found is None else found[kind] for kind in kinds]
        moves = self.mode == "train" and CONTEXT not in batch
        return call_with(self.bco_loss, *policy, *reference, *embeddings, do_train=moves)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if not self.args.should_save:
            return
        mean = self.method.mean_reward
        RunningMoments(None, mean=mean.value, count=mean.count or 1e-24).save_to_json(
            os.path.join(output_dir, RUNNING_NAME)
        )
        if self._density is not None:
            self._density.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._density is not None and checkpoint is not None:
            self._density.load(checkpoint)


def _prompt_density(embedding_func: Any, embedding_tokenizer: Any, train_dataset: Any) -> PromptDensity | None:
    if embedding_func is None and embedding_tokenizer is None:
        return None
    if embedding_func is None:
        raise ValueError(
            "embedding_tokenizer without embedding_func, expected both or neither. Give the function that embeds prompts, or "
            "leave both out."
        )
    if train_dataset is None:
        raise ValueError(
            "embedding_func without train_dataset, expected rows on which to fit the classifier of prompts. Give "
            "train_dataset, or leave embedding_func out."
        )
    return PromptDensity(embedding_func, embedding_tokenizer)
