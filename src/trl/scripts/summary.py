"""The end of a training script: saving, pushing, and telling the user where things are."""

from pathlib import Path
from typing import Any

from trl.checkpoints.wholeness import newest_whole

BOOKKEEPING = ("epoch", "step", "total_flos", "learning_rate", "grad_norm", "step_time", "num_tokens")


def finish(trainer: Any, *, dataset_name: str | None, command: str, newest: Path | None) -> None:
    """Save the model (and push it if asked), then print where it is, the last metrics and the command to go on.

    `newest` is the run's newest checkpoint. Ends the process group: a process that exits with one open may be aborted
    by its threads.
    """
    args = trainer.args
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    if trainer.accelerator.is_main_process:
        state, place = trainer.state, f"Model saved in {args.output_dir}"
        if args.load_best_model_at_end and state.best_model_checkpoint:
            name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            place += f": that of step {state.best_global_step}, the best ({name} {state.best_metric:.4g})"
        metrics = last_metrics(state.log_history)
        finished = state.global_step >= state.max_steps  # not one that a signal stopped
        print("\n".join([place, *metrics, resume_hint(newest, args, command=command, finished=finished)]))
    trainer.accelerator.end_training()


def last_metrics(log_history: list[dict[str, Any]]) -> list[str]:
    """A line each for the last log of training, the last evaluation and the whole run: its step and its measures of quality.

    Measures of one step belong together, as those of several evaluation sets; what was logged at earlier steps is left out.
    """
    titles = {"training": "Last training log", "evaluation": "Last evaluation", "run": "Whole run"}
    lines = []
    for kind, title in titles.items():
        entries = [entry for entry in log_history if kind_of(entry) == kind and measures(entry)]
        if entries:
            step = entries[-1].get("step")
            last = [measures(entry) for entry in entries if entry.get("step") == step]
            found = {name: value for each in last for name, value in each.items()}
            shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            lines.append(f"{title} (step {step}): {shown}")
    return lines


def kind_of(entry: dict[str, Any]) -> str:
    """What a log is about: "training", "evaluation" or the whole "run"."""
    if "train_runtime" in entry:
        return "run"
    return "evaluation" if any(name.startswith("eval_") for name in entry) else "training"


def measures(entry: dict[str, Any]) -> dict[str, float]:
    """The measures of quality in a log; not those of speed, nor bookkeeping."""
    return {
        name: value
        for name, value in entry.items()
        if isinstance(value, (int, float))
        and name.removeprefix("eval_") not in BOOKKEEPING
        and not name.endswith(("_runtime", "_per_second"))
    }


def resume_hint(newest: Path | None, args: Any, *, command: str, finished: bool) -> str:
    """The command that resumes a run from its `newest` checkpoint; a `finished` run needs an option that makes it longer.

    `true` names the newest checkpoint in the run's folder, unless that belongs to an earlier run.
    """
    if newest is None:
        strategy = getattr(args.save_strategy, "value", args.save_strategy)
        every = f", --save_steps {args.save_steps}" if strategy == "steps" else ""
        why = f"no checkpoint was written (--save_strategy {strategy}{every})"
        if finished:
            return f"This run cannot be resumed: {why}. A new one can start from the model."
        return f"It cannot be resumed: {why}. The same command starts from the beginning."
    found = newest_whole(args.output_dir)
    resume = "true" if found is not None and newest.resolve() == found.resolve() else str(newest)
    longer = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    same = f"the same options, a larger --{longer} and" if finished else "the same options and"
    return f"To resume: trl {command} with {same} --resume_from_checkpoint {resume}"


def interruption(newest: Path | None, args: Any, *, command: str, step: int, steps: int) -> str:
    """The message for a run that stopped after `step` of its `steps` optimiser steps."""
    place = f"after step {step} of {steps}" if step else "before the end of the first step"
    saved = "" if newest is None else f", newest checkpoint {newest}"
    return f"Stopped {place}{saved}. {resume_hint(newest, args, command=command, finished=False)}"
