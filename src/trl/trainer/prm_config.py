"""Configuration of process reward models."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from trl.options.dataset import DatasetPreparation
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.model import ModelInit
from trl.options.preference import Dropout, PromptLengths
from trl.options.training import TrainingDefaults


@documented
@dataclass
class PRMConfig(
    PromptLengths,
    Dropout,
    DatasetPreparation,
    ModelInit,
    TrainingDefaults,
):
    r"""Settings of `PRMTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl.experimental.prm import PRMConfig
        >>> args = PRMConfig("my-prm", step_separator="\n\n", use_cpu=True)
        >>> args.learning_rate, args.max_prompt_length, args.train_on_last_step_only
        (1e-05, 512, False)
    """

    learning_rate: float = changed_default(TrainingArguments, "learning_rate", 1e-5)
    step_separator: str = field(
        default="\n",
        metadata={
            "help": "Text behind every step. Its last token carries the class of the step: use the same one to score."
        },
    )
    train_on_last_step_only: bool = field(
        default=False,
        metadata={
            "help": "Train on the class of each solution's last step only; evaluation is on all steps."
        },
    )

    def check(self) -> None:
        super().check()
        if not isinstance(self.step_separator, str) or not self.step_separator:
            raise ValueError(
                f"step_separator must be a text of at least one character, got {self.step_separator!r}. Use '\\n', the default."
            )
