"""SDPO: a student learns from itself, shown a successful answer or feedback. Public names are lazy."""

from trl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
