"""Configuration of iterative supervised fine-tuning."""

from dataclasses import dataclass

from transformers import TrainingArguments

from trl.options.groups import documented, option, same
from trl.options.methods import PreferenceOptions, TruncationMode
from trl.options.shared import shared
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

    learning_rate: float = same(TrainingArguments, "learning_rate", 5e-5)
    max_length: int | None = shared("max_length", None)
    truncation_mode: TruncationMode = same(PreferenceOptions, "truncation_mode")
    optimize_device_cache: bool = option(
        False, "Free unused accelerator memory after every call of `step`: slower, for less memory."
    )

    def check(self) -> None:
        super().check()
        if self.packing:
            raise ValueError(
                "packing must be False for rows that are given to step, got True. Use padding_free=True instead."
            )
        names = ("warmup_steps", "logging_steps", "eval_steps", "save_steps")
        parts = [f"{name}={getattr(self, name)}" for name in names if 0 < (getattr(self, name) or 0) < 1]
        if self.max_steps <= 0 and parts:
            raise ValueError(f"{', '.join(parts)} is a share of max_steps. Set max_steps, or give whole numbers.")
