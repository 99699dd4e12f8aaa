"""Prompts with images as what a model is given beside tokens: pixels, and numbers that run along with the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl.collators.images import is_per_token, processed
from trl.data.image_prompts import ImagePrompts

_TOKENS = ("input_ids", "attention_mask")


class PromptText(NamedTuple):
    """A prompt with a placeholder for each of its images, of whose tokens the last `length` are used."""

    text: str
    images: list[Any]
    length: int


def prompt_inputs(
    reader: ImagePrompts, prompts: Sequence[PromptText], ends: Sequence[int], width: int
) -> dict[str, Tensor]:
    """All that a model is given beside `input_ids` and `attention_mask` `(B, width)` of rows that hold these prompts.

    Row b's prompt ends before column `ends[b]`. What runs along with tokens is 0 in front of it and behind it.
    """
    texts, images = [prompt.text for prompt in prompts], [prompt.images for prompt in prompts]
    made, _ = processed(reader.processor, texts, images, adds_special=reader.adds_special)
    found: dict[str, Tensor] = {}
    for name, value in made.items():
        if name in _TOKENS:
            continue
        if not is_per_token(name, value, made):
            found[name] = value
            continue
        found[name] = value.new_zeros(len(prompts), width, *value.shape[2:])
        for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
            real = made["attention_mask"][row] != 0
            own = value[row][real][reader.own_tokens(made["input_ids"][row][real].tolist(), prompt.text)]
            found[name][row, end - prompt.length : end] = own[len(own) - prompt.length :]
    return found


def prompt_tokens(reader: ImagePrompts, text: str, images: list[Any]) -> tuple[list[int], list[bool]]:
    """A prompt's token ids, with those of its images, and which of them are images'."""
    made, is_image = processed(reader.processor, [text], [images], adds_special=reader.adds_special)
    ids = made["input_ids"][0].tolist()
    own = reader.own_tokens(ids, text)
    return ids[own], is_image[0][own].tolist()


def image_tokens(processor: Any, config: Any) -> tuple[int, ...]:
    """The token ids in whose places a model puts what it sees, sorted."""
    known = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    known += getattr(processor, "image_token_ids", None) or []
    return tuple(sorted({int(token) for token in known if token is not None}))


def as_read(ids: Tensor, generated: Tensor, images: Sequence[int], *, pad: int) -> Tensor:
    """Token ids as a model reads them: image tokens that it generated itself, which no image belongs to, become `pad`.

    >>> as_read(torch.tensor([9, 5, 9]), torch.tensor([False, True, True]), [9], pad=0)
    tensor([9, 5, 0])
    """
    stray = generated & torch.isin(ids, torch.tensor(list(images), dtype=ids.dtype, device=ids.device))
    return ids.masked_fill(stray, pad)
