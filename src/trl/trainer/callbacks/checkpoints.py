"""Callbacks that write checkpoints: adapters for other loops, `enable_jit_checkpoint` where an optimiser step ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from trl.checkpoints.wholeness import has_weights
from trl.models.peft import is_peft_model


class CheckpointOnSignal(TrainerCallback):
    """Saves at SIGTERM, at the end of an optimiser step, in the place of transformers' callback.

    That one may save in the middle of a step: what the step has drawn and measured by then would be part of the
    checkpoint, and count again in the resumed run. All processes save at the same step.
    """

    def __init__(self, theirs: JITCheckpointCallback) -> None:
        self._theirs, self.is_made = theirs, False  # made: saved, and the run stops

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Save, after this step was logged, and stop."""
        self._save_if_asked(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """The same for a signal that came after the epoch's last step."""
        self._save_if_asked(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Give the signal back to who had it."""
        self._theirs.on_train_end(args, state, control)

    def _save_if_asked(self, control: TrainerControl) -> None:
        manager, trainer = self._theirs.jit_manager, self._theirs.trainer
        accelerator = trainer.accelerator  # type: ignore[attr-defined]
        asked = not self.is_made and manager is not None and manager.is_checkpoint_requested
        if accelerator.num_processes > 1:
            asked = accelerator.reduce(torch.tensor(int(asked), device=accelerator.device), reduction="sum")
        if not asked:
            return
        self.is_made = control.should_training_stop = True
        control.should_save = not control.should_evaluate
        if control.should_evaluate:  # which may take longer than the time that is left
            trainer._save_checkpoint(trainer.model, trial=None)  # type: ignore[attr-defined]


def at_step_ends(callbacks: list[TrainerCallback]) -> None:
    """Let transformers' callback save at the end of steps only."""
    for place, callback in enumerate(callbacks):
        if isinstance(callback, JITCheckpointCallback):
            callbacks[place] = CheckpointOnSignal(callback)


class AtTrainBegin(TrainerCallback):
    """Calls a function when the state of a run is set up, before its first evaluation and its first step."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Call it."""
        self._begin()


class PeftSavingCallback(TrainerCallback):
    """Saves the adapter of a PEFT model into each checkpoint folder, as the trainers of this library do themselves."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Write the adapter, on the process that saves, if it is not there and `async_save` will not write it."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        writes = args.should_save and not getattr(args, "async_save", False)
        if writes and is_peft_model(kwargs["model"]) and not has_weights(folder):
            kwargs["model"].save_pretrained(folder)
