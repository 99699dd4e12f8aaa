"""Progress of a run drawn with rich instead of tqdm."""

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from trl.reporting.rich_progress import RichProgress


class RichProgressCallback(TrainerCallback):
    """Shows training and evaluation bars and the newest metrics, on the main process only.

    Use it in the place of the trainer's own bar: `args.disable_tqdm=True, callbacks=[RichProgressCallback()]`.
    """

    def __init__(self):
        self.progress: RichProgress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self.progress is None:
            self.progress = RichProgress(state.max_steps)
            self.progress.advance_to(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.advance_to(state.global_step)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self.progress is not None:
            batches: Any = eval_dataloader
            self.progress.advance_evaluation(len(batches) if has_length(batches) else None)

    def on_evaluate(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.end_evaluation()

    def on_predict(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.end_evaluation()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.progress is not None and logs:
            self.progress.show({"step": state.global_step, **logs})

    def on_train_end(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
