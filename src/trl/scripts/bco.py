"""Binary classifier optimisation from the command line: `trl bco`, or `accelerate launch -m trl.scripts.bco`."""

from trl.scripts.training import training_command

main, make_parser = training_command("bco", __name__)
