"""Configuration of group relative policy optimisation."""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from transformers import TrainingArguments

from trl.objectives.group_advantages import ADVANTAGES, OF_SCALE, SCALES, AdvantageEstimator, Scale
from trl.objectives.group_policy import LOSS_TYPES, Divisor, GroupOptions
from trl.objectives.group_ratios import RATIOS
from trl.objectives.sampler_correction import CorrectionMode
from trl.options.checks import check_at_least, lookup, warn_caller, warn_unread
from trl.options.generation import Generation
from trl.options.groups import documented, option, same
from trl.options.methods import ReferenceSync, RewardFailure, RewardPolicy
from trl.options.shared import PrefixSharingMode, shared
from trl.options.training import TrainingDefaults
from trl.rollouts.schedule import RolloutSizes, check_evaluation, group_sizes


@dataclass
class RolloutTraining(Generation, TrainingDefaults):
    """Settings of all trainers that learn from completions of their own policy."""

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-6)
    remove_unused_columns: bool | None = same(TrainingArguments, "remove_unused_columns", False)  # pyright: ignore[reportIncompatibleVariableOverride]
    num_generations: int | None = option(
        8, "Completions of each prompt, >= 2. The number generated at once must be a multiple of it."
    )
    num_generations_eval: int | None = option(
        None, "Completions of each prompt in evaluations. None: num_generations.", ">= 1"
    )
    generation_batch_size: int | None = option(
        None,
        "Completions generated at once, over all processes: per_device_train_batch_size * processes * "
        "steps_per_generation. None: as steps_per_generation says.",
        ">= 1",
    )
    steps_per_generation: int | None = option(
        None,
        "Micro-batches between two generations. Beyond gradient_accumulation_steps, the later optimiser steps are "
        "off-policy. None: gradient_accumulation_steps.",
        ">= 1",
    )
    num_iterations: int = option(1, "How often each completion is learned from (mu in the paper).", ">= 1")
    mask_truncated_completions: bool = option(
        False, "Do not train on completions that reached their length limit without an end token."
    )
    prefix_sharing: PrefixSharingMode = shared("prefix_sharing")
    disable_dropout: bool = shared("disable_dropout", False)
    shuffle_dataset: bool | None = shared(
        "shuffle_dataset", True, help="Shuffle the prompts anew in every epoch, with `seed` (or data_seed)."
    )
    model_init_kwargs: dict[str, Any] | str | None = shared("model_init_kwargs")

    def __post_init__(self) -> None:
        super().__post_init__()
        found = group_sizes(self)
        self.generation_batch_size, self.steps_per_generation = found[1:]
        together = found.sizes.mini_batches * found.sizes.micro_batches
        if together > found.steps_per_generation:
            warn_caller(
                f"steps_per_generation={found.steps_per_generation} is no multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: the completions of {together} micro-batches "
                f"({found.sizes.mini_batches} optimiser steps) are generated at once, by one policy."
            )
        if self.eval_strategy != "no":
            rows = self.per_device_eval_batch_size * self.world_size
            check_evaluation(rows, self.num_generations_eval or self.num_generations or 1)

    def rollout_sizes(self) -> RolloutSizes:
        """The sizes of a rollout batch and its optimiser steps."""
        return group_sizes(self).sizes

    @property
    def device_rows(self) -> int:
        """Completions in a micro-batch of one process."""
        return self.per_device_train_batch_size


