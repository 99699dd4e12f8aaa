"""A journal of the sessions that have ended, so that a run that was stopped does not run them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from trl.models.distributed import is_sharded


class Journal:
    """Records of sessions in files of `folder`, one for each step, run and process.

    A record belongs to the run, the step, the policy's weights, a random stream, a row and the settings that it was sampled with.
    Records are read at `begin`, and written until `end`. `prune` deletes what a
    checkpoint does not need, unless the journal `keeps` all.
    """

    def __init__(self, folder: Path, *, rank: int, keeps: bool = False) -> None:
        self.folder, self.rank, self.keeps = folder, rank, keeps
        self._held: dict[str, dict[str, Any]] = {}
        self._file: Path | None = None
        self._step, self._policy = 0, ""

    def begin(self, step: int, model: nn.Module, *, run: str | None) -> None:
        """Before the sessions of a rollout batch of a run: read those that have ended. All processes must call it."""
        trained = (_local(each) for each in model.parameters() if each.requires_grad)
        sums: Any = [[each.sum(dtype=torch.float64).item() for each in trained]]
        self._step = step
        self._policy = _digest([run, step, gather_object(sums) if is_sharded(model) else sums])
        name = f"{step:08d}-{run}"
        self._held = {record["key"]: record for record in read_sessions(self.folder, f"{name}-*.jsonl")}
        self._file = self.folder / f"{name}-{self.rank}.jsonl"
        if self._file.is_file() and not self._file.read_bytes().endswith(b"\n"):  # killed while it wrote
            self._file.write_bytes(self._file.read_bytes() + b"\n")

    def end(self) -> None:
        """After them: other sessions are not written."""
        self._held, self._file = {}, None

    def key(self, stream: int, row: Mapping[str, Any], *settings: Any) -> str:
        """Of a session of the present rollout batch."""
        return _digest([self._policy, stream, row, settings])

    def found(self, keys: Sequence[str]) -> dict[int, dict[str, Any]]:
        """The records of some sessions, by their place."""
        return {place: self._held[key] for place, key in enumerate(keys) if key in self._held}

    def write(self, key: str, row: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Append the record of a session that has none."""
        if self._file is None or key in self._held:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            whole = {"key": key, "step": self._step, "row": dict(row), **record}
            file.write(json.dumps(whole, default=str) + "\n")

    def prune(self, step: int, *, run: str | None) -> None:
        """Delete this process's records of earlier steps and of other runs."""
        for file in [] if self.keeps else list(self.folder.glob(f"*-{self.rank}.jsonl")):
            if int(file.name.partition("-")[0]) < step or f"-{run}-" not in file.name:
                file.unlink()


def read_sessions(folder: str | Path, files: str = "*.jsonl") -> Iterator[dict[str, Any]]:
    """The records of a journal: `step`, `row`, `reward`, `conversations` (each with `messages` and `tools`) and more.

    `files` says which of its files are read.
    """
    for file in sorted(Path(folder).glob(files)):
        for line in file.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # half a line
                continue


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This process's part of a parameter: its shard under FSDP2 and ZeRO-3."""
    held = getattr(parameter, "ds_tensor", parameter).detach()
    return held.to_local() if isinstance(held, DTensor) else held


def _digest(value: Any) -> str:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()
