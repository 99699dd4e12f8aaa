"""Configuration of Kahneman-Tversky optimisation."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from trl.objectives.pairs import require_beta
from trl.objectives.unpaired import KTO_LOSSES, KTOOptions
from trl.options.dataset import DatasetPreparation
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.model import ModelInit
from trl.options.preference import (
    Dropout,
    EncoderDecoder,
    EvaluationSamples,
    FusedLoss,
    ImplicitReward,
    OlderCollation,
    PrefixSharing,
    PromptFirstLengths,
    ReferencePolicy,
)
from trl.options.training import TrainingDefaults


@documented
@dataclass
class KTOConfig(
    ReferencePolicy,
    EvaluationSamples,
    PrefixSharing,
    PromptFirstLengths,
    ImplicitReward,
    Dropout,
    FusedLoss,
    EncoderDecoder,
    OlderCollation,
    DatasetPreparation,
    ModelInit,
    TrainingDefaults,
):
    """Settings of `KTOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import KTOConfig
        >>> args = KTOConfig("my-model", desirable_weight=1.33, use_cpu=True)
        >>> args.beta, args.loss_type, args.train_sampling_strategy
        (0.1, 'kto', 'sequential')
    """

    learning_rate: float = changed_default(TrainingArguments, "learning_rate", 1e-6)
    train_sampling_strategy: str = changed_default(TrainingArguments, "train_sampling_strategy", "sequential")
    loss_type: str = field(
        default="kto",
        metadata={
            "help": "Loss of a completion: 'kto', compared with the step's KL estimate, or 'apo_zero_unpaired', compared "
            "with 0. Averaged over the completions of an optimiser step.",
            "choices": tuple(KTO_LOSSES),
        },
    )
    desirable_weight: float = field(
        default=1.0, metadata={"help": "Factor of the losses of desirable completions, >= 0."}
    )
    undesirable_weight: float = field(
        default=1.0, metadata={"help": "Factor of the losses of undesirable completions, >= 0."}
    )

    def check(self) -> None:
        super().check()
        self.kto_options()
        require_beta(self.beta, self.loss_type)

    def kto_options(self) -> KTOOptions:
        """The settings that the loss takes.

        Raises: ValueError for an unknown loss_type, a beta or a weight below 0.
        """
        return KTOOptions(self.loss_type, self.beta, self.desirable_weight, self.undesirable_weight)
