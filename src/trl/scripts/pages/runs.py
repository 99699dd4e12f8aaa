"""Runs as `trl report` shows them: read from their folders, and cut to the size that a page may have."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from trl.checkpoints.wholeness import checkpoints_in, newest_whole
from trl.reporting.run_checks import signs_of
from trl.reporting.run_events import EVENTS, Event, events_in, parts_in, shortened
from trl.reporting.tables import duration
from trl.reporting.usage import usage_of
from trl.scripts.pages import embedded

Json = dict[str, Any]
POINTS = 1_000  # of a curve
PAGE_BYTES = 1_800_000  # of data for 1,000 logged steps, or fewer
CURVES, POINT_BYTES = 0.5, 20  # of the bytes, and of a point at most
BINS, TIMES = 24, 120  # of histograms over time: of values, of steps
TEXT = 3_000  # characters of a text on the page
SHADED = 1_500  # tokens of a completion that are shaded
NOT_COMPARED = ("output_dir", "run_name")
SETTLED = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")


class Run:
    """A run on a page: its last `start`, what was seen in it, `data` that the script draws, `notes` on what it lacks.

    It has a `share` of the bytes of the page. Raises: ValueError for a folder without `run.jsonl`.
    """

    def __init__(self, folder: Path, name: str, *, share: float = 1.0) -> None:
        events = events_in(folder)
        starts, logs, rollouts = (
            [event for event in events if event["event"] == kind] for kind in ("start", "log", "rollouts")
        )
        if not starts:
            raise ValueError(
                f"{folder} has no {EVENTS} of a run. Give the output_dir of a run that was trained with report=True."
            )
        self.name, self.notes, self.signs = name, list[str](), signs_of(events)
        self.start = {"model": "", "data": {}, "architecture": "", "chats": False, **starts[-1]}
        last, words = events[-1], {"end": "ended", "stopped": "stopped"}
        self.has_ended = last["event"] in words
        self.state = words.get(last["event"], "is going on, or was stopped,") + f" after step {last['step']:,}"
        self.state += f" of {self.start['steps']:,}" * bool(self.start["steps"])
        self.state += f" by {last['reason']}" if "reason" in last else ""
        self.figures = figures_of(folder, events, self.start, logs)
        size, kinds = share * PAGE_BYTES * max(1.0, len(logs) / 1_000), ("rewards", "lengths")
        self.data: Json = {"name": name, "curves": curves_of(logs, CURVES * size, self.notes)}
        self.data["histograms"] = {kind: histogram_over_time(rollouts, kind) for kind in kinds if rollouts}
        self.data["completions"] = completions_of(folder, size - len(embedded(self.data)), self.notes)


def figures_of(folder: Path, events: Sequence[Event], start: Event, logs: Sequence[Event]) -> dict[str, str]:
    """Numbers of a run in words, and its checkpoints with the use of the newest whole one."""
    trained, parameters = start["parameters"]
    clock = sum(later["time"] - earlier["time"] for earlier, later in pairwise(events) if later["event"] != "start")
    resumed = [str(event["step"]) for event in events[1:] if event["event"] == "start"]
    values = {name: value for event in logs for name, value in event["values"].items() if name in SETTLED}
    seconds = sum((Counter(event["seconds"]) for event in logs), Counter[str]())
    whole, checkpoints = newest_whole(folder, quick=True), [path.name for path in checkpoints_in(folder)]
    figures = {
        "model": start["model"], "parameters": f"{parameters:,}, of which {trained:,} are trained",
        "device": start["device"], "processes": str(start["processes"]), "resumed after step": ", ".join(resumed),
        "time": duration(clock),
        **{f"time of {name}": f"{n:.1f} s, {n / seconds.total():.0%} of the steps" for name, n in seconds.items()},
        "peak memory": f"{max((event['memory'] for event in logs), default=0) / 2**30:.2f} GiB of the main process",
        "versions": ", ".join(f"{name} {version}" for name, version in start["versions"].items()),
        **{name: f"{value:.5g}" for name, value in values.items()},
        "training rows": str(start["data"].get("rows") or ""),
        "data": "\n".join(start["data"].get("summaries", [])),
        "checkpoints": ", ".join(checkpoints) or f"none in {folder}",
        "to resume": whole and f"the command of the run with --resume_from_checkpoint {whole}",
        "to use": whole and "\n".join(usage_of(whole, start["architecture"], chats=start["chats"])),
    }  # fmt: skip
    return {name: text for name, text in figures.items() if text}


def curves_of(logs: Sequence[Event], size: float, notes: list[str]) -> dict[str, list[tuple[int, float]]]:
    """The logged numbers by name as steps and values; means of neighbours where there are more than fit."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in logs:
        for name, value in {**event["values"], "memory (GiB)": event["memory"] / 2**30}.items():
            if name not in SETTLED and is_number(value):
                curves.setdefault(name, []).append((event["step"], value))
    counts = [len(points) for points in curves.values()] or [1]
    stride = math.ceil(max(max(counts) / POINTS, sum(counts) * POINT_BYTES / size))
    if stride > 1:
        notes.append(f"a point of a curve is the mean of {stride} logs")
    for name, points in curves.items():
        parts = [points[at : at + stride] for at in range(0, len(points), stride)]
        curves[name] = [(part[-1][0], float(f"{fmean(value for _, value in part):.5g}")) for part in parts]
    return curves


