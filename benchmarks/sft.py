"""How our optimiser step compares with hand-written loops: `python benchmarks/sft.py --help`."""

from __future__ import annotations

import logging
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not any("cuda" in argument for argument in sys.argv):
    os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.data import LONG_LENGTHS, Corpus, load_corpus, made_up_corpus
from benchmarks.measure import OURS, free_memory, run_interleaved
from benchmarks.memory import growth_in_subprocess
from benchmarks.packing import time_import, time_packing
from benchmarks.tables import Result, ratios, summary, table_row, write_figures
from benchmarks.throughput import PEAK_FLOPS, padded_flops, useful_flops
from benchmarks.variants import SHAPES, Recipe, build_model

LEGEND = """\
/ bare, / padded: CPU seconds of our step over theirs, median of the steps (sums over all steps, logging included)
operations: floating-point operations that our step needs, over those that the padded loop spends
growth: peak resident memory of the steps over the level with model and optimiser state"""
CPU_COLUMNS = [
    "model", "vocabulary", "ours, s", "/ bare", "/ padded", "operations", "growth, MB", "/ bare", "/ padded",
]  # fmt: skip
GPU_TURN = 5  # steps without waiting for the device


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), help="decoder bodies; CPU: 5m 30m, GPU: 500m")
    parser.add_argument("--vocab", nargs="+", type=int, help="vocabularies; CPU: 5000 152000, GPU: 152000")
    parser.add_argument("--steps", type=int, help="measured steps per case; a multiple of 10 weighs logging fairly")
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--data", type=Path, help="jsonl with question/answer or prompt/completion; default: GSM8K")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype",
        choices=["mixed", "bf16"],
        nargs="+",
        help="GPU: bf16 autocast over fp32 weights, or bf16 weights",
    )
    parser.add_argument("--quick", action="store_true", help="smallest case only, few steps")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    logging.getLogger("trl").setLevel(logging.ERROR)
    if args.device == "cpu":
        torch.set_num_threads(1)
    results = on_cpu(args) if args.device == "cpu" else on_gpu(args)
    write_figures(results, args.out)


# ---- CPU


def on_cpu(args: Namespace) -> list[Result]:
    """The table of CPU seconds, memory growth, packing and import time."""
    corpus = load_corpus(args.data, max_length=args.max_length)
    allocator = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    print(
        f"torch {torch.__version__}, {platform.machine()}, fp32, 1 thread, batch 8, allocator {allocator or 'default'}"
    )
    print(corpus.describe(), end="\n\n")
    sizes = args.sizes or (["5m"] if args.quick else ["5m", "30m"])
    vocabularies = args.vocab or ([5000] if args.quick else [5000, 152_000])
    steps = args.steps or (10 if args.quick else 20)
    print(LEGEND)
    print(table_row(CPU_COLUMNS), table_row(["---"] * len(CPU_COLUMNS)), sep="\n")
    results = [cpu_case(args, corpus, size, vocabulary, steps) for vocabulary in vocabularies for size in sizes]
    results += small_costs(rows=10_000 if args.quick else 100_000)
    return results


def cpu_case(args: Namespace, corpus: Corpus, size: str, vocabulary: int, steps: int) -> Result:
    if vocabulary > 50_000 and not args.steps:
        steps = 10
    recipe = Recipe(steps=steps + 2)
    model = build_model(size, vocabulary)
    found = run_interleaved(model, corpus, recipe, warmup=2)
    needed = sum(useful_flops(model.config, rows) for rows in found.batches)
    padded = sum(padded_flops(model.config, rows) for rows in found.batches)
    del model
    free_memory()
    asked = {"steps": 3 if args.quick else 6, "max_length": args.max_length, "data": args.data}
    growth = {name: growth_in_subprocess(name, size, vocabulary, **asked) for name in found.seconds}
    ours = growth[OURS]
    cells = [
        *(
            size,
            vocabulary,
            f"{median(found.seconds[OURS]):.3f}",
            ratios(found, "bare"),
            ratios(found, "padded"),
        ),
        *(f"{needed / padded:.2f}", f"{ours / 1e6:.0f}"),
        *(f"{ours / growth[other]:.2f}" for other in ("bare", "padded")),
    ]
    print(table_row(cells), flush=True)
    operations = {"needed": needed, "padded": padded}
    case = {"size": size, "vocabulary": vocabulary, "operations": operations, "growth_bytes": growth}
    return {**case, **summary(found)}


