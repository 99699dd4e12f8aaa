"""What a run writes for `trl report`: settings, data, logs, times and memory."""

import platform
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from trl.data.prepared_sets import sequence_lengths
from trl.options.shared import changed_settings
from trl.reporting.run_events import RunEvents, histogram
from trl.reporting.run_lines import peak_memory

MEASURED_ROWS = 100_000  # of the training set, whose lengths are counted


class RunReport(TrainerCallback):
    """Writes `run.jsonl` and files of completions into the output folder, on the main process (`report=True`).

    Times are taken between the hooks of an optimiser step, so that nothing of the step itself is changed.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self.events = trainer, RunEvents()
        self._seconds, self._mark = defaultdict[str, float](float), 0.0
        self.settings: Mapping[str, object] | None = None  # that a command changed; None: those of the trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        """Begin, or go on after the checkpoint's step."""
        if not (getattr(args, "report", False) and state.is_world_process_zero):
            return
        trainer = self._trainer
        self._seconds, self._mark = defaultdict(float), time.perf_counter()
        self.events = begin(
            args.output_dir, trainer._name, trainer.model, trainer.accelerator, run=trainer.runs.name,
            settings=changed_settings(args) if self.settings is None else self.settings, step=state.global_step,
            steps=state.max_steps, model=getattr(trainer.scorer.core.config, "_name_or_path", ""),
            architecture=type(trainer.scorer.core).__name__,
            chats=bool(getattr(trainer._tokenizer, "chat_template", None)), data=data_facts(trainer),
        )  # fmt: skip

    def _spend(self, phase: str, *_: object, **__: object) -> None:
        """Count the time since the last mark."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._mark
        self._mark = now

    on_step_begin: Any = partialmethod(_spend, "rollouts and data")  # rollouts of methods that generate
    on_step_end: Any = partialmethod(_spend, "training")  # the forward and backward passes and the update
    on_evaluate: Any = partialmethod(_spend, "evaluation")
    on_save: Any = partialmethod(_spend, "checkpoints")

    def on_log(self, args: object, state: TrainerState, control: object, logs: Mapping[str, Any], **_: object) -> None:
        """Write a log with the seconds since the last one."""
        if "loss" in logs:
            self._spend("logging")
        self.events.write("log", state.global_step, **log_facts(logs, self._seconds))
        self._seconds.clear()

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """The run has ended."""
        self.events.write("end", state.global_step)

    def close(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """At the end of a block, perhaps by an error: see `RunEvents.stop`."""
        self.events.stop(self._trainer.state.global_step, error)


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
    return {"values": values, "seconds": seconds, "memory": peak_memory()}


def data_facts(trainer: Any) -> dict[str, object]:
    """Rows, what their preparation counted, and a histogram of their lengths in tokens."""
    sets, rows = trainer._sets, trainer.train_dataset
    facts: dict[str, object] = {"rows": len(rows) if hasattr(rows, "__len__") else None}
    facts["summaries"] = [report.summary() for report in getattr(sets, "reports", {}).values()]
    if isinstance(rows, Dataset):
        measured = rows.take(min(len(rows), MEASURED_ROWS))
        if (lengths := sequence_lengths(measured, getattr(sets, "settings", None))).size:
            facts["lengths"] = histogram(lengths, "tokens")
    return facts