@dataclass
class GroupTraining(ReferenceSync, RolloutTraining):
    """Settings of the trainers that compare the rewards of the completions of a prompt."""

    least_generations: ClassVar[int] = 2
    dynamic_sampling: bool = option(
        False, "Replace prompts whose completions all have the same reward by others of the data set (DAPO)."
    )
    max_resampling_rounds: int = option(
        10,
        "How often that is tried for a batch of completions; the groups that are left are kept.",
        ">= 1",
        needs="dynamic_sampling",
    )
    generation_parts: int = option(
        1,
        "Parts in which a batch of completions is generated. The rewards of a part are computed while the next one is "
        "generated, so that calls of a judge take less time.",
        ">= 1",
    )
    epsilon: float = same(GroupOptions, "epsilon")
    epsilon_high: float | None = same(GroupOptions, "epsilon_high")
    beta: float = same(GroupOptions, "beta", 0.04)
    reward_weights: list[float] | None = same(RewardPolicy, "reward_weights")
    reward_deadline: float | None = same(RewardPolicy, "reward_deadline")
    reward_failure: RewardFailure = same(RewardPolicy, "reward_failure")

    def check(self) -> None:
        super().check()
        hint = "A completion is judged against the others of its prompt: 2 is the least, 8 is usual."
        least = self.least_generations
        check_at_least("num_generations", self.num_generations, minimum=least, optional=False, hint=hint)
        if self.sync_ref_model and self.beta == 0:
            warn_caller(
                "sync_ref_model=True has no effect with beta=0.0, which needs no reference. Set beta > 0, or leave it "
                "out."
            )
            self.sync_ref_model = False

    def group_options(self) -> GroupOptions:
        """The settings that the loss takes."""
        return GroupOptions(epsilon=self.epsilon, epsilon_high=self.epsilon_high, beta=self.beta)


def check_estimator(estimator: str | AdvantageEstimator | None) -> None:
    """Raise ValueError for an unknown name, TypeError for what is no function of rewards and group size."""
    if estimator is None:  # the default of the method
        return
    if isinstance(estimator, str):
        lookup(ADVANTAGES, estimator, "advantage_estimator")
        return
    try:
        inspect.signature(estimator).bind(None, 2)
    except TypeError as error:
        raise TypeError(
            f"advantage_estimator must be a name or a function of (rewards, group_size), got {estimator!r} ({error})."
        ) from None


