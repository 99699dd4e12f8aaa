"""Option groups of learning from one's own rollouts: how long, and how a window of rollouts is cut."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from trl.options.checks import check_at_least, check_one_of
from trl.options.groups import OptionGroup

KLEstimator = Literal["k1", "k3"]
RewardFailure = Literal["error", "skip"]


@dataclass
class Episodes(OptionGroup):
    """How many rollouts there are, and how many at once."""

    total_episodes: int | None = field(
        default=None,
        metadata={
            "help": "Prompts to answer in all, rounded up to whole batches; max_steps follows from it. None: "
            "num_train_epochs times the training set, unless max_steps is given."
        },
    )
    num_mini_batches: int = field(
        default=1,
        metadata={
            "help": "Optimiser steps per pass over a batch of rollouts; each learns from an equal part."
        },
    )

    def check(self) -> None:
        super().check()
        check_at_least("total_episodes", self.total_episodes, minimum=1)
        check_at_least("num_mini_batches", self.num_mini_batches, minimum=1, optional=False)


@dataclass
class BatchSizes(OptionGroup):
    """Sizes that follow from others; the trainer fills them in."""

    world_size: int | None = field(
        default=None, metadata={"help": "Number of processes. Filled in by the trainer."}
    )
    num_total_batches: int | None = field(
        default=None,
        metadata={"help": "Rollouts of the whole run, in batches of batch_size. Filled in by the trainer."},
    )
    micro_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows per forward and backward pass, over all processes: per_device_train_batch_size * world_size. "
            "Filled in by the trainer."
        },
    )
    local_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows per rollout and process: per_device_train_batch_size * gradient_accumulation_steps * "
            "num_mini_batches. Filled in by the trainer; a value given is checked against it."
        },
    )
    batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows per rollout, over all processes: local_batch_size * world_size. Filled in by the trainer; a value "
            "given is checked against it."
        },
    )
    local_mini_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows per optimiser step and process: local_batch_size / num_mini_batches. Filled in by the trainer; a "
            "value given is checked against it."
        },
    )
    mini_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows per optimiser step, over all processes: batch_size / num_mini_batches. Filled in by the trainer; a "
            "value given is checked against it."
        },
    )


@dataclass
class SampleTables(OptionGroup):
    """Responses shown while training."""

    num_sample_generations: int = field(
        default=10,
        metadata={
            "help": "How often, evenly over the run, responses to evaluation prompts are shown as a table. 0: never."
        },
    )

    def check(self) -> None:
        super().check()
        check_at_least("num_sample_generations", self.num_sample_generations, minimum=0, optional=False)


@dataclass
class KLInReward(OptionGroup):
    """The distance to the reference as a price on every token."""

    kl_coef: float = field(
        default=0.05,
        metadata={
            "help": "What a nat of KL divergence from the reference costs, in units of reward, >= 0. A larger one keeps the "
            "policy closer to it."
        },
    )
    kl_estimator: KLEstimator = field(
        default="k1",
        metadata={
            "help": "Estimator of the KL divergence per token: 'k1' (the log-ratio, unbiased) or 'k3' (unbiased, never "
            "negative, of lower variance)."
        },
    )
    max_kl_per_token: float | None = field(
        default=20.0,
        metadata={
            "help": "End the run, with advice, where a batch's mean KL divergence per token is above this, in nats: the "
            "policy writes what the reference all but excludes. None: only where it is no finite number."
        },
    )

    def check(self) -> None:
        super().check()
        check_one_of("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        if self.max_kl_per_token is not None and not self.max_kl_per_token > 0:
            raise ValueError(
                f"max_kl_per_token must be > 0 or None, got {self.max_kl_per_token}. Use None for no limit."
            )


@dataclass
class RewardPolicy(OptionGroup):
    """How reward functions and models are weighed, and what becomes of those that fail."""

    reward_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Weight of each reward function or model in the sum. None: 1 each."},
    )
    reward_deadline: float | None = field(
        default=None,
        metadata={
            "help": "Seconds after which the answer of a reward function is not waited for any more. None: waits."
        },
    )
    reward_failure: RewardFailure = field(
        default="error",
        metadata={
            "help": "What happens where a reward function raises, misses its deadline or answers what is no number: 'error' "
            "ends the run, 'skip' counts the rows, on which it then has no opinion."
        },
    )

    def check(self) -> None:
        super().check()
        check_one_of("reward_failure", self.reward_failure, get_args(RewardFailure))
        if self.reward_deadline is not None and not self.reward_deadline > 0:
            raise ValueError(
                f"reward_deadline must be > 0 seconds or None, got {self.reward_deadline}. Use None to wait without end."
            )
