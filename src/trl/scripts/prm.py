"""Process reward modelling from the command line: `trl prm`, or `accelerate launch -m trl.scripts.prm`."""

from trl.scripts.training import training_command

main, make_parser = training_command("prm", __name__)
