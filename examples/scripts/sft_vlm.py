"""Supervised fine-tuning of a vision-language model on chats with images.

    accelerate launch examples/scripts/sft_vlm.py --model_name_or_path llava-hf/llava-1.5-7b-hf \
        --dataset_name HuggingFaceH4/llava-instruct-mix-vsft --output_dir runs/sft-vlm --dtype bfloat16 \
        --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --use_peft --lora_target_modules all-linear

Rows have `messages` and `images`.
"""

from datasets import load_dataset

from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
from trl.scripts.loading import model_init_kwargs

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    parser.set_defaults(max_length=None)  # images soon reach the default of 1024 tokens
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    dataset = dataset.select_columns(["messages", "images"])

    trainer = SFTTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
