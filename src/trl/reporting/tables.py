"""Tables in the terminal: metrics, and samples of what a model said."""

import io
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

if TYPE_CHECKING:
    from pandas import DataFrame

Entry = str | Sequence[Mapping[str, Any]]  # or messages


def print_rich_table(df: "DataFrame") -> None:
    """Print a `pandas.DataFrame` as a table, one row of the frame to a row."""
    table = Table(show_lines=True)
    for column in df.columns:
        table.add_column(str(column))
    for row in df.itertuples(index=False):
        table.add_row(*(escape(str(value)) for value in row))
    print_beside_bars(table)


def open_console(**options: Any) -> Console:
    """A console on stdout, which shows "?" for a character that the terminal's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    return Console(**options)


def print_beside_bars(table: Table | Panel) -> None:
    """Print something of rich's; progress bars are taken away meanwhile, which would stand in its first line."""
    with tqdm.external_write_mode():
        open_console().print(table)


def print_prompt_completions_sample(
    prompts: list, completions: list, rewards: dict[str, list[float]], advantages: list[float], step: int,
    num_samples: int | None = None,
) -> None:  # fmt: skip
    """Print prompts, completions, rewards and advantages side by side, under the training step.

    Prompts and completions are strings or messages, `rewards` values per completion (or None) by function.
    `num_samples` rows are drawn at random, from a stream of their own; None or more: all.
    """
    print_samples(prompts, completions, {**rewards, "Advantage": advantages}, step, num_samples)


def print_samples(
    prompts: Sequence[Entry], completions: Sequence[Entry], values: Mapping[str, Sequence[float | None]], step: int,
    num_samples: int | None = None,
) -> None:  # fmt: skip
    """`print_prompt_completions_sample` with any columns of numbers."""
    rows = range(len(prompts))
    if num_samples is not None and num_samples < len(rows):
        if num_samples <= 0:
            return
        rows = sorted(random.Random(step).sample(rows, num_samples))
    table = Table(show_lines=True, expand=True)
    for title in ("Prompt", "Completion"):
        table.add_column(title, ratio=1)
    for title, numbers in values.items():
        widest = max([len("Advantage"), *(len(_number(numbers[row])) for row in rows)])
        table.add_column(title, justify="right", max_width=widest, overflow="fold")  # long names leave room for texts
    for row in rows:
        cells = [_number(numbers[row]) for numbers in values.values()]
        table.add_row(_conversation(prompts[row]), _conversation(completions[row]), *cells)
    print_beside_bars(Panel(table, title=f"Step {step}"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _conversation(entry: Entry) -> Text:
    """Text of a string, or of messages with their roles, tool calls and the kinds of their non-text parts."""
    if isinstance(entry, str):
        return Text(entry)
    text = Text()
    for index, message in enumerate(entry):
        text.append("\n\n" if index else "")
        text.append(str(message.get("role", "?")).capitalize(), style="bold")
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [_part(part) for part in content or []]
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        parts += [f"{call.get('name')}({call.get('arguments')})" for call in calls]
        text.append("\n" + "\n".join(parts))
    return text


def _part(part: object) -> str:
    if isinstance(part, dict):
        return part["text"] if part.get("type") == "text" else f"<{part.get('type', 'part')}>"
    return str(part)


def duration(seconds: float) -> str:
    """A time in hours, minutes or seconds.

    >>> duration(8), duration(75), duration(7_500)
    ('8s', '1m15s', '2h05m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
