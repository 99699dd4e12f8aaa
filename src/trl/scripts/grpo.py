"""Group relative policy optimisation from the command line: `trl grpo`, or `accelerate launch -m trl.scripts.grpo`."""

from trl._lazy import attach
from trl.scripts.arguments import GRPOScriptArguments as GRPOScriptArguments
from trl.scripts.training import training_command

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere
main, make_parser = training_command("grpo", __name__)
