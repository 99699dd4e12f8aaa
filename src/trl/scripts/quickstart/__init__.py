"""`trl quickstart`: a tiny model learns to add, stage by stage, on this machine, with nothing to download.

What it needs is imported when it runs, so that `--help` answers at once.
"""

import argparse
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trl.scripts.allocator import keep_freed_memory
from trl.scripts.plain_parser import PlainParser
from trl.scripts.quickstart.methods import DEFAULT_METHOD, METHODS

DESCRIPTION = """\
Builds a tokenizer and a small language model and makes a data set of arithmetic conversations. Then: supervised
fine-tuning (SFTTrainer, stopped early), for ppo and dpo a reward model from pairs of right and wrong answers
(RewardTrainer), and the training of --method on top; grpo and rloo learn from whether answers are right. Shows answers
and figures on problems it never saw, stage by stage. No network is used.

A run that was stopped goes on where it was when the same command is given again; one that had ended is replaced.
"""


def make_parser() -> argparse.ArgumentParser:
    """The options of `trl quickstart`."""
    parser = PlainParser(
        prog="trl quickstart", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default=DEFAULT_METHOD,
        help=f"how the fine-tuned model is trained on (default: {DEFAULT_METHOD}); stages that methods share are kept from "
        "one run to the next in the same folder",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("quickstart"),
        help="where models, checkpoints, data and results are written (default: ./quickstart)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the problems, the weights and the order of training (default: 0)",
    )
    parser.add_argument(
        "--max_steps",
        type=_positive,
        default=None,
        help="optimiser steps of each stage; fewer than the default are quicker and learn less",
    )
    parser.add_argument("--no_color", action="store_true", help="print plain text, without colours")
    return parser


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} was given, expected a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages, printing what happens; returns the exit status."""
    started = time.perf_counter()
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.output_dir.exists() and not options.output_dir.is_dir():
        parser.error(f"--output_dir {options.output_dir} is a file, expected a folder. Name another.")

    # OpenMP's threads spin while they wait; on a machine that is busy with other work that made this run ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    print("Loading PyTorch and transformers ...", flush=True)
    keep_freed_memory()
    with _without_warnings(), _saying_how_to_go_on():
        from trl.scripts.quickstart.pipeline import run

        run(
            output_dir=options.output_dir,
            method=options.method,
            seed=options.seed,
            max_steps=options.max_steps,
            color=not options.no_color,
            started=started,
        )
    return 0


@contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    """Tell, where the run is interrupted, that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on where it was.", flush=True)
        raise


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Only errors are logged: what libraries say about extras and devices is of no use here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
