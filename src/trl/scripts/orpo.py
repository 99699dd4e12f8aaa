"""Odds-ratio preference optimisation from the command line: `trl orpo`, or `accelerate launch -m trl.scripts.orpo`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("orpo")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
