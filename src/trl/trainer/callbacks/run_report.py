"""What a run writes for `trl report`: settings, data, logs, times, memory and checkpoints."""

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl.data.prepared_sets import sequence_lengths
from trl.options.shared import changed_settings
from trl.reporting.run_events import RunEvents
from trl.reporting.run_lines import peak_memory

MEASURED_ROWS = 100_000  # of the training set, whose lengths are counted
LENGTH_BINS = 40


class RunReport(TrainerCallback):
    """Writes `run.jsonl` and files of completions into the output folder, on the main process (`report=True`).

    Times are taken between the hooks of an optimiser step, so that nothing of the step itself is changed.
    """

    settings: Mapping[str, object] | None = None
    """Settings that differ from their defaults, of all configs of a command; None: those of the trainer's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self.events = trainer, RunEvents()
        self._seconds, self._mark = dict[str, float](), 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Begin, or go on after the checkpoint's step."""
        if not (getattr(args, "report", False) and state.is_world_process_zero and args.output_dir):
            return
        trainer = self._trainer
        self._seconds, self._mark = {}, time.perf_counter()
        self.events = begin(
            args.output_dir, trainer._name, trainer.model, trainer.accelerator, run=trainer.runs.name,
            settings=changed_settings(args) if self.settings is None else self.settings, step=state.global_step,
            steps=state.max_steps, model=getattr(trainer.scorer.core.config, "_name_or_path", ""),
            architecture=type(trainer.scorer.core).__name__,
            chats=bool(getattr(trainer._tokenizer, "chat_template", None)), data=data_facts(trainer),
        )  # fmt: skip

    def on_step_begin(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        """What lies between two steps is data, and rollouts of methods that generate."""
        self._spend("rollouts and data")

    def on_step_end(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        """The forward and backward passes and the update end here."""
        self._spend("training")

    def on_evaluate(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        """An evaluation ends here."""
        self._spend("evaluation")

    def on_save(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """A checkpoint was written."""
        self._spend("checkpoints")
        self.events.write("checkpoint", state.global_step, name=f"checkpoint-{state.global_step}")

    def on_log(
        self, args: object, state: TrainerState, control: TrainerControl, logs: Mapping[str, Any] | None = None,
        **_: object,
    ) -> None:  # fmt: skip
        """Write a log with the seconds since the last one."""
        if not (self.events.is_active and logs):
            return
        if "loss" in logs:
            self._spend("logging")
        self.events.write("log", state.global_step, **log_facts(logs, self._seconds))
        self._seconds.clear()

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """The run has ended."""
        self.events.write("end", state.global_step)

    def _spend(self, phase: str) -> None:
        """Count the time since the last mark."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now


def begin(
    folder: str | Path | None, method: str, module: torch.nn.Module, accelerator: Accelerator, *, run: str,
    settings: Mapping[str, object], step: int, steps: int = 0, **facts: object,
) -> RunEvents:  # fmt: skip
    """The events of a run on the main process, beginning with facts about it; without a folder none are written."""
    events = RunEvents(Path(folder) if folder and accelerator.is_main_process else None, run, step=step, steps=steps)
    device, versions = accelerator.device, {"python": platform.python_version(), "torch": torch.__version__}
    events.write(
        "start", step, run=run, method=method, settings=dict(settings), steps=steps,
        parameters=[sum(p.numel() for p in module.parameters() if p.requires_grad or is_all) for is_all in (0, 1)],
        processes=accelerator.num_processes,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        versions={**versions, "transformers": transformers.__version__}, **facts,
    )  # fmt: skip
    return events


def log_facts(logs: Mapping[str, Any], seconds: Mapping[str, float] = {}) -> dict[str, object]:
    """The numbers of a log, seconds by phase, and the peak of memory."""
    values = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    rounded = {name: round(value, 6) for name, value in seconds.items()}
    return {"values": values, "seconds": rounded, "memory": peak_memory()}


def data_facts(trainer: Any) -> dict[str, object]:
    """Rows, what their preparation counted, and a histogram of their lengths in tokens."""
    sets, rows = trainer._sets, trainer.train_dataset
    facts: dict[str, object] = {"rows": len(rows) if hasattr(rows, "__len__") else None}
    facts["summaries"] = [report.summary() for report in getattr(sets, "reports", {}).values()]
    if isinstance(rows, Dataset):
        settings = getattr(sets, "settings", None)
        lengths = sequence_lengths(rows.select(range(min(len(rows), MEASURED_ROWS))), settings)
        if lengths.size:
            counts, edges = np.histogram(lengths, bins=min(LENGTH_BINS, int(np.ptp(lengths)) + 1))
            facts["lengths"] = {"counts": counts.tolist(), "edges": edges.round(1).tolist()}
    return facts
