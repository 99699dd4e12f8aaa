"""XPO from the command line: `trl xpo`, or `accelerate launch -m trl.scripts.xpo`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("xpo")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
