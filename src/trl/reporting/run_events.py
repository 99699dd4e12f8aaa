"""What a run writes into its output folder for `trl report`: `run.jsonl`, one event a line, and files of completions.

Events have a name (`event`), an optimiser step (`step`) and a time. A resumed run goes on after its checkpoint's step.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

EVENTS = "run.jsonl"
REASON = 300  # characters of an error
PARTS = "completions"
BARS = 40  # of a histogram
KEPT_PARTS = 200  # files of completions of a run
Event = dict[str, Any]  # JSON values


def parts_in(folder: Path) -> dict[int, Path]:
    """The files of completions by step, in order."""
    files = (folder / PARTS).glob("completions_*.parquet")
    steps = {path.stem.removeprefix("completions_"): path for path in files}
    return dict(sorted((int(step), path) for step, path in steps.items() if step.isdigit()))


def shortened(value: Any, longest: int) -> Any:
    """A text, or every text in messages, without what is over the limit."""
    if isinstance(value, str):
        return value if len(value) <= longest else f"{value[:longest]} … {len(value) - longest} characters left out"
    if isinstance(value, Mapping):
        return {name: shortened(item, longest) for name, item in value.items()}
    return [shortened(item, longest) for item in value] if isinstance(value, list | tuple) else value


def histogram(numbers: np.ndarray, unit: str) -> list[tuple[int, str]]:
    """The bars of a histogram: how many numbers, and in which range."""
    low, high, is_whole = float(numbers.min()), float(numbers.max()), bool((numbers == numbers.round()).all())
    step = max(1, math.ceil((high - low + 1) / BARS))  # of whole numbers
    edges = np.arange(low, high + step + 0.5, step) if is_whole else np.linspace(low, high, 1 + BARS ** (high > low))
    ranges = [f"{first:.5g} to {last - is_whole:.5g} {unit}" for first, last in pairwise(edges)]
    return [*zip(np.histogram(numbers, edges)[0].tolist(), ranges, strict=True)]


def events_in(folder: Path) -> list[Event]:
    """The events of a folder; a line that a killed run or a full disk left unfinished ends them."""
    events = list[Event]()
    with suppress(FileNotFoundError, NotADirectoryError, ValueError), (folder / EVENTS).open("rb") as lines:
        for line in lines:
            events.append(json.loads(line if line.endswith(b"}\n") else b""))
    return events


class RunEvents:
    """Appends events to `run.jsonl`, and writes files of completions beside it; without a folder there are no events.

    Where writing fails (a full disk), a warning is logged and the run goes on without.
    """

    def __init__(self, folder: Path | None = None, run: str | None = None, *, step: int = 0, steps: int = 0) -> None:
        """Go on after step `step` of `run`, of `steps`; what is later, or of other runs, is removed."""
        self.is_active, self._folder = folder is not None, folder or Path()
        self._steps, self.next_part = steps, step  # of the next completions that are kept in a file
        if folder is not None:
            with self._stopping_at_errors():
                folder.mkdir(parents=True, exist_ok=True)
                events = events_in(folder) if step else []
                kept = [*takewhile(lambda event: event["step"] <= step and event.get("run", run) == run, events)]
                (folder / EVENTS).touch()
                lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
                os.truncate(folder / EVENTS, sum(map(len, lines[: len(kept)])))
                for number, part in parts_in(folder).items():
                    if number > step or not kept:
                        part.unlink()

    def write(self, event: str, step: int, **fields: object) -> None:
        """Append an event as one line, in one call of the system."""
        if not self.is_active:
            return
        entry: Event = {"event": event, "step": step, "time": round(time.time(), 3), **fields}
        line = json.dumps(entry, default=str, ensure_ascii=False)
        with self._stopping_at_errors(), (self._folder / EVENTS).open("ab", buffering=0) as file:
            file.write(line.encode("utf-8", "replace") + b"\n")

    def stop(self, step: int, error: BaseException | None) -> None:
        """Write no more events; the last one of a run that an error stopped says so."""
        if error is not None:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]
            self.write("stopped", step, reason=reason[:REASON])
        self.close()

    def write_part(self, folder: Path, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Write completions aside and rename them into place."""
        self.next_part = step + max(1, self._steps // KEPT_PARTS)
        path = folder / PARTS / f"completions_{step:05d}.parquet"
        with self._stopping_at_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(dict(columns)), aside := path.with_suffix(".new"))
            os.replace(aside, path)

    def close(self) -> None:
        """Write no more events."""
        self.is_active = False

    @contextmanager
    def _stopping_at_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("A run's events cannot be written (%s): `trl report` will lack the rest of it.", error)
            self.close()
