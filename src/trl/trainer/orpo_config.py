"""Configuration of odds-ratio preference optimisation."""

from dataclasses import dataclass

from transformers import TrainingArguments

from trl.options.groups import documented, option, same
from trl.options.methods import PromptFirstOptions
from trl.options.shared import PrefixSharingMode, shared


@documented
@dataclass
class ORPOConfig(PromptFirstOptions):
    """Settings of `ORPOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import ORPOConfig
        >>> args = ORPOConfig("my-model", beta=0.25, use_cpu=True)
        >>> args.beta, args.max_length
        (0.25, 1024)
    """

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-6)
    beta: float = option(
        0.1, "Weight of the odds-ratio loss beside the likelihood of the chosen sequences: the paper's lambda."
    )
    prefix_sharing: PrefixSharingMode = shared("prefix_sharing")
