"""Trains a process reward model: how likely is each step of a solution to be right?

    python examples/prm.py --tiny --out runs/prm

makes lists of steps that count on, some of them wrong, builds a small model of random weights and its tokenizer, trains
it for half a minute on a CPU, and shows the held-out accuracy and the scores of one list; nothing is downloaded. With a
model and rows of `prompt`, `completions` (a list of steps) and `labels` (a truth value for each) of your own:

    python examples/prm.py --model Qwen/Qwen3-0.6B --train train.jsonl --test test.jsonl --out runs/prm
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedTokenizerFast

from trl.experimental.prm import PRMConfig, PRMTrainer

if __package__:
    from examples.small_model import train_tokenizer
else:
    from small_model import train_tokenizer


def counting(numbers: random.Random) -> dict[str, Any]:
    """Five steps that count on, 0 after 9; each is wrong with probability 0.4, and the next goes on from what it says."""
    at = numbers.randint(0, 9)
    prompt, steps, labels = f"Count on from {at}.\n", [], []
    for _ in range(5):
        following = (at + 1) % 10
        is_right = numbers.random() < 0.6
        said = following if is_right else numbers.choice([n for n in range(10) if n != following])
        steps.append(f"{at}, {said}")
        labels.append(is_right)
        at = said
    return {"prompt": prompt, "completions": steps, "labels": labels}


def lists(count: int, *, seed: int) -> Dataset:
    """Rows of `prompt`, `completions` and `labels`."""
    numbers = random.Random(seed)
    return Dataset.from_list([counting(numbers) for _ in range(count)])


def digit_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that keeps every character a token of its own."""
    return train_tokenizer([], vocabulary=258)


def small_classifier(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForTokenClassification:
    """A Llama of two layers with a head for two classes, its weights drawn from `seed`."""
    torch.manual_seed(seed)
    special: Any = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,  # wide: so small a model then begins to learn at once
        bos_token_id=None,
        **special,
    )
    config.num_labels = 2
    return LlamaForTokenClassification(config)


def step_scores(trainer: PRMTrainer, row: dict[str, Any]) -> list[float]:
    """The probability that each step of a row is right, read where the trainer puts its label."""
    found = trainer.predict(Dataset.from_list([row]))  # type: ignore[arg-type]
    logits = torch.tensor(found.predictions)[torch.tensor(found.label_ids) != -100]
    return logits.softmax(dim=-1)[:, 1].tolist()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small model on steps that are made here")
    parser.add_argument("--model", help="folder or Hub name of a language model or token classifier")
    parser.add_argument("--train", type=Path, help="json lines to train on")
    parser.add_argument("--test", type=Path, help="json lines to evaluate on")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument(
        "--max_steps", type=int, help="optimiser steps (default: 300 with --tiny, else one epoch)"
    )
    args = parser.parse_args(arguments)
    if not args.tiny and not (args.model and args.train and args.test):
        parser.error("give --tiny, or --model, --train and --test")

    if args.tiny:
        tokenizer = digit_tokenizer()
        model: Any = small_classifier(tokenizer, seed=0)
        train, test = lists(4000, seed=0), lists(200, seed=1)
        settings: dict[str, Any] = {
            "learning_rate": 3e-3, "per_device_train_batch_size": 32, "max_steps": args.max_steps or 300,
            "lr_scheduler_type": "cosine", "warmup_steps": 30, "logging_steps": 50, "save_strategy": "no",
            "gradient_checkpointing": False,
        }  # fmt: skip
    else:
        tokenizer, model = None, args.model
        files = {"train": str(args.train), "test": str(args.test)}
        loaded: Any = load_dataset("json", data_files=files)
        train, test = loaded["train"], loaded["test"]
        settings = {"num_train_epochs": 1, "max_steps": args.max_steps or -1}
    trainer = PRMTrainer(
        model,
        PRMConfig(str(args.out), report_to="none", **settings),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    print(f"held-out accuracy of steps: {metrics['eval_accuracy']:.3f}")
    row: Any = test[0]
    for step, label, score in zip(row["completions"], row["labels"], step_scores(trainer, row), strict=False):
        print(f"{score:.2f}  {'right' if label else 'wrong'}  {step}")
    print(f"model saved in {args.out}")
    return metrics


if __name__ == "__main__":
    main()
