"""Known import paths; these modules only re-export. Names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {"BestOfNSampler": "trl.rollouts.best_of_n"}

if TYPE_CHECKING:
    from trl.rollouts.best_of_n import BestOfNSampler as BestOfNSampler

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
