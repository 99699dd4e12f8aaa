"""Tiny vision-language models and their processors, built from configs with Pillow only: nothing is downloaded."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, ProcessorMixin

from tests.tiny import copy_of
from tests.tiny_tokenizers import tiny_tokenizer

FAMILIES = ("llava", "qwen2_vl", "idefics3", "gemma3")

# What each family's processor replaces by image tokens, as a chat template writes it.
PLACEHOLDERS = {
    "llava": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "gemma3": "<start_of_image>",
}

_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}"
    "{%- if m['content'] is string -%}{{- m['content'] -}}{%- else -%}{%- for part in m['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- 'PLACEHOLDER' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

_TOKENS: dict[str, dict[str, str]] = {
    "llava": {"image_token": "<image>"},
    "qwen2_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    },
    "idefics3": {"image_token": "<image>", "fake": "<fake_token_around_image>", "global": "<global-img>"},
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "initializer_range": 0.3,
}  # fmt: skip


def tiny_image(seed: int = 0, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """An image of random colours, `size` = (height, width) pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def tiny_processor(family: str = "llava") -> ProcessorMixin:
    """The family's processor over the tiny tokenizer: 16 x 16 pixels, 4 image tokens (Idefics 3: 1) for each image."""
    from transformers import Gemma3Processor, Idefics3Processor, LlavaProcessor, Qwen2VLProcessor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    template = _TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[family])
    tokenizer: Any = tiny_tokenizer("none", padding_side="left")
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS[family].values())})
    for name, token in _TOKENS[family].items():
        if name.endswith("_token"):
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    if family == "llava":
        images = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        return LlavaProcessor(
            images, tokenizer, patch_size=8, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    if family == "qwen2_vl":
        images = Qwen2VLImageProcessorPil(
            patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 512}
        )
        return _without_video(Qwen2VLProcessor)(images, tokenizer, chat_template=template)
    if family == "idefics3":
        images = Idefics3ImageProcessorPil(
            size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
        )
        return Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)


def _without_video(processor_class: Any) -> Any:
    """The class without its part for videos, which transformers 5.19 builds with torchvision only."""

    class WithoutVideo(processor_class):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            for name in ("image_token", "video_token"):
                setattr(self, name, getattr(tokenizer, name))
                setattr(self, f"{name}_id", getattr(tokenizer, f"{name}_id"))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return WithoutVideo


def _fields(family: str, processor: Any) -> dict[str, Any]:
    tokenizer = processor.tokenizer
    text = {**_TEXT, "vocab_size": len(tokenizer)}
    image = tokenizer.convert_tokens_to_ids(_TOKENS[family]["image_token"])
    if family == "llava":
        vision = {"model_type": "clip_vision_model", **_VISION}
        return {
            "vision_config": vision,
            "text_config": {"model_type": "llama", **text},
            "image_token_index": image,
        }
    if family == "qwen2_vl":
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4, "initializer_range": 0.3}  # fmt: skip
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS[family].items()}
        return {
            "vision_config": vision,
            "text_config": {**text, "rope_parameters": rope},
            "image_token_id": image,
            "video_token_id": ids["video_token_id"],
            "vision_start_token_id": ids["vision_start_id"],
            "vision_end_token_id": ids["vision_end_id"],
        }
    if family == "idefics3":
        return {
            "vision_config": _VISION,
            "text_config": {"model_type": "llama", **text},
            "image_token_id": image,
            "scale_factor": 2,
        }
    return {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "text_config": {**text, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 256},
        "mm_tokens_per_image": 4,
        "image_token_index": image,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
    }


def tiny_vision_model(
    processor: Any, family: str = "llava", *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A two-layer model of the family with a small vision tower, in eval mode; weights depend on nothing."""
    fields = {**_fields(family, processor), **overrides}

    def build() -> PreTrainedModel:
        config = AutoConfig.for_model(family, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():  # Gemma 3's projector begins at zero and would pass no image on
                if parameter.ndim > 1 and not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.3)
        return model.to(dtype).eval()

    return copy_of((family, dtype, repr(sorted(fields.items()))), build)


# ---- Qwen's models, with batches made by hand: their processors need a tokenizer of theirs

_QWEN_TEXT = {
    **_TEXT, "vocab_size": 60, "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16, "initializer_range": 0.3,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "partial_rotary_factor": 1.0,
}  # fmt: skip
# Fields of the tower and of the decoder by model type.
QWEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ({"fullatt_block_indexes": [1]}, {}),
    "qwen3_vl": ({"deepstack_visual_indexes": [0, 1]}, {}),
    "qwen3_5": ({}, _LINEAR),
}


def qwen_model(model_type: str) -> PreTrainedModel:
    """A two-layer model in float64 and eval mode, for `qwen_batch`."""
    tower, text = QWEN[model_type]
    config = AutoConfig.for_model(
        model_type, vision_config={**_QWEN_TOWER, **tower}, text_config={**_QWEN_TEXT, **text},
        image_token_id=50, video_token_id=51, vision_start_token_id=52, vision_end_token_id=53,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()


def qwen_batch(side: str) -> dict[str, torch.Tensor]:
    """Rows of 10, 13 and 3 tokens, padded on a side: images of 4 tokens and of 1, and a text."""
    rows = [[5, 52, 50, 50, 50, 50, 53, 9, 8, 7], [52, 50, 53, 4, 3, 2, 1, 6, 9, 9, 9, 12, 14], [3, 2, 1]]
    padding = [[0] * (13 - len(row)) for row in rows]
    ids = torch.tensor([(pad + row) if side == "left" else (row + pad) for row, pad in zip(rows, padding, strict=True)])
    pixels = torch.randn(20, 2 * 3 * 4 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill((ids == 0) | (ids >= 50), -100),
        "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 2]]),
        "mm_token_type_ids": (ids == 50).long(),
    }  # fmt: skip
