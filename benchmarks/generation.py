"""Tokens per second of rollouts against `model.generate`: `python benchmarks/generation.py --help`."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.data import BPE_SIZE, load_corpus
from benchmarks.variants import SHAPES, build_model
from transformers import PreTrainedModel

from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine

COLUMNS = [
    "model",
    "case",
    "prompt tokens",
    "completion tokens",
    "ours, tokens/s",
    "generate, tokens/s",
    "ratio",
]
MEAN_LENGTH = 97  # of GSM8K's answers under the benchmark's tokenizer


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of equal prompts in groups of `samples`; completions end at `new_tokens`, or early at a stop token."""

    name: str
    prompts: list[list[int]]
    samples: int
    new_tokens: int
    greedy: bool
    stops: list[int]

    @property
    def requests(self) -> list[list[int]]:
        return [prompt for prompt in self.prompts for _ in range(self.samples)]


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["5m", "30m"], help="decoder bodies")
    parser.add_argument("--vocab", type=int, default=BPE_SIZE)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--turns", type=int, default=3, help="measured turns of each side, after one to warm up")
    parser.add_argument(
        "--threads", type=int, default=1, help="on a CPU: 1 takes CPU seconds, more take wall-clock seconds"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="smallest model and few tokens")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    where = args.device if args.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}, {args.samples} samples of each of {args.prompts} prompts\n")
    print(table_row(COLUMNS), table_row(["---"] * len(COLUMNS)), sep="\n")
    sizes = args.sizes[:1] if args.quick else args.sizes
    results = [measure(args, size, case) for size in sizes for case in cases(args)]
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


def cases(args: Namespace) -> list[Case]:
    """Full-length greedy completions, where both sides must agree; sampled ones that end as answers of GSM8K do."""
    rows = load_corpus(None, max_length=512, rows=args.prompts).rows
    prompts = [row["input_ids"][: row["completion_mask"].index(1)] for row in rows]
    stops = list(range(2, 2 + round(args.vocab / MEAN_LENGTH)))
    if args.quick:
        return [Case("greedy, 16 tokens", prompts, args.samples, 16, True, [])]
    return [
        Case("greedy, all 128 tokens", prompts, args.samples, 128, True, []),
        Case("sampled, ends early, at most 256", prompts, args.samples, 256, False, stops),
    ]


def measure(args: Namespace, size: str, case: Case) -> dict[str, Any]:
    """Tokens per second of both sides, in turns; only tokens up to a completion's end count."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = build_model(size, args.vocab, dtype=dtype, device=args.device).eval()
    sides: dict[str, Callable[[int], list[list[int]]]] = {
        "ours": lambda turn: with_engine(TransformersEngine(model), case, turn),
        "generate": lambda turn: with_generate(model, case, turn),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: list[int] = []
    for turn in range(args.turns + 1):
        found = {}
        for name in sides if turn % 2 else reversed(sides):
            started = now(args)
            found[name] = sides[name](turn)
            count = sum(map(len, found[name]))
            if turn:
                speeds[name].append(count / (now(args) - started))
                tokens.append(count)
        if case.greedy and dtype == torch.float32 and differing(found["ours"], found["generate"]) > 2:
            raise ValueError("greedy completions differ, so the two sides do not do the same work.")
    ours, theirs = (median(speeds[name]) for name in ("ours", "generate"))
    ratio = median(one / other for one, other in zip(speeds["ours"], speeds["generate"], strict=True))
    lengths = f"{min(map(len, case.prompts))}-{max(map(len, case.prompts))}"
    cells = [size, case.name, lengths, round(median(tokens)), round(ours), round(theirs), f"{ratio:.2f}"]
    print(table_row(cells), flush=True)
    return dict(zip(COLUMNS, cells, strict=True)) | {"speeds": speeds}


def with_engine(engine: TransformersEngine, case: Case, turn: int) -> list[list[int]]:
    sampling = Sampling(
        max_new_tokens=case.new_tokens, do_sample=not case.greedy, stop_token_ids=tuple(case.stops), seed=turn
    )
    return [completion.ids for completion in engine.generate(case.requests, sampling)]


@torch.no_grad()
def with_generate(model: PreTrainedModel, case: Case, turn: int) -> list[list[int]]:
    torch.manual_seed(turn)
    requests = case.requests
    width = max(map(len, requests))
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(requests):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    options: dict[str, Any] = {"do_sample": False} if case.greedy else {"do_sample": True, "top_k": 0}
    model.generation_config.eos_token_id = case.stops or None
    generated: Any = model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=case.new_tokens,
        pad_token_id=0, **options,
    )  # fmt: skip
    return [up_to_stop(row, case.stops) for row in generated[:, width:].tolist()]


def up_to_stop(ids: list[int], stops: list[int]) -> list[int]:
    """The ids up to and with the first stop token."""
    end = next((place for place, token in enumerate(ids) if token in set(stops)), len(ids) - 1)
    return ids[: end + 1]


def differing(first: list[list[int]], second: list[list[int]]) -> int:
    """How many completions differ; a few may, where two logits are equal up to rounding."""
    return sum(one != other for one, other in zip(first, second, strict=True))


def now(args: Namespace) -> float:
    """CPU seconds of the process where it has one thread, which other jobs on the machine do not change."""
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if args.device == "cpu" and args.threads == 1 else time.perf_counter()


def table_row(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


if __name__ == "__main__":
    main()
