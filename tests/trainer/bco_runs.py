"""BCO on eight fixed rows, with a reference that is not the policy."""

from typing import Any

import torch
from datasets import Dataset

from tests.trainer.kto_runs import make_any, rows
from tests.trainer.resume_worker import tokenizer
from trl.trainer.bco_config import BCOConfig
from trl.trainer.bco_trainer import BCOTrainer

PROMPTS = ((5, 9), (50, 51, 52), (7,), (6, 40), (55, 44), (8, 9, 10), (20, 30), (58,))  # for the embedding


def embed(*, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Two numbers for each prompt: the mean token id, and the mean of its square, scaled."""
    mask = attention_mask.double()
    scaled = input_ids.double() / 60
    return torch.stack([(scaled**power * mask).sum(1) / mask.sum(1) for power in (1, 2)], dim=1)


def embedded_rows() -> list[dict[str, Any]]:
    """The rows with prompts under the embedding tokenizer; desirable ones have lower token ids, mostly."""
    return [{**row, "embedding_input_ids": list(ids)} for row, ids in zip(rows(), PROMPTS, strict=True)]


def make(out: str | None = None, *, matched: bool = False, **settings: Any) -> BCOTrainer:
    """A BCO trainer, on request with underlying-distribution matching."""
    settings.pop("prefix_sharing", None)  # one completion behind its prompt has nothing to share
    if matched:
        settings = {"embedding_func": embed, "embedding_tokenizer": tokenizer(), **settings}
        settings.setdefault("train_dataset", Dataset.from_list(embedded_rows()))
    return make_any(BCOTrainer, BCOConfig, out, settings)


MATCHED = {"matched": True, "beta": 0.3}
