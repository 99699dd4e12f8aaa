"""Contrastive preference optimisation from the command line: `trl cpo`, or `accelerate launch -m trl.scripts.cpo`."""

from trl.scripts.training import training_command

main, make_parser = training_command("cpo", __name__)
