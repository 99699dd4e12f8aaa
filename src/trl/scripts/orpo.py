"""Odds-ratio preference optimisation from the command line: `trl orpo`, or `accelerate launch -m trl.scripts.orpo`."""

from trl.scripts.training import training_command

main, make_parser = training_command("orpo", __name__)
