"""Option groups of learning from rewards that several configs share."""

from dataclasses import dataclass
from typing import Literal

from trl.options.groups import OptionGroup, option

RewardFailure = Literal["error", "skip"]
SYNC_SETTINGS = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")


@dataclass
class PPOOptions(OptionGroup):
    """Generalised advantage estimation, and PPO's losses of policy and value function."""

    gamma: float = option(1.0, "Discount of rewards, per token.", "[0, 1]")
    lam: float = option(
        0.95, "Lambda of generalised advantage estimation. 0: values alone; 1: rewards alone.", "[0, 1]"
    )
    whiten_rewards: bool = option(
        False, "Scale the tokens' rewards to unit variance before advantages are estimated."
    )
    cliprange: float = option(
        0.2, "How far the ratio of new to old probability may leave 1 before it is clipped.", "(0, inf]"
    )
    cliprange_value: float = option(
        0.2, "How far a value may leave that of the rollout before it is clipped.", "(0, inf]"
    )
    vf_coef: float = option(0.1, "Weight of the value loss beside the policy loss, >= 0.")


@dataclass
class RewardPolicy(OptionGroup):
    """Weights of reward functions and models, and what happens if they fail."""

    reward_weights: list[float] | None = option(
        None, "Weight of each reward function or model in the sum. None: 1 each."
    )
    reward_deadline: float | None = option(
        None, "Seconds after which a call of a reward function is abandoned. None: no limit.", "(0, inf]"
    )
    reward_failure: RewardFailure = option(
        "error", "If a reward function fails: 'error' ends the run, 'skip' counts the rows and leaves it out."
    )


@dataclass
class ReferenceSync(OptionGroup):
    """A reference that follows the policy (TR-DPO)."""

    sync_ref_model: bool = option(
        False, "Every ref_model_sync_steps steps, replace the reference by a mixture of policy and reference."
    )
    ref_model_mixup_alpha: float = option(0.6, "Share of the policy in that mixture.", "[0, 1]")
    ref_model_sync_steps: int = option(512, "Optimiser steps between two updates of the reference.", ">= 1")
