"""How our batch of PPO compares with a hand-written one, per completion token: `python benchmarks/ppo.py --help`."""

from __future__ import annotations

import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.data import BPE_SIZE, load_corpus
from benchmarks.group_loops import PHASES, Phases, Spent, Work, prompts_of
from benchmarks.measure import on_one_quiet_thread
from benchmarks.ppo_loops import PaddedPPO, make_ppo_trainer
from benchmarks.tables import Result, table_row, write_figures
from benchmarks.variants import SHAPES, build_model, build_reward_model
from transformers import TrainerCallback

MEAN_LENGTH = 97  # of GSM8K's answers under the benchmark's tokenizer
LEGEND = """\
ours: CPU milliseconds per completion token, median of the batches; / bare: over the loop written by hand
generate, score, update: our part of it (its share), over the loop's; score: rewards, old and reference log-probs, values, advantages"""
COLUMNS = ["case", "model", "vocabulary", "tokens", "ours, ms", "/ bare", *PHASES]


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["5m"], help="decoder bodies")
    parser.add_argument("--vocab", nargs="+", type=int, default=[BPE_SIZE])
    parser.add_argument("--batches", type=int, default=3, help="measured batches of each side, after one")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a batch")
    parser.add_argument("--micro", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--epochs", type=int, default=4, help="optimiser steps that learn from a batch")
    parser.add_argument("--data", type=Path, help="jsonl with question/answer; default: GSM8K")
    parser.add_argument("--quick", action="store_true", help="short answers, one batch")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    args = parser.parse_args()
    args.batches = 1 if args.quick else args.batches
    return args


def main() -> None:
    args = parse()
    on_one_quiet_thread()
    print(
        f"torch {torch.__version__}, {platform.machine()}, fp32, 1 thread, {args.prompts} prompts, {args.epochs} epochs\n"
    )
    print(LEGEND)
    print(table_row(COLUMNS), table_row(["---"] * len(COLUMNS)), sep="\n")
    results = [
        measure(args, size, vocabulary, ends_early)
        for vocabulary in args.vocab
        for size in args.sizes
        for ends_early in (True, False)
    ]
    write_figures(results, args.out)


def measure(args: Namespace, size: str, vocabulary: int, ends_early: bool) -> Result:
    """One case: batches of both sides in turn in this process, on the same prompts."""
    corpus = load_corpus(args.data, max_length=512, rows=(args.batches + 1) * args.prompts)
    prompts = prompts_of(corpus, questions=1, count=len(corpus.rows))
    stops = list(range(1, 1 + round(vocabulary / MEAN_LENGTH))) if ends_early else []
    new_tokens = 16 if args.quick else 256 if ends_early else 128
    work = Work(prompts, new_tokens, stops, args.prompts, 1, args.micro)
    models = build_model(size, vocabulary), build_reward_model(size, vocabulary)
    spent = run_in_turn(models, work, corpus.tokenizer, batches=args.batches, epochs=args.epochs)
    ratio = median(_per_token(a) / _per_token(b) for a, b in zip(*spent.values(), strict=True))
    case = "ends early" if ends_early else f"all {new_tokens} tokens"
    cells = [
        *(case, size, vocabulary, round(median(one.tokens for one in spent["ours"]))),
        *(f"{1000 * median(map(_per_token, spent['ours'])):.2f}", f"{ratio:.3f}"),
        *(_phase(spent, name) for name in PHASES),
    ]
    print(table_row(cells), flush=True)
    seconds = {side: [{**one.seconds, "tokens": one.tokens} for one in own] for side, own in spent.items()}
    return {"case": case, "size": size, "vocabulary": vocabulary, "ratio": ratio, "seconds": seconds}


def _per_token(spent: Spent) -> float:
    return spent.total / spent.tokens


def _phase(spent: dict[str, list[Spent]], name: str) -> str:
    pairs = zip(spent["ours"], spent["bare"], strict=True)
    ratio = median(a.seconds[name] / a.tokens / (b.seconds[name] / b.tokens) for a, b in pairs)
    share = median(one.seconds[name] / one.total for one in spent["ours"])
    return f"{ratio:.3f} ({share:.0%})"


def run_in_turn(
    models: tuple[Any, Any], work: Work, tokenizer: Any, *, batches: int, epochs: int
) -> dict[str, list[Spent]]:
    """`batches` batches of our trainer's `train()` and of the loop in turn, after one of each that does not count."""
    loop = PaddedPPO(*models, work, epochs)
    trainer = make_ppo_trainer(*models, work, tokenizer, batches=batches + 1, epochs=epochs)
    phases = Phases(trainer, work.device)
    phases._time(trainer, "advantages", "score")
    found: dict[str, list[Spent]] = {"ours": [], "bare": []}

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args: Any, **_: Any) -> None:
            phases.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % epochs:
                return
            window = trainer._rollout_batch
            ours = phases.stop(len(window.completions.values))
            bare = loop.step([prompt.tolist() for prompt in window.prompts.split()])
            if state.global_step > epochs:
                found["ours"].append(ours)
                found["bare"].append(bare)
            phases.start()

    trainer.add_callback(TakeTurns())
    trainer.train()
    return found


if __name__ == "__main__":
    main()
