"""Settings that trainers of a policy's own responses share, for a data set of prompts: for loops of a user's own too."""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainerState, TrainingArguments

from trl.options.groups import documented, option
from trl.options.shared import shared
from trl.options.training import TrainingDefaults

StopToken = Literal["eos"]
_FILLED_IN = "Filled in by the trainer; a value given is checked against it."


@documented
@dataclass
class OnPolicyConfig(TrainingDefaults):
    """Settings of a loop that learns from a policy's own responses: those of `transformers.TrainingArguments` and the ones
    below. The loop sets the fields that a trainer would fill in.

    Example:
        >>> from trl.trainer.utils import OnPolicyConfig
        >>> args = OnPolicyConfig("my-model", response_length=24, stop_token="eos", use_cpu=True)
        >>> args.temperature, args.local_rollout_forward_batch_size, args.world_size
        (0.7, 64, 1)
    """

    dataset_num_proc: int | None = shared("dataset_num_proc")
    response_length: int = option(53, "Longest response, in tokens, with the token that stops it.", ">= 1")
    stop_token: StopToken | None = option(
        None,
        "'eos': responses end with the tokenizer's end-of-sequence token. None: with stop_token_id, or at "
        "response_length.",
    )
    stop_token_id: int | None = option(None, "Id of the token that ends a response. None: see stop_token.")
    temperature: float = shared("temperature", 0.7)
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the score of a response without its end token. None: nothing."
    )
    local_rollout_forward_batch_size: int = option(
        64, "Rows per process and forward pass, without gradient, after a rollout.", ">= 1"
    )
    total_episodes: int | None = option(
        None,
        "Prompts in all, rounded up to whole batches; sets max_steps. None: num_train_epochs times the training set, "
        "unless max_steps is given.",
        ">= 1",
    )
    num_mini_batches: int = option(
        1, "Optimiser steps per pass over a batch of rollouts, each on an equal part.", ">= 1"
    )
    num_sample_generations: int = option(
        10, "Times, evenly over the run, that a table of responses to evaluation prompts is shown.", ">= 0"
    )
    world_size: int | None = option(None, "Number of processes. Filled in by the trainer.")
    num_total_batches: int | None = option(None, "Rollouts of the whole run. Filled in by the trainer.")
    micro_batch_size: int | None = option(
        None,
        "Rows per pass, over all processes: per_device_train_batch_size * world_size. Filled in by the trainer.",
    )
    local_batch_size: int | None = option(
        None,
        "Rows per rollout and process: per_device_train_batch_size * gradient_accumulation_steps * num_mini_batches. "
        + _FILLED_IN,
    )
    batch_size: int | None = option(
        None, f"Rows per rollout, over all processes: local_batch_size * world_size. {_FILLED_IN}"
    )
    local_mini_batch_size: int | None = option(
        None, f"Rows per optimiser step and process: local_batch_size / num_mini_batches. {_FILLED_IN}"
    )
    mini_batch_size: int | None = option(
        None, f"Rows per optimiser step, over all processes: batch_size / num_mini_batches. {_FILLED_IN}"
    )
    sft_model_path: str = option(
        "EleutherAI/pythia-160m",
        "Where a script loads the policy from. The trainer takes the model it is given.",
    )

    def check(self) -> None:
        super().check()
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError(
                f"stop_token={self.stop_token!r} and stop_token_id={self.stop_token_id} cannot be combined. Set one."
            )


def _processes(self: Any) -> int:
    """`TrainingArguments.world_size`, which the field would hide."""
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
