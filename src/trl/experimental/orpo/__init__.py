"""Odds-ratio preference optimisation at its 0.26 path. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "ORPOConfig": "trl.trainer.orpo_config",
    "ORPOTrainer": "trl.trainer.orpo_trainer",
}

if TYPE_CHECKING:
    from trl.trainer.orpo_config import ORPOConfig as ORPOConfig
    from trl.trainer.orpo_trainer import ORPOTrainer as ORPOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
