"""Rows of prompts as the methods of TRL's `OnlineDPOTrainer` make them, for programs that call these; training does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase


class LegacyPromptRows:
    """Mixin with the two methods."""

    @staticmethod
    def tokenize_row(
        feature: Mapping[str, Any], is_encoder_decoder: bool, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, Any]:
        """A row with its prompt as `prompt_input_ids` and `prompt_attention_mask`; for decoders after the begin token."""
        ids = [int(token) for token in tokenizer(feature["prompt"], add_special_tokens=False)["input_ids"]]  # type: ignore[union-attr]
        begin = tokenizer.bos_token_id
        if not is_encoder_decoder and isinstance(begin, int) and ids[:1] != [begin]:
            ids = [begin, *ids]
        return {**feature, "prompt_input_ids": ids, "prompt_attention_mask": [1] * len(ids)}

    def process_vision_row(
        self: Any, features: dict[str, Any], processing_class: Any = None
    ) -> dict[str, Any]:
        """A row with `prompt` and `images` as the processor makes it: `prompt_input_ids`, `prompt_attention_mask` and what belongs
        to the images."""
        processor = processing_class or self.processing_class
        made = processor(images=features["images"], text=features["prompt"], add_special_tokens=False)
        names = {"input_ids": "prompt_input_ids", "attention_mask": "prompt_attention_mask"}
        return {str(names.get(name, name)): value[0] for name, value in made.items()}
