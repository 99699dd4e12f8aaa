"""REINFORCE leave-one-out: the baseline of a completion is the mean reward of the other completions of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl._lazy import attach
from trl.legacy.interface import LegacyGroups
from trl.legacy.rloo import of_any_level
from trl.methods.rloo import RLOOMethod
from trl.reporting.model_card import Paper
from trl.rollouts.maker import Completer
from trl.trainer.online_trainer import AnyDataset, OnlineTrainer, RolloutFunc
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.samples import SampleTables, ShowSamples

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class RLOOTrainer(LegacyGroups, SampleTables, OnlineTrainer):
    """Trainer of REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    Takes what `GRPOTrainer` takes, and `ref_model`, what the KL divergence is measured from (None: the policy as it is
    now, or the base of an adapter). `older`: arguments of 0.9-0.21, `RLOOTrainer(config, tokenizer, policy, ref_policy,
    reward_model, train_dataset, ...)`, which move with a warning (`trl.legacy`).

    Example:
        >>> def brevity(completions, **columns):
        ...     return [-float(len(text)) for text in completions]
        >>> trainer = RLOOTrainer(
        ...     "Qwen/Qwen3-0.6B", brevity, RLOOConfig("brief"), dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "rloo"]
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss", "reward", "reward_std")
    _name: ClassVar[str] = "RLOO"
    _paper = Paper(
        "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs", "2402.14740"
    )
    args: RLOOConfig
    method: RLOOMethod
    method_type = RLOOMethod
    config_type = RLOOConfig

    @of_any_level
    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel | None = None,
        reward_funcs: Any | Sequence[Any] = None,
        args: RLOOConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: Any | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        agent: Any = None,
        environment_factory: Any = None,
        ref_model: str | nn.Module | PreTrainedModel | None = None,
        completer: Completer | None = None,
        **older: Any,
    ) -> None:
        super().__init__(
            model,  # type: ignore[arg-type]
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            peft_config,
            tools,
            rollout_func,
            ref_model=ref_model,
            agent=agent,
            environment_factory=environment_factory,
            completer=completer,
        )  # fmt: skip
        self.method.eos_token_id = self._tokenizer.eos_token_id  # type: ignore[assignment]
        if self.args.local_rollout_forward_batch_size:
            self.rows_at_once = self.args.local_rollout_forward_batch_size
        if eval_dataset is not None and self.args.num_sample_generations:
            self.add_callback(ShowSamples(self))
