"""How our steps of DPO, reward modelling and KTO compare with hand-written ones: `python benchmarks/preference.py --help`."""

from __future__ import annotations

import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.data import Corpus
from benchmarks.measure import OURS, free_memory, on_one_quiet_thread, run_interleaved
from benchmarks.memory import growth_in_subprocess
from benchmarks.pair_data import describe_pairs, load_pairs
from benchmarks.preference_tasks import TASKS
from benchmarks.prefix_sharing import time_sharing
from benchmarks.tables import Result, ratios, summary, table_row, write_figures
from benchmarks.variants import SHAPES, Recipe

LEGEND = """\
/ bare, / padded: CPU seconds of our step over theirs, median of the steps (sums over all steps, logging included)
operations: floating-point operations that our step needs, over those that the padded loop spends
growth: peak resident memory of the steps over the level with model, reference and optimiser state"""
COLUMNS = [
    "method", "model", "vocabulary", "pairs or rows", "ours, s", "/ bare", "/ padded", "operations", "growth, MB",
    "/ bare", "/ padded",
]  # fmt: skip
RATIOS = (1, 4, 16)
LARGE = 50_000
"""Vocabularies from here on take batches of 4 where a loop has logits: padded ones would need 15 GB with 8."""


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["5m"], help="decoder bodies")
    parser.add_argument("--vocab", nargs="+", type=int, help="vocabularies; default: 5000 152000")
    parser.add_argument("--steps", type=int, help="measured steps per case; default: 8, with --quick or 30m 5")
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--data", type=Path, help="jsonl of dialogues with chosen and rejected; default: HH harmless")
    parser.add_argument("--no_memory", action="store_true", help="leave out the growth of memory")
    parser.add_argument("--quick", action="store_true", help="smallest cases only, few steps")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    on_one_quiet_thread()
    corpus = load_pairs(args.data, max_length=args.max_length)
    allocator = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    print(f"torch {torch.__version__}, {platform.machine()}, fp32, 1 thread, allocator {allocator or 'default'}")
    print(describe_pairs(corpus), end="\n\n")
    print(LEGEND)
    print(table_row(COLUMNS), table_row(["---"] * len(COLUMNS)), sep="\n")
    results = [
        case(args, corpus, method, size, vocabulary)
        for method in args.methods
        for vocabulary in args.vocab or ([5000] if args.quick else [5000, 152_000])
        for size in args.sizes
    ]
    if "dpo" in args.methods:
        results += prefix_sharing(args)
    write_figures(results, args.out)


def case(args: Namespace, corpus: Corpus, method: str, size: str, vocabulary: int) -> Result:
    """One method on one model: times in turn in this process, memory in a process for each variant."""
    task = TASKS[method]
    batch_size = 4 if task.has_logits and vocabulary >= LARGE else 8
    steps = args.steps or (5 if size == "30m" or args.quick else 8)
    model = task.build(size, vocabulary)
    recipe = Recipe(steps=steps + 1, batch_size=batch_size)
    found = run_interleaved(model, task.rows(corpus), recipe, warmup=1, loops=task.loops, make=task.make)
    work = [task.operations(model.config, rows) for rows in found.batches]
    needed, padded = (sum(part) for part in zip(*work, strict=True))
    del model
    free_memory()
    growth = {} if args.no_memory else _growth(args, method, size, vocabulary, batch_size)
    cells = [
        *(method, size, vocabulary, batch_size, f"{median(found.seconds[OURS]):.3f}"),
        *(ratios(found, "bare"), ratios(found, "padded"), f"{needed / padded:.2f}"),
        *_growth_cells(growth, task.loops),
    ]
    print(table_row(cells), flush=True)
    operations = {"needed": needed, "padded": padded}
    known: Result = {"method": method, "size": size, "vocabulary": vocabulary, "batch_size": batch_size}
    return {**known, "operations": operations, "growth_bytes": growth, **summary(found)}


def _growth_cells(growth: dict[str, int], loops: Iterable[str]) -> list[str]:
    if not growth:
        return ["-", *("-" for _ in loops)]
    return [f"{growth[OURS] / over:.2f}" for over in (1e6, *(growth[name] for name in loops))]


def _growth(args: Namespace, method: str, size: str, vocabulary: int, batch_size: int) -> dict[str, int]:
    asked: dict[str, Any] = {
        "steps": 3 if args.quick else 4,
        "max_length": args.max_length,
        "data": args.data,
    }
    return {
        variant: growth_in_subprocess(variant, size, vocabulary, task=method, batch_size=batch_size, **asked)
        for variant in (OURS, *TASKS[method].loops)
    }


def prefix_sharing(args: Namespace) -> list[Result]:
    """The table of our DPO step with a shared prompt over the same without."""
    steps = args.steps or (3 if args.quick else 6)
    print("\nDPO, prompt shared over prompt repeated (CPU seconds of a step, median; operations):")
    columns = ["prompt : completion", "model", "shared, s", "/ repeated", "operations"]
    print(table_row(columns), table_row(["---"] * len(columns)), sep="\n")
    results: list[Result] = []
    for ratio in RATIOS:
        found = time_sharing(ratio, "5m", 5000, steps=steps)
        seconds = f"{median(found.seconds[True]):.3f}"
        cells = [f"{ratio} : 1", "5m", seconds, f"{found.gain:.3f}", f"{found.operations:.3f}"]
        print(table_row(cells), flush=True)
        results.append({"prefix_sharing": ratio, "gain": found.gain, "operations": found.operations})
    return results


if __name__ == "__main__":
    main()
