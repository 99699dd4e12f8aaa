"""PPO for summaries: posts in, "TL;DR" out, with a policy and a reward model that were trained on such summaries.

    accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml examples/scripts/ppo/ppo_tldr.py \
        --dataset_name trl-lib/tldr --dataset_test_split validation --output_dir models/minimal/ppo_tldr --learning_rate 3e-6 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --total_episodes 1000000 \
        --model_name_or_path EleutherAI/pythia-1b-deduped \
        --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
        --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
        --local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos

Rows have a `prompt` that ends with "TL;DR:"; those of more than 512 tokens are left out. `--tiny` runs on prompts of three words
with a small classifier of rude words.
"""

from datasets import load_dataset
from ppo import TINY, load_parts, tiny, train

from trl import ModelConfig, ScriptArguments, TrlParser
from trl.experimental.ppo import PPOConfig, PPOTrainer

MAX_PROMPT_TOKENS = 512

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PPOConfig, ModelConfig))
    parser.set_defaults(dataset_name="trl-lib/tldr", dataset_test_split="validation", stop_token="eos")
    given = tiny.arguments(parser, tiny.rewarded, **TINY, missing_eos_penalty=1.0, dataset_test_split="test")
    script_args, training_args, model_args = parser.parse_args_and_config(given)
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
    train(trainer, training_args, script_args.dataset_name)
