"""Direct preference optimisation (DPO) on pairs of a better and a worse answer.

    python examples/scripts/dpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 --output_dir runs/dpo

The reference is the model before training; with `--use_peft` it is the model without the adapter. `trl dpo` does the same, and has
more options.
"""

from trl import (
    DatasetMixtureConfig,
    DPOConfig,
    DPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
)
from trl.scripts.training import load_inputs

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = DPOTrainer(
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
