"""GFPO: of many completions of a prompt, those that score best by a second measure are learned from. Names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "GFPOConfig": "trl.experimental.gfpo.gfpo_config",
    "GFPOTrainer": "trl.experimental.gfpo.gfpo_trainer",
}

if TYPE_CHECKING:
    from trl.experimental.gfpo.gfpo_config import GFPOConfig as GFPOConfig
    from trl.experimental.gfpo.gfpo_trainer import GFPOTrainer as GFPOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
