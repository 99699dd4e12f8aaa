"""Online DPO from the command line: `trl online-dpo`, or `accelerate launch -m trl.scripts.online_dpo`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("online-dpo")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
