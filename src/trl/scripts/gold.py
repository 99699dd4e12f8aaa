"""Distillation across tokenizers (GOLD): `trl gold`, or `accelerate launch -m trl.scripts.gold`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("gold")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
