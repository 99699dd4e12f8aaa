"""Runs as `trl report` shows them: read from their folders, and cut to the size that a page may have."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trl.checkpoints.wholeness import checkpoints_in, newest_whole
from trl.reporting.run_checks import Sign, signs_of
from trl.reporting.run_events import EVENTS, Event, events_in, parts_in, read_part
from trl.reporting.tables import duration
from trl.reporting.usage import usage_of
from trl.scripts.pages import Bar, bars

Json = dict[str, Any]
POINTS = 1_000  # of a curve
PAGE_BYTES = 1_800_000  # of data for 1,000 logged steps, or fewer
CURVES = 0.4  # of the bytes
BINS, TIMES = 24, 120  # of histograms over time: of values, of steps
TEXT = 3_000  # characters of a text on the page
SHADED = 1_500  # tokens of a completion that are shaded
NOT_COMPARED = ("output_dir", "run_name")
SETTLED = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")


@dataclass
class RunPage:
    """A run: its first event, what was seen in it, `data` that the page's script draws, and what was left out of it."""

    name: str
    folder: str
    start: Event
    has_ended: bool
    state: str
    signs: list[Sign]
    figures: dict[str, str]
    seconds: dict[str, float]
    lengths: list[Bar]  # of the training rows
    checkpoints: list[str]
    advice: list[str]
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
    size = share * PAGE_BYTES * max(1.0, len(logs) / 1_000)
    seconds: Counter[str] = Counter()
    for event in logs:
        seconds.update(event["seconds"])
    has_ended = events[-1]["event"] == "end"
    last, steps = events[-1]["step"], starts[-1]["steps"]
    state = "ended" if has_ended else "is going on, or was stopped,"
    notes: list[str] = []
    data: Json = {"name": name, "curves": curves_of(logs, round(CURVES * size), notes)}
    data["histograms"] = [histogram_over_time(rollouts, kind) for kind in ("rewards", "lengths") if rollouts]
    data["pieces"], data["completions"] = completions_of(folder, size - len(json.dumps(data)), notes)
    lengths = starts[-1].get("data", {}).get("lengths")
    return RunPage(
        name, str(folder), starts[-1], has_ended, f"{state} after step {last:,}" + f" of {steps:,}" * bool(steps),
        signs_of(events), figures_of(events, starts, logs), dict(seconds),
        bars(**lengths, unit="tokens") if lengths else [],
        [path.name for path in checkpoints_in(folder)], advice_of(folder, starts[-1]), data, notes,
    )  # fmt: skip


