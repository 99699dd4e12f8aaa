"""A table of what the model says to evaluation prompts, growing with training."""

import pandas as pd
from transformers import GenerationConfig, Trainer, TrainerCallback

from trl.reporting.tables import print_rich_table
from trl.trainer.samples import evaluation_rows, sample_completions, send_table


class LogCompletionsCallback(TrainerCallback):
    """Generates completions of evaluation prompts during training and sends them to the trackers of `report_to`.

    Every `freq` optimiser steps (default: `eval_steps`) the model completes the first `num_prompts` rows (default:
    all) of the trainer's `eval_dataset`, and a table `completions` of step, prompt and completion, with all rows so
    far, goes to wandb, trackio, comet_ml, mlflow or tensorboard; where none of them is active, the new rows are
    printed. Without `generation_config` the model's own is used, with 128 new tokens if it sets no limit.
    """

    def __init__(
        self,
        trainer: Trainer,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ):
        if freq is not None and freq < 1:
            raise ValueError(f"freq must be at least 1, got {freq}. Leave it out to use eval_steps.")
        self.trainer, self.generation_config, self.freq = trainer, generation_config, freq
        self.rows = evaluation_rows(trainer, num_prompts, "LogCompletionsCallback")
        self.table: list[dict[str, object]] = []
        self._last_step = -1

    def on_step_end(self, args, state, control, **kwargs):
        freq = self.freq or int(state.eval_steps or 0)
        due = freq > 0 and state.global_step % freq == 0
        if not due or state.global_step == self._last_step:
            return
        self._last_step = state.global_step
        samples = sample_completions(self.trainer, self.rows, self.generation_config)
        new = [{"step": state.global_step, **sample._asdict()} for sample in samples]
        self.table += new
        if not self.trainer.accelerator.is_main_process:
            return
        if not send_table(self.trainer, "completions", pd.DataFrame(self.table), has_all_steps=True):
            print_rich_table(pd.DataFrame(new))
