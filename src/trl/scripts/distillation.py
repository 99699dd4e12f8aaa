"""On-policy distillation: `trl distillation`, or `accelerate launch -m trl.scripts.distillation`."""

from trl.scripts.training import training_command

main, make_parser = training_command("distillation", __name__)
