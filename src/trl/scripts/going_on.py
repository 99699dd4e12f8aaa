"""What a user is told of how a training run can go on: from which checkpoint, or that it left none."""

from pathlib import Path
from typing import Any

from trl.checkpoints.wholeness import newest_whole


def way_on(newest: Path | None, args: Any, *, command: str, finished: bool) -> str:
    """How a run whose `newest` checkpoint this is goes on; one that `finished` needs an option that makes it longer.

    `true` stands for the newest checkpoint in the run's folder, which may be one of an earlier run: then it is named.
    """
    if newest is None:
        return _no_way_on(args, finished=finished)
    resume = "true" if _same(newest, newest_whole(args.output_dir)) else str(newest)
    longer = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    same = f"the same options, a larger --{longer} and" if finished else "the same options and"
    return f"To go on: trl {command} with {same} --resume_from_checkpoint {resume}"


def interruption(newest: Path | None, args: Any, *, command: str, step: int, steps: int) -> str:
    """What to tell of a run that stopped after `step` of its `steps` optimiser steps, before its end."""
    place = f"after step {step} of {steps}" if step else "before the end of the first step"
    saved = "" if newest is None else f", newest checkpoint {newest}"
    return f"Stopped {place}{saved}. {way_on(newest, args, command=command, finished=False)}"


def _no_way_on(args: Any, *, finished: bool) -> str:
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    every = f", --save_steps {args.save_steps}" if strategy == "steps" else ""
    why = f"no checkpoint was written (--save_strategy {strategy}{every})"
    if finished:
        return f"This run cannot go on: {why}. A new one can start from the model."
    return f"It cannot go on from there, as {why}: the same command starts from the beginning."


def _same(one: Path, other: Path | None) -> bool:
    return other is not None and one.resolve() == other.resolve()
