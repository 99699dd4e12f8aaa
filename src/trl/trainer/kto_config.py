"""Configuration of Kahneman-Tversky optimisation."""

from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from trl.objectives.pairs import require_beta
from trl.objectives.unpaired import KTO_LOSSES
from trl.options.groups import documented, option, same
from trl.options.methods import PromptFirstOptions, ReferencePolicy
from trl.options.shared import PrefixSharingMode, shared


@documented
@dataclass
class KTOConfig(ReferencePolicy, PromptFirstOptions):
    """Settings of `KTOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import KTOConfig
        >>> args = KTOConfig("my-model", desirable_weight=1.33, use_cpu=True)
        >>> args.beta, args.loss_type, args.train_sampling_strategy
        (0.1, 'kto', 'sequential')
    """

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-6)
    train_sampling_strategy: str = same(TrainingArguments, "train_sampling_strategy", "sequential")
    loss_type: str = option(
        "kto",
        "Loss of a completion: 'kto', compared with the step's KL estimate, or 'apo_zero_unpaired', compared with 0. "
        "Averaged over the completions of an optimiser step.",
        choices=tuple(KTO_LOSSES),
    )
    desirable_weight: float = option(1.0, "Factor of the losses of desirable completions, >= 0.")
    undesirable_weight: float = option(1.0, "Factor of the losses of undesirable completions, >= 0.")
    prefix_sharing: PrefixSharingMode = shared("prefix_sharing")
    use_liger_loss: bool | None = shared("use_liger_loss")
    base_model_attribute_name: str = shared("base_model_attribute_name")

    def check(self) -> None:
        super().check()
        require_beta(self.beta, self.loss_type)

    def loss_options(self) -> dict[str, Any]:
        """The settings that `kto_terms` takes."""
        names = ("loss_type", "beta", "desirable_weight", "undesirable_weight")
        return {name: getattr(self, name) for name in names}
