"""Supervised fine-tuning of a model or an adapter: the program of `trl sft`, with all of its options.

    python examples/scripts/sft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara \
        --output_dir runs/sft --packing true

`--tiny` fine-tunes a small Llama of random weights on calm answers.
"""

import sys
from pathlib import Path
from typing import Any

from trl.scripts.sft import main, make_parser

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny


def calm_answers(folder: Path) -> dict[str, Any]:
    """Prompts with their calm answers."""
    return {**tiny.manners(folder), "column_mapping": "chosen=completion"}


if __name__ == "__main__":
    parser = make_parser()
    trainer = main(*parser.parse_args_and_config(tiny.arguments(parser, calm_answers)))
