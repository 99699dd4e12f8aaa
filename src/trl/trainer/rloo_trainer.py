"""REINFORCE leave-one-out: the baseline of a completion is the mean reward of the other completions of its prompt."""

from typing import ClassVar

from transformers import TrainerCallback

from trl._lazy import attach
from trl.agents.completer import Agent
from trl.legacy.interface import LegacyGroups
from trl.legacy.rloo import of_any_level
from trl.methods.rloo import EQUAL_REWARDS, RLOOMethod
from trl.models.peft import AdapterConfig
from trl.reporting.model_card import Paper
from trl.rewards.source import ProcessingClasses
from trl.rollouts.experience import Experience
from trl.rollouts.maker import Completer
from trl.tensors.reduce import Weighted
from trl.trainer.arguments import AnyDataset, AnyModel, EvalDatasets, Optimizers, Processor
from trl.trainer.group_setup import Environments, RewardFuncs, RolloutFunc, Tools
from trl.trainer.online_trainer import OnlineTrainer
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
        self, model: AnyModel | None = None,
        reward_funcs: RewardFuncs = None, args: RLOOConfig | None = None,
        train_dataset: AnyDataset | None = None, eval_dataset: EvalDatasets | None = None,
        processing_class: Processor | None = None,
        reward_processing_classes: ProcessingClasses = None, callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None), peft_config: AdapterConfig = None, tools: Tools | None = None,
        rollout_func: RolloutFunc | None = None, agent: Agent | None = None,
        environment_factory: Environments | None = None, ref_model: AnyModel | None = None,
        completer: Completer | None = None, **older: object,
    ) -> None:  # fmt: skip
        super().__init__(
            model,  # type: ignore[arg-type]
            reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
            optimizers, peft_config, tools, rollout_func, ref_model=ref_model, agent=agent,
            environment_factory=environment_factory, completer=completer,
        )  # fmt: skip
        self.method.eos_token_id = self._tokenizer.eos_token_id  # type: ignore[assignment]
        if self.args.local_rollout_forward_batch_size:
            self.rows_at_once = self.args.local_rollout_forward_batch_size
        if eval_dataset is not None and self.args.num_sample_generations:
            self.add_callback(ShowSamples(self))

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """Warns, once, of completions that only differ by the KL penalty."""
        metrics = super().rollout_metrics(experience, share=share)
        if self._token_counts is not None and EQUAL_REWARDS in metrics and metrics[EQUAL_REWARDS].mean == 1:
            self._token_counts.warn_only_kl_differs(self.args.beta, metric=EQUAL_REWARDS)
        return metrics
