"""Checkpoints that are whole or not there, and the small state that transformers' own checkpoints leave out."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from accelerate import Accelerator
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

logger = logging.getLogger(__name__)

STAGING = "incomplete-"


@runtime_checkable
class SavesState(Protocol):
    """A callback with state of its own that belongs into every checkpoint."""

    def save_state(self, folder: Path) -> None:
        """Write it into the checkpoint's folder; called on every process while the checkpoint is made."""
        ...


class CheckpointWriter:
    """Saves one checkpoint under `run_dir/incomplete-<step>` and renames it to `run_dir/checkpoint-<step>`.

    A rename is atomic on one file system, so a run killed at any moment leaves the checkpoint whole or not at all.
    Older checkpoints are removed only after the new one is in place.
    """

    def __init__(
        self, run_dir: str, state: TrainerState, args: TrainingArguments, accelerator: Accelerator
    ) -> None:
        self.run_dir = Path(run_dir)
        self.staging = self.run_dir / f"{STAGING}{state.global_step}"
        self._name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._state, self._args, self._accelerator = state, args, accelerator

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While the parent writes into `staging`: no old checkpoint is removed yet, nothing is pushed yet."""
        if self._args.should_save:
            shutil.rmtree(self.staging, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        kept = {name: getattr(self._args, name) for name in ("save_total_limit", "push_to_hub")}
        self._args.save_total_limit, self._args.push_to_hub = None, False
        try:
            yield
        except Exception:  # a full disk: give back what the unfinished checkpoint takes
            if self._args.should_save:
                shutil.rmtree(self.staging, ignore_errors=True)
            raise
        finally:
            for name, value in kept.items():
                setattr(self._args, name, value)

    def publish(self) -> Path:
        """Rename into place, then remove what `save_total_limit` no longer allows. All processes must call it."""
        self._record_best()
        self._accelerator.wait_for_everyone()
        final = self.run_dir / self._name
        if self._args.should_save:
            if final.exists():  # an earlier run's, at the same step: replaced as a whole
                final.rename(self.staging / "replaced")
            (self.staging / self._name).rename(final)
            shutil.rmtree(self.staging)
            rotate_checkpoints(
                output_dir=str(self.run_dir),
                save_total_limit=self._args.save_total_limit,
                best_model_checkpoint=self._state.best_model_checkpoint,
                use_mtime=True,
            )
        self._accelerator.wait_for_everyone()
        return final

    def _record_best(self) -> None:
        """The parent looked for the best checkpoint in `staging`; write down its final path instead."""
        best_step = self._state.best_global_step
        if best_step:
            best = self.run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
            self._state.best_model_checkpoint = (
                str(best) if best.name == self._name or best.exists() else None
            )
        if self._args.should_save:
            self._state.save_to_json(str(self.staging / self._name / TRAINER_STATE_NAME))


def check_resumable(checkpoint: str | bool | None, output_dir: str | None) -> None:
    """Raise FileNotFoundError where the checkpoint to resume from, or (for True) any in the run's folder, is missing."""
    folder = Path(output_dir or ".")
    found = sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: len(path.name))
    known = (
        f"There are {', '.join(map(str, found))}."
        if found
        else f"There is none in {folder}: leave it out to start anew."
    )
    if checkpoint is True and not found:
        raise FileNotFoundError(f"resume_from_checkpoint=True needs a checkpoint to go on from. {known}")
    if isinstance(checkpoint, (str, Path)) and not Path(checkpoint).is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint={str(checkpoint)!r}: there is no such folder. {known}"
        )


def remove_incomplete(output_dir: str | None) -> None:
    """Remove what a killed run left half written."""
    if output_dir is None:
        return
    for folder in Path(output_dir).glob(f"{STAGING}*"):
        logger.warning("Removing %s: a checkpoint that an earlier run did not finish writing.", folder)
        shutil.rmtree(folder)


def save_progress(folder: Path, *, rank: int, state: dict[str, Any]) -> None:
    """Write what this process has summed since the last log; floats keep every bit in JSON."""
    (folder / f"progress_{rank}.json").write_text(json.dumps(state, indent=1))


def load_progress(checkpoint: str | None, *, rank: int, processes: int) -> dict[str, Any] | None:
    """What `save_progress` wrote, or None for a checkpoint without it, which is said.

    A run of another number of processes shares its sums out anew: the first process goes on with all of them.
    """
    if checkpoint is None:
        return None
    folder = Path(checkpoint)
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("progress_*.json"))}
    own = found.get(f"progress_{rank}")
    known = own or next(iter(found.values()), None)
    if known is not None and known.get("processes", processes) != processes:
        return _shared_out(list(found.values()), first=rank == 0)
    if own is None:
        logger.warning(
            "%s has no progress_%d.json: sums of metrics start from zero.%s", folder, rank, _also_lost(folder)
        )
    return own


def _shared_out(states: list[dict[str, Any]], *, first: bool) -> dict[str, Any]:
    """One process's state from those of all processes of a run that had another number of them."""
    sums: dict[str, tuple[float, float]] = {}
    for name, (total, count) in (item for state in states for item in state["metrics"].items()):
        known = sums.get(name, (0.0, 0.0))
        sums[name] = (known[0] + total, known[1] + count)
    return {
        **states[0],
        "loss_since_log": sum(state["loss_since_log"] for state in states) / len(states),
        "tokens_seen": sum(state["tokens_seen"] for state in states) if first else 0,
        "metrics": sums if first else {},
    }


def _also_lost(folder: Path) -> str:
    """What else a checkpoint of `save_only_model` does not hold; the empty string for others."""
    if (folder / "scheduler.pt").is_file() or any(folder.glob("global_step*")):
        return ""
    return " It holds no optimiser either (save_only_model): its moments, the schedule and random streams start anew."
