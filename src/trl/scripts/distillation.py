"""On-policy distillation: `trl distillation`, or `accelerate launch -m trl.scripts.distillation`."""

import sys

from trl.scripts.running import run_script
from trl.scripts.training import training_command

main, make_parser = training_command("distillation")

if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
