"""Binary classifier optimisation from the command line: `trl bco`, or `accelerate launch -m trl.scripts.bco`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("bco")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
