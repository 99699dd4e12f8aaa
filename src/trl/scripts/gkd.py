"""Knowledge distillation from the command line: `trl gkd`, or `accelerate launch -m trl.scripts.gkd`."""

from trl.scripts.training import training_command

main, make_parser = training_command("gkd", __name__)
