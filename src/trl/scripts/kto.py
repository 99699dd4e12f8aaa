"""Kahneman-Tversky optimisation from the command line: `trl kto`, or `accelerate launch -m trl.scripts.kto`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("kto")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
