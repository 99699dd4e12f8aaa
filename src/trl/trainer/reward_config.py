"""Configuration of reward modelling."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from trl.options.batching import PadMultiple
from trl.options.dataset import ChatTemplate, DatasetPreparation, PadToken, SequenceLength
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.memory import Offloading
from trl.options.model import ModelInit
from trl.options.preference import Dropout, PrefixSharing
from trl.options.training import TrainingDefaults


@documented
@dataclass
class RewardConfig(
    Offloading,
    PrefixSharing,
    PadMultiple,
    SequenceLength,
    Dropout,
    PadToken,
    ChatTemplate,
    DatasetPreparation,
    ModelInit,
    TrainingDefaults,
):
    """Settings of `RewardTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import RewardConfig
        >>> args = RewardConfig("my-reward-model", center_rewards_coefficient=0.01, use_cpu=True)
        >>> args.learning_rate, args.max_length, args.prefix_sharing
        (0.0001, 1024, 'auto')
    """

    learning_rate: float = changed_default(TrainingArguments, "learning_rate", 1e-4)
    max_length: int | None = field(
        default=1024,
        metadata={
            "help": "Longest sequence, prompt included, in tokens: pairs with a longer one are left out, and counted. None: "
            "no limit."
        },
    )
    center_rewards_coefficient: float | None = field(
        default=None,
        metadata={
            "help": "Weight of the squared sum of a pair's rewards, which is added to its loss and keeps rewards near 0. "
            "0.01 is recommended (arXiv:2312.09244). None: none."
        },
    )