@documented
@dataclass
class GRPOConfig(GroupOptions, GroupTraining):
    """Settings of `GRPOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    A batch of `per_device_train_batch_size * processes * steps_per_generation` completions, `num_generations` of each
    prompt, is generated by the policy and then learned from `num_iterations` times.

    Example:
        >>> from trl.trainer.grpo_config import GRPOConfig
        >>> args = GRPOConfig("my-model", loss_type="dr_grpo", scale_rewards="none", use_cpu=True)
        >>> args.num_generations, args.generation_batch_size, args.beta
        (8, 8, 0.0)
    """

    scale_rewards: str = option(
        "group",
        "Divide advantages by the standard deviation of the rewards of the 'group' (or True), of the 'batch', or "
        "'none' (or False).",
    )
    advantage_estimator: str | None | AdvantageEstimator = option(  # noqa: RUF036 (HfArgumentParser looks for None there)
        None,
        "Function of rewards (N,) and group size that returns advantages (N,), or its name: 'scaled_by_group', "
        "'scaled_by_batch', 'unscaled', 'leave_one_out'. None, in GRPO: as scale_rewards says.",
    )
    top_entropy_quantile: float = option(
        1.0, "Share of the tokens that are trained, those of largest entropy (the paper uses 0.2). 1: all.", "[0, 1]"
    )
    teacher_kl_coef: float = option(
        0.0,
        "Weight of the reverse KL divergence from a teacher beside the reward, as an advantage of each token, per nat. "
        "0: no teacher.",
    )
    teacher_model_name_or_path: str | None = shared("teacher_model_name_or_path")
    teacher_model_init_kwargs: dict[str, Any] | str | None = shared("teacher_model_init_kwargs")
    cast_lm_head_to_fp32: bool = option(False, "Compute the logits in float32, whatever the model's dtype.")
    vllm_max_model_length: int | None = option(
        None,
        "vLLM's context length, prompt and completion, in tokens. None: that of the model (and the server).",
        ">= 1",
    )
    vllm_importance_sampling_correction: bool = option(
        True, "Weigh the loss by the ratio of the trainer's probabilities to those of the sampler (any engine)."
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "Ratio of each token or of the sequence; above the cap it is cut to the cap ('token_truncate', "
        "'sequence_truncate') or set to 0 ('token_mask', 'sequence_mask').",
        choices=get_args(CorrectionMode),
    )
    vllm_importance_sampling_cap: float = option(3.0, "Largest such ratio.", "(0, inf]")
    use_liger_loss: bool | None = shared("use_liger_loss")
    base_model_attribute_name: str = shared("base_model_attribute_name")

    def check(self) -> None:
        given = self.scale_rewards  # older programs and command lines say yes or no
        self.scale_rewards = {"true": "group", "false": "none"}.get(str(given).lower(), str(given))
        if self.loss_type == "luspo" and self.importance_sampling_level == type(self).importance_sampling_level:
            warn_caller(
                "loss_type='luspo' reads ratios of whole sequences: importance_sampling_level='sequence' is used."
            )
            self.importance_sampling_level = "sequence"
        row = lookup(LOSS_TYPES, self.loss_type, "loss_type")
        missing = [name for name in row.parameters if not hasattr(self, name)]
        if missing or row.over not in get_args(Divisor):
            raise ValueError(
                f"loss_type={self.loss_type!r} reads {', '.join(row.parameters) or 'no setting'} of "
                f"{type(self).__name__}, which lacks {', '.join(missing) or 'none'}, and is a mean over {row.over!r}, "
                f"one of {', '.join(get_args(Divisor))}. Give the settings to a subclass of the config."
            )
        lookup(RATIOS, self.importance_sampling_level, "importance_sampling_level")
        lookup(SCALES, self.scale_rewards, "scale_rewards")
        if self.advantage_estimator is not None:
            check_estimator(self.advantage_estimator)
            warn_unread(self, ["scale_rewards"], "with an advantage_estimator. Leave it out")
        super().check()
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "loss_type='dr_grpo' divides by max_completion_length, got None. Set it to the longest completion, in "
                "tokens."
            )
        self._warn_of_ignored()

    def _warn_of_ignored(self) -> None:
        """Warn of settings that the chosen loss does not read."""
        read = {*LOSS_TYPES[self.loss_type].parameters}
        if "epsilon_high" in read and self.epsilon_high is None:
            read.add("epsilon")
        unread = {name for row in LOSS_TYPES.values() for name in row.parameters} - read
        if self.beta == 0:
            unread.add("use_bias_correction_kl")
        if self.loss_type == "vespo" and not (self.use_bias_correction_kl and self.beta > 0):
            unread.add("importance_sampling_level")
        corrections = {"vllm_importance_sampling_mode", "vllm_importance_sampling_cap"}
        if not self.vllm_importance_sampling_correction:
            warn_unread(self, corrections, "with vllm_importance_sampling_correction=False. Leave it out")
        elif self.loss_type == "vespo":
            unread |= corrections
        warn_unread(self, unread, f"with loss_type={self.loss_type!r} and beta={self.beta}. Leave it out")
        bound = self.high
        if self.loss_type == "cispo" and bound < 1:
            warn_caller(
                f"loss_type='cispo' takes epsilon_high={bound} as the largest weight of a token, expected more than 1: "
                "here every token's gradient is cut to that. Set epsilon_high to 5.0, say."
            )

    @property
    def estimator(self) -> str | AdvantageEstimator:
        """The advantage estimator, or its name."""
        return self.advantage_estimator or OF_SCALE[self.scale_rewards]

    @property
    def reward_scale(self) -> Scale:
        """What the logged deviation of rewards is over: the batch where advantages are scaled by that."""
        return "batch" if self.estimator == OF_SCALE["batch"] else "group"

    def group_options(self) -> GroupOptions:
        """The settings that the loss takes."""
        return self
