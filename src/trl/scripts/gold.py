"""Distillation across tokenizers (GOLD): `trl gold`, or `accelerate launch -m trl.scripts.gold`."""

from trl.scripts.training import training_command

main, make_parser = training_command("gold", __name__)
