"""How the figures are printed and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import OURS, Measured

Result = dict[str, Any]


def ratios(found: Measured, over: str) -> str:
    """Our seconds over another variant's: median of the steps, in brackets that of the sums."""
    return f"{found.ratio(over):.3f} ({found.total_ratio(over):.3f})"


def summary(found: Measured) -> Result:
    """What was measured, for the file of figures."""
    others = [name for name in found.seconds if name != OURS]
    return {
        "seconds": found.seconds,
        "ratio": {name: found.ratio(name) for name in others},
        "total_ratio": {name: found.total_ratio(name) for name in others},
        "first_loss": found.first_loss,
    }


def table_row(cells: list[Any]) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def write_figures(results: list[Result], out: Path | None) -> None:
    """Write all figures as JSON, if a file was asked for."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1))
        print(f"\nwritten to {out}")
