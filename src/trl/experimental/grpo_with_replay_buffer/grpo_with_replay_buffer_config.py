"""Configuration of GRPO with a replay buffer."""

from dataclasses import dataclass

from trl.options.groups import documented, option
from trl.trainer.grpo_config import GRPOConfig


@documented
@dataclass
class GRPOWithReplayBufferConfig(GRPOConfig):
    """Settings of `GRPOWithReplayBufferTrainer`: those of `GRPOConfig` and the one below.

    Example:
        >>> from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferConfig
        >>> GRPOWithReplayBufferConfig("my-model", replay_buffer_size=16, use_cpu=True).replay_buffer_size
        16
    """

    replay_buffer_size: int = option(
        64,
        "Groups of earlier completions that are kept, those of high reward and deviation; they replace new groups "
        "whose rewards are all equal. 0: none, as GRPO.",
        ">= 0",
    )
