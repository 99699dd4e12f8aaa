"""Configuration of PPO step by step, and what all configs of a policy's own responses share."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainerState, TrainingArguments

from trl.options.checks import warn_caller
from trl.options.groups import OptionGroup, documented, moved, option
from trl.options.methods import PPOOptions
from trl.options.shared import JSONDict, LoopOptions, Weights, shared
from trl.options.training import TrainingDefaults

_OF_DATA_SETS = {"num_ppo_epochs", "reward_model_path", "kl_coef", "kl_estimator", "ds3_gather_for_generation"}
KLPenalty = Literal["kl", "abs", "mse", "full"]


StopToken = Literal["eos"]
_FILLED_IN = "Filled in by the trainer; a value given is checked against it."


@dataclass
class EpisodeOptions(OptionGroup):
    """Settings of PPO and RLOO from 0.9 on that count episodes and end completions."""

    dataset_num_proc: int | None = shared("dataset_num_proc")
    stop_token: StopToken | None = option(
        None,
        "'eos': responses end with the tokenizer's end-of-sequence token. None: with stop_token_id, or at "
        "response_length (RLOO: only with another setting of 0.21).",
    )
    stop_token_id: int | None = option(None, "Id of the token that ends a response. None: see stop_token.")
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the score of a response without its end token. None: nothing."
    )
    total_episodes: int | None = option(
        None,
        "Responses in all, rounded up to whole batches; sets max_steps. None: num_train_epochs times the training set, "
        "unless max_steps is given (RLOO: only with another setting of 0.21).",
        ">= 1",
    )
    sft_model_path: str = option(
        "EleutherAI/pythia-160m", "Where a script loads the policy from. The trainer takes the model it is given."
    )

    def check(self) -> None:
        super().check()
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError(
                f"stop_token={self.stop_token!r} and stop_token_id={self.stop_token_id} cannot be combined. Set one."
            )


@documented
@dataclass
class OnPolicyConfig(EpisodeOptions, TrainingDefaults):
    """Settings of a loop that learns from a policy's own responses: those of `transformers.TrainingArguments` and the
    ones below. The loop sets the fields that a trainer would fill in.

    Example:
        >>> from trl.trainer.utils import OnPolicyConfig
        >>> args = OnPolicyConfig("my-model", response_length=24, stop_token="eos", use_cpu=True)
        >>> args.temperature, args.local_rollout_forward_batch_size, args.world_size
        (0.7, 64, 1)
    """

    response_length: int = option(53, "Longest response, in tokens, with the token that stops it.", ">= 1")
    temperature: float = shared("temperature", 0.7)
    local_rollout_forward_batch_size: int = option(
        64, "Rows per process and forward pass, without gradient, after a rollout.", ">= 1"
    )
    num_sample_generations: int = option(
        10, "Times, evenly over the run, that a table of responses to evaluation prompts is shown.", ">= 0"
    )
    num_mini_batches: int = option(
        1, "Optimiser steps per pass over a batch of rollouts, each on an equal part.", ">= 1"
    )
    world_size: int | None = option(None, "Number of processes. Filled in by the trainer.")
    num_total_batches: int | None = option(None, "Rollouts of the whole run. Filled in by the trainer.")
    micro_batch_size: int | None = option(
        None, "Rows per pass, over all processes: per_device_train_batch_size * world_size. Filled in by the trainer."
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


# The field would hide the number of processes of the run.
OnPolicyConfig.world_size = property(TrainingArguments.world_size.fget, lambda config, value: None)  # type: ignore


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


@documented
@dataclass
class PPOConfig(LoopOptions, PPOOptions):
    """Configuration of `trl.PPOTrainer`.

    A step takes `batch_size` responses per process, and goes over them `ppo_epochs` times in minibatches; there is one
    optimiser step for each `mini_batch_size * gradient_accumulation_steps` of them.

    Example:
        >>> config = PPOConfig(batch_size=8, mini_batch_size=2, gradient_accumulation_steps=2)
        >>> config.backward_batch_size, config.kl_penalty
        (4, 'kl')
    """

    def __new__(cls, *args: Any, **given: Any) -> "PPOConfig":
        """Raise TypeError for the arguments of the PPO that is given a data set."""
        own = {entry.name for entry in dataclasses.fields(cls)}
        of_data_sets = {entry.name for entry in dataclasses.fields(OnPolicyConfig)} | _OF_DATA_SETS
        if elsewhere := sorted(of_data_sets & given.keys() - own):
            raise TypeError(
                f"PPOConfig got {', '.join(elsewhere)}, which the trainer over data sets takes; this one belongs to "
                "PPO step by step. Use PPOConfig and PPOTrainer of trl.experimental.ppo."
            )
        return super().__new__(cls)

    task_name: str | None = option(None, "Name of the task, for trackers only.")
    model_name: str | None = option("gpt2", "Name of the model, for scripts and trackers only.")
    query_dataset: str | None = option("imdb", "Name of the data set, for scripts and trackers only.")
    reward_model: str | None = option(
        "sentiment-analysis:lvwerra/distilbert-imdb", "Name of the reward model, for scripts and trackers only."
    )
    remove_unused_columns: bool = option(
        True, "Keep only 'query', 'response', 'label' and the model's inputs of a datasets.Dataset."
    )
    push_to_hub_if_best_kwargs: JSONDict = option(
        dict,
        "Arguments of push_to_hub, with repo_id: push whenever the mean score is the best so far, compared every "
        "compare_steps steps. Empty: never.",
    )
    steps: int = option(20000, "Number of steps, for the loop that calls the trainer.")
    weights: Weights | None = shared("weights")
    learning_rate: float = option(1.41e-5, "Learning rate of the trainer's own optimiser (Adam).", "> 0")
    batch_size: int = option(128, "Responses per process and call of step.", ">= 1")
    mini_batch_size: int = option(128, "Responses per process and forward pass, in training and scoring.", ">= 1")
    gradient_accumulation_steps: int = option(1, "Minibatches per optimiser step.", ">= 1")
    ppo_epochs: int = option(4, "Passes of a step over its responses.", ">= 1")
    forward_batch_size: int | None = moved(to="mini_batch_size")
    max_grad_norm: float | None = option(None, "Largest norm of the gradient; None: no limit.", "(0, inf]")
    optimize_cuda_cache: bool | None = moved(to="optimize_device_cache")
    optimize_device_cache: bool = option(
        False, "Release the accelerator's cached memory after generating and after each step: slower."
    )
    early_stopping: bool = option(
        False, "End a step's epochs once the policy is more than 1.5 * target_kl from the one that sampled."
    )
    target_kl: float = option(1.0, "Divergence per token that early_stopping allows, in nats.", "(0, inf]")
    compare_steps: int = option(1, "Steps between two comparisons of the mean score with the best so far.", ">= 1")
    ratio_threshold: float = option(
        10.0, "Skip a minibatch whose mean ratio of new to old probabilities exceeds this.", "(0, inf]"
    )
    adap_kl_ctrl: bool = option(True, "Adapt the KL penalty's weight towards target; otherwise it is fixed.")
    init_kl_coef: float = option(0.2, "Weight of the KL penalty at the start, in reward per nat, >= 0.")
    kl_penalty: KLPenalty = option(
        "kl",
        "Penalty of each token: 'kl' the log-ratio of policy to reference, 'abs' its size, 'mse' half its square, "
        "'full' the divergence of the whole distributions (needs memory for them).",
    )
    target: float = option(6.0, "Divergence per response that adap_kl_ctrl aims at, in nats.", "> 0")
    horizon: float = option(10000.0, "Number of responses over which adap_kl_ctrl changes the weight.", "> 0")
    use_score_scaling: bool = option(
        False, "Divide scores by their running standard deviation (Secrets of RLHF I, arXiv:2307.04964)."
    )
    use_score_norm: bool = option(False, "Subtract the scores' running mean as well.", needs="use_score_scaling")
    score_clip: float | None = option(
        None, "Cut scores to [-score_clip, score_clip], after scaling. None: no limit.", "(0, inf]"
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass: slower, less memory.")
    is_encoder_decoder: bool | None = option(None, "Whether the model is an encoder-decoder. Set by the trainer.")
    is_peft_model: bool | None = option(None, "Whether the model is a PeftModel. Set by the trainer.")
    world_size: int | None = option(None, "Number of processes. Set by the trainer.")
    backward_batch_size: int | None = option(
        None, "Responses per optimiser step: mini_batch_size * gradient_accumulation_steps. Computed."
    )
    global_backward_batch_size: int | None = option(None, "backward_batch_size of all processes. Set by the trainer.")
    global_batch_size: int | None = option(None, "batch_size of all processes. Set by the trainer.")

    def __post_init__(self) -> None:
        super().__post_init__()
        default = type(self).mini_batch_size
        if self.batch_size < self.mini_batch_size == default:
            self.mini_batch_size = max(self.batch_size // self.gradient_accumulation_steps, 1)
            warn_caller(
                f"mini_batch_size is lowered from its default {default} to {self.mini_batch_size}, as batch_size is "
                f"{self.batch_size}. Set it to choose another."
            )
        given, computed = self.backward_batch_size, self.mini_batch_size * self.gradient_accumulation_steps
        self.backward_batch_size = computed
        if given not in (None, 1, computed):
            warn_caller(
                f"backward_batch_size={given} has no effect: it is mini_batch_size * gradient_accumulation_steps, "
                f"{computed}. Leave it out.",
                FutureWarning,
            )
        if self.batch_size % computed:
            raise ValueError(
                "batch_size must be a multiple of mini_batch_size * gradient_accumulation_steps, got "
                f"{self.batch_size} and {self.mini_batch_size} * {self.gradient_accumulation_steps}. Choose a "
                "batch_size that they divide."
            )

    def check(self) -> None:
        """Raise on bad values."""
        super().check()
        push = self.push_to_hub_if_best_kwargs
        if push and "repo_id" not in push:
            raise ValueError(
                f"push_to_hub_if_best_kwargs must have 'repo_id', got {sorted(push)}. Add the name of the repository."
            )
