"""GSPO-token: `GRPOTrainer` with `importance_sampling_level="sequence_token"`. Public names are lazy.

It is the trainer of `trl`, which knows this level as it knows the others.
"""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {"GRPOTrainer": "trl.trainer.grpo_trainer"}

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer as GRPOTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
