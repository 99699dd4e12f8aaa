"""REINFORCE leave-one-out from the command line: `trl rloo`, or `accelerate launch -m trl.scripts.rloo`."""

from trl._lazy import attach
from trl.scripts.arguments import RLOOScriptArguments as RLOOScriptArguments
from trl.scripts.training import training_command

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere
main, make_parser = training_command("rloo", __name__)
