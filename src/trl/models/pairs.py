"""Counts of pair batches, prefix sharing, mean logits."""

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
    """Whether completions share one copy of their prompt; warns if a model of packed rows does not support it.

    Raises: ValueError if it is required and not supported.
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
    """The number of rows of a batch; padded batches without `rows` have `per_row` sequences per row."""
    return len(batch["rows"]) if "rows" in batch else batch["input_ids"].shape[0] // per_row


def pair_units(batch: Mapping[str, Any]) -> Tensor:
    """The number of pairs of a batch, and of trained tokens in chosen completions: int64 `(2,)`."""
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
