"""Runs as `trl report` shows them: read from their folders, and cut to the size that a page may have."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from trl.checkpoints.wholeness import checkpoints_in, newest_whole
from trl.reporting.run_checks import Sign, signs_of
from trl.reporting.run_events import EVENTS, Event, events_in, parts_in, read_part, shortened
from trl.reporting.tables import duration
from trl.reporting.usage import usage_of
from trl.scripts.pages import Bar, bars, embedded

Json = dict[str, Any]
POINTS = 1_000  # of a curve
PAGE_BYTES = 1_800_000  # of data for 1,000 logged steps, or fewer
CURVES, POINT_BYTES = 0.5, 20  # of the bytes, and of a point at most
BINS, TIMES = 24, 120  # of histograms over time: of values, of steps
TEXT = 3_000  # characters of a text on the page
SHADED = 1_500  # tokens of a completion that are shaded
NOT_COMPARED = ("output_dir", "run_name")
SETTLED = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")


@dataclass
class RunPage:
    """A run: its last `start`, what was seen in it, `data` that the script draws, and `notes` on what was left out."""

    name: str
    start: Event
    has_ended: bool
    state: str
    signs: list[Sign]
    figures: dict[str, str]
    lengths: list[Bar]  # of the training rows
    data: Json
    notes: list[str]


def read_run(folder: Path, name: str, *, share: float = 1.0) -> RunPage:
    """A run with a `share` of the bytes of a page. Raises: ValueError for a folder without `run.jsonl`."""
    events = events_in(folder)
    starts, logs, rollouts = (
        [event for event in events if event["event"] == kind] for kind in ("start", "log", "rollouts")
    )
    if not starts:
        raise ValueError(
            f"{folder} has no {EVENTS} of a run. Give the output_dir of a run that was trained with report=True."
        )
    size, notes = share * PAGE_BYTES * max(1.0, len(logs) / 1_000), list[str]()
    data: Json = {"name": name, "curves": curves_of(logs, CURVES * size, notes)}
    data["histograms"] = [histogram_over_time(rollouts, kind) for kind in ("rewards", "lengths") if rollouts]
    data["completions"] = completions_of(folder, size - len(embedded(data)), notes)
    start = {"model": "", "data": {}, "architecture": "", "chats": False, **starts[-1]}
    has_ended = events[-1]["event"] == "end"
    state = "ended" if has_ended else "is going on, or was stopped,"
    state += f" after step {events[-1]['step']:,}" + f" of {start['steps']:,}" * bool(start["steps"])
    figures = {**figures_of(events, start, logs), **checkpoints_of(folder, start)}
    lengths = start["data"].get("lengths")
    return RunPage(
        name, start, has_ended, state, signs_of(events), {key: text for key, text in figures.items() if text},
        bars(**lengths, unit="tokens") if lengths else [], data, notes,
    )  # fmt: skip


def figures_of(events: Sequence[Event], start: Event, logs: Sequence[Event]) -> dict[str, str]:
    """Numbers of a run in words."""
    trained, parameters = start["parameters"]
    clock = sum(later["time"] - earlier["time"] for earlier, later in pairwise(events) if later["event"] != "start")
    resumed = [str(event["step"]) for event in events[1:] if event["event"] == "start"]
    values = {name: value for event in logs for name, value in event["values"].items() if name in SETTLED}
    seconds = Counter[str]()
    for event in logs:
        seconds.update(event["seconds"])
    whole = seconds.total() or 1.0
    times = {f"time of {name}": f"{spent:.1f} s, {spent / whole:.0%} of the steps" for name, spent in seconds.items()}
    return {
        "model": start["model"], "parameters": f"{parameters:,}, of which {trained:,} are trained",
        "device": start["device"], "processes": str(start["processes"]), "resumed after step": ", ".join(resumed),
        "time": duration(clock), **times,
        "peak memory": f"{max((event['memory'] for event in logs), default=0) / 2**30:.2f} GiB of the main process",
        "versions": ", ".join(f"{name} {version}" for name, version in start["versions"].items()),
        **{name: f"{value:.5g}" for name, value in values.items()},
        "training rows": str(start["data"].get("rows") or ""),
        "data": "\n".join(start["data"].get("summaries", [])),
    }  # fmt: skip


def checkpoints_of(folder: Path, start: Event) -> dict[str, str]:
    """The checkpoints of a run, and how to use the newest whole one."""
    whole, names = newest_whole(folder, quick=True), [path.name for path in checkpoints_in(folder)]
    listed = {"checkpoints": ", ".join(names) or f"none in {folder}"}
    if whole is None:
        return listed
    return {
        **listed,
        "to resume": f"the command of the run with --resume_from_checkpoint {whole}",
        "to use": "\n".join(usage_of(whole, start["architecture"], chats=start["chats"])),
    }


def curves_of(logs: Sequence[Event], size: float, notes: list[str]) -> Json:
    """The logged numbers by name as steps and values; means of neighbours where there are more than fit."""
    every: dict[str, list[tuple[int, float]]] = {}
    for event in logs:
        values = {**event["values"], "memory (GiB)": event["memory"] / 2**30}
        for name, value in values.items():
            if name not in SETTLED and is_number(value):
                every.setdefault(name, []).append((event["step"], value))
    counts = [len(points) for points in every.values()] or [1]
    stride = math.ceil(max(max(counts) / POINTS, sum(counts) * POINT_BYTES / size))
    if stride > 1:
        notes.append(f"a point of a curve is the mean of {stride} logs")
    return {name: _thinned(points, stride) for name, points in every.items()}


def _thinned(points: Sequence[tuple[int, float]], stride: int) -> Json:
    parts = [points[at : at + stride] for at in range(0, len(points), stride)]
    means = [float(f"{fmean(value for _, value in part):.5g}") for part in parts]
    return {"steps": [part[-1][0] for part in parts], "values": means}


def histogram_over_time(rollouts: Sequence[Event], kind: str) -> Json:
    """How often each of `BINS` ranges of values was seen in each of `TIMES` ranges of steps, at most."""
    stride = math.ceil(len(rollouts) / TIMES)
    parts = [rollouts[at : at + stride] for at in range(0, len(rollouts), stride)]
    columns = [[value for event in part for value in event[kind] if is_number(value)] for part in parts]
    values = [value for column in columns for value in column]
    edges = np.histogram_bin_edges(values, BINS)
    counts = [np.histogram(column, edges)[0].tolist() for column in columns]
    ends = {"low": min(values, default=0.0), "high": max(values, default=0.0)}
    return {"kind": kind, **ends, "steps": [part[-1]["step"] for part in parts], "counts": counts}


def completions_of(folder: Path, size: float, notes: list[str]) -> list[Json]:
    """The kept completions by step: of the newest step, and of as many others, evenly spread, as fit into the bytes."""
    parts, shown = list(parts_in(folder).items()), dict[int, list[Json]]()
    for back in sorted(range(len(parts)), key=lambda back: f"{back:032b}"[::-1]):  # 0, then multiples of 2^k
        step, path = parts[-1 - back]
        rows, names = read_part(path)
        for row in rows:
            entry = _shown_row(row, (*names, "reward", "advantage"))
            size -= len(embedded(entry).encode())
            if size > 0 or not shown:
                shown.setdefault(step, []).append(entry)
        if size <= 0:
            break
    if size <= 0:
        rows = sum(map(len, shown.values()))
        notes.append(
            f"{rows} completions of {len(shown)} of {len(parts)} kept steps are here, all are in {folder}/completions"
        )
    return [{"step": step, "rows": rows} for step, rows in sorted(shown.items())]


def _shown_row(row: Json, names: Sequence[str]) -> Json:
    """A completion: numbers, texts or messages, and columns of the first `SHADED` tokens."""
    columns = {name: (row.get(f"token_{name}") or [])[:SHADED] for name in ("texts", "logps", "entropies", "tool")}
    shown: Json = {
        "group": row.get("group", 0),
        "length": len(row.get("token_texts") or []),
        "tokens": columns["texts"],
        "numbers": {name: float(f"{row[name]:.4g}") for name in names if is_number(row.get(name))},
        "logps": [round(value, 1) if is_number(value) else None for value in columns["logps"]],
        "entropies": [round(value, 1) if is_number(value) else None for value in columns["entropies"]],
        "tool": [at for at, is_of_tool in enumerate(columns["tool"]) if is_of_tool],
    }
    for name in ("prompt", "completion"):
        text = json.loads(row[name]) if row.get(f"chat_{name}") else row[name]
        shown[name] = shortened(text, TEXT)
    return shown


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def compared(tables: Sequence[Mapping[str, object]], missing: str = "") -> list[tuple[str, list[str], bool]]:
    """Tables of runs side by side: a name, its text in each run, and whether they differ."""
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [str(table.get(name, missing)) for table in tables]) for name in names]
    return [(name, texts, len(set(texts)) > 1 and name not in NOT_COMPARED) for name, texts in rows]
