"""PPO on a data set of prompts, from a policy, a reward model and a value model.

    python examples/ppo_dataset.py --dataset_name my-org/prompts --sft_model_path my-org/policy \
        --reward_model_path my-org/reward-model --output_dir runs/ppo --stop_token eos --missing_eos_penalty 1.0 \
        --learning_rate 3e-6 --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --total_episodes 100000

Rows have a `prompt`, text or messages; the value model starts from the reward model. A tenth of the rows, at most 100, are
kept back, and the table of samples answers them. Without models or data at hand, `python examples/ppo_dataset.py --tiny
--output_dir runs/ppo` trains a one-layer Llama of random weights to say the names of birds, as a reward function asks it to.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset, load_dataset
from tiny_words import word_model, word_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl import TrlParser
from trl.experimental.ppo import PPOConfig, PPOTrainer

BIRDS = ("wren", "robin", "heron", "owl", "swift")
OTHERS = ("table", "chair", "lamp", "cup", "shelf", "door", "rug", "clock", "vase", "desk")
TINY: dict[str, Any] = {
    "per_device_train_batch_size": 32, "num_mini_batches": 1, "total_episodes": 32 * 20, "response_length": 4,
    "temperature": 1.0, "learning_rate": 3e-3, "logging_steps": 4, "gradient_checkpointing": False, "num_ppo_epochs": 2,
}  # fmt: skip


@dataclass
class Arguments:
    """What to run on."""

    tiny: bool = field(default=False, metadata={"help": "Train a model of random weights on built-in words."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "A folder or Hub name with a column 'prompt'."}
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Its split to train on."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Where the tokenizer is loaded from. None: where the policy is, sft_model_path."},
    )


def share_of_birds(completions: list[str], **_: Any) -> list[float]:
    """The share of a text's words that are birds."""
    words = [text.split() for text in completions]
    return [sum(word in BIRDS for word in each) / max(len(each), 1) for each in words]


def tiny_parts() -> dict[str, Any]:
    """A model of random weights, prompts of one word, and the function that scores."""
    tokenizer = word_tokenizer([*BIRDS, *OTHERS, "name", "some"])
    return {
        "processing_class": tokenizer,
        "model": word_model(tokenizer),
        "reward_funcs": share_of_birds,
        "train_dataset": Dataset.from_dict({"prompt": ["name some", "some", "name"] * 16}),
    }


def real_parts(args: Arguments, config: PPOConfig) -> dict[str, Any]:
    """The same by name."""
    if args.dataset_name is None:
        raise SystemExit("Give --dataset_name, or --tiny.")
    load = AutoModelForSequenceClassification.from_pretrained
    rows = load_dataset(args.dataset_name, split=args.dataset_train_split)
    kept_back = min(100, len(rows) // 10)
    return {
        "processing_class": AutoTokenizer.from_pretrained(args.model_name_or_path or config.sft_model_path),
        "model": config.sft_model_path,
        "reward_model": load(config.reward_model_path, num_labels=1),
        "value_model": load(config.reward_model_path, num_labels=1),
        "train_dataset": rows.select(range(len(rows) - kept_back)),
        "eval_dataset": rows.select(range(len(rows) - kept_back, len(rows))) if kept_back else None,
    }


def main() -> None:
    args, config = TrlParser((Arguments, PPOConfig)).parse_args_into_dataclasses()  # type: ignore[arg-type]
    if args.tiny:
        config = replace(config, **TINY)
    trainer = PPOTrainer(config, **(tiny_parts() if args.tiny else real_parts(args, config)))
    trainer.train()
    trainer.save_model()
    logs = [entry for entry in trainer.state.log_history if "objective/scores" in entry]
    if logs:  # none where the run is shorter than logging_steps
        first, last = logs[0]["objective/scores"], logs[-1]["objective/scores"]
        print(f"score: {first:.3f} -> {last:.3f}, KL at the end {logs[-1]['objective/kl']:.3f} nats")


if __name__ == "__main__":
    main()
