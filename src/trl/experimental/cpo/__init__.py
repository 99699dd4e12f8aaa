"""Contrastive preference optimisation at its 0.26 path. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "CPOConfig": "trl.trainer.cpo_config",
    "CPOTrainer": "trl.trainer.cpo_trainer",
}

if TYPE_CHECKING:
    from trl.trainer.cpo_config import CPOConfig as CPOConfig
    from trl.trainer.cpo_trainer import CPOTrainer as CPOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
