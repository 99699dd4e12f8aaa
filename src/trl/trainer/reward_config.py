"""Configuration of reward modelling."""

from dataclasses import dataclass

from transformers import TrainingArguments

from trl.options.groups import documented, option, same
from trl.options.shared import PrefixSharingMode, shared
from trl.options.training import SequenceOptions


@documented
@dataclass
class RewardConfig(SequenceOptions):
    """Settings of `RewardTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import RewardConfig
        >>> args = RewardConfig("my-reward-model", center_rewards_coefficient=0.01, use_cpu=True)
        >>> args.learning_rate, args.max_length, args.prefix_sharing
        (0.0001, 1024, 'auto')
    """

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-4)
    max_length: int | None = shared(
        "max_length",
        help="Longest sequence, with its prompt, in tokens: pairs with a longer one are left out and counted. None: no "
        "limit.",
    )
    center_rewards_coefficient: float | None = option(
        None,
        "Weight of the squared sum of a pair's rewards in its loss, which keeps rewards near 0; 0.01 is recommended "
        "(arXiv:2312.09244). None: none.",
    )
    prefix_sharing: PrefixSharingMode = shared("prefix_sharing")
    disable_dropout: bool = shared("disable_dropout")
