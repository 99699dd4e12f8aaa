"""Settings that trainers of a policy's own responses share, for a data set of prompts: for loops of a user's own too."""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerState, TrainingArguments

from trl.options.dataset import DatasetPreparation
from trl.options.docs import documented
from trl.options.online import BatchSizes, Episodes, SampleTables
from trl.options.rollout import FixedResponses
from trl.options.training import TrainingDefaults


@documented
@dataclass
class OnPolicyConfig(
    FixedResponses, SampleTables, Episodes, BatchSizes, DatasetPreparation, TrainingDefaults
):
    """Settings of a loop that learns from a policy's own responses: those of `transformers.TrainingArguments` and the ones
    below. What a trainer fills in is left to the loop.

    Example:
        >>> from trl.trainer.utils import OnPolicyConfig
        >>> args = OnPolicyConfig("my-model", response_length=24, stop_token="eos", use_cpu=True)
        >>> args.temperature, args.local_rollout_forward_batch_size, args.world_size
        (0.7, 64, 1)
    """

    sft_model_path: str = field(
        default="EleutherAI/pythia-160m",
        metadata={
            "help": "Where a script loads the policy from. The trainer itself takes the model it is given."
        },
    )


def _processes(self: Any) -> int:
    """What `TrainingArguments` says, which the field would hide."""
    actual: Any = TrainingArguments.world_size
    return actual.fget(self)


def _ignore_processes(self: Any, value: Any) -> None:
    """The number of processes is that of the run."""


OnPolicyConfig.world_size = property(_processes, _ignore_processes)  # type: ignore[assignment]


@dataclass
class OnlineTrainerState(TrainerState):
    """`transformers.TrainerState` with the number of episodes (responses that were learned from) so far, `episode`.

    `epoch` is None before the first one, as in 0.26.

    >>> state = OnlineTrainerState(episode=512)
    >>> state.episode, state.global_step
    (512, 0)
    """

    epoch: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    episode: int = 0
