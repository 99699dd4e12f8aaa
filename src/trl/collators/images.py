"""What a processor makes of texts and images: inputs of a model, padded on the right, and prompts of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl.data.image_rows import ImagePrompts

# Prefix attention lets every token of these models' rows see all others, also those that it should predict.
_PREFIX_ATTENTION = ("PaliGemmaProcessor", "ColPaliProcessor")
_TOKENS = ("input_ids", "attention_mask")


def check_processor(processor: Any) -> None:
    """Raises ValueError or TypeError for a processor that no batch can be made with."""
    name = type(processor).__name__
    if not hasattr(processor, "image_processor"):
        raise TypeError(
            f"processor must have an image_processor, got {name}. Load it with AutoProcessor.from_pretrained."
        )
    if name in _PREFIX_ATTENTION:
        raise ValueError(
            f"processor is a {name}, whose model lets tokens see those they should predict, expected one of a causal "
            "model. Take another model, or, with SFTTrainer and DPOTrainer, a data_collator of your own that passes the processor "
            "a suffix."
        )


def processed(
    processor: Any, texts: list[str], images: Sequence[list[Any]], *, adds_special: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """What a processor makes of texts, padded on the right, and their images; and which positions `(B, T)` are images'."""
    made = dict(
        processor(
            text=texts,
            **({"images": list(images)} if any(images) else {}),
            padding=True,
            padding_side="right",
            add_special_tokens=adds_special,
            return_mm_token_type_ids=True,
            return_tensors="pt",
        )
    )
    made.pop("labels", None)
    types = made.get("mm_token_type_ids")
    if "mm_token_type_ids" not in processor.model_input_names:
        made.pop("mm_token_type_ids", None)
    if types is not None:
        return made, types != 0
    known = [token for token in processor.image_token_ids if token is not None]
    return made, torch.isin(made["input_ids"], torch.tensor(known, dtype=made["input_ids"].dtype))


def is_per_token(name: str, value: Any, batch: dict[str, Tensor]) -> bool:
    """Whether a value belongs to the tokens `(B, T, ...)`, not to images."""
    is_of_images = name.startswith(("pixel_", "image_")) and not name.endswith("token_type_ids")
    return isinstance(value, Tensor) and not is_of_images and value.shape[:2] == batch["input_ids"].shape


class PromptText(NamedTuple):
    """A prompt with a placeholder for each of its images, of whose tokens the last `length` are used."""

    text: str
    images: list[Any]
    length: int


def prompt_inputs(
    reader: ImagePrompts, prompts: Sequence[PromptText], ends: Sequence[int], width: int
) -> dict[str, Tensor]:
    """The model's inputs beside `input_ids` and `attention_mask` `(B, width)` of rows with these prompts.

    Row b's prompt ends before column `ends[b]`. Inputs per token are 0 outside of it.
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
    """The token ids that a model replaces by image features, sorted."""
    known = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    known += getattr(processor, "image_token_ids", None) or []
    return tuple(sorted({int(token) for token in known if token is not None}))


def as_read(ids: Tensor, generated: Tensor, images: Sequence[int], *, pad: int) -> Tensor:
    """Token ids as model inputs: image tokens that the model generated, which have no image, become `pad`.

    >>> as_read(torch.tensor([9, 5, 9]), torch.tensor([False, True, True]), [9], pad=0)
    tensor([9, 5, 0])
    """
    stray = generated & torch.isin(ids, torch.tensor(list(images), dtype=ids.dtype, device=ids.device))
    return ids.masked_fill(stray, pad)
