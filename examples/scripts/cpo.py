"""Contrastive preference optimisation (CPO) on a preference data set.

    accelerate launch examples/scripts/cpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 --output_dir runs/cpo

SimPO: `--loss_type simpo --cpo_alpha 0 --beta 2.0 --simpo_gamma 1.0`. `--use_peft` trains an adapter. `--tiny` trains a small
Llama of random weights to prefer calm answers to rude ones.
"""

import sys
from pathlib import Path
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.scripts.training import load_inputs

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny


def train(config_class: Any, trainer_class: Any) -> Any:
    """Read the command line, train, and save; returns the trainer."""
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    given = tiny.arguments(parser, tiny.manners)
    script_args, training_args, model_args = parser.parse_args_and_config(given)
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, DatasetMixtureConfig())

    trainer = trainer_class(
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
    return trainer


if __name__ == "__main__":
    trainer = train(CPOConfig, CPOTrainer)
