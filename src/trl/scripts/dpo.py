"""Direct preference optimisation from the command line: `trl dpo`, or `accelerate launch -m trl.scripts.dpo`."""

from trl.scripts.training import training_command

main, make_parser = training_command("dpo", __name__)
