"""Tiny diffusion pipelines, built from configs: 32x32 images, a vocabulary of letters."""

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
    """A `StableDiffusionPipeline` with a UNet of 16 and 32 channels, latents of 8x8, and a decoder to 32x32."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        block_out_channels=(16, 32), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    vae = tiny_vae()
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


def tiny_vae(*, shift: float | None = None) -> Any:
    """A decoder of latents of 8x8 to images of 32x32."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 16, 16), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, sample_size=32, shift_factor=shift,
    )  # fmt: skip


def shortened(pipeline: Any) -> Any:
    """T5's hidden states end after `TOKENS` tokens, not after 256 or 512, which attention would spend its time on."""
    embeds = pipeline._get_t5_prompt_embeds
    pipeline._get_t5_prompt_embeds = lambda *prompts, **options: embeds(
        *prompts, **{**options, "max_sequence_length": TOKENS}
    )
    return pipeline


def tiny_sd3(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> Any:
    """A `StableDiffusion3Pipeline` without T5."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=64, caption_projection_dim=32, pooled_projection_dim=64, pos_embed_max_size=16,
    )  # fmt: skip
    config, tokenizer = text_config(projection_dim=32), tiny_clip_tokenizer()
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=tiny_vae(shift=0.0),
        text_encoder=CLIPTextModelWithProjection(config), tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(config), tokenizer_2=tokenizer,
        text_encoder_3=None, tokenizer_3=None,  # type: ignore[arg-type]
    )  # fmt: skip
    return shortened(pipeline if dtype == torch.float32 else pipeline.to(dtype))


def tiny_flux(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> Any:
    """A `FluxPipeline`; the tokenizer of letters serves its T5, too."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    t5 = T5Config(vocab_size=54, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, pad_token_id=53)
    pipeline = FluxPipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=tiny_vae(shift=0.0),
        text_encoder=CLIPTextModel(text_config()), tokenizer=tiny_clip_tokenizer(),
        text_encoder_2=T5EncoderModel(t5).eval(), tokenizer_2=tiny_clip_tokenizer(),  # type: ignore[arg-type]
    )  # fmt: skip
    return shortened(pipeline if dtype == torch.float32 else pipeline.to(dtype))
