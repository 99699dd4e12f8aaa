"""`ORPOConfig` at its 0.26 path."""

from trl.trainer.orpo_config import ORPOConfig as ORPOConfig
