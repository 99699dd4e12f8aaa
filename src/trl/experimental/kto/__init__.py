"""The 0.26 path of `KTOTrainer` and `KTOConfig`. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "KTOConfig": "trl.trainer.kto_config",
    "KTOTrainer": "trl.trainer.kto_trainer",
}

if TYPE_CHECKING:
    from trl.trainer.kto_config import KTOConfig as KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer as KTOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
