"""Configuration of PPO step by step, with a loop of the user's own."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from trl.options.checks import check_at_least, json_object
from trl.options.docs import documented
from trl.options.policy_gradient import (
    AdvantageEstimation,
    ClippedLosses,
    KLControl,
    ScoreScaling,
    check_positive,
)
from trl.reporting.step_statistics import flatten_dict
from trl.trainer.on_policy_config import OnPolicyConfig

_OF_DATA_SETS = {
    "num_ppo_epochs",
    "reward_model_path",
    "kl_coef",
    "kl_estimator",
    "ds3_gather_for_generation",
}
JSONDict = dict[str, Any] | str | None
_DICTS = ("tracker_kwargs", "accelerator_kwargs", "project_kwargs", "push_to_hub_if_best_kwargs")


def _script_name() -> str:
    """The name of the running script, without its ending."""
    return os.path.splitext(os.path.basename(sys.argv[0]))[0]


@documented
@dataclass
class PPOConfig(AdvantageEstimation, ClippedLosses, KLControl, ScoreScaling):
    """Configuration of `trl.PPOTrainer`.

    A step takes `batch_size` responses per process, and goes over them `ppo_epochs` times in minibatches; there is one
    optimiser step for each `mini_batch_size * gradient_accumulation_steps` of them.

    Example:
        >>> config = PPOConfig(batch_size=8, mini_batch_size=2, gradient_accumulation_steps=2)
        >>> config.backward_batch_size, config.kl_penalty
        (4, 'kl')
    """

    def __new__(cls, *args: Any, **given: Any) -> PPOConfig:
        """Raise TypeError for the arguments of the PPO that is given a data set."""
        own = {entry.name for entry in dataclasses.fields(cls)}
        of_data_sets = {entry.name for entry in dataclasses.fields(OnPolicyConfig)} | _OF_DATA_SETS
        if elsewhere := sorted(of_data_sets & given.keys() - own):
            raise TypeError(
                f"PPOConfig got {', '.join(elsewhere)}, which the trainer over data sets takes; this one belongs to PPO step by "
                "step. Use PPOConfig and PPOTrainer of trl.experimental.ppo."
            )
        return super().__new__(cls)

    exp_name: str = field(
        default_factory=_script_name,
        metadata={"help": "Name of the experiment. Default: that of the script."},
    )
    seed: int = field(
        default=0, metadata={"help": "Seed of all random streams, set when the trainer is built."}
    )
    log_with: Literal["wandb", "tensorboard"] | str | None = field(
        default=None,
        metadata={
            "help": "Tracker that log_stats writes to: 'wandb', 'tensorboard' or another that accelerate knows. None: none."
        },
    )
    task_name: str | None = field(default=None, metadata={"help": "Name of the task, for trackers alone."})
    model_name: str | None = field(
        default="gpt2",
        metadata={"help": "Name of the model, for scripts and trackers: the trainer loads nothing."},
    )
    query_dataset: str | None = field(
        default="imdb", metadata={"help": "Name of the data set, for scripts and trackers alone."}
    )
    reward_model: str | None = field(
        default="sentiment-analysis:lvwerra/distilbert-imdb",
        metadata={"help": "Name of the reward model, for scripts and trackers alone."},
    )
    remove_unused_columns: bool = field(
        default=True,
        metadata={
            "help": "Leave out the columns of a datasets.Dataset other than 'query', 'response', 'label' and what the model "
            "takes."
        },
    )
    tracker_kwargs: JSONDict = field(
        default_factory=dict, metadata={"help": "init_kwargs of accelerate's init_trackers."}
    )
    accelerator_kwargs: JSONDict = field(
        default_factory=dict, metadata={"help": "Arguments of the Accelerator."}
    )
    project_kwargs: JSONDict = field(
        default_factory=dict,
        metadata={
            "help": "Arguments of accelerate's ProjectConfiguration, such as logging_dir for tensorboard."
        },
    )
    tracker_project_name: str = field(default="trl", metadata={"help": "Name of the project for trackers."})
    push_to_hub_if_best_kwargs: JSONDict = field(
        default_factory=dict,
        metadata={
            "help": "Arguments of push_to_hub, repo_id among them: push whenever the mean score is the best so far, looked at "
            "every compare_steps steps. Empty: never."
        },
    )
    steps: int = field(
        default=20000, metadata={"help": "Number of steps, for the loop that calls the trainer."}
    )
    learning_rate: float = field(
        default=1.41e-5, metadata={"help": "Learning rate of the optimiser that the trainer makes (Adam)."}
    )
    batch_size: int = field(
        default=128, metadata={"help": "Responses per process that one call of step takes."}
    )
    mini_batch_size: int = field(
        default=128, metadata={"help": "Responses per process in one forward pass, in training and scoring."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Minibatches per optimiser step."})
    ppo_epochs: int = field(default=4, metadata={"help": "How often a step goes over its responses."})
    forward_batch_size: int | None = field(default=None, metadata={"help": "Older name of mini_batch_size."})
    max_grad_norm: float | None = field(
        default=None,
        metadata={"help": "Longest gradient, by its norm; longer ones are scaled down. None: no limit."},
    )
    optimize_cuda_cache: bool | None = field(
        default=None, metadata={"help": "Older name of optimize_device_cache."}
    )
    optimize_device_cache: bool = field(
        default=False,
        metadata={
            "help": "Release the accelerator's cached memory after generating and after each step: slower."
        },
    )
    early_stopping: bool = field(
        default=False,
        metadata={
            "help": "End a step's epochs once the policy has moved by more than 1.5 * target_kl from the one that sampled."
        },
    )
    target_kl: float = field(
        default=1.0, metadata={"help": "Divergence per token that early_stopping allows, in nats, > 0."}
    )
    compare_steps: int = field(
        default=1, metadata={"help": "Steps between two looks at whether the mean score is the best so far."}
    )
    ratio_threshold: float = field(
        default=10.0,
        metadata={
            "help": "Leave a minibatch out whose mean ratio of new to old probabilities is above this, > 0."
        },
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={"help": "Keep only some activations for the backward pass and compute the others again."},
    )
    is_encoder_decoder: bool | None = field(
        default=None, metadata={"help": "Set by the trainer: whether the model is an encoder-decoder."}
    )
    is_peft_model: bool | None = field(
        default=None, metadata={"help": "Set by the trainer: whether the model is a PeftModel."}
    )
    world_size: int | None = field(
        default=None, metadata={"help": "Set by the trainer: number of processes."}
    )
    backward_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Worked out: mini_batch_size * gradient_accumulation_steps, the responses of an optimiser step."
        },
    )
    global_backward_batch_size: int | None = field(
        default=None, metadata={"help": "Set by the trainer: backward_batch_size of all processes."}
    )
    global_batch_size: int | None = field(
        default=None, metadata={"help": "Set by the trainer: batch_size of all processes."}
    )

    def __post_init__(self) -> None:
        self._take_older_names()
        for name in _DICTS:
            setattr(self, name, self.options(name))
        self.settle()
        default = type(self).mini_batch_size
        if self.batch_size < self.mini_batch_size == default:
            self.mini_batch_size = max(self.batch_size // self.gradient_accumulation_steps, 1)
            warnings.warn(
                f"mini_batch_size is lowered from its default {default} to {self.mini_batch_size}, as batch_size is "
                f"{self.batch_size}. Set it to choose another.",
                stacklevel=3,
            )
        given, self.backward_batch_size = (
            self.backward_batch_size,
            self.mini_batch_size * self.gradient_accumulation_steps,
        )
        if given not in (None, 1, self.backward_batch_size):
            warnings.warn(
                f"backward_batch_size={given} has no effect: it is mini_batch_size * gradient_accumulation_steps, "
                f"{self.backward_batch_size}. Leave it out.",
                FutureWarning,
                stacklevel=3,
            )
        if self.batch_size % self.backward_batch_size:
            raise ValueError(
                f"batch_size must be a multiple of mini_batch_size * gradient_accumulation_steps, got {self.batch_size} and "
                f"{self.mini_batch_size} * {self.gradient_accumulation_steps}. Choose a batch_size that they divide."
            )

    def check(self) -> None:
        """Raise on bad values."""
        super().check()
        sizes = (
            "batch_size",
            "mini_batch_size",
            "gradient_accumulation_steps",
            "ppo_epochs",
            "compare_steps",
        )
        for name in sizes:
            check_at_least(name, getattr(self, name), minimum=1, optional=False)
        for name in ("learning_rate", "target_kl", "ratio_threshold"):
            check_positive(name, getattr(self, name), "The default is a good start.")
        if self.max_grad_norm is not None:
            check_positive("max_grad_norm", self.max_grad_norm, "Use None to leave gradients as they are.")
        push = self.options("push_to_hub_if_best_kwargs")
        if push and "repo_id" not in push:
            raise ValueError(
                f"push_to_hub_if_best_kwargs must have 'repo_id', got {sorted(push)}. Add the name "
                "of the repository to push to."
            )

    def options(self, name: str) -> dict[str, Any]:
        """The arguments that a field such as `tracker_kwargs` holds."""
        return json_object(name, getattr(self, name)) or {}

    def to_dict(self) -> dict[str, Any]:
        """All fields as one flat dict, those of dicts as `name/key`."""
        return flatten_dict({entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)})

    def _take_older_names(self) -> None:
        for older, name in (
            ("forward_batch_size", "mini_batch_size"),
            ("optimize_cuda_cache", "optimize_device_cache"),
        ):
            value = getattr(self, older)
            if value is not None:
                warnings.warn(f"{older} is now {name}. Use that.", FutureWarning, stacklevel=4)
                setattr(self, name, value)
