"""Supervised fine-tuning of Gemma 3 on chats of text.

    accelerate launch examples/scripts/sft_gemma3.py --dataset_name open-r1/codeforces-cots --output_dir runs/gemma3 \
        --dtype bfloat16 --use_peft --lora_target_modules all-linear --packing true
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
    parser.set_defaults(model_name_or_path="google/gemma-3-4b-it", attn_implementation="eager")
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
