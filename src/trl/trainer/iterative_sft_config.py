"""Configuration of iterative supervised fine-tuning."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from transformers import TrainingArguments

from trl.options.checks import check_one_of
from trl.options.dataset import SequenceLength
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.preference import CompletionLengths, TruncationMode
from trl.trainer.sft_config import SFTConfig


@documented
@dataclass
class IterativeSFTConfig(SFTConfig):
    """Settings of `IterativeSFTTrainer`: those of `SFTConfig` and the ones below.

    `max_steps` is the number of optimiser steps that the learning rate's schedule is made for; without it the schedule
    stays where it is after its warm-up. Rows are never packed.

    Example:
        >>> from trl import IterativeSFTConfig
        >>> args = IterativeSFTConfig("my-model", max_length=512, use_cpu=True)
        >>> args.truncation_mode, args.optimize_device_cache
        ('keep_end', False)
    """

    learning_rate: float = changed_default(TrainingArguments, "learning_rate", 5e-5)
    max_length: int | None = changed_default(SequenceLength, "max_length", None)
    truncation_mode: Literal["keep_end", "keep_start"] = changed_default(
        CompletionLengths, "truncation_mode", "keep_end"
    )
    optimize_device_cache: bool = field(
        default=False,
        metadata={
            "help": "Give unused accelerator memory back after every call of `step`: slower, for less memory."
        },
    )

    def check(self) -> None:
        super().check()
        check_one_of("truncation_mode", self.truncation_mode, get_args(TruncationMode))
        if self.packing:
            raise ValueError(
                "packing=True has no meaning for rows that are given to step, expected False. Use padding_free=True for "
                "batches without padding."
            )
        self._check_fractions()

    def _check_fractions(self) -> None:
        """A part of a run needs a run of known length."""
        names = ("warmup_steps", "logging_steps", "eval_steps", "save_steps")
        parts = [f"{name}={getattr(self, name)}" for name in names if 0 < (getattr(self, name) or 0) < 1]
        if self.max_steps <= 0 and parts:
            raise ValueError(
                f"{', '.join(parts)} is a part of max_steps, which is {self.max_steps}. Set max_steps, or give whole numbers."
            )
