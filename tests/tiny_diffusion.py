"""Tiny diffusion pipelines, built from configs: 64x64 images, a vocabulary of letters."""

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = ["a red dog", "a blue cat", "one green bird", "two small fish"]
TOKENS = 16


def tiny_clip_tokenizer() -> CLIPTokenizer:
    """Letters, and letters that end a word."""
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    folder = Path(mkdtemp())
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        model_max_length=TOKENS,
        pad_token="<|endoftext|>",
    )


def text_config(**more: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=54, hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=TOKENS, bos_token_id=52, eos_token_id=53, pad_token_id=53, **more,
    )  # fmt: skip


def tiny_pipeline(seed: int = 0, *, dtype: torch.dtype = torch.float32, **scheduler: Any) -> Any:
    """A `StableDiffusionPipeline` with a UNet of 32 and 64 channels, latents of 16x16, and a decoder to 64x64."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(16, 16, 16), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, sample_size=64,
    )  # fmt: skip
    settings = {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "clip_sample": False,
    }
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text_config()),
        tokenizer=tiny_clip_tokenizer(),
        unet=unet,
        scheduler=DDIMScheduler(**{**settings, "set_alpha_to_one": False, "steps_offset": 1, **scheduler}),
        safety_checker=None,
        feature_extractor=None,  # type: ignore[arg-type]
        requires_safety_checker=False,
    )
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)
