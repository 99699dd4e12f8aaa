"""Kahneman-Tversky optimisation from the command line: `trl kto`, or `accelerate launch -m trl.scripts.kto`."""

from trl.scripts.training import training_command

main, make_parser = training_command("kto", __name__)
