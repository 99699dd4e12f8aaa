"""A quick answer to `trl <command> --help`."""

import importlib


def leave_out_peft() -> None:
    """Keep transformers from importing PEFT in this process, which is to print a help text and end.

    `transformers.training_args` (5.19), needed for its options, imports PEFT for a type check wherever it is
    installed, and with it bitsandbytes, scikit-learn and TorchInductor: two thirds of the time to the help text.
    To be removed once `transformers.trainer_utils` imports PEFT where it uses it.
    """
    utils = importlib.import_module("transformers.utils")
    setattr(utils, "is_peft_available", lambda *_, **__: False)  # noqa: B010 - the module's own name, replaced
