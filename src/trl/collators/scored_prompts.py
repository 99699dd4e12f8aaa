"""Batches of pairs in which the prompts are trained too: each once, as part of its chosen sequence (ORPO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trl.collators.rows import IGNORED


def with_prompts_scored(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch of pairs (any layout of `as_pair_batch`) in which the tokens of each chosen prompt are labelled as well.

    They belong to sequence 2i, in front of its completion. `prompt_tokens (B,)` says how many of a sequence's scored
    tokens they are: all but the prompt's first, which nothing predicts. A batch that has it is returned as it is.

    >>> from trl.collators.preference import completion_batch
    >>> found = with_prompts_scored(completion_batch([([4, 5, 6], [[7], [8]])], prefix_sharing=True))
    >>> found["scored_target"].tolist(), found["scored_sequence"].tolist(), found["prompt_tokens"].tolist()
    ([5, 6, 7, 8], [0, 0, 0, 1], [2])
    """
    if "prompt_tokens" in batch:
        return batch
    if "scored_target" in batch:
        return {**batch, **_of_prefix_groups(batch)}
    prompt, sequence, count = _of_rows(batch) if "attention_mask" in batch else _of_packed_row(batch)
    labels = torch.where(prompt, batch["input_ids"], batch["labels"])
    tokens = torch.bincount(sequence[prompt], minlength=count)[:count:2]
    return {**batch, "labels": labels, "prompt_tokens": (tokens - 1).clamp(min=0)}


def _of_prefix_groups(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The prompt in front of every chosen branch, labelled and scored."""
    table = batch["segment_table"][0, 0]
    chosen = table[table[:, 3] > 0][0::2]
    start, length = chosen[:, 2].to(batch["input_ids"].device), chosen[:, 3].to(batch["input_ids"].device)
    tokens = length - 1
    pair = torch.repeat_interleave(torch.arange(len(tokens), device=tokens.device), tokens)
    first = tokens.cumsum(0) - tokens  # where each prompt begins among the scored tokens
    source = torch.arange(len(pair), device=pair.device) - (first - start)[pair]
    ids, labels = batch["input_ids"][0], batch["labels"].clone()
    labels[0, source + 1] = ids[source + 1]
    return {
        "labels": labels,
        "scored_source": torch.cat([source, batch["scored_source"]]),
        "scored_target": torch.cat([ids[source + 1], batch["scored_target"]]),
        "scored_sequence": torch.cat([2 * pair, batch["scored_sequence"]]),
        "prompt_tokens": tokens,
    }


def _of_rows(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Of padded rows `(B, T)`: which tokens are a chosen prompt's, whose they are, and the number of sequences."""
    labels, mask = batch["labels"], batch["attention_mask"].bool()
    sequence = torch.arange(len(labels), device=labels.device)[:, None].expand(labels.shape)
    before = (labels != IGNORED).cumsum(dim=1) == 0
    return before & mask & (sequence % 2 == 0), sequence, len(labels)


def _of_packed_row(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """The same of a packed row of plain sequences `(1, N)`; filler at its end is none of them."""
    starts, labelled = batch["position_ids"][0] == 0, batch["labels"][0] != IGNORED
    sequence, seen = starts.cumsum(0) - 1, labelled.cumsum(0)
    count = int(starts.sum()) // 2 * 2
    before = seen == (seen - labelled.int())[starts][sequence]
    return (before & (sequence % 2 == 0) & (sequence < count))[None], sequence[None], count
