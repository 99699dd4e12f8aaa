"""GRPO for diffusion models: several images of a prompt are compared with each other. Public names are lazy."""

from trl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
