"""The picture of a run: exact match as it rises, and what each stage logged. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.scripts.quickstart.stages import Curve

COLOURS = ("#2456a6", "#c8553d", "#2a7f4f", "#8a5fa8")
EXACT_MATCH = "exact_match"  # the curve that every stage has whose model answers


@dataclass(frozen=True)
class Panel:
    """What to draw of a stage: logged names with their labels, on the left axis and, in another unit, on the right."""

    title: str
    unit: str
    left: Mapping[str, str]
    right: Mapping[str, str] = field(default_factory=dict)
    right_unit: str = ""
    right_share: bool = True  # between 0 and 1


def draw_run(
    path: Path, panels: Mapping[str, Panel], curves: Mapping[str, Mapping[str, Curve]], held_out: int
) -> None:
    """Write a PNG: exact match over all stages, then a panel per stage.

    Raises: ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    rows = (len(panels) + 2) // 2
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    axes: Sequence[Any] = figure.subplots(rows, 2, squeeze=False).flatten()  # type: ignore[union-attr]
    _draw_exact_match(axes[0], curves, held_out)
    for place, (stage, panel) in zip(axes[1:], panels.items(), strict=False):
        _draw_panel(place, panel, curves.get(stage, {}))
    for place in axes[1 + len(panels) :]:
        place.set_axis_off()
    figure.savefig(path, dpi=120)


def _draw_exact_match(axes: Any, curves: Mapping[str, Mapping[str, Curve]], held_out: int) -> None:
    """Exact match of one stage after the other, over all optimiser steps so far."""
    begin, last = 0, 0.0
    answering = {stage: found[EXACT_MATCH] for stage, found in curves.items() if found.get(EXACT_MATCH)}
    for number, (stage, curve) in enumerate(answering.items()):
        steps = [begin] + [begin + step for step, _ in curve]
        values = [last] + [100 * value for _, value in curve]
        axes.plot(steps, values, color=COLOURS[number % len(COLOURS)], marker=".", label=stage)
        axes.axvspan(begin, steps[-1], color=COLOURS[number % len(COLOURS)], alpha=0.06)
        begin, last = steps[-1], values[-1]
        axes.annotate(
            f"{last:.0f} %",
            (begin, last),
            textcoords="offset points",
            xytext=(-4, 6),
            ha="right",
            weight="bold",
        )
    axes.set(
        title=f"Right answers to {held_out} problems never seen",
        xlabel="optimiser step of the model that answers",
        ylabel="exact match (%)",
        ylim=(0, 108),
    )
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)


def _draw_panel(axes: Any, panel: Panel, curves: Mapping[str, Curve]) -> None:
    lines = _draw_curves(axes, panel.left, curves, COLOURS)
    if panel.right:
        other = axes.twinx()
        lines += _draw_curves(other, panel.right, curves, COLOURS[len(panel.left) :], linestyle="--")
        other.set_ylabel(panel.right_unit)
        if panel.right_share:
            other.set_ylim(0, 1.05)
    axes.set(title=panel.title, xlabel="optimiser step", ylabel=panel.unit)
    axes.legend(
        handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(lines) or 1, frameon=False
    )
    axes.grid(alpha=0.3)


def _draw_curves(
    axes: Any, labels: Mapping[str, str], curves: Mapping[str, Curve], colours: Sequence[str], **style: Any
) -> list[Any]:
    lines = []
    for colour, (name, label) in zip(colours, labels.items(), strict=False):
        if curves.get(name):
            lines += axes.plot(
                *zip(*curves[name], strict=True), color=colour, label=label, marker=".", **style
            )
    return lines
