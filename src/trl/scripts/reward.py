"""Reward modelling from the command line: `trl reward`, or `accelerate launch -m trl.scripts.reward`."""

from trl.scripts.training import training_command

main, make_parser = training_command("reward", __name__)
