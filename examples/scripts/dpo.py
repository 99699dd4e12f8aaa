"""Direct preference optimisation (DPO): the program of `trl dpo`, with all of its options.

    python examples/scripts/dpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 --output_dir runs/dpo

`--tiny` trains a small Llama of random weights to prefer calm answers to rude ones.
"""

import sys
from pathlib import Path

from trl.scripts.dpo import main, make_parser

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

if __name__ == "__main__":
    parser = make_parser()
    trainer = main(*parser.parse_args_and_config(tiny.arguments(parser, tiny.manners)))
