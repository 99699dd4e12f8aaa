"""REINFORCE leave-one-out: the baseline of a completion is the mean reward of the other completions of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl._lazy import attach
from trl.legacy import move_arguments
from trl.legacy.rloo import in_older_order, older_reward, with_sizes_of_run
from trl.models.scoring.causal import Scored
from trl.objectives.group_advantages import estimated, normalized, reward_statistics
from trl.objectives.group_policy import sequence_policy_loss
from trl.objectives.kl import k1
from trl.options.training import config_or_default
from trl.reporting.model_card import Paper
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import OLD, REF, SCORES, TRAINED, Experience
from trl.rollouts.maker import less_penalty
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted
from trl.tensors.sequences import sum_by_sequence
from trl.trainer.grpo_config import GroupTraining
from trl.trainer.online_method import EQUAL_REWARDS, GroupMethod, StepContext
from trl.trainer.online_trainer import AnyDataset, OnlineTrainer, RolloutFunc
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.samples import SampleTables, ShowSamples

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

KL = "kl"


class RLOOMethod(GroupMethod):
    """Rewards less the KL penalty, advantages over the mean of the others, the clipped surrogate of whole
    completions.
    """

    args: RLOOConfig
    eos_token_id: int | None = None

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """The score, less `missing_eos_penalty` for a completion without its end token."""
        scores = less_penalty(scores, experience, self.args.missing_eos_penalty, token=self.eos_token_id)
        return super().apply_rewards(experience, scores, inputs, training=training)

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
        advantages = estimated(self.args.advantage_estimator, rewards, group_size)
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
        metrics = super().metrics(rows, sources, group_size, share=share)
        if not self.has_reference:
            return metrics
        equal = reward_statistics(self.given_rewards(rows), group_size)["frac_reward_zero_std"]
        return {**metrics, EQUAL_REWARDS: Weighted(equal.total * share, equal.count * share)}

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """The divergence per token, `kl`."""
        trained = experience.per_token[TRAINED]
        return {KL: weighted(_log_ratios(experience), trained)} if self.has_reference else {}


def _log_ratios(experience: Experience) -> Tensor:
    return k1(experience.per_token[OLD], experience.per_token[REF])


class RLOOTrainer(SampleTables, OnlineTrainer):
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
    method_type: ClassVar[type[GroupMethod]] = RLOOMethod
    config_type: ClassVar[type[GroupTraining]] = RLOOConfig

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
