"""Process rewards on eight fixed solutions of different lengths and numbers of steps."""

import sys
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_classifier
from tests.trainer.one_step import LENGTHS, trainer_of
from trl.trainer.prm_config import PRMConfig
from trl.trainer.prm_trainer import PRMTrainer


def rows(seed: int = 2, count: int = len(LENGTHS)) -> list[dict[str, list[int]]]:
    """Tokenised solutions: every third token ends a step, in some rows the first or only one."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        classes = torch.randint(0, 2, (length,), generator=generator).tolist()
        labels = [c if (t + index) % 3 == 0 else -100 for t, c in enumerate(classes)]
        found.append({"input_ids": torch.randint(3, 60, (length,), generator=generator).tolist(), "labels": labels})  # fmt: skip
    return found


def step_classifier(architecture: str = "gpt2", **options: Any) -> Any:
    """A tiny token classifier with two labels, in float64."""
    options = {"dtype": torch.float64, "num_labels": 2, **options}
    return tiny_classifier(architecture, of_tokens=True, **options)


def make(out: str | None = None, **settings: Any) -> PRMTrainer:
    """A trainer with `settings`, those of its config and its arguments by name, over the defaults."""
    settings.setdefault("model", step_classifier())
    return trainer_of(PRMTrainer, PRMConfig, out, settings, train_dataset=Dataset.from_list(rows()))


def main(out: str) -> None:
    """One step and predictions of seven solutions, in two processes."""
    torch.set_num_threads(1)
    trainer = make(per_device_train_batch_size=2, gradient_accumulation_steps=2, per_device_eval_batch_size=3)
    trainer.train()
    found = trainer.predict(Dataset.from_list(rows()[:7]))
    if trainer.is_world_process_zero():
        torch.save({"predictions": found.predictions, "labels": found.label_ids}, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
