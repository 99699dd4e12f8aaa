"""Output of the quickstart: progress lines, tables and the plot."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import TrainerCallback

from trl.scripts.quickstart.task import Row, replies, share_right

SHOWN_ROWS = 8
EXACT_MATCH = "exact_match"
Curves = dict[str, list[tuple[int, float]]]  # metric -> (optimiser step, value)


class Progress(TrainerCallback):
    """Prints the `shown` metrics (name -> label), exact match on `held_out` and the time left at each log.

    With `held_out=None` the model does not answer (a reward model). `curves` holds every logged metric.
    """

    def __init__(
        self, console: Console, shown: Mapping[str, str], tokenizer: Any, held_out: Sequence[Row] | None
    ) -> None:
        self.console, self.shown, self.tokenizer, self.held_out = console, shown, tokenizer, held_out
        self.curves: Curves = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line for a log of training."""
        if not logs or not self.shown.keys() <= logs.keys() or "train_runtime" in logs:
            return
        found = dict(logs)
        if self.held_out:
            answers = replies(kwargs["model"], self.tokenizer, self.held_out)
            found[EXACT_MATCH] = share_right(answers, self.held_out)
        for name, value in found.items():
            if isinstance(value, int | float):
                self.curves.setdefault(name, []).append((state.global_step, float(value)))
        labels = {**self.shown, EXACT_MATCH: "exact match"}
        texts = [f"{label} {found[name]:.3f}" for name, label in labels.items() if name in found]
        pace = (time.perf_counter() - self._began) / state.global_step
        texts.append(f"at most {pace * (state.max_steps - state.global_step):.0f} s left")
        self.console.print("   ".join([f"step {state.global_step:>4} of {state.max_steps}", *texts]))


def print_answers(console: Console, held_out: Sequence[Row], answers: Mapping[str, Sequence[str]]) -> None:
    """Print the answers of every stage to some held-out prompts, side by side."""
    table = Table(
        "prompt", *answers, "right", title="Answers to prompts that were not trained on", title_justify="left"
    )
    for index, row in enumerate(held_out[:SHOWN_ROWS]):
        texts = [each[index] for each in answers.values()]
        colours = ["green" if text == row["completion"] else "red" for text in texts]
        cells = [f"[{colour}]{escape(text)}[/{colour}]" for colour, text in zip(colours, texts, strict=True)]
        table.add_row(row["prompt"], *cells, row["completion"])
    console.print()
    console.print(table)


def print_stages(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """Print one row per stage: exact match and pair accuracy on held-out prompts, steps and seconds."""
    forms = {"exact_match": ".1%", "pair_accuracy": ".1%", "steps": "d", "seconds": ".0f"}
    table = Table("stage", title="Stage by stage, on held-out prompts", title_justify="left")
    for name in forms:
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        cells = ["-" if result[name] is None else format(result[name], form) for name, form in forms.items()]
        table.add_row(result["stage"], *cells)
    console.print(table)


def draw(path: Path, curves: Mapping[str, Curves]) -> None:
    """Write a PNG with one panel per stage: exact match and the accuracies that were logged.

    Raises: ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(curves), 3.6), layout="constrained")
    panels: Any = figure.subplots(1, len(curves), squeeze=False)
    for axes, (stage, found) in zip(panels[0], curves.items(), strict=True):
        axes.set(title=stage, xlabel="optimiser step", ylim=(0, 1.05))
        for name in (EXACT_MATCH, "accuracy", "rewards/accuracies", "rewards/is_right/mean"):
            if name in found:
                axes.plot(*zip(*found[name], strict=True), marker=".", label=name.replace("_", " "))
        axes.legend(loc="lower right")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
