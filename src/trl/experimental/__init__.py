"""Variants that are still moving, and the 0.26 import paths."""

from trl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
