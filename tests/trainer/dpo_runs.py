"""DPO on eight fixed pairs, with a reference that is not the policy."""

import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.one_step import SETTINGS, KeepGradients
from tests.trainer.resume_worker import tokenizer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

# Lengths of prompt, chosen and rejected: every order of the two completions, one-token prompts and completions.
LENGTHS = ((4, 3, 6), (2, 5, 5), (7, 1, 4), (3, 8, 2), (5, 5, 1), (1, 2, 3), (6, 4, 4), (2, 7, 9))


def pairs(seed: int = 2, count: int = len(LENGTHS)) -> list[dict[str, list[int]]]:
    """Tokenised pairs of fixed lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 60, (length,), generator=generator).tolist()

    names = ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids")
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(count)]
    return [{name: ids(length) for name, length in zip(names, row, strict=True)} for row in lengths]


def policy_and_reference(architecture: str = "gpt2", **options: Any) -> tuple[Any, Any]:
    """A tiny float64 model, and one whose weights differ from it a little."""
    options = {"dtype": torch.float64, **options}
    policy, reference = (tiny_model(architecture, **options) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return policy, reference


def make(out: str | None = None, *, model: Any = None, ref_model: Any = None, **settings: Any) -> DPOTrainer:
    """A trainer with `settings` over the defaults; its callback `keep` holds the gradients of every step."""
    arguments = (
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "compute_metrics",
        "peft_config",
        "callbacks",
        "processing_class",
    )
    given = {name: settings.pop(name) for name in arguments if name in settings}
    if model is None:
        model, reference = policy_and_reference()
        ref_model = (
            reference if ref_model is None and not settings.pop("copied_reference", False) else ref_model
        )
    keep = KeepGradients()
    given["callbacks"] = [keep, *given.get("callbacks", [])]
    given.setdefault("train_dataset", Dataset.from_list(pairs()))
    given.setdefault("processing_class", tokenizer())
    args = DPOConfig(out or tempfile.mkdtemp(), **{**SETTINGS, **settings})
    trainer = DPOTrainer(model, ref_model, args, **given)
    trainer.keep = keep  # type: ignore[attr-defined]
    return trainer
