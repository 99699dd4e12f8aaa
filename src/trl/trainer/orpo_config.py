"""Configuration of odds-ratio preference optimisation."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from trl.objectives.pairs import check_beta
from trl.options.dataset import DatasetPreparation
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.model import ModelInit
from trl.options.preference import (
    Dropout,
    EncoderDecoder,
    EvaluationSamples,
    OlderCollation,
    PrefixSharing,
    PromptFirstLengths,
)
from trl.options.training import TrainingDefaults


@documented
@dataclass
class ORPOConfig(
    EvaluationSamples,
    PrefixSharing,
    PromptFirstLengths,
    Dropout,
    EncoderDecoder,
    OlderCollation,
    DatasetPreparation,
    ModelInit,
    TrainingDefaults,
):
    """Settings of `ORPOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import ORPOConfig
        >>> args = ORPOConfig("my-model", beta=0.25, use_cpu=True)
        >>> args.beta, args.max_length
        (0.25, 1024)
    """

    learning_rate: float = changed_default(TrainingArguments, "learning_rate", 1e-6)
    beta: float = field(
        default=0.1,
        metadata={
            "help": "Weight of the odds-ratio loss beside the likelihood of the chosen sequences: the paper's lambda."
        },
    )

    def check(self) -> None:
        super().check()
        check_beta(self.beta)
