"""The gradient and the log of optimiser steps of SFT on eight fixed rows.

As a program in two processes: `-m tests.trainer.one_step OUT.pt '{"per_device_train_batch_size": 4}'` writes the log.
"""

import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.trainer.resume_worker import tokenizer
from trl import SFTConfig, SFTTrainer

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "per_device_train_batch_size": 8, "max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    "save_strategy": "no", "gradient_checkpointing": False, "seed": 11,
}  # fmt: skip
LENGTHS = (9, 3, 14, 5, 7, 11, 4, 6)


def fixed_rows() -> list[dict[str, list[int]]]:
    """Eight rows of different lengths; completions of different lengths, one with a single token."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        prompt = (2 * number) % (length - 1) if number else length - 1
        rows.append({"input_ids": ids, "completion_mask": [0] * prompt + [1] * (length - prompt)})
    return rows


class KeepGradients(TrainerCallback):
    """Copies the gradients of each optimiser step before it is made."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = {
            name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        self.steps.append(named)


def trainer_of(
    trainer_class: Any, config_class: Any, out: str | None, settings: dict[str, Any], **defaults: Any
) -> Any:
    """A trainer whose callback `keep` holds the gradients of every step.

    `settings` are those of its config, over `SETTINGS`, and its arguments by name, over `defaults`.
    """
    names = inspect.signature(trainer_class.__init__).parameters
    given = {**defaults, **{name: value for name, value in settings.items() if name in names}}
    own = {name: value for name, value in settings.items() if name not in names}
    keep = KeepGradients()
    given["callbacks"] = [keep, *given.get("callbacks", [])]
    given.setdefault("processing_class", tokenizer())
    args = config_class(out or tempfile.mkdtemp(), **{**SETTINGS, **own})
    trainer = trainer_class(args=args, **given)
    trainer.keep = keep
    return trainer


def step(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient and the log of a trainer's one step."""
    trainer.train()
    (gradients,) = trainer.keep.steps
    return gradients, trainer.state.log_history[0]


def plain_gradient(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of a plain loss by parameter."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradient(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-10
) -> None:
    """Gradients agree to `tolerance` of the largest entry."""
    assert found.keys() == expected.keys()
    size = max(gradient.abs().max().item() for gradient in expected.values())
    assert size > 1e-6
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max().item() <= tolerance * size, name


def assert_same_steps(found: list[Any], expected: list[Any], tolerance: float = 1e-10) -> None:
    """The gradients of all steps agree, to a part of the largest of the step, or of 1."""
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        size = max(float(value.abs().max()) for value in other.values())
        assert size > 0
        for name, value in other.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=tolerance * max(size, 1), msg=name)


def run(
    model: Any = None, data: Any = None, *, trainer_class: type[SFTTrainer] = SFTTrainer, **settings: Any
) -> tuple[SFTTrainer, KeepGradients]:
    """Train with `settings` over the defaults above; the trainer, and the gradients of every step."""
    keep = KeepGradients()
    model = tiny_model("gpt2", dtype=torch.float64) if model is None else model
    args = SFTConfig(tempfile.mkdtemp(), **{**SETTINGS, **settings})
    data = Dataset.from_list(fixed_rows()) if data is None else data
    trainer = trainer_class(model, args, train_dataset=data, processing_class=tokenizer(), callbacks=[keep])
    trainer.train()
    return trainer, keep


def main(out: str, settings: str) -> None:
    torch.set_num_threads(1)
    trainer, _ = run(**json.loads(settings))
    if trainer.is_world_process_zero():
        torch.save(trainer.state.log_history, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
