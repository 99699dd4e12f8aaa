"""The small state that transformers' own checkpoints leave out, and what all processes must agree on."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl.checkpoints.wholeness import CheckpointError, checkpoints_in, read_manifest

logger = logging.getLogger(__name__)

T = TypeVar("T")
Progress = dict[str, Any]  # JSON values
_RAISED = CheckpointError, FileNotFoundError, ConnectionError, PermissionError, OSError, ValueError, RuntimeError


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


def together(act: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What `act` returns on each process, on all of them, which must all call it; so is an error of any."""
    value, failure, kind = None, None, None
    try:
        value = act()
    except Exception as error:
        # Others raise a type that takes a text: they may not be able to build the error itself.
        failure, kind = error, next((kind for kind in _RAISED if isinstance(error, kind)), RuntimeError)
    outcomes: list[Any] = [(value, kind, str(failure))]
    if dist.is_initialized():
        mine, outcomes = outcomes[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, mine, group=group)
    if failure is not None:
        raise failure
    for rank, (_, kind, text) in enumerate(outcomes):
        if kind is not None:
            raise kind(f"in process {rank}: {text}")
    return [value for value, *_ in outcomes]


def on_main(accelerator: Accelerator | PartialState, make: Callable[[], T]) -> T:
    """What `make` returns on the main process, on all processes, which must all call it; so are its errors."""
    return cast(T, together(make if accelerator.is_main_process else lambda: None)[0])


class SavesState(TrainerCallback, ABC):
    """A callback whose state is in `state_file` of every checkpoint."""

    state_file: str
    resumed_from: str | None = None
    """The checkpoint that a run of ours resumes from."""

    def resumed_file(self, args: TrainingArguments, state: TrainerState) -> Path:
        """The file of the state in the checkpoint that a run resumes from; other trainers have it in `output_dir`."""
        return Path(self.resumed_from or f"{args.output_dir}/checkpoint-{state.global_step}") / self.state_file

    @abstractmethod
    def save_state(self, folder: Path) -> None:
        """Write the state into a checkpoint, which is not complete yet."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Write it where a trainer of another library did not."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if folder.is_dir() and not (folder / self.state_file).is_file():
            self.save_state(folder)


def save_progress(folder: Path, *, rank: int, state: Progress) -> None:
    """Write what this process has summed since the last log; JSON keeps every bit of a float."""
    (folder / f"progress_{rank}.json").write_text(json.dumps(state, indent=1))


def load_progress(folder: Path, *, rank: int, processes: int, copies: int = 1) -> Progress | None:
    """What `save_progress` wrote, shared out anew for other numbers of processes; None (warned) without it.

    `copies`: neighbouring processes that count the same things.
    """
    states = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("progress_*.json"))}
    layout = processes, copies
    if any((state.get("processes", processes), state.get("copies", copies)) != layout for state in states.values()):
        return _shared_out(list(states.values()), first=rank == 0, copies=copies)
    state = states.get(f"progress_{rank}")
    if state is None:
        logger.warning("%s has no progress_%d.json: sums of metrics start from zero.", folder, rank)
    return state


def _shared_out(states: list[Progress], *, first: bool, copies: int) -> Progress:
    """One process's state from those of all processes of a run that had another number of them.

    The first process takes all sums; extremes of the others are in a list `more_extremes`.
    """
    sums: dict[str, tuple[float, float]] = {}
    share = copies / states[0].get("copies", copies)
    for name, (total, count) in (item for state in states for item in state["metrics"]["sums"].items()):
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + share * total, before[1] + share * count)
    return {
        **states[0],
        "loss_since_log": sum(state["loss_since_log"] for state in states) / len(states),
        "tokens_seen": round(share * sum(state["tokens_seen"] for state in states)) if first else 0,
        "metrics": {**states[0]["metrics"], "sums": sums if first else {}},
        "more_extremes": [state["metrics"]["extremes"] for state in states[1:]],
    }
