"""A window's experience in a checkpoint: one file per process, which another number of processes can share out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trl.rollouts.experience import Experience, concatenate


def save_window(folder: Path, experience: Experience, *, rank: int, facts: Mapping[str, Any]) -> None:
    """Write a process's part of a window, with `facts` (JSON values) by which it is known again."""
    tensors = {name: value.detach().cpu().clone() for name, value in experience.state().items()}
    save_file(tensors, folder / _name(rank), metadata={"facts": json.dumps(dict(facts), sort_keys=True)})


def load_window(folder: Path, *, rank: int, processes: int, facts: Mapping[str, Any]) -> Experience | None:
    """A process's part of the window that `save_window` wrote, or None where there is none with these `facts`.

    Another number of `processes` than wrote it takes equal parts of the whole, in order.
    """
    files = [folder / _name(number) for number in range(len(list(folder.glob(_name("*")))))]
    if not files or any(
        not file.is_file() or _facts(file) != json.loads(json.dumps(dict(facts))) for file in files
    ):
        return None
    if len(files) == processes:
        return _read(files[rank])
    whole = concatenate([_read(file) for file in files])
    if len(whole) % processes:
        return None
    own = len(whole) // processes
    return whole.take(torch.arange(rank * own, (rank + 1) * own))


def _name(rank: int | str) -> str:
    return f"rollout_{rank}.safetensors"


def _facts(file: Path) -> Any:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["facts"])


def _read(file: Path) -> Experience:
    with safe_open(file, "pt") as opened:
        names: Sequence[str] = list(opened.keys())
        state: dict[str, Tensor] = {name: opened.get_tensor(name) for name in names}
    return Experience.from_state(state)
