"""The 0.26 path of `BCOTrainer` and `BCOConfig`. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "BCOConfig": "trl.trainer.bco_config",
    "BCOTrainer": "trl.trainer.bco_trainer",
}

if TYPE_CHECKING:
    from trl.trainer.bco_config import BCOConfig as BCOConfig
    from trl.trainer.bco_trainer import BCOTrainer as BCOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
