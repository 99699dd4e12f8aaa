"""PPO for summaries: posts in, "TL;DR" out, with a policy and a reward model that were trained on such summaries.

    accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml examples/scripts/ppo/ppo_tldr.py \
        --dataset_name trl-lib/tldr --dataset_test_split validation --output_dir models/minimal/ppo_tldr --learning_rate 3e-6 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --total_episodes 1000000 \
        --model_name_or_path EleutherAI/pythia-1b-deduped \
        --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
        --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
        --local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos

Rows have a `prompt` that ends with "TL;DR:"; those of more than 512 tokens are left out.
"""

from typing import Any

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.scripts.loading import model_init_kwargs

MAX_PROMPT_TOKENS = 512


def load_parts(config: PPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """The tokenizer and the models that the options name, as arguments of the trainer."""
    config.model_init_kwargs = settings = model_init_kwargs(model_args)
    score = AutoModelForSequenceClassification.from_pretrained
    name = model_args.model_name_or_path or config.sft_model_path
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return {
        "processing_class": tokenizer,
        "model": config.sft_model_path,
        "ref_model": None,  # a copy of the policy, or the policy without its adapter
        "reward_model": score(config.reward_model_path, num_labels=1, **settings),
        "value_model": score(config.reward_model_path, num_labels=1, **{"dtype": "float32", **settings}),
        "peft_config": get_peft_config(model_args),
    }


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PPOConfig, ModelConfig))
    parser.set_defaults(dataset_name="trl-lib/tldr", dataset_test_split="validation", stop_token="eos")
    script_args, training_args, model_args = parser.parse_args_and_config()
    parts = load_parts(training_args, model_args)
    tokenizer = parts["processing_class"]

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    dataset = dataset.map(
        lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]},
        remove_columns=dataset[script_args.dataset_train_split].column_names,
    ).filter(lambda row: len(row["input_ids"]) <= MAX_PROMPT_TOKENS)

    trainer = PPOTrainer(
        training_args,
        **parts,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split],
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
