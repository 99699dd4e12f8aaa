"""GFPO: of many completions of a prompt, the best by a second measure are trained on. Public names are lazy."""

from trl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
