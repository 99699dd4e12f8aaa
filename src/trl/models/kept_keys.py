"""Tokens that are read once for two forwards: the first keeps their keys and values, the second comes behind them.

So a prompt's first completion is scored with gradient, and further ones behind the same prompt without, at the cost of
their own tokens: nothing is kept of them for a backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from trl.models.dropout import has_noise
from trl.models.scorer_base import ScorerBase


class KeptKeys(Cache):
    """Keys and values of some tokens of a flat row, layer by layer: the `past_key_values` of two forwards.

    The first is computed as without it; at `tokens` (int64 positions in its row) keys and values are kept, detached. In the
    second they stand in front of the row's own, as the first segments of its table say.
    """

    def __init__(self, tokens: Tensor) -> None:
        super().__init__(layers=[])
        self.tokens = tokens
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What a layer's queries attend to, `(1, heads, tokens, D)` each."""
        states = (key_states, value_states)
        if layer_idx not in self._kept:
            key, value = (state.detach().index_select(2, self.tokens) for state in states)
            self._kept[layer_idx] = (key, value)
            return states
        key, value = (
            torch.cat([kept, own], dim=2) for kept, own in zip(self._kept[layer_idx], states, strict=True)
        )
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions and masks come from the batch, never from here."""
        return 0


def can_keep_keys(scorer: ScorerBase) -> bool:
    """Whether the keys of the next forward are those that another would compute, and are there to keep.

    Not for models of padded rows, under gradient checkpointing (layers run without a cache), or with dropout or noise.
    """
    core = scorer.core
    if not scorer.takes_trees or not core.training:
        return scorer.takes_trees
    return not (core.is_gradient_checkpointing or scorer.neftune_alpha or has_noise(core))
