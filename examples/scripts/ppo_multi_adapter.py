"""Multi-adapter RL: one base model, an adapter that scores, an adapter that learns, and without either the reference.

    python examples/scripts/ppo_multi_adapter.py --model_name my/base --reward_model my/reward-adapter --query_dataset my/queries \
        --steps 100 --output_dir runs/adapters

`--reward_model` is an adapter that `RewardTrainer` trained over the same base (LoRA, task type SEQ_CLS); `--query_dataset` has a
column `query`. `--load_in_4bit` quantises the base. Adapters need `pip install 'trl[peft]'`.

Without a model or data at hand, `--tiny` trains both adapters over a one-layer Llama of random weights: the first on pairs, with `RewardTrainer`, the second by PPO.
"""

import random
import sys
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    TrlParser,
)
from trl.models.peft import require_peft

WARM = ("sun", "beach", "summer", "sand", "swim")
COLD = ("snow", "ice", "winter", "frost", "sledge")
OTHER = ("the", "we", "saw", "a", "and", "then", "of", "in")


@dataclass
class Arguments:
    """What to run on."""

    tiny: bool = field(default=False, metadata={"help": "Train a small model of random weights on built-in words."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Quantise the base model to 4 bits."})
    output_dir: str = field(default="runs/adapters", metadata={"help": "Folder for the trained adapters."})


def pairs(count: int) -> Dataset:
    """Texts about warm places, preferred to those about cold ones."""
    dice, rows = random.Random(0), []
    for _ in range(count):
        chosen, rejected = (
            " ".join(word for _ in range(4) for word in (dice.choice(OTHER), dice.choice(kind)))
            for kind in (WARM, COLD)
        )
        rows.append({"chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def train_reward_adapter(base: str, tokenizer: Any, folder: str) -> None:
    """Train a reward model's adapter on `pairs` and save it."""
    from peft import LoraConfig

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    args = RewardConfig(
        output_dir=folder, per_device_train_batch_size=16, max_steps=40, learning_rate=1e-2, report_to="none",
        logging_strategy="no", save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"])
    trainer = RewardTrainer(model, args, train_dataset=pairs(256), processing_class=tokenizer, peft_config=lora)
    trainer.train()
    trainer.save_model(folder)


def tiny_parts(config: PPOConfig, folder: Path) -> tuple[str, Any, str, Dataset, PPOConfig]:
    """Base, tokenizer, reward adapter, queries and settings of `--tiny`."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tiny import TINY, word_model, word_tokenizer

    tokenizer = word_tokenizer([*WARM, *COLD, *OTHER])
    base, adapter = str(folder / "base"), str(folder / "reward_adapter")
    word_model(tokenizer).save_pretrained(base)
    train_reward_adapter(base, tokenizer, adapter)
    dice = random.Random(1)
    queries = [" ".join(dice.choices(OTHER, k=3)) for _ in range(256)]
    config = replace(config, **{**TINY, "learning_rate": 1e-2}, steps=min(config.steps, 40), use_score_scaling=True)
    return base, tokenizer, adapter, Dataset.from_dict({"query": queries}), config


def main() -> None:
    args, config = TrlParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    require_peft()
    from peft import LoraConfig

    if args.tiny:
        base, tokenizer, adapter, dataset, config = tiny_parts(config, Path(args.output_dir))
    else:
        base, adapter = config.model_name or "", config.reward_model
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        dataset = load_dataset(config.query_dataset or "", split="train")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32),
        reward_adapter=adapter,
        **({"load_in_4bit": True} if args.load_in_4bit else {}),
    )
    trainer = PPOTrainer(
        config,
        model,
        tokenizer=tokenizer,
        dataset=dataset.map(lambda row: {"input_ids": tokenizer(row["query"])["input_ids"]}),
    )
    kwargs = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "min_length": -1,
        "max_new_tokens": 8 if args.tiny else 32,
    }
    policy, means, kls = trainer.accelerator.unwrap_model(trainer.model), [], []
    for batch in islice(chain.from_iterable(repeat(trainer.dataloader)), config.steps):
        responses = trainer.generate(batch["input_ids"], return_prompt=False, **kwargs)
        batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
        whole = [torch.cat(parts) for parts in zip(batch["input_ids"], responses, strict=True)]
        rewards = [policy.compute_reward_score(ids[None])[0, -1, 0] for ids in whole]
        stats = trainer.step(batch["input_ids"], responses, rewards)
        trainer.log_stats(stats, batch, rewards)
        means.append(float(torch.stack(rewards).mean()))
        kls.append(stats["objective/kl"])
    few = max(1, len(means) // 5)
    first, last = sum(means[:few]) / few, sum(means[-few:]) / few
    print(
        f"score of the reward adapter: {first:.3f} -> {last:.3f} over {len(means)} steps, KL at the end {kls[-1]:.3f} nats"
    )
    trainer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
