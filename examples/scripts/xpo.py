"""XPO: the program of `trl xpo`, with all of its options.

    python examples/scripts/xpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --judge pair_rm \
        --dataset_name trl-lib/ultrafeedback-prompt --learning_rate 5.0e-7 --output_dir runs/xpo

`--tiny` trains a small Llama of random weights on the scores of a small reward model.
"""

import sys
from pathlib import Path

from trl.scripts.xpo import main, make_parser

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

if __name__ == "__main__":
    parser = make_parser()
    trainer = main(*parser.parse_args_and_config(tiny.arguments(parser, tiny.scored)))
