"""Odds-ratio preference optimisation (ORPO) on a preference data set.

    accelerate launch examples/scripts/orpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 --output_dir runs/orpo

`--use_peft` trains an adapter. `--tiny` trains a small Llama of random weights to prefer calm answers to rude ones.
"""

import sys
from pathlib import Path

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.scripts.training import load_inputs

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, ORPOConfig, ModelConfig))
    given = tiny.arguments(parser, tiny.manners)
    script_args, training_args, model_args = parser.parse_args_and_config(given)
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, DatasetMixtureConfig())

    trainer = ORPOTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
