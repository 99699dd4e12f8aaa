"""Attention over our cache, registered with transformers so that a model's own forward uses it.

Inside `rollout_attention_of(model, cache)` every attention layer stores its keys and values in the cache: those of a packed row of
prompts, then those of one new token for each row. The model's own cache is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from trl.generation.transformers.cache import RolloutCache
from trl.models.packed.attention import packed_attention

ROLLOUT_ATTENTION = "trl_rollout"

_CACHE: ContextVar[RolloutCache] = ContextVar("rollout cache")


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row of prompts or of newest tokens: `query (1, heads, N, D) -> (1, N, heads, D)`."""
    cache, layer = _CACHE.get(), module.layer_idx
    assert isinstance(layer, int)
    query, key = (
        query.to(value.dtype),
        key.to(value.dtype),
    )  # under autocast the rotary embedding returns float32
    if cache.step is None:
        cache.store_prompts(layer, key[0], value[0])
        return packed_attention(
            module, query, key, value, attention_mask, 0.0, scaling,
            sliding_window=sliding_window, softcap=softcap, **kwargs,
        )  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or getattr(module, "sliding_window", None)
    newest = (part[0].transpose(0, 1) for part in (query, key, value))
    with without_autocast(query.device.type):
        return cache.attend(layer, *newest, scale=scale, window=window, softcap=softcap)[None], None


def without_autocast(device: str) -> Any:
    """A block without autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def rollout_attention_of(model: Any, cache: RolloutCache) -> Iterator[None]:
    """Inside the block the model's attention layers use `cache`."""
    before = model.config._attn_implementation
    model.config._attn_implementation = ROLLOUT_ATTENTION
    token = _CACHE.set(cache)
    try:
        yield
    finally:
        _CACHE.reset(token)
        model.config._attn_implementation = before


AttentionInterface.register(ROLLOUT_ATTENTION, rollout_attention)
AttentionMaskInterface.register(ROLLOUT_ATTENTION, sdpa_mask)
