"""Option groups of learning from groups of completions: how many, how a batch of them is cut, and how far a step may go."""

from dataclasses import dataclass, field

from trl.options.checks import check_at_least, warn_caller
from trl.options.groups import OptionGroup


@dataclass
class PromptGroups(OptionGroup):
    """How many completions a prompt has, how many are generated at once, and how often they are learned from."""

    num_generations: int | None = field(
        default=8,
        metadata={
            "help": "Completions of each prompt, >= 2. The number of completions that are generated at once must be a "
            "multiple of it."
        },
    )
    num_generations_eval: int | None = field(
        default=None,
        metadata={"help": "Completions of each prompt in evaluations, >= 1. None: num_generations."},
    )
    generation_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Completions that are generated at once, over all processes: per_device_train_batch_size * processes * "
            "steps_per_generation. None: as steps_per_generation says."
        },
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches that are learned from before the next completions are generated. More than "
            "gradient_accumulation_steps is several optimiser steps, the later ones off-policy. None: "
            "gradient_accumulation_steps."
        },
    )
    num_iterations: int = field(
        default=1, metadata={"help": "How often each completion is learned from (mu in the paper), >= 1."}
    )

    def check(self) -> None:
        super().check()
        hint = "A completion is judged against the others of its prompt: 2 is the least, 8 is usual."
        check_at_least("num_generations", self.num_generations, minimum=2, optional=False, hint=hint)
        check_at_least("num_generations_eval", self.num_generations_eval, minimum=1)
        check_at_least("generation_batch_size", self.generation_batch_size, minimum=1)
        check_at_least("steps_per_generation", self.steps_per_generation, minimum=1)
        check_at_least("num_iterations", self.num_iterations, minimum=1, optional=False)


@dataclass
class DynamicSampling(OptionGroup):
    """What becomes of groups that teach nothing."""

    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Sample other prompts, drawn from the whole data set, in the place of those whose completions all have the "
            "same reward (DAPO)."
        },
    )
    max_resampling_rounds: int = field(
        default=10,
        metadata={
            "help": "How often that is tried for a batch of completions, >= 1. Groups that are left then stay as they are."
        },
    )

    def check(self) -> None:
        super().check()
        hint = "Set dynamic_sampling=False to sample every prompt once."
        check_at_least(
            "max_resampling_rounds", self.max_resampling_rounds, minimum=1, optional=False, hint=hint
        )
        if self.max_resampling_rounds != 10 and not self.dynamic_sampling:
            warn_caller(
                f"max_resampling_rounds={self.max_resampling_rounds} has no effect with dynamic_sampling=False. Leave it out, or "
                "set dynamic_sampling=True."
            )


@dataclass
class ClippedRatio(OptionGroup):
    """How far the ratio of new to old probability may leave 1."""

    epsilon: float = field(
        default=0.2,
        metadata={
            "help": "How far the ratio of new to old probability may fall below 1, and rise above it, before the loss stops "
            "rewarding it, > 0."
        },
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "How far it may rise above 1, > 0 (DAPO: 0.28); cispo: the largest weight itself (5.0). None: epsilon."
        },
    )


@dataclass
class ReferencePenalty(OptionGroup):
    """What the distance to the reference costs."""

    beta: float = field(
        default=0.04,
        metadata={
            "help": "What a nat of KL divergence from the reference costs, >= 0. A larger one keeps the policy closer to it; 0 "
            "needs no reference."
        },
    )


@dataclass
class TruncatedCompletions(OptionGroup):
    """What becomes of completions that were cut off."""

    mask_truncated_completions: bool = field(
        default=False,
        metadata={
            "help": "Do not train on completions that reached their greatest length without an end token."
        },
    )
