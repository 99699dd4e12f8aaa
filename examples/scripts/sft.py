"""Supervised fine-tuning of a model or an adapter.

    python examples/scripts/sft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara \
        --output_dir runs/sft --packing true

`--use_peft` trains an adapter. `trl sft` does the same, and has more options.
"""

from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
)
from trl.scripts.training import load_inputs

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = SFTTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
