"""Configuration of GRPO with a replay buffer."""

from dataclasses import dataclass, field

from trl.options.checks import check_at_least
from trl.options.docs import documented
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

    replay_buffer_size: int = field(
        default=64,
        metadata={
            "help": "Groups of earlier completions that are kept, those of high reward and deviation; they take the place of new "
            "groups whose rewards are all equal. 0: none, as GRPO."
        },
    )

    def check(self) -> None:
        super().check()
        check_at_least("replay_buffer_size", self.replay_buffer_size, minimum=0, optional=False)
