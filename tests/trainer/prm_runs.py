"""Process rewards on eight fixed solutions of different lengths and numbers of steps."""

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_classifier
from tests.trainer.one_step import LENGTHS, SETTINGS, KeepGradients
from tests.trainer.resume_worker import tokenizer
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


def make(out: str | None = None, *, model: Any = None, **settings: Any) -> PRMTrainer:
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
    args = PRMConfig(out or tempfile.mkdtemp(), **{**SETTINGS, **settings})
    trainer = PRMTrainer(model or step_classifier(), args, processing_class=tokenizer(), **given)
    trainer.keep = keep  # type: ignore[attr-defined]
    return trainer


def main(out: str, settings: str) -> None:
    """One step and two evaluations of seven rows, under torchrun: `OUT.pt SETTINGS`."""
    torch.set_num_threads(1)
    trainer = make(**json.loads(settings))
    trainer.train()
    seven = Dataset.from_list(rows()[:7])
    trainer.evaluate(seven)
    found = trainer.predict(seven)
    if trainer.is_world_process_zero():
        torch.save(
            {"gradients": trainer.keep.steps, "logs": trainer.state.log_history, "predictions": found.predictions,
             "labels": found.label_ids}, out
        )  # fmt: skip
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
