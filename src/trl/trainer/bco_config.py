"""Configuration of binary classifier optimisation."""

from dataclasses import dataclass

from transformers import TrainingArguments

from trl.objectives.pairs import require_beta
from trl.options.groups import documented, option, same
from trl.options.methods import PromptFirstOptions, ReferencePolicy


@documented
@dataclass
class BCOConfig(ReferencePolicy, PromptFirstOptions):
    """Settings of `BCOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import BCOConfig
        >>> args = BCOConfig("my-model", prompt_sample_size=512, use_cpu=True)
        >>> args.beta, args.min_density_ratio, args.max_density_ratio
        (0.1, 0.5, 10.0)
    """

    train_sampling_strategy: str = same(TrainingArguments, "train_sampling_strategy", "sequential")
    prompt_sample_size: int = option(
        1024,
        "Prompts of each kind, desirable and undesirable, that fit the classifier of prompts (with an embedding_func).",
        ">= 1",
    )
    min_density_ratio: float = option(
        0.5, "Smallest weight of an undesirable completion by its prompt's density ratio, >= 0."
    )
    max_density_ratio: float = option(
        10.0, "Largest weight of an undesirable completion by its prompt's density ratio.", "[0, inf]"
    )

    def check(self) -> None:
        super().check()
        require_beta(self.beta, "bco")
        if self.min_density_ratio > self.max_density_ratio:
            raise ValueError(
                f"min_density_ratio must be <= max_density_ratio, got {self.min_density_ratio} and "
                f"{self.max_density_ratio}. The defaults are 0.5 and 10."
            )
