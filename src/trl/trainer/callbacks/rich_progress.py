"""Progress of a run drawn with rich instead of tqdm: bars for training and evaluation over the newest metrics."""

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback
from transformers.trainer_utils import has_length


class RichProgressCallback(TrainerCallback):
    """Shows training and evaluation bars and the newest metrics, on the main process only.

    Use it in the place of the trainer's own bar: `args.disable_tqdm=True, callbacks=[RichProgressCallback()]`.
    """

    console: Console | None = None  # None: the terminal

    def __init__(self):
        self.live: Live | None = None
        self.metrics: dict[str, str] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero or self.live is not None:
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.bars = Progress(TextColumn("{task.description}"), *columns, console=self.console)
        self.training = self.bars.add_task("Training", total=state.max_steps, completed=state.global_step)
        self.evaluation = self.bars.add_task("Evaluating", visible=False)
        self.live = Live(self._view(), console=self.console, refresh_per_second=4)
        self.live.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.live is not None:
            self.bars.update(self.training, completed=state.global_step)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self.live is not None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.bars.update(self.evaluation, advance=1, total=total, visible=True)

    def on_evaluate(self, args, state, control, **kwargs):
        if self.live is not None:
            self.bars.reset(self.evaluation, visible=False)

    def on_predict(self, args, state, control, **kwargs):
        self.on_evaluate(args, state, control)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.live is not None and logs:
            values = {"step": state.global_step, **logs}
            values.pop("total_flos", None)
            self.metrics |= {n: f"{v:.4g}" if isinstance(v, float) else str(v) for n, v in values.items()}
            self.live.update(self._view())

    def on_train_end(self, args, state, control, **kwargs):
        if self.live is not None:
            self.live.update(self._view(), refresh=True)
            self.live.stop()
            self.live = None

    def _view(self) -> Group:
        table = Table(show_header=False, box=None)
        for name, value in self.metrics.items():
            table.add_row(name, value)
        return Group(self.bars, table)