def histogram_over_time(rollouts: Sequence[Event], kind: str) -> Json:
    """How often each of `BINS` ranges of values was seen in each of `TIMES` ranges of steps, at most."""
    seen = [(place, value) for place, event in enumerate(rollouts) for value in event[kind] if is_number(value)]
    places, values = np.array(seen, float).reshape(-1, 2).T
    bins, every = (min(len(rollouts), TIMES), BINS), (0, len(rollouts))
    counts = np.histogram2d(places, values, bins, range=(every, None))[0].astype(int).tolist()  # type: ignore[arg-type]
    ends = {"low": min(values, default=0.0), "high": max(values, default=0.0)}
    return {**ends, "steps": [event["step"] for event in (rollouts[0], rollouts[-1])], "counts": counts}


def completions_of(folder: Path, size: float, notes: list[str]) -> list[Json]:
    """The kept completions: of the newest step, and of as many others, evenly spread, as fit into the bytes."""
    parts, shown = list(parts_in(folder).items()), list[Json]()
    order = sorted(range(len(parts)), key=lambda back: f"{back:032b}"[::-1])  # 0, then multiples of 2^k
    for row in (row for back in order for row in shown_rows(*parts[-1 - back])):
        size -= len(embedded(row).encode())
        if size <= 0 and shown:
            break
        shown.append(row)
    if size <= 0:
        steps = len({row["step"] for row in shown})
        notes.append(
            f"{len(shown)} completions of {steps} of {len(parts)} kept steps are here, all are in {folder}/completions"
        )
    return sorted(shown, key=lambda row: row["step"])


def shown_rows(step: int, path: Path) -> Iterator[Json]:
    """The completions of a file: rewards and advantage, texts or messages, columns of the first `SHADED` tokens."""
    for row in pq.read_table(path).to_pylist():
        shown: Json = {"step": step, "group": row["group"], "length": len(row["token_texts"])}
        shown["numbers"] = {name: v for name, v in row.items() if isinstance(v, float) and is_number(v)}
        for name in ("prompt", "completion"):
            shown[name] = shortened(json.loads(row[name]) if row[f"chat_{name}"] else row[name], TEXT)
        for name in ("texts", "logps", "entropies", "tool"):
            column = (row.get(f"token_{name}") or [])[:SHADED]
            shown[name] = [
                value if isinstance(value, str) else round(value, 1) if is_number(value) else None for value in column
            ]
        yield shown


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def compared(tables: Sequence[Mapping[str, object]], missing: str = "") -> list[tuple[str, list[str], bool]]:
    """Tables of runs side by side: a name, its text in each run, and whether they differ."""
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [str(table.get(name, missing)) for table in tables]) for name in names]
    return [(name, texts, len(set(texts)) > 1 and name not in NOT_COMPARED) for name, texts in rows]
