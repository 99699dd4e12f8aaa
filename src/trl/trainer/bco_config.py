"""Configuration of binary classifier optimisation."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from trl.objectives.pairs import check_beta, require_beta
from trl.options.checks import check_at_least
from trl.options.dataset import DatasetPreparation
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.model import ModelInit
from trl.options.preference import (
    Dropout,
    EncoderDecoder,
    EvaluationSamples,
    ImplicitReward,
    OlderCollation,
    PromptFirstLengths,
    ReferencePolicy,
)
from trl.options.training import TrainingDefaults


@documented
@dataclass
class BCOConfig(
    ReferencePolicy,
    EvaluationSamples,
    PromptFirstLengths,
    ImplicitReward,
    Dropout,
    EncoderDecoder,
    OlderCollation,
    DatasetPreparation,
    ModelInit,
    TrainingDefaults,
):
    """Settings of `BCOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import BCOConfig
        >>> args = BCOConfig("my-model", prompt_sample_size=512, use_cpu=True)
        >>> args.beta, args.min_density_ratio, args.max_density_ratio
        (0.1, 0.5, 10.0)
    """

    train_sampling_strategy: str = changed_default(TrainingArguments, "train_sampling_strategy", "sequential")
    prompt_sample_size: int = field(
        default=1024,
        metadata={
            "help": "Prompts of each kind, desirable and undesirable, on which the classifier of prompts is fitted. Used "
            "with an embedding_func only."
        },
    )
    min_density_ratio: float = field(
        default=0.5,
        metadata={
            "help": "Smallest weight of an undesirable completion by its prompt's density ratio, >= 0."
        },
    )
    max_density_ratio: float = field(
        default=10.0,
        metadata={"help": "Largest weight of an undesirable completion by its prompt's density ratio."},
    )

    def check(self) -> None:
        super().check()
        check_beta(self.beta)
        require_beta(self.beta, "bco")
        check_at_least("prompt_sample_size", self.prompt_sample_size, minimum=1)
        if not 0 <= self.min_density_ratio <= self.max_density_ratio:
            raise ValueError(
                "min_density_ratio and max_density_ratio must satisfy 0 <= min <= max, got "
                f"{self.min_density_ratio} and {self.max_density_ratio}. The defaults are 0.5 and 10."
            )
