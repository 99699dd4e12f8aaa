"""Configuration of process reward models."""

from dataclasses import dataclass

from transformers import TrainingArguments

from trl.options.groups import documented, option, same
from trl.options.shared import shared
from trl.options.training import RowOptions


@documented
@dataclass
class PRMConfig(RowOptions):
    r"""Settings of `PRMTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl.experimental.prm import PRMConfig
        >>> args = PRMConfig("my-prm", step_separator="\n\n", use_cpu=True)
        >>> args.learning_rate, args.max_prompt_length, args.train_on_last_step_only
        (1e-05, 512, False)
    """

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-5)
    max_prompt_length: int | None = shared("max_prompt_length")
    max_completion_length: int | None = shared("max_completion_length")
    disable_dropout: bool = shared("disable_dropout")
    step_separator: str = option(
        "\n", "Text behind every step; its last token carries the class of the step. Score with the same one."
    )
    train_on_last_step_only: bool = option(
        False, "Train on the class of each solution's last step only; evaluation is on all steps."
    )

    def check(self) -> None:
        super().check()
        if not isinstance(self.step_separator, str) or not self.step_separator:
            raise ValueError(
                f"step_separator must be a non-empty text, got {self.step_separator!r}. Use '\\n', the default."
            )
