"""A reward model from pairs: the program of `trl reward`, with all of its options.

    python examples/scripts/reward_modeling.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 --output_dir runs/reward

`--tiny` trains a small Llama of random weights to tell calm answers from rude ones.
"""

import sys
from pathlib import Path

from trl.scripts.reward import main, make_parser

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

if __name__ == "__main__":
    parser = make_parser()
    trainer = main(*parser.parse_args_and_config(tiny.arguments(parser, tiny.manners)))
