"""What the user sees: progress, the loss as it falls, replies side by side, the table of stages, how to go on."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from trl.scripts.quickstart.task import Task

if TYPE_CHECKING:
    from trl.scripts.quickstart.stages import StageResult

PRINTED_LINES = 10
SAMPLES = 8
SHOWN_CHARACTERS = 10


class Column(NamedTuple):
    """A column of the table of stages: a field of their results, and what it means; one without numbers is left out."""

    title: str
    field: str
    form: str
    meaning: str = ""


COLUMNS = (
    Column("exact match", "exact_match", ".1%", "greedy answers that are the right number and nothing else"),
    Column(
        "pair accuracy",
        "pair_accuracy",
        ".1%",
        "right answer scored above a wrong one (reward: by its score; dpo: by its log-ratio to sft)",
    ),
    Column("reward", "reward", "+.2f", "mean score of the greedy answers by the reward model"),
    Column("KL from sft", "kl", ".2f", "nats per sampled answer"),
    Column("steps", "steps", "d"),
    Column("seconds", "seconds", ".0f"),
)


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

    def pairs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """How many pairs there are, and the first one."""
        first = rows[0]
        question, right, wrong = (first[key][-1]["content"] for key in ("prompt", "chosen", "rejected"))
        self.say(
            f"{len(rows):,} pairs of a right and a wrong answer, such as: {question}  {right}, not {wrong}"
        )

    def earlier_run(self, kept: Sequence[str], replaced: Sequence[Path]) -> None:
        """Which stages of an earlier run are kept, and which of its files will be replaced."""
        if kept:
            self.say("Goes on from an earlier run, of which these stages are kept: " + ", ".join(kept))
        if replaced:
            self.say("Replaces the results of an earlier run: " + ", ".join(str(path) for path in replaced))

    def reached(self, result: "StageResult", held_out: int) -> None:
        """What a stage reached on what was held out."""
        if result.exact_match is not None:
            right = round(result.exact_match * held_out)
            self.say(
                f"Exact match on held-out problems after {result.stage}: {result.exact_match:.1%} ({right} of {held_out})"
            )
        if result.pair_accuracy is not None:
            self.say(f"Pair accuracy on held-out problems after {result.stage}: {result.pair_accuracy:.1%}")

    def samples(self, task: Task, replies: Mapping[str, list[str]]) -> None:
        """Replies of every stage to the same held-out problems."""
        table = Table(title="Answers to problems it never saw", title_justify="left")
        table.add_column("question", no_wrap=True)
        for stage in replies:
            table.add_column(stage, no_wrap=True)
        table.add_column("right", justify="right", no_wrap=True)
        for index, problem in enumerate(task.held_out[:SAMPLES]):
            cells = [
                _verdict(task.is_correct(problem, texts[index]), texts[index]) for texts in replies.values()
            ]
            table.add_row(escape(task.question(problem)), *cells, task.answer(problem))
        self.console.print()
        self.console.print(table)

    def stages(self, results: Sequence["StageResult"]) -> None:
        """The table of stages."""
        table = Table(title="Stage by stage, on held-out problems", title_justify="left")
        table.add_column("stage")
        columns = [
            each for each in COLUMNS if any(getattr(result, each.field) is not None for result in results)
        ]
        for column in columns:
            table.add_column(column.title, justify="right")
        for result in results:
            table.add_row(
                result.stage, *(_cell(getattr(result, column.field), column.form) for column in columns)
            )
        self.console.print()
        self.console.print(table)
        for column in columns:
            if column.meaning:
                self.say(f"{column.title}: {column.meaning}")

    def files(self, method: str, output_dir: Path, files: Sequence[Path]) -> None:
        """Where everything is, and the commands to go on with."""
        model_dir = output_dir / method
        self.heading("Saved")
        self.say(f"Model: {model_dir}")
        for path in files:
            self.say(f"Also:  {path}")
        self.heading("To go on")
        self.say("Train it further, on the same data or on yours:\n")
        for needed, command in COMMANDS.items():
            if output_dir / needed in files:
                self.say(command.format(model_dir=model_dir, output_dir=output_dir))
        self.say("")
        self.say("Ask it something, in Python:\n")
        self.say(SNIPPET.format(model_dir=model_dir))


# by the file that a command reads
COMMANDS = {
    "train.jsonl": "  trl sft --model_name_or_path {model_dir} --dataset_name {output_dir}/train.jsonl --assistant_only_loss true "
    "--learning_rate 1e-3 --output_dir {output_dir}/more_sft",
    "pairs.jsonl": "  trl dpo --model_name_or_path {model_dir} --dataset_name {output_dir}/pairs.jsonl --learning_rate 3e-4 "
    "--output_dir {output_dir}/more_dpo",
    "prompts.jsonl": "  trl grpo --model_name_or_path {model_dir} --dataset_name {output_dir}/prompts.jsonl "
    "--reward_funcs trl.scripts.quickstart.online.is_right --max_completion_length 8 --per_device_train_batch_size 256 "
    "--learning_rate 3e-4 --max_steps 100 --output_dir {output_dir}/more_grpo",
}

SNIPPET = """\
  from transformers import pipeline

  ask = pipeline("text-generation", "{model_dir}")
  print(ask([{{"role": "user", "content": "What is 23 + 48?"}}], max_new_tokens=8)[0]["generated_text"][-1])
"""


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _verdict(is_correct: bool, reply: str) -> str:
    text = "".join(
        sign if sign.isascii() and sign.isprintable() else "\N{MIDDLE DOT}" for sign in reply.strip()
    )
    text = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    colour = "green" if is_correct else "red"
    return f"[{colour}]{escape(text) or '(nothing)'}[/{colour}]"


class Shown(NamedTuple):
    """How a logged number is printed."""

    label: str
    form: str


class TrainingProgress(TrainerCallback):
    """A progress bar with the first of the shown numbers in it, and a line with all for every tenth of the training."""

    def __init__(self, report: Report, stage: str, shown: Mapping[str, Shown]) -> None:
        self.report, self.stage, self.shown = report, stage, shown
        self._printed: int | None = None
        console = report.console
        self._bar = Progress(
            TextColumn(stage),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[latest]}"),
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
        self._began, self._first = time.perf_counter(), state.global_step
        self._task = self._bar.add_task("training", total=state.max_steps, completed=self._first, latest="")
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the numbers; print them if another tenth of the steps is done."""
        if not self.shown.keys() <= (logs or {}).keys():
            return
        texts = [f"{shown.label} {format(logs[name], shown.form)}" for name, shown in self.shown.items()]
        self._bar.update(self._task, latest=texts[0])
        tenth = state.global_step * PRINTED_LINES // state.max_steps
        if self._printed is None or tenth > self._printed:
            self._printed = tenth
            texts.append(self._time_left(state))
            self.report.say("   ".join([f"step {state.global_step:>5} of {state.max_steps}", *texts]))

    def _time_left(self, state: Any) -> str:
        pace = (time.perf_counter() - self._began) / max(1, state.global_step - self._first)
        return f"at most {pace * (state.max_steps - state.global_step):.0f} s left"

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the bar away."""
        self._bar.stop()
