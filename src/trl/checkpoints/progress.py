"""Checkpoints that are whole or not there, and the small state that transformers' own checkpoints leave out."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl.checkpoints.identity import Facts, compare, of_other_runs
from trl.checkpoints.ownership import clear
from trl.checkpoints.wholeness import (
    CheckpointError,
    checkpoint_to_load,
    checkpoints_in,
    has_weights,
    publish,
    read_manifest,
    synced_sums,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Progress = dict[str, Any]  # JSON values


@dataclass(frozen=True)
class Run:
    """A run: its own folder, what its checkpoints say about it, and the checkpoint that it resumes from."""

    folder: Path
    facts: Facts
    checkpoint: str | None = None


def begin_run(folder: Path, facts: Facts, args: TrainingArguments, *, resume: str | bool | None, alone: bool) -> Run:
    """Find and check the checkpoint to resume from, and clear the output directory; for the main process.

    Raises: FileNotFoundError or CheckpointError where the run cannot resume, or must be `alone` and is not.
    """
    output_dir, run = folder.parent, folder.name.rpartition("-")[2]
    clear(output_dir, folder.name, alone=alone)
    without: list[str] = getattr(args, "resume_without", None) or []
    checkpoint = checkpoint_to_load(resume, output_dir, without=without)
    if checkpoint is not None:
        for line in compare(checkpoint, facts, ignore_data=args.ignore_data_skip):
            logger.warning("Resuming with another setting than %s: %s.", checkpoint, line)
        if without:
            logger.warning("resume_without: %s of %s start anew.", " and ".join(without), checkpoint)
        run = read_manifest(checkpoint).get("run")
    others = of_other_runs(output_dir, run) if folder.is_dir() else []  # else nothing is written
    if others:
        logger.warning(
            "%s holds checkpoints of another run (%s). This run replaces those of the same step, and save_total_limit "
            "counts and removes them too. Use another output_dir to keep them.",
            output_dir, ", ".join(path.name for path in others),
        )  # fmt: skip
    return Run(folder, {"run": run, **facts}, None if checkpoint is None else str(checkpoint))


def date_of_run(args: TrainingArguments) -> str:
    """The ISO date on which a run began: that of the checkpoint that it resumes from or the newest one, or today."""
    named, begun = args.resume_from_checkpoint, [datetime.now().date().isoformat()]
    is_folder = isinstance(named, (str, Path)) and Path(named).is_dir()
    checkpoints = [Path(str(named))] if is_folder else checkpoints_in(args.output_dir or ".")
    if checkpoints:
        begun = [read_manifest(checkpoints[0]).get("date") or begun[0]]
    if args.world_size > 1:
        broadcast_object_list(begun)
    return begun[0]


def starts_anew(args: TrainingArguments, part: str) -> bool:
    """Whether a part of the checkpoint is left out on resuming (`resume_without`)."""
    return part in (getattr(args, "resume_without", None) or ())


def on_main(accelerator: Accelerator, make: Callable[[], T]) -> T:
    """What `make` returns on the main process, on all processes, which must all call it; so are its errors."""
    outcome: list[T | Exception | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [make()]
        except (ValueError, OSError) as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return cast(T, outcome[0])


@runtime_checkable
class SavesState(Protocol):
    """A callback with state of its own that belongs into every checkpoint."""

    def save_state(self, folder: Path) -> None:
        """Write it into the checkpoint's folder; called on every process while the checkpoint is made."""
        ...


