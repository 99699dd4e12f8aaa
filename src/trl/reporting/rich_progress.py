"""A live terminal view of a training run: bars for training and evaluation over the newest metrics."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_HIDDEN = ("total_flos",)


class RichProgress:
    """Two progress bars and a table of the newest value of every metric, redrawn in place until `stop`."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._training = _bars(console)
        self._evaluation = _bars(console)
        self._training_task = self._training.add_task("Training", total=total_steps)
        self._evaluation_task: Any = None
        self.metrics: dict[str, str] = {}
        self._live = Live(self._view(), console=console, refresh_per_second=4)
        self._live.start()

    def advance_to(self, step: int) -> None:
        """Set the training bar to `step` optimiser steps."""
        self._training.update(self._training_task, completed=step)

    def advance_evaluation(self, total: int | None) -> None:
        """One more evaluation batch of `total` (`None` where it is unknown)."""
        if self._evaluation_task is None:
            self._evaluation_task = self._evaluation.add_task("Evaluating", total=total)
        self._evaluation.advance(self._evaluation_task)

    def end_evaluation(self) -> None:
        """Take the evaluation bar away."""
        if self._evaluation_task is not None:
            self._evaluation.remove_task(self._evaluation_task)
            self._evaluation_task = None

    def show(self, logs: Mapping[str, Any]) -> None:
        """Put the newest values into the table; metrics that are not in `logs` keep theirs."""
        values = {name: _formatted(value) for name, value in logs.items() if name not in _HIDDEN}
        self.metrics.update(values)
        self._live.update(self._view())

    def stop(self) -> None:
        """Draw a last time and give the terminal back."""
        self._live.update(self._view(), refresh=True)
        self._live.stop()

    def _view(self) -> Group:
        table = Table(show_header=False, box=None)
        for name, value in self.metrics.items():
            table.add_row(name, value)
        return Group(self._training, self._evaluation, table)


def _bars(console: Console | None) -> Progress:
    text = TextColumn("{task.description}")
    return Progress(
        text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=console
    )


def _formatted(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
