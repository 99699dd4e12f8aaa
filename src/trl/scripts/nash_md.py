"""Nash-MD from the command line: `trl nash-md`, or `accelerate launch -m trl.scripts.nash_md`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("nash-md")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
