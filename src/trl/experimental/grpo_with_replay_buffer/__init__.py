"""GRPO in which groups that teach nothing give way to good groups of earlier batches. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "GRPOWithReplayBufferConfig": "trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_config",
    "GRPOWithReplayBufferTrainer": "trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_trainer",
}

if TYPE_CHECKING:
    from trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_config import (
        GRPOWithReplayBufferConfig as GRPOWithReplayBufferConfig,
    )
    from trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_trainer import (
        GRPOWithReplayBufferTrainer as GRPOWithReplayBufferTrainer,
    )

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
