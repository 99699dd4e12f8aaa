"""Supervised fine-tuning from the command line: `trl sft`, or `accelerate launch -m trl.scripts.sft`."""

from trl.scripts.training import training_command

main, make_parser = training_command("sft", __name__)
