"""Online DPO: a judge compares two completions of each prompt, and DPO learns from the pairs.

    python examples/scripts/dpo_online.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --judge pair_rm \
        --dataset_name trl-lib/ultrafeedback-prompt --learning_rate 5.0e-7 --output_dir runs/online-dpo

Rows have a `prompt`. `--reward_model NAME` compares by the scores of a classifier. `trl online-dpo` does the same, and has more options.
"""

from dataclasses import dataclass, field

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.scripts.training import load_inputs


@dataclass
class Arguments(ScriptArguments):
    reward_model: str | None = field(
        default=None, metadata={"help": "Classifier that scores completions, instead of --judge."}
    )


if __name__ == "__main__":
    parser = TrlParser((Arguments, OnlineDPOConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = OnlineDPOTrainer(
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
