"""Runs the stages of a method one after the other and writes down what they reached."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from rich.console import Console

from trl.scripts.quickstart.dpo import DirectPreferenceOptimisation
from trl.scripts.quickstart.methods import DEFAULT_METHOD, METHODS
from trl.scripts.quickstart.online import GRPO, PPO, RLOO
from trl.scripts.quickstart.plot import draw_run
from trl.scripts.quickstart.records import (
    DATA_FILES,
    PLOT_FILE,
    RESULTS_FILE,
    begin_stage,
    end_stage,
    plan_run,
    take_up,
    write_results,
)
from trl.scripts.quickstart.report import Report
from trl.scripts.quickstart.reward import RewardModel
from trl.scripts.quickstart.sft import SupervisedFineTuning
from trl.scripts.quickstart.stages import BaseModel, Context, Stage, StageResult
from trl.scripts.quickstart.task import Task, make_task
from trl.scripts.quickstart.training import remove_checkpoints

LARGEST_SUM = 99
HELD_OUT = 300
MOST_THREADS = 8  # a model this small gains nothing from more

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        BaseModel(),
        SupervisedFineTuning(),
        RewardModel(),
        DirectPreferenceOptimisation(),
        PPO,
        GRPO,
        RLOO,
    )
}


def run(
    *,
    output_dir: Path,
    method: str = DEFAULT_METHOD,
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
    stages = [STAGES[name] for name in METHODS[method]]
    report.say(
        f"A small model learns to add, up to {LARGEST_SUM}: {' -> '.join(METHODS[method])}. "
        f"Everything goes to {output_dir}/"
    )
    output_dir.mkdir(parents=True, exist_ok=True)
    with _no_foreign_bars(), _threads():
        _run_stages(context, method, stages)
        context.results = [_with_reward(context, result) for result in context.results]
    report.samples(task, context.replies)
    report.stages(context.results)
    seconds = time.perf_counter() - started
    files = [*_data_files(context), _write_results(context, method, seconds), *_plot(context, stages)]
    report.files(method, output_dir, files)
    report.say(f"{seconds:.0f} seconds in all.")
    return context


def default_task(*, seed: int) -> Task:
    """The sums that the quickstart trains on and holds out."""
    return make_task(largest_sum=LARGEST_SUM, held_out=HELD_OUT, seed=seed)


def _run_stages(context: Context, method: str, stages: Sequence[Stage]) -> None:
    plan = plan_run(context, method, stages)
    context.report.earlier_run([stage.name for stage in plan.kept], plan.replaced)
    (context.output_dir / RESULTS_FILE).unlink(
        missing_ok=True
    )  # until it is there again, this run has not ended
    for number, stage in enumerate(stages, start=1):
        if stage in plan.kept:
            context.results.append(take_up(context, stage))
            continue
        context.report.heading(f"Stage {number} of {len(stages)}: {stage.name}")
        if stage is not plan.interrupted:
            remove_checkpoints(context, stage.name)
        begin_stage(context, stages[:number])
        result = stage.run(context)
        end_stage(context, stages[:number], result)
        remove_checkpoints(context, stage.name)
        context.results.append(result)
        context.report.reached(result, len(context.task.held_out))


def _with_reward(context: Context, result: StageResult) -> StageResult:
    return replace(result, reward=context.reward_of(result.stage))


def _data_files(context: Context) -> list[Path]:
    paths = [context.output_dir / name for name in DATA_FILES]
    return [path for path in paths if path.exists()]


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


def _write_results(context: Context, method: str, seconds: float) -> Path:
    """Write every number of the run as JSON."""
    task = context.task
    content: dict[str, Any] = {
        "seed": context.seed,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "problems": {"train": len(task.problems), "held_out": len(task.held_out)},
        "stages": [asdict(result) for result in context.results],
        "curves": context.curves,
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
    return write_results(context, method, content)


def _plot(context: Context, stages: Sequence[Stage]) -> list[Path]:
    """The picture of the run, where matplotlib is installed."""
    path = context.output_dir / PLOT_FILE
    panels = {stage.name: stage.panel for stage in stages if stage.panel is not None}
    try:
        draw_run(path, panels, context.curves, len(context.task.held_out))
    except ImportError:
        context.report.say(
            "\nNo picture of the run: matplotlib is not installed (pip install matplotlib, and run again)."
        )
        return []
    return [path]
