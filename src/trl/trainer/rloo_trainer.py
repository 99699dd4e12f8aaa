"""REINFORCE leave-one-out: the baseline of a completion is the mean reward of the other completions of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl._lazy import attach
from trl.legacy import move_arguments
from trl.legacy.interface import LegacyGroups
from trl.legacy.rloo import in_older_order, older_reward, with_sizes_of_run
from trl.methods.rloo import RLOOMethod
from trl.options.training import config_or_default
from trl.reporting.model_card import Paper
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

    @in_older_order
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
        **older: Any,
    ) -> None:
        named = {
            "model": model,
            "reward_funcs": reward_funcs,
            "args": args,
            "processing_class": processing_class,
            "ref_model": ref_model,
        }
        moved = move_arguments(RLOOConfig, named, older, stacklevel=4)  # of the program
        args = config_or_default(moved["args"], RLOOConfig, "rloo")
        args = with_sizes_of_run(args, train_dataset, moved["processing_class"], is_older_call="policy" in older)
        if older.get("reward_model") is not None:
            moved["reward_funcs"] = older_reward(older["reward_model"], moved["processing_class"], args)
        if "ref_policy" in older and args.beta == 0:  # which had to be passed
            moved["ref_model"] = None
        super().__init__(
            **{**moved, "args": args},
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            agent=agent,
            environment_factory=environment_factory,
        )
        self.method.eos_token_id = self._tokenizer.eos_token_id  # type: ignore[assignment]
        if args.local_rollout_forward_batch_size:
            self.rows_at_once = args.local_rollout_forward_batch_size
        if eval_dataset is not None and args.num_sample_generations:
            self.add_callback(ShowSamples(self))
