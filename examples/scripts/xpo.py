"""XPO: online DPO against the completions of the reference, with a bonus for exploration.

    python examples/scripts/xpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --judge pair_rm \
        --dataset_name trl-lib/ultrafeedback-prompt --learning_rate 5.0e-7 --output_dir runs/xpo

Rows have a `prompt`. `--reward_model NAME` compares by the scores of a classifier. `trl xpo` does the same, and has more options.
"""

from dataclasses import dataclass, field

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.xpo import XPOConfig, XPOTrainer
from trl.scripts.training import load_inputs


@dataclass
class Arguments(ScriptArguments):
    reward_model: str | None = field(
        default=None, metadata={"help": "Classifier that scores completions, instead of --judge."}
    )


if __name__ == "__main__":
    parser = TrlParser((Arguments, XPOConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = XPOTrainer(
        model_args.model_name_or_path,
        reward_funcs=script_args.reward_model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
