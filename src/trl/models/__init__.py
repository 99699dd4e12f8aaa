"""Loading, PEFT, quantisation, value heads, attention over segments, the scoring forward. Public names are lazy."""

from trl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
