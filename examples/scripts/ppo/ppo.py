"""PPO on a data set of prompts, from a policy, a reward model and a value model.

    python examples/scripts/ppo/ppo.py --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style \
        --dataset_train_split descriptiveness --learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 \
        --output_dir models/minimal/ppo --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000 \
        --model_name_or_path EleutherAI/pythia-1b-deduped --sft_model_path EleutherAI/pythia-1b-deduped \
        --reward_model_path EleutherAI/pythia-1b-deduped --missing_eos_penalty 1.0

Rows have a `prompt`, text or messages. The tokenizer is that of `model_name_or_path`, the value model starts from the reward model.
A tenth of the rows, at most 100, are kept back, and the table of samples answers them. `--use_peft` trains an adapter.
"""

from typing import Any

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.scripts.loading import model_init_kwargs


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
    script_args, training_args, model_args = parser.parse_args_and_config()
    name, split = script_args.dataset_name, script_args.dataset_train_split
    rows = load_dataset(name, name=script_args.dataset_config, split=split).select_columns(["prompt"])
    kept_back = min(100, len(rows) // 10)
    trainer = PPOTrainer(
        training_args,
        **load_parts(training_args, model_args),
        train_dataset=rows.select(range(len(rows) - kept_back)),
        eval_dataset=rows.select(range(len(rows) - kept_back, len(rows))) if kept_back else None,
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=name)