def figures_of(events: Sequence[Event], starts: Sequence[Event], logs: Sequence[Event]) -> dict[str, str]:
    """Numbers of a run in words."""
    start = starts[-1]
    trained, parameters = start["parameters"]
    clock = sum(later["time"] - earlier["time"] for earlier, later in pairwise(events) if later["event"] != "start")
    peak = max((event["memory"] for event in logs), default=0)
    data, versions = start.get("data", {}), start.get("versions", {})
    figures = {
        "method": str(start["method"]), "model": str(start["model"] or "-"),
        "parameters": f"{parameters:,}, of which {trained:,} are trained",
        "device": f"{start['device']}, {start['processes']} process{'es' * (start['processes'] > 1)}",
        "time": duration(clock), "peak memory": f"{peak / 2**30:.2f} GiB of the main process",
        "training rows": "a stream" if data.get("rows") is None else f"{data['rows']:,}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }  # fmt: skip
    if len(starts) > 1:
        figures["resumed"] = "after step " + ", ".join(str(event["step"]) for event in starts[1:])
    values = {name: value for event in logs for name, value in event["values"].items() if name in SETTLED}
    return {**figures, **{name: f"{value:.5g}" for name, value in values.items()}}


def advice_of(folder: Path, start: Event) -> list[str]:
    """How to use the checkpoints of a run."""
    whole = newest_whole(folder, quick=True)
    if whole is None:
        return []
    resume = f"the command of the run with --resume_from_checkpoint {whole}"
    use = usage_of(whole, start.get("architecture", ""), chats=start.get("chats", False))
    return [f"To resume: {resume}", *(f"To use: {line}" for line in use)]


def curves_of(logs: Sequence[Event], size: int, notes: list[str]) -> Json:
    """The logged numbers by name as steps and values; means of neighbours where there are more than fit."""
    every: dict[str, list[tuple[int, float | None]]] = {}
    for event in logs:
        for name, value in {**event["values"], "memory (GiB)": event["memory"] / 2**30}.items():
            if name not in SETTLED:
                every.setdefault(name, []).append((event["step"], _known(value)))
    longest = max(map(len, every.values()), default=0)
    stride = max(1, math.ceil(longest / POINTS))
    while True:
        curves = {name: _thinned(points, stride) for name, points in every.items()}
        if len(json.dumps(curves)) <= size or stride >= longest:
            break
        stride *= 2
    if stride > 1:
        notes.append(f"a point of a curve is the mean of {stride} logs")
    return curves


def _thinned(points: Sequence[tuple[int, float | None]], stride: int) -> Json:
    parts = [points[at : at + stride] for at in range(0, len(points), stride)]
    values = [[value for _, value in part if value is not None] for part in parts]
    means = [float(f"{sum(part) / len(part):.5g}") if part else None for part in values]
    return {"steps": [part[-1][0] for part in parts], "values": means}


def histogram_over_time(rollouts: Sequence[Event], kind: str) -> Json:
    """How often each of `BINS` ranges of values was seen in each of `TIMES` ranges of steps, at most."""
    stride = math.ceil(len(rollouts) / TIMES)
    parts = [rollouts[at : at + stride] for at in range(0, len(rollouts), stride)]
    columns = [[value for event in part for value in event[kind] if _known(value) is not None] for part in parts]
    values = [value for column in columns for value in column]
    edges = np.histogram_bin_edges(values, BINS)
    counts = [np.histogram(column, edges)[0].tolist() for column in columns]
    ends = {"low": min(values, default=0.0), "high": max(values, default=0.0)}
    return {"kind": kind, **ends, "steps": [part[-1]["step"] for part in parts], "counts": counts}


def completions_of(folder: Path, size: float, notes: list[str]) -> tuple[list[str], list[Json]]:
    """The texts of tokens, and the kept completions by step; evenly spaced steps where there are more than fit."""
    pieces: dict[str, int] = {}
    files = parts_in(folder)
    steps = {step: _shown_rows(path, pieces) for step, path in files.items()}
    if (texts := len(json.dumps(list(pieces)))) > size / 2:
        steps, pieces, texts = {step: _shown_rows(path, None) for step, path in files.items()}, {}, 0
        notes.append("the texts of tokens do not fit: completions are not shaded")
    size -= texts
    sizes = {step: len(json.dumps(rows, ensure_ascii=False).encode()) for step, rows in steps.items()}
    chosen, stride = list(steps), 1
    while stride < len(steps) and sum(sizes[step] for step in chosen) > size:
        stride += 1
        chosen = sorted({*list(steps)[::stride], list(steps)[-1]})
    if len(chosen) < len(steps):
        notes.append(
            f"completions of {len(chosen)} of {len(steps)} kept steps are here, all are in {folder}/completions"
        )
    for step in chosen:
        while len(steps[step]) > 1 and len(json.dumps(steps[step])) > size:
            steps[step] = steps[step][: len(steps[step]) // 2]
            notes.append(f"the first {len(steps[step])} completions of step {step} are here")
    return list(pieces), [{"step": step, "rows": steps[step]} for step in chosen]


def _shown_rows(path: Path, pieces: dict[str, int] | None) -> list[Json]:
    """The rows of a file; tokens (None: left out) are places in `pieces`, log-probs and entropies tenths of nats."""
    rows, names = read_part(path)
    shown = []
    for row in rows:
        numbers = {name: row[name] for name in (*names, "reward", "advantage") if _known(row.get(name)) is not None}
        tokens = row.get("token_texts") or []
        entry: Json = {"group": row.get("group", 0), "numbers": {k: float(f"{v:.4g}") for k, v in numbers.items()}}
        for name in ("prompt", "completion"):
            entry[name] = _turns(row[name]) if row.get(f"chat_{name}") else _cut(row[name])
        entry["length"] = len(tokens)
        if tokens and pieces is not None:
            entry["tokens"] = [pieces.setdefault(text, len(pieces)) for text in tokens[:SHADED]]
            entry["logps"] = list(map(_tenths, (row.get("token_logps") or [])[:SHADED]))
            entry["entropies"] = [_tenths(-value) for value in (row.get("token_entropies") or [])[:SHADED]]
            entry["tool"] = [at for at, by_tool in enumerate((row.get("token_tool") or [])[:SHADED]) if by_tool]
            if entry["completion"] == "".join(tokens[:SHADED]):
                del entry["completion"]
        shown.append(entry)
    return shown


def _turns(text: str) -> list[Json]:
    """Messages: role, text, and calls of tools with their arguments."""
    turns = []
    for message in json.loads(text):
        content = message.get("content") or ""
        said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        names = [f"{call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})" for call in calls]
        turns.append({"role": message["role"], "text": _cut(said), "calls": list(map(_cut, names))})
    return turns


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[:TEXT]} … ({len(text) - TEXT:,} characters more)"


def _tenths(logp: float) -> int:
    return round(-10 * max(logp, -99.0)) if logp == logp else 990


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def compared_settings(runs: Sequence[RunPage]) -> list[tuple[str, list[str], bool]]:
    """Settings that differ from their defaults in any run: name, their text in each run, and whether runs differ."""
    settings: list[Mapping[str, object]] = [run.start["settings"] for run in runs]
    names = dict.fromkeys(name for changed in settings for name in changed)
    rows = [(name, [str(changed.get(name, "default")) for changed in settings]) for name in names]
    return [(name, texts, len(set(texts)) > 1 and name not in NOT_COMPARED) for name, texts in rows]