class CheckpointWriter:
    """Saves one checkpoint in the run's own folder and renames it to `run_dir/checkpoint-<step>`.

    A rename is atomic on one file system, so a run killed at any moment leaves the checkpoint whole or not at all.
    Older checkpoints are removed only after the new one is in place.
    """

    def __init__(
        self, run: Run, run_dir: str, state: TrainerState, args: TrainingArguments, accelerator: Accelerator
    ) -> None:
        self.run_dir = Path(run_dir)
        self.staging = run.folder
        self._name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._facts, self._state, self._args, self._accelerator = run.facts, state, args, accelerator

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While the parent writes into `staging`: no old checkpoint is removed yet, nothing is pushed yet."""
        kept = {name: getattr(self._args, name) for name in ("save_total_limit", "push_to_hub")}
        self._args.save_total_limit, self._args.push_to_hub = None, False
        try:
            yield
        except Exception:  # a full disk: give back what the unfinished checkpoint takes
            if self._args.should_save:
                shutil.rmtree(self.staging / self._name, ignore_errors=True)
            raise
        finally:
            for name, value in kept.items():
                setattr(self._args, name, value)

    def publish(self) -> Path:
        """Rename into place, then remove what `save_total_limit` no longer allows. All processes must call it.

        Raises: CheckpointError where its weights are not there.
        """
        self._record_best()
        self._accelerator.wait_for_everyone()
        final, written = self.run_dir / self._name, self.staging / self._name
        part, parts = self._accelerator.process_index, self._accelerator.num_processes
        sums = gather_object([synced_sums(written, part=part, parts=parts)])
        if self._args.should_save:
            if not has_weights(written):
                raise CheckpointError(
                    f"{written} has no weights, expected those of step {self._state.global_step}: another program "
                    "removed them. Earlier checkpoints are untouched. Give each run an output_dir of its own."
                )
            whole = {name: entry for part_sums in sums for name, entry in part_sums.items()}
            publish(written, final, self._facts, replaced=self.staging / "replaced", sums=whole)
            self._rotate(final)
        self._accelerator.wait_for_everyone()
        return final

    def _rotate(self, newest: Path) -> None:
        """Remove what is over `save_total_limit`: first what an earlier run left at later steps, then the lowest.

        The newest and the best checkpoint stay. Times are not read: clocks are set back.
        """
        if not (limit := self._args.save_total_limit):
            return
        kept = {newest, Path(self._state.best_model_checkpoint or newest)}
        others = [path for path in checkpoints_in(self.run_dir) if path not in kept]
        step = self._state.global_step
        others.sort(key=lambda path: int(path.name.rpartition("-")[2]) > step)  # else the highest first
        for old in others[max(limit - len(kept), 0) :]:
            shutil.rmtree(old, ignore_errors=True)

    def _record_best(self) -> None:
        """The parent looked for the best checkpoint in `staging`; write down its final path instead."""
        best_step = self._state.best_global_step
        if best_step:
            best = self.run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
            self._state.best_model_checkpoint = str(best) if best.name == self._name or best.exists() else None
        if self._args.should_save:
            self._state.save_to_json(str(self.staging / self._name / TRAINER_STATE_NAME))


def save_progress(folder: Path, *, rank: int, state: Progress) -> None:
    """Write what this process has summed since the last log; JSON keeps every bit of a float."""
    (folder / f"progress_{rank}.json").write_text(json.dumps(state, indent=1))


def load_progress(checkpoint: str | None, *, rank: int, processes: int) -> Progress | None:
    """What `save_progress` wrote, or None for a checkpoint without it, which is said.

    A run of another number of processes shares its sums out anew: the first process goes on with all of them.
    """
    if checkpoint is None:
        return None
    folder = Path(checkpoint)
    states = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("progress_*.json"))}
    if any(state.get("processes", processes) != processes for state in states.values()):
        return _shared_out(list(states.values()), first=rank == 0)
    state = states.get(f"progress_{rank}")
    if state is None:
        logger.warning("%s has no progress_%d.json: sums of metrics start from zero.", folder, rank)
    return state


def _shared_out(states: list[Progress], *, first: bool) -> Progress:
    """One process's state from those of all processes of a run that had another number of them."""
    sums: dict[str, tuple[float, float]] = {}
    for name, (total, count) in (item for state in states for item in state["metrics"]["sums"].items()):
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + total, before[1] + count)
    return {
        **states[0],
        "loss_since_log": sum(state["loss_since_log"] for state in states) / len(states),
        "tokens_seen": sum(state["tokens_seen"] for state in states) if first else 0,
        "metrics": {**states[0]["metrics"], "sums": sums if first else {}},
    }
