"""What the trainers of pairs share: how a batch is counted, and whether completions share their prompt."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trl.models.packed.layout import scored_sequences
from trl.models.scoring.causal import Scored
from trl.tensors.reduce import Weighted, weighted

logger = logging.getLogger(__name__)


def shares_prefix(scorer: Any, prefix_sharing: Any) -> bool:
    """Whether the completions of one prompt are laid out behind one copy of it; warns where a model of packed rows cannot.

    Raises: ValueError where that is required and the model cannot take it.
    """
    unsupported = "its flash attention only separates plain sequences"
    if prefix_sharing == "auto" and scorer.packed and not scorer.shares_prefixes:
        logger.warning(
            "prefix sharing is disabled for this model, because %s: the prompt is repeated for each completion.",
            unsupported,
        )
    if prefix_sharing is True and not scorer.shares_prefixes:
        why = unsupported if scorer.packed else "; ".join(scorer.fallbacks) or "it takes padded rows only"
        raise ValueError(
            f"prefix_sharing=True, but {type(scorer.core).__name__} cannot take shared prompts: {why}. Use 'auto', which "
            "repeats prompts where it must."
        )
    return prefix_sharing is not False and scorer.shares_prefixes


def row_count(batch: Mapping[str, Any], *, per_row: int = 1) -> int:
    """How many rows a batch has; padded rows that do not say it have `per_row` sequences each, in turn."""
    return len(batch["rows"]) if "rows" in batch else batch["input_ids"].shape[0] // per_row


def pair_units(batch: Mapping[str, Any]) -> Tensor:
    """How many pairs a batch has, and how many trained tokens their chosen completions: int64 `(2,)`."""
    chosen = (scored_sequences(batch) % 2 == 0).sum().cpu()
    return torch.stack([torch.tensor(row_count(batch, per_row=2)), chosen])


def mean_logits(scored: Scored, completion: Tensor | None = None) -> dict[str, Weighted]:
    """`logits/chosen` and `logits/rejected`: the mean logit over the vocabulary and the scored positions of each kind.

    `completion` bool `(K,)`: the positions that count, where others are scored too.
    """
    assert scored.mean_logits is not None
    is_chosen = scored.positions.sequence % 2 == 0
    counted = torch.ones_like(is_chosen) if completion is None else completion
    masks = {"chosen": is_chosen & counted, "rejected": ~is_chosen & counted}
    return {f"logits/{name}": weighted(scored.mean_logits, mask) for name, mask in masks.items()}
