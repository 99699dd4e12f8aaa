"""A reference that follows the bias-corrected average of the policy's weights (BEMA). Public names are lazy.

`DPOTrainer` is the one of `trl`: it hands its reference to this `BEMACallback` as it does to any callback that moves
it.
"""

from trl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
