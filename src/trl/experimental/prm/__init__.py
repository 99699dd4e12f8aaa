"""Process reward models (Uesato et al. 2022, arXiv:2211.14275). Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "PRMConfig": "trl.trainer.prm_config",
    "PRMTrainer": "trl.trainer.prm_trainer",
}

if TYPE_CHECKING:
    from trl.trainer.prm_config import PRMConfig as PRMConfig
    from trl.trainer.prm_trainer import PRMTrainer as PRMTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
