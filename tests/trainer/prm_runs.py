"""Process rewards on eight fixed solutions of different lengths and numbers of steps."""

import json
import sys
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_classifier
from tests.trainer.one_step import LENGTHS, train_and_predict, trainer_of
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


def main(out: str, settings: str) -> None:
    """One step and two evaluations of seven solutions, under torchrun: `OUT.pt SETTINGS`."""
    torch.set_num_threads(1)
    train_and_predict(make(**json.loads(settings)), rows(), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
