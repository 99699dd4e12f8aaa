"""Kahneman-Tversky optimisation (KTO) on completions marked good or bad: the program of `trl kto`, with all of its options.

    python examples/scripts/kto.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/kto-mix-14k --num_train_epochs 1 --output_dir runs/kto

`--tiny` trains a small Llama of random weights to prefer calm answers to rude ones.
"""

import sys
from pathlib import Path

from trl.scripts.kto import main, make_parser

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

if __name__ == "__main__":
    parser = make_parser()
    trainer = main(*parser.parse_args_and_config(tiny.arguments(parser, tiny.manners)))
