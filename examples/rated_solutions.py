"""Writes solutions of models, marked right or wrong, as rows that KTO and BCO train on.

    python examples/rated_solutions.py --solutions ../shared/data/gsm8k/model_solutions.jsonl --out runs/gsm8k/rated.jsonl \
        --held_out runs/gsm8k/rated_test.jsonl

A row has `prompt`, `completion` and `label` (true: the answer is right). Every tenth question goes into the held-out file,
with all of its solutions. Rows are shuffled.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rated(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each solution of a question."""
    for solution in question.values():
        if isinstance(solution, dict):
            yield {
                "prompt": question["question"].strip() + "\n",
                "completion": solution["solution"].strip(),
                "label": solution["is_correct"],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--solutions", type=Path, required=True, help="jsonl file of questions with their solutions"
    )
    parser.add_argument("--out", type=Path, required=True, help="jsonl file of rows to train on")
    parser.add_argument("--held_out", type=Path, help="jsonl file of rows to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffling")
    args = parser.parse_args()
    questions = [json.loads(line) for line in args.solutions.read_text(encoding="utf-8").splitlines()]
    kept = [number for number in range(len(questions)) if args.held_out is None or number % 10]
    parts = {args.out: kept}
    if args.held_out is not None:
        parts[args.held_out] = [number for number in range(len(questions)) if not number % 10]
    for path, numbers in parts.items():
        rows = [row for number in numbers for row in rated(questions[number])]
        random.Random(args.seed).shuffle(rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows, {sum(row['label'] for row in rows)} of them desirable")


if __name__ == "__main__":
    main()
