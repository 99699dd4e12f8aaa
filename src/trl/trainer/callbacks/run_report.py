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

from trl.data.prepared_sets import PreparedSets, sequence_lengths
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
        trainer, step, steps = self._trainer, state.global_step, state.max_steps
        self.events = RunEvents(Path(args.output_dir), trainer.runs.name, step=step, steps=steps)
        self._seconds, self._mark = {}, time.perf_counter()
        settings = changed_settings(args) if self.settings is None else self.settings
        self.events.write(
            "start", step, run=trainer.runs.name, method=trainer._name, settings=dict(settings), steps=steps,
            model=getattr(trainer.scorer.core.config, "_name_or_path", ""),
            architecture=type(trainer.scorer.core).__name__,
            chats=bool(getattr(trainer._tokenizer, "chat_template", None)), data=data_facts(trainer),
            **machine_facts(trainer.model, args.device, args.world_size),
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


def loop_events(
    folder: str | Path | None, method: str, config: Any, model: torch.nn.Module, accelerator: Accelerator, *, step: int,
    steps: int = 0,
) -> RunEvents:  # fmt: skip
    """`run.jsonl` of a loop without transformers' trainer, on the main process; without a folder nothing."""
    if folder is None or not accelerator.is_main_process:
        return RunEvents()
    events = RunEvents(Path(folder), method, step=step, steps=steps)
    facts = machine_facts(model, accelerator.device, accelerator.num_processes)
    settings = changed_settings(config)
    events.write("start", step, run=method, method=method, settings=settings, steps=steps, model="", **facts)
    return events


def log_facts(logs: Mapping[str, Any], seconds: Mapping[str, float] = {}) -> dict[str, object]:
    """The numbers of a log, seconds by phase, and the peak of memory."""
    values = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    rounded = {name: round(value, 6) for name, value in seconds.items()}
    return {"values": values, "seconds": rounded, "memory": peak_memory()}


def machine_facts(model: torch.nn.Module, device: torch.device, processes: int) -> dict[str, object]:
    """Parameters, those that train and all; processes, device and versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "parameters": [sum(p.numel() for p in model.parameters() if p.requires_grad or is_all) for is_all in (0, 1)],
        "processes": processes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "versions": {**versions, "transformers": transformers.__version__},
    }


def data_facts(trainer: Any) -> dict[str, object]:
    """Rows, what their preparation counted, and a histogram of their lengths in tokens."""
    sets, rows = trainer._sets, trainer.train_dataset
    facts: dict[str, object] = {"rows": len(rows) if hasattr(rows, "__len__") else None}
    facts["summaries"] = [report.summary() for report in getattr(sets, "reports", {}).values()]
    if isinstance(rows, Dataset):
        names = sets.settings.sequences if isinstance(sets, PreparedSets) else (("input_ids",),)
        lengths = sequence_lengths(rows.select(range(min(len(rows), MEASURED_ROWS))), names)
        if lengths.size:
            counts, edges = np.histogram(lengths, bins=LENGTH_BINS)
            facts["lengths"] = {"counts": counts.tolist(), "edges": edges.round(1).tolist()}
    return facts
