"""What the user sees: progress, the loss as it falls, replies side by side, the table of stages, how to go on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from trl.scripts.quickstart.task import Task

if TYPE_CHECKING:
    from trl.scripts.quickstart.stages import StageResult

PRINTED_LOSSES = 10
SAMPLES = 8
SHOWN_CHARACTERS = 14


class Report:
    """Prints to a console; a terminal also gets a moving progress bar."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str = "") -> None:
        """One line, never wrapped or marked up."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        """The title of a section."""
        self.console.print(f"\n[bold]{escape(text)}[/bold]", highlight=False)

    def built(self, task: Task, vocabulary: int, parameters: int) -> None:
        """What was made before training."""
        self.say(
            f"{len(task.problems):,} problems to train on, {len(task.held_out)} held out; "
            f"a vocabulary of {vocabulary} tokens; a model of {parameters:,} parameters."
        )

    def overwriting(self, paths: Sequence[Path]) -> None:
        """Which files of an earlier run will be replaced."""
        if paths:
            self.say("Replaces the results of an earlier run: " + ", ".join(str(path) for path in paths))

    def accuracy(self, result: "StageResult", held_out: int) -> None:
        """One stage's share of right answers."""
        right = round(result.exact_match * held_out)
        self.say(
            f"Exact match on held-out problems after {result.stage}: {result.exact_match:.1%} ({right} of {held_out})"
        )

    def samples(self, task: Task, replies: Mapping[str, list[str]]) -> None:
        """Replies of every stage to the same held-out problems."""
        table = Table(title="Answers to problems it never saw", title_justify="left")
        table.add_column("question", no_wrap=True)
        for stage in replies:
            table.add_column(f"{stage} answers", no_wrap=True)
        table.add_column("right answer", justify="right", no_wrap=True)
        for index, problem in enumerate(task.held_out[:SAMPLES]):
            cells = [
                _verdict(task.is_correct(problem, texts[index]), texts[index]) for texts in replies.values()
            ]
            table.add_row(escape(task.question(problem)), *cells, task.answer(problem))
        self.console.print()
        self.console.print(table)

    def stages(self, results: Sequence["StageResult"]) -> None:
        """The table of stages."""
        table = Table(title="Stage by stage", title_justify="left")
        for column in ("stage", "exact match", "training loss", "steps", "seconds"):
            table.add_column(column, justify="left" if column == "stage" else "right")
        for result in results:
            loss = "-" if result.loss is None else f"{result.loss:.4f}"
            steps = str(result.steps or "-")
            table.add_row(result.stage, f"{result.exact_match:.1%}", loss, steps, f"{result.seconds:.0f}")
        self.console.print()
        self.console.print(table)

    def files(self, model_dir: Path, output_dir: Path, others: Sequence[Path]) -> None:
        """Where everything is, and the commands to go on with."""
        self.heading("Saved")
        self.say(f"Model: {model_dir}")
        for path in others:
            self.say(f"Also:  {path}")
        self.heading("To go on")
        self.say("Train it further, here on the same conversations, or on yours:\n")
        self.say(
            f"  trl sft --model_name_or_path {model_dir} --dataset_name {output_dir / 'train.jsonl'} "
            f"--assistant_only_loss true --learning_rate 1e-3 --output_dir {output_dir / 'more'}\n"
        )
        self.say("Ask it something, in Python:\n")
        self.say(SNIPPET.format(model_dir=model_dir))


SNIPPET = """\
  from transformers import pipeline

  ask = pipeline("text-generation", "{model_dir}")
  print(ask([{{"role": "user", "content": "What is 23 + 48?"}}], max_new_tokens=8)[0]["generated_text"][-1])
"""


def _verdict(is_correct: bool, reply: str) -> str:
    text = "".join(
        sign if sign.isascii() and sign.isprintable() else "\N{MIDDLE DOT}" for sign in reply.strip()
    )
    text = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    colour = "green" if is_correct else "red"
    return f"[{colour}]{escape(text) or '(nothing)'}[/{colour}]"


class TrainingProgress(TrainerCallback):
    """A progress bar with the loss in it, and a line for every tenth of the training; keeps all logged losses."""

    def __init__(self, report: Report, stage: str) -> None:
        self.report = report
        self.losses: list[tuple[int, float]] = []
        self._printed = 0
        console = report.console
        self._bar = Progress(
            TextColumn(stage),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def replace_printers(self, trainer: Any) -> None:
        """Take the place of the callback that prints every log as a dict."""
        trainer.remove_callback(PrinterCallback)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar."""
        self._task = self._bar.add_task("training", total=state.max_steps, loss="-")
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the loss; print it if another tenth of the steps is done."""
        if "loss" not in (logs or {}):
            return
        self.losses.append((state.global_step, logs["loss"]))
        self._bar.update(self._task, loss=f"{logs['loss']:.4f}")
        tenth = state.global_step * PRINTED_LOSSES // state.max_steps
        if tenth > self._printed or len(self.losses) == 1:
            self._printed = tenth
            self.report.say(
                f"step {state.global_step:>5} of {state.max_steps}   loss {logs['loss']:.4f}"
                f"   token accuracy {logs.get('mean_token_accuracy', float('nan')):.1%}"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the bar away."""
        self._bar.stop()
