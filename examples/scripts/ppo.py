"""Controlled sentiment by PPO: the query says which mood is wanted, a lexicon or a classifier rewards it.

    accelerate launch examples/scripts/ppo.py --log_with wandb --mini_batch_size 1 --gradient_accumulation_steps 16

trains `lvwerra/gpt2-imdb` on `stanfordnlp/imdb` with the classifier `lvwerra/distilbert-imdb`; `--model_name`, `--query_dataset`
and `--reward_model` name others. `--control` puts `[positive]` or `[negative]` in front of each query; without it, positive texts
are wanted. `--use_peft` trains an adapter, and the model without it is the reference. `--tiny` trains a one-layer Llama of random
weights to choose its words by the query, with a lexicon as reward.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, pipeline

from trl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    TrlParser,
)
from trl.core import LengthSampler

GOOD = ("great", "lovely", "funny", "moving", "clever")
BAD = ("dull", "awful", "silly", "boring", "flat")
OTHER = ("the", "film", "plot", "actor", "was", "and", "very", "scene", "music", "a")
MARKS = {1.0: "[positive]", -1.0: "[negative]"}


@dataclass
class Arguments:
    """What to run on."""

    tiny: bool = field(default=False, metadata={"help": "Train a small model of random weights on built-in words."})
    control: bool = field(default=False, metadata={"help": "Let each query say which mood is wanted."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter (`pip install 'trl[peft]'`)."})
    use_seq2seq: bool = field(default=False, metadata={"help": "The model is an encoder-decoder."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    output_dir: str = field(default="runs/sentiment", metadata={"help": "Folder for the trained model."})


def lexicon(texts: list[str]) -> list[float]:
    """Share of good words less share of bad ones, in [-1, 1]."""
    counts = [(sum(w in GOOD for w in t.split()), sum(w in BAD for w in t.split()), len(t.split())) for t in texts]
    return [(good - bad) / max(words, 1) for good, bad, words in counts]


def classifier(name: str) -> Callable[[list[str]], list[float]]:
    """The logit of a classifier's label POSITIVE; `name` is that of the model, or `task:model`."""
    task, _, model = name.rpartition(":")
    pipe = pipeline(task or "sentiment-analysis", model=model, top_k=None, function_to_apply="none")

    def score(texts: list[str]) -> list[float]:
        found = [{one["label"]: one["score"] for one in each} for each in pipe(texts)]
        return [labels["POSITIVE"] - labels.get("NEGATIVE", 0.0) for labels in found]

    return score


def tiny_parts(config: PPOConfig) -> tuple[Any, Any, Dataset, Any, PPOConfig]:
    """Model, tokenizer, queries, reward and settings of `--tiny`."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tiny import TINY, word_model, word_tokenizer

    tokenizer = word_tokenizer([*GOOD, *BAD, *OTHER], MARKS.values())
    dice = random.Random(0)
    queries = [" ".join(dice.choices(OTHER, k=3)) for _ in range(256)]
    steps = min(config.steps, 40)
    config = replace(config, **TINY, steps=steps)
    return word_model(tokenizer), tokenizer, Dataset.from_dict({"query": queries}), lexicon, config


def real_parts(config: PPOConfig) -> tuple[Any, Any, Dataset, Any, PPOConfig]:
    """Model, tokenizer, queries, reward and settings by name."""
    config = replace(config, model_name=config.model_name or "lvwerra/gpt2-imdb")
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    name = "stanfordnlp/imdb" if config.query_dataset == "imdb" else config.query_dataset
    dataset = load_dataset(name, split="train").rename_column("text", "query")
    length = LengthSampler(2, 8)

    def begin(row: dict[str, Any]) -> dict[str, Any]:
        return {"query": tokenizer.decode(tokenizer(row["query"])["input_ids"][: length()])}

    dataset = dataset.filter(lambda row: len(row["query"]) > 200).map(begin)
    return config.model_name, tokenizer, dataset, classifier(config.reward_model or ""), config


def main() -> None:
    args, config = TrlParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    model, tokenizer, dataset, score, config = tiny_parts(config) if args.tiny else real_parts(config)
    controlled = args.control or args.tiny
    signs = [1.0 - 2.0 * (number % 2) * controlled for number in range(len(dataset))]

    def tokenize(row: dict[str, Any], index: int) -> dict[str, Any]:
        query = f"{MARKS[signs[index]]} {row['query']}" if controlled else row["query"]
        return {"query": query, "input_ids": tokenizer(query)["input_ids"], "label": signs[index]}

    peft_config = None
    if args.use_peft:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=16, bias="none", task_type="CAUSAL_LM")
    model_class = AutoModelForSeq2SeqLMWithValueHead if args.use_seq2seq else AutoModelForCausalLMWithValueHead
    settings = {"trust_remote_code": True} if args.trust_remote_code else {}
    trainer = PPOTrainer(
        config,
        model_class.from_pretrained(model, peft_config=peft_config, summary_dropout_prob=0.0, **settings),
        tokenizer=tokenizer,
        dataset=dataset.map(tokenize, with_indices=True),
    )
    kwargs = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "min_length": -1,
        "max_new_tokens": 8 if args.tiny else 20,
    }
    means, kls = [], []
    for batch in islice(chain.from_iterable(repeat(trainer.dataloader)), config.steps):
        responses = trainer.generate(batch["input_ids"], return_prompt=False, **kwargs)
        batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
        texts = (
            batch["response"] if args.tiny else [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
        )
        rewards = [torch.tensor(sign * s) for sign, s in zip(batch["label"], score(texts), strict=True)]
        stats = trainer.step(batch["input_ids"], responses, rewards)
        trainer.log_stats(stats, batch, rewards)
        means.append(stats["ppo/mean_scores"])
        kls.append(stats["objective/kl"])
    few = max(1, len(means) // 5)
    first, last = sum(means[:few]) / few, sum(means[-few:]) / few
    print(f"mood asked for: {first:.3f} -> {last:.3f} over {len(means)} steps, KL at the end {kls[-1]:.3f} nats")
    trainer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
