"""Agents that talk to the policy over HTTP. Public names are lazy."""

from trl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
