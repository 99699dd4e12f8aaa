"""What a run writes into its output folder for `trl report`: `run.jsonl`, one event a line, and parts of completions.

Events have a name (`event`), an optimiser step (`step`) and a time. A resumed run goes on after its checkpoint's step.
"""

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trl.reporting.run_checks import RunChecks

logger = logging.getLogger(__name__)

EVENTS = "run.jsonl"
PARTS = "completions"
KEPT_PARTS = 200  # files of completions of a run
Event = dict[str, Any]  # JSON values
Columns = Mapping[str, Sequence[object]]


def parts_in(folder: Path) -> dict[int, Path]:
    """The files of completions by step, in order."""
    files = (folder / PARTS).glob("completions_*.parquet")
    steps = {path.stem.removeprefix("completions_"): path for path in files}
    return dict(sorted((int(step), path) for step, path in steps.items() if step.isdigit()))


def write_part(folder: Path, step: int, columns: Columns, rewards: Sequence[str]) -> str:
    """Write completions aside, rename them into place, and return the file's name; the schema names the `rewards`."""
    path = folder / PARTS / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(columns)).replace_schema_metadata({"trl_rewards": json.dumps(list(rewards))})
    aside = path.with_suffix(".new")
    pq.write_table(table, aside)
    os.replace(aside, path)
    return path.name


def read_part(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a file of completions, and its columns of rewards."""
    table = pq.read_table(path)
    return table.to_pylist(), json.loads((table.schema.metadata or {}).get(b"trl_rewards", b"[]"))


def events_in(folder: Path) -> list[Event]:
    """The events of a folder."""
    path = folder / EVENTS
    return [event for _, event in _whole_lines(path.read_bytes().splitlines(keepends=True))] if path.exists() else []


def _whole_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, Event]]:
    """Events with the place in the file where each ends; a line that a killed run left unfinished ends them."""
    end = 0
    for line in lines:
        if not line.endswith(b"}\n"):
            return
        try:
            event = json.loads(line)
        except ValueError:  # torn where the disk was full
            return
        end += len(line)
        yield end, event


class RunEvents:
    """Appends events to `run.jsonl`, and the signs that something is wrong which they show; closed it writes nothing.

    Where writing fails (a full disk), a warning is logged and the run goes on without.
    """

    def __init__(self, folder: Path | None = None, run: str | None = None, *, step: int = 0, steps: int = 0) -> None:
        self.folder, self._file = folder, None
        if folder is not None:
            self.open(folder, run, step=step, steps=steps)

    @property
    def is_active(self) -> bool:
        """Whether this process writes."""
        return self.folder is not None

    def open(self, folder: Path, run: str | None, *, step: int, steps: int = 0) -> None:
        """Go on after step `step` of `run`, of `steps` (0: unknown); later ones and other runs are removed."""
        self.folder, self._checks, self._signs = folder, RunChecks(), dict[str, float]()
        self._steps, self._next_part = steps, step
        try:
            folder.mkdir(parents=True, exist_ok=True)
            end = self._keep(folder, run, step)
            self._file = (folder / EVENTS).open("ab", buffering=0)
            self._file.truncate(end)
        except OSError as error:
            self._stop(error)

    def _keep(self, folder: Path, run: str | None, step: int) -> int:
        """Follow the events that stay and remove later parts; returns where `run.jsonl` is to be cut."""
        end, path = 0, folder / EVENTS
        with path.open("rb") if step and path.exists() else nullcontext(()) as file:
            for place, event in _whole_lines(file):
                if event["step"] > step or (event["event"] == "start" and event.get("run") != run):
                    break
                self._follow(event)
                end = place
        for number, part in parts_in(folder).items():
            if number > step or not end:
                part.unlink()
        return end

    def _follow(self, event: Event) -> dict[str, str]:
        """Keep what the checks need of an event; returns the signs that a log shows for the first time."""
        if event["event"] == "check":
            self._checks.fired.add(event["name"])
        if event["event"] == "rollouts":
            self._signs = {name: event[name] for name in ("repeated", "equal")}
        return self._checks.read({**event["values"], **self._signs}) if event["event"] == "log" else {}

    def write(self, event: str, step: int, **fields: object) -> None:
        """Append an event as one line, in one call of the system, and the signs that it shows."""
        entry: Event = {"event": event, "step": step, "time": round(time.time(), 3), **fields}
        line = json.dumps(entry, default=str, ensure_ascii=False)
        if self._file is not None:
            try:
                self._file.write(line.encode("utf-8", "replace") + b"\n")
            except OSError as error:
                self._stop(error)
        for sign, text in self._follow(entry).items() if self.is_active else ():
            self.write("check", step, name=sign, text=text)

    def keeps_part(self, step: int) -> bool:
        """Whether the completions of a step are among those of which a file is kept."""
        return self.is_active and step >= self._next_part

    def write_rollouts(
        self, step: int, facts: Mapping[str, object], columns: Columns | None, rewards: Sequence[str]
    ) -> None:
        """Write numbers of a batch of completions, and `columns` of it, if there are any, as a file."""
        file = None
        if columns is not None and self.folder is not None:
            self._next_part = step + max(1, (self._steps or 4 * step) // KEPT_PARTS)
            try:
                file = write_part(self.folder, step, columns, rewards)
            except OSError as error:
                self._stop(error)
        self.write("rollouts", step, file=file, **facts)

    def end(self, step: int) -> None:
        """The run has ended."""
        self.write("end", step)
        self.close()

    def close(self) -> None:
        """Write nothing until the next run."""
        if self._file is not None:
            self._file.close()
        self.folder = self._file = None

    def _stop(self, error: OSError) -> None:
        place = f"{self.folder}/{EVENTS}"
        logger.warning("%s cannot be written (%s), so `trl report` will lack the rest of this run.", place, error)
        if self._file is not None:
            self._file.close()
        self._file = None
