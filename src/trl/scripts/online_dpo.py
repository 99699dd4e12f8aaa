"""Online DPO from the command line: `trl online-dpo`, or `accelerate launch -m trl.scripts.online_dpo`."""

from trl.scripts.training import training_command

main, make_parser = training_command("online-dpo", __name__)
