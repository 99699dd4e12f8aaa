"""REINFORCE leave-one-out: the baseline of a completion is the mean reward of the other completions of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl._lazy import attach
from trl.legacy import move_arguments
from trl.models.scoring.causal import Scored
from trl.objectives.group_advantages import leave_one_out, normalized, reward_statistics
from trl.objectives.group_policy import sequence_policy_loss
from trl.objectives.kl import k1
from trl.rollouts.experience import OLD, REF, SCORES, TRAINED, Experience
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted
from trl.tensors.sequences import sum_by_sequence
from trl.trainer.grpo_config import GroupTraining
from trl.trainer.online_method import EQUAL_REWARDS, GroupMethod, StepContext
from trl.trainer.online_trainer import AnyDataset, OnlineTrainer, RolloutFunc
from trl.trainer.rloo_config import RLOOConfig

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

KL = "kl"


class RLOOMethod(GroupMethod):
    """Rewards less the KL penalty, advantages over the mean of the others, the clipped surrogate of whole completions."""

    args: RLOOConfig

    def needs_old(self, experience: Experience) -> bool:
        return self.has_reference

    def with_penalties(self, experience: Experience) -> Experience:
        """With the divergence of each completion from the reference."""
        if not self.has_reference:
            return experience
        gaps = where_counted(_log_ratios(experience), experience.per_token[TRAINED])
        kl = sum_by_sequence(gaps, experience.completions.row_index, len(experience))
        return experience.with_rows(**{KL: kl})

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        rewards = self.given_rewards(rows)
        if self.has_reference:
            rewards = rewards - self.args.beta * rows[KL].to(rewards.dtype)
        advantages = leave_one_out(rewards, group_size)
        if self.args.normalize_advantages:
            advantages = normalized(advantages, ~rewards.isnan())
        return rewards, advantages

    def given_rewards(self, rows: Mapping[str, Tensor]) -> Tensor:
        bounds = self.args.reward_clip_range
        return rows[SCORES] if bounds is None else rows[SCORES].clamp(*bounds)

    def objective(self, experience: Experience, scored: Scored, context: StepContext) -> list[LossTerms]:
        tokens = self.tokens(experience, context)
        return [sequence_policy_loss(scored.logps, tokens, self.settings, entropies=scored.entropies)]

    def metrics(
        self, rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int, *, share: float
    ) -> dict[str, Weighted]:
        """With the share of completions whose group was given equal rewards, which differ by the KL penalty alone."""
        found = super().metrics(rows, sources, group_size, share=share)
        if not self.has_reference:
            return found
        given = reward_statistics(self.given_rewards(rows), group_size)["frac_reward_zero_std"]
        return {**found, EQUAL_REWARDS: Weighted(given.total * share, given.count * share)}

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """The divergence per token, `kl`."""
        trained = experience.per_token[TRAINED]
        return {KL: weighted(_log_ratios(experience), trained)} if self.has_reference else {}


def _log_ratios(experience: Experience) -> Tensor:
    return k1(experience.per_token[OLD], experience.per_token[REF])


class RLOOTrainer(OnlineTrainer):
    """Trainer of REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    Takes what `GRPOTrainer` takes. `older`: arguments of 0.21 and before, which move with a warning (`trl.legacy`).

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
    _paper: ClassVar[dict[str, str]] = {
        "title": "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
        "id": "2402.14740",
    }
    args: RLOOConfig
    method_type: ClassVar[type[GroupMethod]] = RLOOMethod
    config_type: ClassVar[type[GroupTraining]] = RLOOConfig

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
        **older: Any,
    ) -> None:
        named = {
            "model": model,
            "reward_funcs": reward_funcs,
            "args": args,
            "processing_class": processing_class,
        }
        moved = move_arguments(RLOOConfig, named, older)
        super().__init__(
            moved["model"],
            moved["reward_funcs"],
            moved["args"],
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=moved["processing_class"],
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            agent=agent,
            environment_factory=environment_factory,
        )
