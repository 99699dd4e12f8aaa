"""Known import path of `ModelConfig`."""

from trl.options.model import ModelConfig

__all__ = ["ModelConfig"]
