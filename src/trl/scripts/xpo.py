"""XPO from the command line: `trl xpo`, or `accelerate launch -m trl.scripts.xpo`."""

from trl.scripts.training import training_command

main, make_parser = training_command("xpo", __name__)
