"""Supervised fine-tuning from the command line: `trl sft`, or `accelerate launch -m trl.scripts.sft`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("sft")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
