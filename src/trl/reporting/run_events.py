"""What a run writes into its output folder for `trl report`: `run.jsonl`, one event a line, and files of completions.

Events have a name (`event`), an optimiser step (`step`) and a time. A resumed run goes on after its checkpoint's step.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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


def read_part(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a file of completions, and its columns of rewards."""
    table = pq.read_table(path)
    return table.to_pylist(), json.loads((table.schema.metadata or {}).get(b"trl_rewards", b"[]"))


def shortened(value: Any, longest: int) -> Any:
    """A text, or every text in messages, without what is over the limit."""
    if isinstance(value, str):
        return value if len(value) <= longest else f"{value[:longest]} … {len(value) - longest} characters left out"
    if isinstance(value, Mapping):
        return {name: shortened(item, longest) for name, item in value.items()}
    return [shortened(item, longest) for item in value] if isinstance(value, list | tuple) else value


def events_in(folder: Path) -> list[Event]:
    """The events of a folder."""
    return [event for _, event in _whole_lines(folder / EVENTS)]


def _whole_lines(path: Path) -> Iterator[tuple[int, Event]]:
    """Events with the place in the file where each ends; a line that a killed run left unfinished ends them."""
    end = 0
    with path.open("rb") if path.exists() else nullcontext(()) as lines:
        for line in lines:
            try:
                event = json.loads(line if line.endswith(b"}\n") else b"")
            except ValueError:  # torn where the run was killed, or the disk was full
                return
            end += len(line)
            yield end, event


class RunEvents:
    """Appends events to `run.jsonl`, and writes files of completions beside it; without a folder there are no events.

    Where writing fails (a full disk), a warning is logged and the run goes on without.
    """

    def __init__(self, folder: Path | None = None, run: str | None = None, *, step: int = 0, steps: int = 0) -> None:
        """Go on after step `step` of `run`, of `steps`; what is later, or of other runs, is removed."""
        self._file, self._steps, self._next_part = None, steps, step
        if folder is not None:
            with self._stopping_at_errors():
                folder.mkdir(parents=True, exist_ok=True)
                end = _cut(folder, run, step)
                self._file = (folder / EVENTS).open("ab", buffering=0)
                self._file.truncate(end)

    @property
    def is_active(self) -> bool:
        """Whether this process writes events."""
        return self._file is not None

    def write(self, event: str, step: int, **fields: object) -> None:
        """Append an event as one line, in one call of the system."""
        if self._file is None:
            return
        entry: Event = {"event": event, "step": step, "time": round(time.time(), 3), **fields}
        line = json.dumps(entry, default=str, ensure_ascii=False)
        with self._stopping_at_errors():
            self._file.write(line.encode("utf-8", "replace") + b"\n")

    def keeps_part(self, step: int) -> bool:
        """Whether the completions of a step are among those of which a file is kept."""
        return self.is_active and step >= self._next_part

    def write_part(self, folder: Path, step: int, columns: Columns, rewards: Sequence[str]) -> None:
        """Write completions aside and rename them into place; the schema names the columns of `rewards`."""
        self._next_part = step + max(1, self._steps // KEPT_PARTS)
        path = folder / PARTS / f"completions_{step:05d}.parquet"
        table = pa.table(dict(columns)).replace_schema_metadata({"trl_rewards": json.dumps(list(rewards))})
        with self._stopping_at_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, aside := path.with_suffix(".new"))
            os.replace(aside, path)

    def close(self) -> None:
        """Write no more events."""
        if self._file is not None:
            self._file.close()
        self._file = None

    @contextmanager
    def _stopping_at_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("A run's events cannot be written (%s): `trl report` will lack the rest of it.", error)
            self.close()


def _cut(folder: Path, run: str | None, step: int) -> int:
    """Where the events of a run end after a step (0 without any); files of later completions are removed."""
    end = 0
    for place, event in _whole_lines(folder / EVENTS) if step else ():
        if event["step"] > step or (event["event"] == "start" and event.get("run") != run):
            break
        end = place
    for number, part in parts_in(folder).items():
        if number > step or not end:
            part.unlink()
    return end
