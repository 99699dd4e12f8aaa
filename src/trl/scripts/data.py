"""`trl data NAME --out DIR`: a small data set made from a seed, as `train` and `test` files."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl.data.arithmetic import ROWS, make_rows
from trl.options.spelling import did_you_mean
from trl.scripts.plain_parser import PlainParser


def make_parser() -> PlainParser:
    parser = PlainParser(prog="trl data", description="Make a small data set of word problems, without a download.")
    parser.add_argument("name", metavar="NAME", help=f"kind of rows: {', '.join(ROWS)}")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--rows", type=int, default=400, help="rows of train; test has an eighth (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()

    def write(options: argparse.Namespace) -> None:
        if (name := options.name) not in ROWS:
            parser.error(f"NAME must be one of {', '.join(ROWS)}, got {name!r}.{did_you_mean(name, ROWS)}")
        splits = make_rows(name, rows=options.rows, seed=options.seed)
        Path(options.out).mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            print(f"{save(Path(options.out) / split, rows)}: {len(rows)} rows of {', '.join(rows[0])}")

    return parser.run(write, argv)


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines, as Parquet if they have images; returns the file."""
    if "images" in rows[0]:
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
    return path.with_suffix(".jsonl")
