"""What a run leaves in its folder so that a later one can go on: one `stage.json` per stage, and `results.json` at the end."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl.scripts.quickstart.stages import Context, Stage, StageResult, as_json

STAGE_FILE, RESULTS_FILE, PLOT_FILE = "stage.json", "results.json", "quickstart.png"
DATA_FILES = ("train.jsonl", "held_out.jsonl", "pairs.jsonl", "held_out_pairs.jsonl", "prompts.jsonl")


@dataclass(frozen=True)
class Plan:
    """How a run begins: the stages it takes over as they are, the stage whose checkpoints it takes up, what it replaces."""

    kept: tuple[Stage, ...]
    interrupted: Stage | None
    replaced: tuple[Path, ...]


def stage_key(stages: Sequence[Stage], context: Context) -> str:
    """Names all that the last of these stages depends on: the settings of it and of those before, seed, steps, task."""
    task = hashlib.sha256(repr(context.task).encode()).hexdigest()
    return hashlib.sha256(repr((*stages, context.seed, context.max_steps, task)).encode()).hexdigest()[:16]


def plan_run(context: Context, method: str, stages: Sequence[Stage]) -> Plan:
    """Look at what an earlier run left in the folder.

    A run of the same method that had ended is replaced. Of any other, one that was stopped or one that ended with another
    method, the first stages are kept as far as they had ended with the same settings; and the next one is taken up from
    its checkpoint, if it had begun.
    """
    folder = context.output_dir
    kept: list[Stage] = []
    interrupted = None
    if _read(folder / RESULTS_FILE).get("method") != method:
        for number, stage in enumerate(stages, start=1):
            record = _read(folder / stage.name / STAGE_FILE)
            if record.get("key") != stage_key(stages[:number], context):
                break
            if not record.get("result"):
                interrupted = stage
                break
            kept.append(stage)
    return Plan(tuple(kept), interrupted, tuple(_replaced(folder, stages, len(kept), interrupted)))


def _replaced(folder: Path, stages: Sequence[Stage], kept: int, interrupted: Stage | None) -> Sequence[Path]:
    """Which files and folders of an earlier run will be written anew: its own alone."""
    data = [] if kept else [folder / name for name in DATA_FILES]
    results = [folder / name for name in (RESULTS_FILE, PLOT_FILE)]
    models = [folder / stage.name for stage in stages[kept:] if stage is not interrupted]
    return [path for path in (*data, *results, *models) if path.exists()]


def begin_stage(context: Context, stages: Sequence[Stage]) -> None:
    """Note that the last of these stages has begun."""
    _write(context.folder(stages[-1].name) / STAGE_FILE, {"key": stage_key(stages, context), "result": None})


def end_stage(context: Context, stages: Sequence[Stage], result: StageResult) -> None:
    """Note what the last of these stages reached."""
    content = {"key": stage_key(stages, context), **as_json(result, context)}
    _write(context.folder(stages[-1].name) / STAGE_FILE, content)


def take_up(context: Context, stage: Stage) -> StageResult:
    """Put back into the context what a stage of an earlier run had left there."""
    record = _read(context.folder(stage.name) / STAGE_FILE)
    if record["replies"] is not None:
        context.replies[stage.name] = record["replies"]
    if record["curves"]:
        context.curves[stage.name] = {
            name: [(int(step), float(value)) for step, value in curve]
            for name, curve in record["curves"].items()
        }
    stage.restore(context)
    return StageResult(**record["result"])


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write aside and rename, so that a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(aside, path)


def write_results(context: Context, method: str, content: dict[str, Any]) -> Path:
    """Write the file that says that a run has ended."""
    path = context.output_dir / RESULTS_FILE
    _write(path, {"method": method, **content})
    return path
