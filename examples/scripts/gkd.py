"""Generalised knowledge distillation (GKD): the program of `trl gkd`, with all of its options.

    python examples/scripts/gkd.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --teacher_model_name_or_path Qwen/Qwen2-1.5B-Instruct --dataset_name trl-lib/chatbot_arena_completions \
        --lmbda 1.0 --beta 1.0 --num_train_epochs 1 --output_dir runs/gkd

`--tiny` trains a small Llama of random weights to add, as its teacher does.
"""

import sys
from pathlib import Path

from trl.scripts.gkd import main, make_parser

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

if __name__ == "__main__":
    parser = make_parser()
    trainer = main(*parser.parse_args_and_config(tiny.arguments(parser, tiny.taught)))
