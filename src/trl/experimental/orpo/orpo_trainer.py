"""`ORPOTrainer` at its 0.26 path."""

from trl.trainer.orpo_trainer import ORPOTrainer as ORPOTrainer
