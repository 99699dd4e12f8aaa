"""`CPOTrainer` at its 0.26 path."""

from trl.trainer.cpo_trainer import CPOTrainer as CPOTrainer
