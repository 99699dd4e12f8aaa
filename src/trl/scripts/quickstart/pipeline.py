"""Runs the stages one after the other and writes down what they reached."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from rich.console import Console

from trl.scripts.quickstart.report import Report
from trl.scripts.quickstart.stages import STAGES, Context
from trl.scripts.quickstart.task import Task, make_task

LARGEST_SUM = 99
HELD_OUT = 300
MOST_THREADS = 8  # a model this small gains nothing from more


def run(
    *,
    output_dir: Path,
    seed: int = 0,
    max_steps: int | None = None,
    color: bool = True,
    started: float | None = None,
) -> Context:
    """Run every stage, print the story, write `results.json`; returns the context with all that was made.

    `started` is when the command began, on the clock of `time.perf_counter`: seconds count from there.
    """
    started = time.perf_counter() if started is None else started
    report = Report(Console(no_color=not color, highlight=False))
    task = default_task(seed=seed)
    context = Context(output_dir, seed, max_steps, task, report)
    report.say(f"A small model learns to add, up to {LARGEST_SUM}. Everything goes to {output_dir}/")
    report.overwriting(_earlier_files(output_dir))
    output_dir.mkdir(parents=True, exist_ok=True)
    with _no_foreign_bars(), _threads():
        for stage in STAGES:
            report.heading(f"Stage: {stage.name}")
            result = stage.run(context)
            context.results.append(result)
            report.accuracy(result, len(task.held_out))
    report.samples(task, context.replies)
    report.stages(context.results)
    seconds = time.perf_counter() - started
    files = [*_data_files(output_dir), _write_results(context, seconds), *_plot(context)]
    model_dir = next(result.model_dir for result in reversed(context.results) if result.model_dir)
    report.files(model_dir, output_dir, files)
    report.say(f"{seconds:.0f} seconds in all.")
    return context


def default_task(*, seed: int) -> Task:
    """The sums that the quickstart trains on and holds out."""
    return make_task(largest_sum=LARGEST_SUM, held_out=HELD_OUT, seed=seed)


def _data_files(output_dir: Path) -> list[Path]:
    return [output_dir / "train.jsonl", output_dir / "held_out.jsonl"]


def _earlier_files(output_dir: Path) -> list[Path]:
    """What a run replaces: its own files and the models of its stages, nothing else."""
    names = ("results.json", "loss.png", *(stage.name for stage in STAGES))
    candidates = [*_data_files(output_dir), *(output_dir / name for name in names)]
    return [path for path in candidates if path.exists()]


@contextmanager
def _threads() -> Iterator[None]:
    """All cores, up to eight; what OMP_NUM_THREADS says wins."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(_cores(), MOST_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _no_foreign_bars() -> Iterator[None]:
    """No progress bars but ours while the stages run."""
    switches = [
        (library.is_progress_bar_enabled(), library.disable_progress_bar, library.enable_progress_bar)
        for library in (datasets.utils.logging, transformers.utils.logging)
    ]
    for _, disable, _ in switches:
        disable()
    try:
        yield
    finally:
        for was_enabled, _, enable in switches:
            if was_enabled:
                enable()


def _write_results(context: Context, seconds: float) -> Path:
    """Write every number of the run as JSON."""
    task = context.task
    content: dict[str, Any] = {
        "seed": context.seed,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "problems": {"train": len(task.problems), "held_out": len(task.held_out)},
        "stages": [asdict(result) for result in context.results],
        "losses": context.losses,
        "answers": [
            {
                "question": task.question(problem),
                "answer": task.answer(problem),
                **{stage: replies[index] for stage, replies in context.replies.items()},
            }
            for index, problem in enumerate(task.held_out)
        ],
        "seconds": seconds,
    }
    path = context.output_dir / "results.json"
    path.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    return path


def _plot(context: Context) -> list[Path]:
    """A picture of the losses, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    axes = (figure := Figure(figsize=(6, 4))).add_subplot()
    for stage, losses in context.losses.items():
        axes.plot(*zip(*losses, strict=True), label=stage)
    axes.set(xlabel="optimiser step", ylabel="training loss (nats per token)")
    axes.legend()
    path = context.output_dir / "loss.png"
    figure.savefig(path, dpi=120)
    return [path]
