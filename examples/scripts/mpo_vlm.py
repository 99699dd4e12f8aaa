"""Mixed preference optimisation (MPO) of a vision-language model: DPO with a weighted sum of three losses.

    accelerate launch examples/scripts/mpo_vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name HuggingFaceH4/rlaif-v_formatted --output_dir runs/mpo-vlm --dtype bfloat16 --use_peft

The default is the mixture of the paper (arXiv:2411.10442). Rows have `prompt`, `chosen`, `rejected` (messages) and `images`.
"""

from datasets import load_dataset

from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.scripts.loading import model_init_kwargs

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
    parser.set_defaults(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
    parser.set_defaults(max_length=None, max_prompt_length=None)  # images are long
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    dataset = dataset.select_columns(["prompt", "chosen", "rejected", "images"])

    trainer = DPOTrainer(
        model_args.model_name_or_path,  # a copy of it is the reference; with an adapter, the model without it
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
