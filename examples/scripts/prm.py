"""Trains a process reward model: how likely is each step of a solution to be right?

    accelerate launch examples/scripts/prm.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/math_shepherd \
        --num_train_epochs 1 --output_dir runs/prm

Rows have `prompt`, `completions` (a list of steps) and `labels` (a truth value for each). At the end the script prints the
held-out accuracy, and the scores of the steps of one row.
"""

from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.prm import PRMConfig, PRMTrainer
from trl.scripts.loading import model_init_kwargs


def step_scores(trainer: PRMTrainer, row: dict[str, Any]) -> list[float]:
    """The probability that each step of a row is right, read where the trainer puts its label."""
    found = trainer.predict(Dataset.from_list([row]))  # type: ignore[arg-type]
    logits = torch.tensor(found.predictions)[torch.tensor(found.label_ids) != -100]
    return logits.softmax(dim=-1)[:, 1].tolist()


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PRMConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
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
    trainer.save_model()
    metrics = trainer.evaluate()
    print(f"held-out accuracy of steps: {metrics['eval_accuracy']:.3f}")
    row: Any = dataset[script_args.dataset_test_split][0]
    for step, label, score in zip(row["completions"], row["labels"], step_scores(trainer, row), strict=False):
        print(f"{score:.2f}  {'right' if label else 'wrong'}  {step}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
