"""An inspection on a page of HTML, which needs no network, and in the terminal."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trl.reporting.tables import open_console
from trl.scripts.inspection.collect import Inspection
from trl.scripts.inspection.tokens import Token
from trl.scripts.messages import Shown, rendered
from trl.scripts.pages import Bar, bars, render

BARS = 40
MOST_TOKENS = 600  # of a sequence on the page; of longer ones the ends are shown


def write_page(inspection: Inspection, path: Path) -> None:
    """Write the page. What rows say is text in it, never markup."""
    text = render(
        "trl.scripts.inspection", "page.html", inspection=inspection, histogram=histogram, shortened=shortened
    )
    path.write_text(text, encoding="utf-8")


def histogram(numbers: np.ndarray, unit: str) -> list[Bar]:
    """The bars of a histogram."""
    low, high, is_whole = float(numbers.min()), float(numbers.max()), bool((numbers == numbers.round()).all())
    step = max(1, math.ceil((high - low + 1) / BARS))  # of whole numbers
    edges = np.arange(low, high + step + 0.5, step) if is_whole else np.linspace(low, high, 1 + BARS ** (high > low))
    return bars(np.histogram(numbers, edges)[0].tolist(), edges.tolist(), unit, is_whole=is_whole)


def shortened(tokens: Sequence[Token]) -> list[Token]:
    """The tokens, or the ends of a long sequence around a note of how many are left out."""
    half = MOST_TOKENS // 2
    gap = Token(-1, f" … {len(tokens) - MOST_TOKENS} tokens … ", "gap", "text")
    return list(tokens) if len(tokens) <= MOST_TOKENS else [*tokens[:half], gap, *tokens[-half:]]


def print_inspection(inspection: Inspection, *, rows: int = 2) -> None:
    """Print the numbers, the first rows and the faults."""
    console = open_console(highlight=False, soft_wrap=True)
    width = max(map(len, inspection.figures))
    for name, value in inspection.figures.items():
        console.print(f"  {name:<{width}}  {value}", markup=False)
    for number, sequences in inspection.shown[:rows]:
        console.print(f"\nRow {number}", style="bold")
        for title, tokens in sequences.items():
            shown = Shown(title, [token.id for token in tokens], [token.state for token in tokens])
            console.print(rendered(inspection.tokenizer, shown, colour=console.is_terminal))
    for fault in inspection.faults:
        first = f" (first: {', '.join(map(str, fault.rows))})" if fault.rows else ""
        console.print(f"\n{fault.name}: {fault.count:,} of {fault.of:,} rows{first}", style="bold red", markup=False)
        console.print(f"  {fault.text}", markup=False)
    if not inspection.faults:
        console.print("\nNo fault was found.", style="bold")
