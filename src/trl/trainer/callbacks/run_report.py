"""What a run writes for `trl report`: settings, data, logs, times, memory, checkpoints, and signs that something is wrong."""

import platform
import time
from collections.abc import Mapping, Sequence
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
from trl.reporting.run_checks import RunChecks
from trl.reporting.run_events import Columns, Event, RunEvents
from trl.reporting.run_lines import peak_memory

KEPT_PARTS = 200  # files of completions of a run
MEASURED_ROWS = 100_000  # of the training set, whose lengths are counted
LENGTH_BINS = 40


class Recorder:
    """Appends events to `run.jsonl`, and the signs that something is wrong which they show."""

    def __init__(self) -> None:
        self._events: RunEvents | None = None
        self._checks, self._signs = RunChecks(), dict[str, float]()

    @property
    def is_active(self) -> bool:
        """Whether this process writes."""
        return self._events is not None

    def _open(self, folder: Path, run: str | None, step: int, steps: int) -> None:
        self._events, self._checks, self._signs = RunEvents(folder, run, step=step), RunChecks(), {}
        self._steps, self._next_part = steps, step  # steps of the run, 0: unknown
        for event in self._events.kept:
            self._follow(event)
        self._events.kept.clear()

    def close(self) -> None:
        """Write nothing until the next run."""
        if self._events is not None:
            self._events.close()
        self._events = None

    def _write(self, event: str, step: int, **fields: Any) -> None:
        if self._events is None:
            return
        self._events.write(event, step, time=round(time.time(), 3), **fields)
        for name, text in self._follow({"event": event, **fields}).items():
            self._write("check", step, name=name, text=text)

    def keeps_part(self, step: int) -> bool:
        """Whether the completions of a step are among those of which a file is kept."""
        return self._events is not None and step >= self._next_part

    def write_rollouts(
        self, step: int, facts: Mapping[str, object], part: tuple[Columns, Sequence[str]] | None
    ) -> None:
        """Write numbers of a batch of completions; and a `part` of it, with its columns of rewards, as a file."""
        if self._events is None:
            return
        file = None
        if part is not None:
            file = self._events.write_part(step, part[0], rewards=part[1])
            self._next_part = step + max(1, (self._steps or 4 * step) // KEPT_PARTS)
        self._write("rollouts", step, file=file, **facts)

    def _follow(self, event: Event) -> dict[str, str]:
        """Keep what the checks need of an event; returns what they find."""
        if event["event"] == "check":
            self._checks.fired.add(event["name"])
        if event["event"] == "rollouts":
            self._signs = {name: event[name] for name in ("repeated", "equal")}
        return self._checks.read({**event["values"], **self._signs}) if event["event"] == "log" else {}


class LoopReport(Recorder):
    """`run.jsonl` of a loop without transformers' trainer, on the main process; without a folder nothing."""

    def __init__(
        self, folder: str | Path | None, method: str, settings: Mapping[str, object], model: torch.nn.Module,
        accelerator: Accelerator, *, step: int, steps: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if folder is not None and accelerator.is_main_process:
            self._open(Path(folder), method, step, steps)
        facts = machine_facts(model, accelerator.device, accelerator.num_processes)
        self._write("start", step, run=method, method=method, settings=dict(settings), steps=steps, model="", **facts)
        self._mark = time.perf_counter()

    def log(self, step: int, values: Mapping[str, Any], *, training: float | None = None) -> None:
        """Write the numbers of an epoch or step, which ends here, of whose seconds some were `training` (None: all)."""
        seconds, self._mark = time.perf_counter() - self._mark, time.perf_counter()
        parts = {"training": round(seconds if training is None else training, 6)}
        if training is not None:
            parts["rollouts and data"] = round(max(0.0, seconds - training), 6)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._write("log", step, values=numbers, seconds=parts, memory=peak_memory())

    def end(self, step: int) -> None:
        """The run has ended."""
        self._write("end", step)
        self.close()


class RunReport(Recorder, TrainerCallback):
    """Writes `run.jsonl` and files of completions into the output folder, on the main process (`report=True`).

    Times are taken between the hooks of an optimiser step, so that nothing of the step itself is changed.
    """

    settings: Mapping[str, object] | None = None
    """Settings that differ from their defaults, of all configs of a command; None: those of the trainer's."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self._seconds, self._mark = dict[str, float](), 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Begin, or go on after the checkpoint's step."""
        self.close()
        if not (getattr(args, "report", False) and state.is_world_process_zero and args.output_dir):
            return
        trainer, step = self._trainer, state.global_step
        self._open(Path(args.output_dir), trainer.runs.name, step, state.max_steps)
        self._seconds, self._mark = {}, time.perf_counter()
        settings = changed_settings(args) if self.settings is None else self.settings
        self._write(
            "start", step, run=trainer.runs.name, method=trainer._name, settings=dict(settings), steps=state.max_steps,
            model=getattr(trainer.scorer.core.config, "_name_or_path", ""), architecture=type(trainer.scorer.core).__name__,
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
        self._write("checkpoint", state.global_step, name=f"checkpoint-{state.global_step}")

    def on_log(
        self, args: object, state: TrainerState, control: TrainerControl, logs: Mapping[str, Any] | None = None,
        **_: object,
    ) -> None:  # fmt: skip
        """Write a log, and what it shows for the first time."""
        if self._events is None or not logs:
            return
        values = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if "loss" in values:
            self._spend("logging")
        seconds, self._seconds = self._seconds, {}
        rounded = {name: round(value, 6) for name, value in seconds.items()}
        self._write("log", state.global_step, values=values, seconds=rounded, memory=peak_memory())

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """The run has ended."""
        self._write("end", state.global_step)
        self.close()

    def _spend(self, phase: str) -> None:
        """Count the time since the last mark."""
        if self._events is not None:
            now = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
            self._mark = now


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
    evaluation = trainer.eval_dataset
    facts: dict[str, object] = {"rows": len(rows) if hasattr(rows, "__len__") else None}
    facts["eval_rows"] = len(evaluation) if isinstance(evaluation, Dataset) else None
    facts["summaries"] = [report.summary() for report in getattr(sets, "reports", {}).values()]
    if isinstance(rows, Dataset):
        names = sets.settings.sequences if isinstance(sets, PreparedSets) else (("input_ids",),)
        lengths = sequence_lengths(rows.select(range(min(len(rows), MEASURED_ROWS))), names)
        if lengths.size:
            counts, edges = np.histogram(lengths, bins=LENGTH_BINS)
            facts["lengths"] = {"counts": counts.tolist(), "edges": edges.round(1).tolist()}
    return facts
