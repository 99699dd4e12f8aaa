"""`CPOConfig` at its 0.26 path."""

from trl.trainer.cpo_config import CPOConfig as CPOConfig