def small_costs(*, rows: int) -> list[Result]:
    packed = [time._asdict() for time in time_packing(rows=rows)]
    print(f"\npacking {rows} rows to 512 tokens, CPU seconds (share of the room filled):")
    for entry in packed:
        print(f"  {entry['strategy']}: {entry['seconds']:.2f} ({entry['filled']:.4f})")
    imports = {name: time_import(name) for name in ("import trl", "from trl import SFTTrainer", "import torch")}
    print("import, CPU seconds: " + ", ".join(f"`{name}` {spent:.3f}" for name, spent in imports.items()))
    return [{"packing": packed, "rows": rows}, {"import_seconds": imports}]


# ---- GPU


def on_gpu(args: Namespace) -> list[Result]:
    """Tokens per second, utilisation and peak memory on one accelerator."""
    name = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {name}, peak for MFU {PEAK_FLOPS / 1e12:.0f} TFLOP/s")
    short = load_corpus(args.data, max_length=args.max_length)
    long = made_up_corpus(LONG_LENGTHS, max_length=2048, rows=2000, name="made-up rows up to 2048 tokens")
    work = [(short, 32)] if args.quick else [(short, 32), (long, 16)]
    header = [
        "model",
        "weights",
        "data",
        "tokens/step",
        "variant",
        "ms/step",
        "tokens/s",
        "MFU",
        "peak growth, GB",
        "ours /",
        "memory ours /",
    ]
    print(table_row(header), table_row(["---"] * len(header)), sep="\n")
    steps = args.steps or (10 if args.quick else 20)
    return [
        gpu_case(corpus, batch_size, size, vocabulary, weights, steps)
        for size in args.sizes or ["500m"]
        for vocabulary in args.vocab or [151_936]
        for weights in args.dtype or ["mixed", "bf16"]
        for corpus, batch_size in work
    ]


def gpu_case(corpus: Corpus, batch_size: int, size: str, vocabulary: int, weights: str, steps: int) -> Result:
    dtype = torch.float32 if weights == "mixed" else torch.bfloat16
    model = build_model(size, vocabulary, dtype=dtype, device="cuda")
    recipe = Recipe(steps=steps + 2 * GPU_TURN, batch_size=batch_size, device="cuda", autocast=weights == "mixed")
    found = run_interleaved(model, corpus, recipe, warmup=2 * GPU_TURN, turn=GPU_TURN)
    flops = sum(useful_flops(model.config, rows) for rows in found.batches)
    tokens = found.real_tokens
    result: Result = {
        "size": size,
        "vocabulary": vocabulary,
        "weights": weights,
        "data": corpus.source,
        **summary(found),
    }
    for name, seconds in found.seconds.items():
        spent, peak = GPU_TURN * sum(seconds), max(found.peak_bytes[name])
        result[name] = {
            "tokens_per_second": tokens / spent,
            "mfu": flops / spent / PEAK_FLOPS,
            "peak_growth": peak,
        }
        print(
            table_row(
                [
                    size, weights, corpus.source, round(tokens / steps), name, f"{1000 * median(seconds):.1f}",
                    round(tokens / spent), f"{flops / spent / PEAK_FLOPS:.3f}", f"{peak / 1e9:.2f}",
                    ratios(found, name), f"{found.memory_ratio(name):.2f}",
                ]
            ),
            flush=True,
        )  # fmt: skip
    del model
    free_memory()
    return result


if __name__ == "__main__":
    main()
