"""Reward modelling on eight fixed pairs of whole sequences, two of which share nothing."""

from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_classifier
from tests.trainer.one_step import trainer_of
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

# Lengths of what a pair shares, of the chosen and of the rejected rest: 0 shares nothing, a rest of 0 is a prefix.
LENGTHS = ((4, 3, 6), (2, 5, 5), (7, 1, 4), (0, 8, 2), (5, 5, 0), (1, 2, 3), (0, 1, 1), (2, 0, 9))


def rows(seed: int = 2, count: int = len(LENGTHS)) -> list[dict[str, Any]]:
    """Tokenised pairs of fixed lengths, with margins; the rests of a pair begin with different tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int, low: int) -> list[int]:
        return torch.randint(low, low + 25, (length,), generator=generator).tolist()

    found = []
    for index in range(count):
        shared, chosen, rejected = LENGTHS[index % len(LENGTHS)]
        prompt = ids(shared, 3)
        found.append(
            {
                "chosen_input_ids": prompt + ids(chosen, 5),
                "rejected_input_ids": prompt + ids(rejected, 30),
                "margin": 0.25 * (index % 4),
            }
        )
    return found


def reward_model(architecture: str = "gpt2", **options: Any) -> Any:
    """A tiny classifier with one label, in float64."""
    return tiny_classifier(architecture, **{"dtype": torch.float64, "num_labels": 1, **options})


def make(out: str | None = None, **settings: Any) -> RewardTrainer:
    """A trainer with `settings`, those of its config and its arguments by name, over the defaults."""
    settings.setdefault("model", reward_model())
    return trainer_of(RewardTrainer, RewardConfig, out, settings, train_dataset=Dataset.from_list(rows()))
