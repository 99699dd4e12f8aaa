"""What the training stages share: settings, the run with its progress and checkpoints, the curves of its log."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from trl.checkpoints.wholeness import newest_whole
from trl.scripts.quickstart.evaluation import exact_match
from trl.scripts.quickstart.plot import EXACT_MATCH
from trl.scripts.quickstart.report import Shown, TrainingProgress
from trl.scripts.quickstart.stages import EVAL_BATCH_SIZE, Context, Curve

CHECKPOINTS = 8  # per stage
PROBES = 10  # exact match, so many times per stage


def common_settings(context: Context, name: str, *, steps: int) -> dict[str, Any]:
    """Settings of every trainer here; the models are far too small for anything to save memory."""
    steps = context.max_steps or steps
    return {
        "output_dir": str(context.folder(name)),
        "max_steps": steps,
        "warmup_steps": min(50, steps // 10),
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "gradient_checkpointing": False,
        "logging_steps": max(1, min(20, steps // 3)),
        "save_steps": max(1, steps // CHECKPOINTS),
        "save_total_limit": 1,
        "per_device_eval_batch_size": EVAL_BATCH_SIZE,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": context.seed,
    }


def run_training(
    context: Context, name: str, trainer: Trainer, shown: Mapping[str, Shown], *, answers: bool = True
) -> None:
    """Train, from the newest checkpoint that an interrupted run left; save the model and keep the curves.

    With `answers` exact match on the held-out problems is probed along the way.
    """
    progress = TrainingProgress(context.report, name, shown)
    progress.replace_printers(trainer)
    trainer.add_callback(progress)
    if answers:
        trainer.add_callback(ExactMatchProbe(context))
    checkpoint = newest_whole(context.folder(name))
    if checkpoint is not None:
        context.report.say(f"Goes on from {checkpoint}.")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    context.curves[name] = logged_curves(trainer.state.log_history)


def remove_checkpoints(context: Context, name: str) -> None:
    """Remove a stage's checkpoints."""
    for folder in context.folder(name).glob("checkpoint-*"):
        shutil.rmtree(folder)


def logged_curves(log_history: list[dict[str, Any]]) -> dict[str, Curve]:
    """Every number that was logged while training, by name."""
    curves: dict[str, Curve] = {}
    for entry in log_history:
        for key, value in entry.items():
            if (
                key not in ("step", "epoch")
                and isinstance(value, int | float)
                and "train_runtime" not in entry
            ):
                curves.setdefault(key, []).append((int(entry["step"]), float(value)))
    return curves


class ExactMatchProbe(TrainerCallback):
    """Greedy answers to the held-out problems every tenth of the training, and at its end; for the picture alone."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Probe at every tenth of the steps."""
        if state.global_step % max(1, state.max_steps // PROBES) == 0:
            self._probe(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Probe what the training ended with."""
        if not any(
            entry["step"] == state.global_step and EXACT_MATCH in entry for entry in state.log_history
        ):
            self._probe(state)

    def _probe(self, state: Any) -> None:
        task = self.context.task
        found = exact_match(
            self.context.policy, self.context.ready_tokenizer, task.held_out, EVAL_BATCH_SIZE, task=task
        )
        state.log_history.append({"step": state.global_step, EXACT_MATCH: found.accuracy})
