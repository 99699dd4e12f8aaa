"""Adapters written into every checkpoint, for loops that are not those of this library."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl.models.peft import is_peft_model


class PeftSavingCallback(TrainerCallback):
    """Saves the adapter of a PEFT model into each checkpoint folder. The trainers of this library do so by themselves."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Write the adapter, on the process that saves."""
        if args.should_save and is_peft_model(kwargs["model"]):
            kwargs["model"].save_pretrained(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")
