"""What a run writes into its output folder for `trl report`: `run.jsonl`, one event a line, and parts of completions.

Events have a name (`event`), an optimiser step (`step`) and a time. A resumed run goes on after its checkpoint's step.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

EVENTS = "run.jsonl"
PARTS = "completions"
Event = dict[str, Any]  # JSON values
Columns = Mapping[str, Sequence[object]]


def part_path(folder: Path, step: int) -> Path:
    """The file of the completions that were logged after an optimiser step."""
    return folder / PARTS / f"completions_{step:05d}.parquet"


def parts_in(folder: Path) -> dict[int, Path]:
    """The files of completions by step, in order."""
    files = (folder / PARTS).glob("completions_*.parquet")
    steps = {path.stem.rpartition("_")[2]: path for path in files}
    return dict(sorted((int(step), path) for step, path in steps.items() if step.isdigit()))


def write_part(folder: Path, step: int, columns: Columns, *, rewards: Sequence[str]) -> Path:
    """Write completions aside and rename them into place; the schema names the columns of `rewards`."""
    path = part_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(columns)).replace_schema_metadata({"trl_rewards": json.dumps(list(rewards))})
    aside = path.with_suffix(".new")
    pq.write_table(table, aside)
    os.replace(aside, path)
    return path


def read_part(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a file of completions, and its columns of rewards."""
    table = pq.read_table(path)
    return table.to_pylist(), json.loads((table.schema.metadata or {}).get(b"trl_rewards", b"[]"))


def events_in(folder: Path) -> Iterator[Event]:
    """The events of a folder; a line that a killed run left unfinished ends them."""
    path = folder / EVENTS
    if path.exists():
        with path.open("rb") as file:
            for _, event in _whole_lines(file):
                yield event


def _whole_lines(file: Iterable[bytes]) -> Iterator[tuple[int, Event]]:
    """Events with the place in the file where each ends."""
    end = 0
    for line in file:
        try:
            event = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(event, dict) or "step" not in event:
            return
        end += len(line)
        yield end, event


class RunEvents:
    """Appends events to `run.jsonl`. Where writing fails (a full disk), a warning is logged and the run goes on without."""

    def __init__(self, folder: Path, run: str | None, *, step: int) -> None:
        """Go on after optimiser step `step` of `run`; what is there of later steps or of other runs is removed."""
        self.folder, self._file = folder, None
        self.kept: list[Event] = []
        """The events that the run goes on after."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            end = self._keep(run, step)
            self._file = (folder / EVENTS).open("ab", buffering=0)
            self._file.truncate(end)
        except OSError as error:
            self._stop(error)

    def _keep(self, run: str | None, step: int) -> int:
        """Read what stays and remove later parts; returns where `run.jsonl` is to be cut."""
        end, path = 0, self.folder / EVENTS
        with path.open("rb") if step and path.exists() else nullcontext(()) as file:
            for place, event in _whole_lines(file):
                if event["step"] > step or (event["event"] == "start" and event.get("run") != run):
                    break
                self.kept.append(event)
                end = place
        for number, part in parts_in(self.folder).items():
            if number > step or not self.kept:
                part.unlink()
        return end

    def write(self, event: str, step: int, **fields: object) -> None:
        """Append an event as one line, in one call of the system."""
        line = json.dumps({"event": event, "step": step, **fields}, default=str, ensure_ascii=False)
        if self._file is not None:
            try:
                self._file.write(line.encode("utf-8", "replace") + b"\n")
            except OSError as error:
                self._stop(error)

    def write_part(self, step: int, columns: Columns, *, rewards: Sequence[str]) -> str | None:
        """`write_part` into the run's folder; returns the file's name, None where it could not be written."""
        try:
            return write_part(self.folder, step, columns, rewards=rewards).name
        except OSError as error:
            self._stop(error)
            return None

    def close(self) -> None:
        """Nothing is written after it."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _stop(self, error: OSError) -> None:
        place = self.folder / EVENTS
        logger.warning("%s cannot be written (%s), so `trl report` will lack the rest of this run.", place, error)
        self.close()
