"""Trains a process reward model: how likely is each step of a solution to be right?

    accelerate launch examples/scripts/prm.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/math_shepherd \
        --num_train_epochs 1 --output_dir runs/prm

Rows have `prompt`, `completions` (a list of steps) and `labels` (a truth value for each). `--tiny` makes lists of steps that count
on, some of them wrong, trains a small model of random weights for half a minute on a CPU, and shows the held-out accuracy and
the scores of one list.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, LlamaForTokenClassification

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.prm import PRMConfig, PRMTrainer
from trl.scripts.loading import model_init_kwargs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from small_model import small_llama, train_tokenizer

import tiny


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


def small_parts(folder: Path) -> dict[str, Any]:
    """Lists of steps, a tokenizer of characters, and a Llama of two layers with a head for two classes."""
    tokenizer = train_tokenizer([], vocabulary=258)
    config = small_llama(tokenizer, seed=0, layers=2, width=64).config
    config.num_labels, config.initializer_range = 2, 0.1  # so wide that so small a model learns at once
    torch.manual_seed(0)
    model = LlamaForTokenClassification(config)
    splits = {"train": (4000, random.Random(0)), "test": (200, random.Random(1))}
    rows = {name: [counting(numbers) for _ in range(count)] for name, (count, numbers) in splits.items()}
    return tiny.save(folder, rows, model, tokenizer)


def step_scores(trainer: PRMTrainer, row: dict[str, Any]) -> list[float]:
    """The probability that each step of a row is right, read where the trainer puts its label."""
    found = trainer.predict(Dataset.from_list([row]))  # type: ignore[arg-type]
    logits = torch.tensor(found.predictions)[torch.tensor(found.label_ids) != -100]
    return logits.softmax(dim=-1)[:, 1].tolist()


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PRMConfig, ModelConfig))
    settings = {"per_device_train_batch_size": 32, "max_steps": 300, "lr_scheduler_type": "cosine", "warmup_steps": 30, "logging_steps": 50}  # fmt: skip
    given = tiny.arguments(parser, small_parts, **settings)
    script_args, training_args, model_args = parser.parse_args_and_config(given)
    name: Any = model_args.model_name_or_path
    training_args.model_init_kwargs = model_init_kwargs(model_args)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

    trainer = PRMTrainer(
        name,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split],
        processing_class=AutoTokenizer.from_pretrained(name),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    metrics = trainer.evaluate()
    print(f"held-out accuracy of steps: {metrics['eval_accuracy']:.3f}")
    row: Any = dataset[script_args.dataset_test_split][0]
    for step, label, score in zip(row["completions"], row["labels"], step_scores(trainer, row), strict=False):
        print(f"{score:.2f}  {'right' if label else 'wrong'}  {step}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
