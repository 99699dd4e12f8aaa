"""Configuration of PPO on a data set of prompts."""

from dataclasses import dataclass, field

from trl.options.checks import check_at_least
from trl.options.docs import documented
from trl.options.model import ModelInit
from trl.options.online import KLInReward, RewardPolicy
from trl.options.policy_gradient import AdvantageEstimation, ClippedLosses
from trl.options.preference import Dropout, PrefixSharing, ReferenceAdapters
from trl.options.rollout import GatheredGeneration
from trl.trainer.on_policy_config import OnPolicyConfig


@documented
@dataclass
class PPOConfig(
    AdvantageEstimation,
    ClippedLosses,
    KLInReward,
    GatheredGeneration,
    RewardPolicy,
    ReferenceAdapters,
    PrefixSharing,
    Dropout,
    ModelInit,
    OnPolicyConfig,
):
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

    num_ppo_epochs: int = field(
        default=4, metadata={"help": "Passes over a batch of rollouts before the next one is made."}
    )
    exp_name: str = field(default="ppo_config", metadata={"help": "Name of the experiment, for trackers."})
    reward_model_path: str = field(
        default="EleutherAI/pythia-160m",
        metadata={
            "help": "Where a script loads the reward model from. The trainer itself takes the model it is given."
        },
    )

    def check(self) -> None:
        super().check()
        check_at_least("num_ppo_epochs", self.num_ppo_epochs, minimum=1, optional=False)
