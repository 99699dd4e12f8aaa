"""PAPO: GRPO on images that also learns to look at them. Names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "PAPOConfig": "trl.experimental.papo.papo_config",
    "PAPOTrainer": "trl.experimental.papo.papo_trainer",
}

if TYPE_CHECKING:
    from trl.experimental.papo.papo_config import PAPOConfig as PAPOConfig
    from trl.experimental.papo.papo_trainer import PAPOTrainer as PAPOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
