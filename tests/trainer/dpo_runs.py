"""DPO on eight fixed pairs, with a reference that is not the policy."""

from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.one_step import trainer_of
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


def make_any(kinds: tuple[Any, Any], rows: list[Any], out: str | None, settings: dict[str, Any]) -> Any:
    """A trainer with `settings`, those of its config and its arguments by name, over the defaults."""
    copied = settings.pop("copied_reference", False)
    if settings.get("model") is None:
        settings["model"], reference = policy_and_reference()
        if not copied:
            settings.setdefault("ref_model", reference)
    return trainer_of(*kinds, out, settings, train_dataset=Dataset.from_list(rows))


def make(out: str | None = None, **settings: Any) -> DPOTrainer:
    """A DPO trainer; `settings` as in `make_any`."""
    return make_any((DPOTrainer, DPOConfig), pairs(), out, settings)
