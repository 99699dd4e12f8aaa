"""Reward modelling on eight fixed pairs of whole sequences, two of which share nothing."""

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_classifier
from tests.trainer.one_step import SETTINGS, KeepGradients
from tests.trainer.resume_worker import tokenizer
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


def make(out: str | None = None, *, model: Any = None, **settings: Any) -> RewardTrainer:
    """A trainer with `settings` over the defaults; its callback `keep` holds the gradients of every step."""
    arguments = (
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "compute_metrics",
        "peft_config",
        "callbacks",
    )
    given = {name: settings.pop(name) for name in arguments if name in settings}
    keep = KeepGradients()
    given["callbacks"] = [keep, *given.get("callbacks", [])]
    given.setdefault("train_dataset", Dataset.from_list(rows()))
    args = RewardConfig(out or tempfile.mkdtemp(), **{**SETTINGS, **settings})
    trainer = RewardTrainer(model or reward_model(), args, processing_class=tokenizer(), **given)
    trainer.keep = keep  # type: ignore[attr-defined]
    return trainer


def main(out: str, settings: str) -> None:
    """One step and two evaluations of seven pairs, under torchrun: `OUT.pt SETTINGS`."""
    torch.set_num_threads(1)
    trainer = make(**json.loads(settings))
    trainer.train()
    seven = Dataset.from_list(rows()[:7])
    trainer.evaluate(seven)
    found = trainer.predict(seven)
    if trainer.is_world_process_zero():
        torch.save(
            {"gradients": trainer.keep.steps, "logs": trainer.state.log_history, "predictions": found.predictions}, out
        )  # fmt: skip
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
