"""An inspection on a page of HTML, which needs no network, and in the terminal."""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from trl.reporting.tables import open_console
from trl.scripts.inspection.collect import Inspection
from trl.scripts.inspection.tokens import Token
from trl.scripts.messages import Shown, rendered
from trl.scripts.pages import Bar, bars, render

BARS = 40
MOST_TOKENS = 600  # of a sequence on the page; of longer ones the ends are shown


def histogram(values: Sequence[float] | np.ndarray, *, unit: str) -> list[Bar]:
    """The bars of a histogram of numbers; none without numbers."""
    numbers = np.asarray(values, dtype=float)
    if not numbers.size:
        return []
    low, high = float(numbers.min()), float(numbers.max())
    is_whole = bool((numbers == numbers.round()).all())
    step = max(1, math.ceil((high - low + 1) / BARS))  # of whole numbers
    bins: int | np.ndarray = np.arange(low, high + step + 0.5, step) if is_whole else BARS if high > low else 1
    counts, edges = np.histogram(numbers, bins)
    edges = edges if is_whole or high > low else np.array([low, high])
    return bars(counts.tolist(), edges.tolist(), unit, is_whole=is_whole)


def write_page(inspection: Inspection, path: Path) -> None:
    """Write the page. What rows say is text in it, never markup."""
    text = render(
        "trl.scripts.inspection", "page.html", inspection=inspection, shortened=shortened,
        lengths=histogram(inspection.lengths, unit="tokens"),
        rewards={name: histogram(values, unit="reward") for name, values in inspection.rewards.items()},
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def shortened(tokens: Sequence[Token]) -> list[Token]:
    """The tokens, those of an image as one, or the ends of a long sequence around a note of how many are left out."""
    runs = [(state, list(run)) for state, run in groupby(tokens, key=lambda token: token.state)]
    image = "[{} image tokens]".format
    pieces = [[run[0]._replace(text=image(len(run)))] if state == "image" else run for state, run in runs]
    tokens = [token for piece in pieces for token in piece]
    if len(tokens) <= MOST_TOKENS:
        return list(tokens)
    half = MOST_TOKENS // 2
    gap = Token(-1, f" … {len(tokens) - MOST_TOKENS} tokens … ", "gap", None, is_template=False)
    return [*tokens[:half], gap, *tokens[-half:]]


def print_inspection(inspection: Inspection, *, rows: int = 2) -> None:
    """Print the numbers, the first rows and the faults."""
    console = open_console(highlight=False, soft_wrap=True)
    width = max(map(len, inspection.figures))
    for name, value in inspection.figures.items():
        console.print(f"  {name:<{width}}  {value}", markup=False)
    for row in inspection.shown[:rows]:
        console.print(f"\nRow {row.number}", style="bold")
        for title, tokens in row.sequences.items():
            shown = Shown(title, [token.id for token in tokens], [token.state for token in tokens])
            console.print(rendered(inspection.tokenizer, shown, colour=console.is_terminal))
    for fault in inspection.faults:
        first = f" (first: {', '.join(map(str, fault.rows))})" if fault.rows else ""
        console.print(f"\n{fault.name}: {fault.count:,} of {fault.of:,} rows{first}", style="bold red", markup=False)
        console.print(f"  {fault.text}", markup=False)
    if not inspection.faults:
        console.print("\nNo fault was found.", style="bold")
    for note in inspection.notes:
        console.print(note, markup=False)
