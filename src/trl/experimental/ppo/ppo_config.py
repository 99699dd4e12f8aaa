"""Configuration of PPO on a data set of prompts."""

from dataclasses import dataclass
from typing import Any, Literal

from trl.options.groups import documented, option, same
from trl.options.methods import PPOOptions, RewardPolicy
from trl.options.shared import PrefixSharingMode, shared
from trl.trainer.ppo_config import OnPolicyConfig
from trl.trainer.rloo_config import RLOOConfig

KLEstimator = Literal["k1", "k3"]


@documented
@dataclass
class PPOConfig(PPOOptions, RewardPolicy, OnPolicyConfig):
    """Settings of `trl.experimental.ppo.PPOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    A batch of `per_device_train_batch_size * gradient_accumulation_steps * num_mini_batches` prompts per process is
    answered by the policy and then learned from for `num_ppo_epochs * num_mini_batches` optimiser steps. `save_steps`,
    `logging_steps` and `eval_steps` count optimiser steps.

    Example:
        >>> from trl.experimental.ppo import PPOConfig
        >>> args = PPOConfig("my-model", total_episodes=1000, stop_token="eos", missing_eos_penalty=1.0, use_cpu=True)
        >>> args.kl_coef, args.num_ppo_epochs, args.response_length
        (0.05, 4, 53)
    """

    num_ppo_epochs: int = option(4, "Passes over a batch of rollouts.", ">= 1")
    exp_name: str = option("ppo_config", "Name of the experiment, for trackers.")
    reward_model_path: str = same(RLOOConfig, "reward_model_path")
    kl_coef: float = option(0.05, "KL penalty against the reference, in reward per nat, >= 0.")
    kl_estimator: KLEstimator = option(
        "k1",
        "Estimator of the KL divergence per token: 'k1' (the log-ratio, unbiased) or 'k3' (unbiased, never negative, "
        "of lower variance).",
    )
    max_kl_per_token: float | None = option(
        20.0,
        "End the run if a batch's mean KL divergence per token exceeds this, in nats: the policy has diverged from the "
        "reference. None: only if it is not finite.",
        "(0, inf]",
    )
    model_init_kwargs: dict[str, Any] | str | None = shared("model_init_kwargs")
    model_adapter_name: str | None = shared("model_adapter_name")
    ref_adapter_name: str | None = shared("ref_adapter_name")
    prefix_sharing: PrefixSharingMode = shared("prefix_sharing")
    disable_dropout: bool = shared("disable_dropout")
    ds3_gather_for_generation: bool = shared("ds3_gather_for_generation")
