"""PPO on a data set of prompts. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "PPOConfig": "trl.experimental.ppo.ppo_config",
    "PPOTrainer": "trl.experimental.ppo.ppo_trainer",
}

if TYPE_CHECKING:
    from trl.experimental.ppo.ppo_config import PPOConfig as PPOConfig
    from trl.experimental.ppo.ppo_trainer import PPOTrainer as PPOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
