"""Contrastive preference optimisation from the command line: `trl cpo`, or `accelerate launch -m trl.scripts.cpo`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("cpo")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
