"""A reference that follows the bias-corrected average of the policy's weights (BEMA). Public names are lazy.

`DPOTrainer` is the one of `trl`: it hands its reference to this `BEMACallback` as it does to any callback that moves it.
"""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "BEMACallback": "trl.experimental.bema_for_ref_model.callback",
    "DPOTrainer": "trl.trainer.dpo_trainer",
}

if TYPE_CHECKING:
    from trl.experimental.bema_for_ref_model.callback import BEMACallback as BEMACallback
    from trl.trainer.dpo_trainer import DPOTrainer as DPOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
