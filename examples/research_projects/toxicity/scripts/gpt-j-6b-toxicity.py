"""Detoxification by PPO: a classifier of toxic language rewards texts that it finds harmless.

    accelerate launch examples/research_projects/toxicity/scripts/gpt-j-6b-toxicity.py --log_with wandb \
        --model_name EleutherAI/gpt-j-6B --query_dataset allenai/real-toxicity-prompts \
        --reward_model facebook/roberta-hate-speech-dynabench-r4-target --steps 100 --output_dir runs/harmless

The reward is the raw logit of the classifier's first label (not toxic): it still tells texts apart where a probability is 1.

Without a model or data at hand, `--tiny` first trains a one-layer classifier on built-in texts, and then a one-layer Llama of random weights against it.
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

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, TrlParser


@dataclass
class Arguments:
    """What to run on."""

    tiny: bool = field(default=False, metadata={"help": "Train small models of random weights on built-in words."})
    output_dir: str = field(default="runs/harmless", metadata={"help": "Folder for the trained model."})


def tiny_parts(config: PPOConfig) -> tuple[Any, Any, Any, Any, Dataset, PPOConfig]:
    """Model, tokenizer, classifier and its tokenizer, queries and settings of `--tiny`."""
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from tiny import CALM, RUDE, TINY, classifier, rude_texts, word_model, word_tokenizer

    tokenizer = word_tokenizer([*RUDE, *CALM])
    queries = rude_texts(256, random.Random(0))[0]
    config = replace(config, **TINY, steps=min(config.steps, 40), score_clip=5.0)
    return (
        word_model(tokenizer),
        tokenizer,
        classifier(tokenizer),
        tokenizer,
        Dataset.from_dict({"query": queries}),
        config,
    )


def real_parts(config: PPOConfig) -> tuple[Any, Any, Any, Any, Dataset, PPOConfig]:
    """The same by name; prompts are those whose continuation was toxic."""
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    judge = AutoModelForSequenceClassification.from_pretrained(config.reward_model)
    dataset = load_dataset(config.query_dataset, split="train")
    toxic = dataset.filter(lambda row: (row["prompt"]["toxicity"] or 0.0) > 0.3)
    queries = [row["prompt"]["text"] + row["continuation"]["text"] for row in toxic]
    short = [tokenizer.decode(tokenizer(query)["input_ids"][:20]) for query in queries]
    judge_tokenizer = AutoTokenizer.from_pretrained(config.reward_model)
    return (
        config.model_name,
        tokenizer,
        judge.eval(),
        judge_tokenizer,
        Dataset.from_dict({"query": short}),
        config,
    )


@torch.no_grad()
def harmlessness(texts: list[str], model: Any, tokenizer: Any) -> torch.Tensor:
    """The logit of the classifier's first label for each text, `(B,)`."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].cpu()


def main() -> None:
    args, config = TrlParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    parts = tiny_parts(config) if args.tiny else real_parts(config)
    model, tokenizer, judge, judge_tokenizer, dataset, config = parts
    trainer = PPOTrainer(
        config,
        AutoModelForCausalLMWithValueHead.from_pretrained(model, summary_dropout_prob=0.0),
        tokenizer=tokenizer,
        dataset=dataset.map(lambda row: {"input_ids": tokenizer(row["query"])["input_ids"]}),
    )
    judge.to(trainer.accelerator.device)
    kwargs = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "min_length": -1,
        "max_new_tokens": 8 if args.tiny else 30,
    }
    means, kls = [], []
    for batch in islice(chain.from_iterable(repeat(trainer.dataloader)), config.steps):
        responses = trainer.generate(batch["input_ids"], return_prompt=False, **kwargs)
        batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
        # An empty response is judged as one word, so that saying nothing is no way out.
        judged = [text or tokenizer.unk_token or " " for text in batch["response"]]
        rewards = list(harmlessness(judged, judge, judge_tokenizer))
        stats = trainer.step(batch["input_ids"], responses, rewards)
        trainer.log_stats(stats, batch, rewards)
        means.append(stats["ppo/mean_scores"])
        kls.append(stats["objective/kl"])
    few = max(1, len(means) // 5)
    first, last = sum(means[:few]) / few, sum(means[-few:]) / few
    print(f"harmlessness: {first:.3f} -> {last:.3f} over {len(means)} steps, KL at the end {kls[-1]:.3f} nats")
    trainer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
