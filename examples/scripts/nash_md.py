"""Nash-MD: policy gradient on the preference for the policy over a mixture of it with its reference.

    python examples/scripts/nash_md.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --judge pair_rm \
        --dataset_name trl-lib/ultrafeedback-prompt --learning_rate 5.0e-7 --output_dir runs/nash-md

Rows have a `prompt`. `--reward_model NAME` compares by the scores of a classifier. `trl nash-md` does the same, and has more options.
"""

from dataclasses import dataclass, field

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.nash_md import NashMDConfig, NashMDTrainer
from trl.scripts.training import load_inputs


@dataclass
class Arguments(ScriptArguments):
    reward_model: str | None = field(
        default=None, metadata={"help": "Classifier that scores completions, instead of --judge."}
    )


if __name__ == "__main__":
    parser = TrlParser((Arguments, NashMDConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = NashMDTrainer(
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
