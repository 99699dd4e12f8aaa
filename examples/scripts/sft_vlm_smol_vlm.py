"""Supervised fine-tuning of SmolVLM on chats with images.

    accelerate launch examples/scripts/sft_vlm_smol_vlm.py --dataset_name HuggingFaceH4/llava-instruct-mix-vsft \
        --output_dir runs/smol-vlm --dtype bfloat16 --use_peft --lora_target_modules down_proj o_proj k_proj q_proj v_proj

Rows have `messages` and `images`.
"""

from datasets import load_dataset

from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
from trl.scripts.loading import model_init_kwargs

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    parser.set_defaults(
        max_length=None, model_name_or_path="HuggingFaceTB/SmolVLM-Instruct"
    )  # images soon reach the default of 1024 tokens
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
