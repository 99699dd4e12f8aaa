"""Process reward modelling from the command line: `trl prm`, or `accelerate launch -m trl.scripts.prm`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("prm")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
