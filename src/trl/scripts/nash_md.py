"""Nash-MD from the command line: `trl nash-md`, or `accelerate launch -m trl.scripts.nash_md`."""

from trl.scripts.training import training_command

main, make_parser = training_command("nash-md", __name__)
