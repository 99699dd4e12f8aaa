"""The state of a step-level loop in a folder; resuming is bit-exact."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from trl.checkpoints.wholeness import CheckpointError, faults, listed, publish
from trl.models.value_wrapper import under_module_names
from trl.tensors.moments import RunningMoments

_FILE = "ppo_state.json"  # of the plain values
_FORMAT = 1
State = dict[str, Any]


def save_step_state(folder: str | Path, accelerator: Accelerator, state: State, *, file: str = _FILE) -> None:
    """Save what accelerate prepared, `state` (plain values) and random generators, replacing `folder` atomically.

    All processes must call it.
    """
    final, staging, replaced = Path(folder), _beside(folder, "saving"), _beside(folder, "replaced")
    if accelerator.is_main_process:
        shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
        staging.mkdir(parents=True)
    accelerator.wait_for_everyone()
    # accelerate checks names after loading safetensors, and takes tied weights of a wrapper for unknown ones.
    with under_module_names(accelerator):
        accelerator.save_state(str(staging), safe_serialization=False)
    torch.save(rng_states(), staging / f"random_streams_{accelerator.process_index}.pt")
    if accelerator.is_main_process:
        known = {"format": _FORMAT, "processes": accelerator.num_processes, **state}
        (staging / file).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        publish(staging, final, {}, replaced=replaced)
    accelerator.wait_for_everyone()


def _beside(folder: str | Path, kind: str) -> Path:
    """The folder of a state that is being saved, or of the last state while the next is renamed into place."""
    return Path(folder).with_name(f"_{kind}-{Path(folder).name}")


def load_step_state(
    folder: str | Path, accelerator: Accelerator, *, scheduled: bool = False, file: str = _FILE
) -> State:
    """Load a saved state; returns the plain values. `scheduled`: the accelerator has prepared a scheduler.

    Raises: FileNotFoundError without a state; CheckpointError without a file; ValueError for other processes.
    """
    folder = Path(folder)
    if not folder.exists() and _beside(folder, "replaced").exists():  # killed between two renames
        folder = _beside(folder, "replaced")
    values = folder / file
    if not values.is_file():
        raise FileNotFoundError(f"{values} is missing. Give a folder that save_state wrote.")
    if broken := faults(folder, needed={}):
        raise CheckpointError(f"{folder} is not whole: {listed(broken)}. Load another state.")
    state = json.loads(values.read_text(encoding="utf-8"))
    if state["processes"] != accelerator.num_processes:
        raise ValueError(
            f"{folder} is of {state['processes']} processes, not {accelerator.num_processes}. Launch as many."
        )
    has_schedule = (folder / "scheduler.bin").is_file()
    if has_schedule != scheduled:
        kind = "with" if has_schedule else "without"
        raise ValueError(f"{folder} was saved {kind} an lr_scheduler. Build the trainer {kind} one.")
    with under_module_names(accelerator):
        accelerator.load_state(str(folder))
    streams = folder / f"random_streams_{accelerator.process_index}.pt"
    set_rng_states(torch.load(streams, weights_only=True, map_location="cpu"))
    return state


def rng_states() -> State:
    """The states of Python's, numpy's and torch's global generators, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_states(streams: State) -> None:
    version, numbers, gauss = streams["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = streams["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(streams["torch"])
    if streams["cuda"]:
        torch.cuda.set_rng_state_all(streams["cuda"])


@contextmanager
def own_rng_states() -> Iterator[None]:
    """A block whose random numbers do not change those after it."""
    streams = rng_states()
    try:
        yield
    finally:
        set_rng_states(streams)


def moments_state(running: RunningMoments) -> dict[str, float]:
    return {name: float(getattr(running, name)) for name in ("mean", "std", "var", "count")}
