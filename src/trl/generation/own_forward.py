"""Prefill and decoding through a model's own forward, over flat rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trl.generation.cache import RolloutCache
from trl.models.parts import decoder_of, logit_rule
from trl.tensors.segments import Segments


class Decoder(Protocol):
    """What turns tokens into logits over a cache."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts into the cache; logits `(n, V)` after the last token of each."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read one token `(R,)` per row, each at its position; logits `(R, V)`."""
        ...


class OwnForward:
    """The model's own layers; their attention must be `rollout_attention` on the same cache."""

    def __init__(self, model: Any, cache: RolloutCache) -> None:
        self.cache, self.device = cache, model.get_input_embeddings().weight.device
        self.decoder: Any = decoder_of(model)
        self.head, self.rule = model.get_output_embeddings(), logit_rule(model.config)
        self._no_table = torch.zeros(1, 1, 1, 4, dtype=torch.int64, device=self.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        segments = Segments.from_lengths(len(prompt) for prompt in prompts)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        self.cache.step = None
        self.cache.expect_prompts(segments.length, self.device)
        hidden = self._hidden(ids, segments.position_ids()[0].to(self.device), segments.to_table())
        lasts = torch.tensor(segments.length).cumsum(0) - 1
        return self.logits(hidden[lasts.to(self.device)])

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.logits(self._hidden(tokens, positions, self._no_table))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `(R, V)` of hidden states `(R, H)`, at least float32, in memory of their own."""
        products = self.head(hidden)
        return self.rule.apply_(products.to(torch.promote_types(products.dtype, torch.float32)))

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """`mask` travels to the attention layers as it is; it must have four dimensions."""
        outputs = self.decoder(
            input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False
        )
        return outputs.last_hidden_state[0]
