"""`trl quickstart`: train a tiny model to sort digits, in stages, on a CPU and without downloads."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from trl.scripts.env import keep_freed_memory
from trl.scripts.plain_parser import PlainParser

DESCRIPTION = """\
Builds a character tokenizer, a small language model and a data set of digits to sort. Then: supervised fine-tuning
(SFTTrainer, stopped early), for ppo and dpo a reward model from pairs of right and wrong answers (RewardTrainer), for
distillation a larger teacher (SFTTrainer), and training with --method. Prints answers and figures for prompts that no
stage trained on. No network is used.
"""
METHODS: dict[str, tuple[str, ...]] = {  # the stages of each method
    "ppo": ("sft", "reward", "ppo"), "dpo": ("sft", "reward", "dpo"), "grpo": ("sft", "grpo"),
    "rloo": ("sft", "rloo"), "distillation": ("sft", "teacher", "distillation"),
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = PlainParser(prog="trl quickstart", description=DESCRIPTION, formatter_class=layout)
    add = parser.add_argument
    add("--method", choices=METHODS, default="ppo", help="method of the last stage (default: ppo)")
    add("--output_dir", type=Path, default=Path("quickstart"), help="output folder (default: ./quickstart)")
    add("--seed", type=int, default=0, help="seed of the data, the weights and the training (default: 0)")
    add("--max_steps", type=int, help="optimiser steps per stage, instead of the defaults")
    add("--no_color", action="store_true", help="print plain text, without colours")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    stages = METHODS[vars(options).pop("method")]
    if options.max_steps is not None and options.max_steps < 1:
        parser.error(f"--max_steps must be at least 1, got {options.max_steps}.")
    if options.output_dir.exists() and not options.output_dir.is_dir():
        parser.error(f"--output_dir must be a folder, got the file {options.output_dir}. Name another one.")
    print("Loading PyTorch and transformers ...", flush=True)
    keep_freed_memory()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from trl.scripts.quickstart.stages import run_stages

        run_stages(stages, **vars(options))
    finally:
        logging.disable(disabled)
    return 0
