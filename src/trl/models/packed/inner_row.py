"""The decoder of a vision-language model on real tokens only, inside a model that takes padded rows.

The model around the decoder needs rows as its processor makes them: it puts the features of images among the
embeddings and computes positions. Hooks of the decoder then drop the padding: it runs on one packed row, and its hidden
states go back to their places in the padded rows, zeros at padding.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from trl.models.packed.mixers import tensors_in
from trl.models.packed.support import packed_unsupported, use_packed_attention
from trl.tensors.segments import Segments

logger = logging.getLogger(__name__)

# Tensors for tokens `(B, T, ...)`, and positions, of which rotary embeddings may take several `(..., B, T)`.
_OF_TOKENS, _POSITIONS = ("inputs_embeds", "visual_pos_masks"), "position_ids"
# Features of images in the order of their tokens, added in later layers.
_KNOWN = (*_OF_TOKENS, _POSITIONS, "attention_mask", "deepstack_visual_embeds")


class _Padded(NamedTuple):
    """Where a packed row's tokens stand among the `batch` x `width` places of padded rows."""

    batch: int
    width: int
    places: Tensor  # (N,)


_ROWS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the padded rows of a segment table


def pack_decoder(core: PreTrainedModel) -> str | None:
    """Let the decoder of a model with several configs drop padding; the reason why it cannot, None if it does."""
    decoder = core.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or decoder.config is not core.config.get_text_config():
        return "it exposes no decoder"
    if reason := packed_unsupported(decoder):
        return reason
    if not use_packed_attention(decoder):
        return "flash attention has no table of segments. Use 'sdpa'"
    if not getattr(decoder, "drops_padding", False):
        decoder.drops_padding = True  # type: ignore[assignment]
        decoder.register_forward_pre_hook(_before, with_kwargs=True, prepend=True)  # before the hooks that read a table
        decoder.register_forward_hook(_after, with_kwargs=True)
    return None


def _before(
    decoder: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    mask, embedded, positions = (kwargs.get(name) for name in ("attention_mask", "inputs_embeds", _POSITIONS))
    if args or kwargs.get("use_cache") is not False or not isinstance(embedded, Tensor) or mask is None:
        return None
    others = [name for name, value in kwargs.items() if name not in _KNOWN and tensors_in(value)]
    if others or not isinstance(mask, Tensor) or mask.ndim != 2:
        _warn(type(decoder), f"{' and '.join(others)}" if others else "a mask that is not of tokens")
        return None
    is_real, (batch, width) = mask.bool(), mask.shape
    padded = _Padded(batch, width, is_real.flatten().nonzero()[:, 0])
    if positions is None:
        positions = torch.arange(width, device=mask.device)[None]
    assert isinstance(positions, Tensor)
    every = positions.expand(*positions.shape[:-2], batch, width).flatten(-2)
    table = Segments.from_lengths(is_real.sum(1).tolist()).table
    _ROWS[table] = padded
    packed = {name: value[is_real][None] for name in _OF_TOKENS if isinstance(value := kwargs.get(name), Tensor)}
    return args, {**kwargs, **packed, _POSITIONS: every[..., padded.places].unsqueeze(-2), "attention_mask": table}


def _after(decoder: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object], outputs: object) -> object:
    mask = kwargs.get("attention_mask")
    padded = _ROWS.get(mask) if isinstance(mask, Tensor) else None
    if padded is None:
        return outputs

    def spread(value: object) -> object:
        if not isinstance(value, Tensor) or value.shape[:2] != (1, len(padded.places)):
            return value
        rows = value.new_zeros(padded.batch * padded.width, *value.shape[2:])
        return rows.index_copy(0, padded.places, value[0]).unflatten(0, (padded.batch, padded.width))

    return tree_map(spread, outputs)


@cache
def _warn(decoder: type[PreTrainedModel], what: str) -> None:
    logger.warning("%s runs on padded rows, because the model around it gives it %s.", decoder.__name__, what)
