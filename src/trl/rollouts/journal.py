"""A journal of the sessions that have ended, so that a run that was stopped does not run them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Journal:
    """Records of sessions in files of `folder`, one for each step and process.

    A record belongs to the step, the policy's weights, a random stream and a row. Records are written between `begin` and `end`.
    `prune` deletes those before a checkpoint, unless the journal `keeps` them.
    """

    def __init__(self, folder: Path, *, rank: int, keeps: bool = False) -> None:
        self.folder, self.rank, self.keeps = folder, rank, keeps
        self._held: dict[str, dict[str, Any]] = {}
        self._step: int | None = None
        self._weights = ""

    def start(self, *, resumes: bool) -> None:
        """Read the records of the run that is resumed, or delete them."""
        self._held = {}
        if resumes:
            self._held = {record["key"]: record for record in read_sessions(self.folder)}
            for file in self._files():
                if not file.read_bytes().endswith(b"\n"):  # the process was killed while it wrote
                    file.write_bytes(file.read_bytes() + b"\n")
        else:
            self.prune(None)

    def begin(self, step: int, model: nn.Module) -> None:
        """Before the sessions of a rollout batch."""
        sums = [each.detach().sum(dtype=torch.float64) for each in model.parameters() if each.requires_grad]
        self._step, self._weights = step, _digest(torch.stack(sums).tolist() if sums else [])

    def end(self) -> None:
        """After them: other sessions are not written."""
        self._step = None

    def found(self, sessions: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
        """The records of streams and rows, by their place; each is found once."""
        if self._step is None:
            return {}
        keys = enumerate(self._key(*each) for each in sessions)
        return {place: self._held.pop(key) for place, key in keys if key in self._held}

    def write(self, stream: int, row: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Append the record of a session."""
        if self._step is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {"key": self._key(stream, row), "row": dict(row), **record}
        with (self.folder / f"{self._step:08d}-{self.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole, default=str) + "\n")

    def prune(self, step: int | None) -> None:
        """Delete this process's records of earlier steps; all for None."""
        for file in [] if self.keeps else self._files():
            if step is None or int(file.name.partition("-")[0]) < step:
                file.unlink()

    def _files(self) -> list[Path]:
        return list(self.folder.glob(f"*-{self.rank}.jsonl"))

    def _key(self, stream: int, row: Mapping[str, Any]) -> str:
        return _digest([self._step, self._weights, stream, row])


def read_sessions(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a journal: `row`, `reward`, `conversations` (each with `messages` and `tools`) and more of each session."""
    for file in sorted(Path(folder).glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # half a line
                continue


def _digest(value: Any) -> str:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()
