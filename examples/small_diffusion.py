"""A small Stable Diffusion pipeline of random weights, for the examples of diffusion models: mosaics of 64x64."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

PROMPTS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("disc", "square")]
SIDE, TOKENS = 64, 16


def tokenizer(folder: Path) -> CLIPTokenizer:
    """Letters, and letters that end a word."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    return CLIPTokenizer(*files, model_max_length=TOKENS, pad_token="<|endoftext|>")


def mosaic_decoder(side: int) -> AutoencoderKL:
    """A decoder of latents of `side` x `side` to 64x64: a tile for each place, coloured by its four numbers."""
    blocks = (SIDE // side).bit_length()
    # More groups than one would hold the mean of each channel at 0.
    vae = AutoencoderKL(
        block_out_channels=(8,) * blocks, in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * blocks, up_block_types=("UpDecoderBlock2D",) * blocks, sample_size=SIDE, scaling_factor=1.0,
    )  # fmt: skip
    decoder: Any = vae.decoder
    for name, parameter in decoder.named_parameters():
        if name.endswith(("conv2.weight", "to_out.0.weight", "bias")):
            nn.init.zeros_(parameter)
        elif "upsamplers" in name:
            nn.init.dirac_(parameter)
    for conv, gain in ((vae.post_quant_conv, 1.0), (decoder.conv_in, 1.0), (decoder.conv_out, 1.5)):
        set_middle(conv, gain * torch.randn(conv.weight.shape[:2]) / conv.weight.shape[1] ** 0.5)
    return vae


def set_middle(conv: Any, weight: torch.Tensor, bias: float | torch.Tensor = 0.0) -> None:
    """Make a convolution act on each place alone: `weight` `(channels out, channels in)`."""
    middle = conv.weight.shape[-1] // 2
    nn.init.zeros_(conv.weight).data[:, :, middle, middle] = weight
    conv.bias.data[:] = bias


def let_contrast_follow(vae: AutoencoderKL) -> None:
    """Set a mosaic decoder's weights so that three numbers are colours, and the fourth's mean over the image is its contrast.

    Channels 0 to 5 hold the colours with both signs, 6 and 7 the fourth number. Attention with equal weights adds the mean of
    channel 6 to the colours. The last layer subtracts their activations: `silu(c + x) - silu(c - x)` vanishes as c falls.
    """
    decoder: Any = vae.decoder
    weight, spread, last, both = torch.zeros(8, 4), torch.zeros(8, 8), torch.zeros(3, 8), torch.eye(3)
    weight[:3, :3], weight[3:6, :3], weight[6, 3], weight[7, 3] = both, -both, 1.0, -1.0
    spread[:6, 6], spread[6:, 6] = 10.0, -30.0  # the sum of all channels stays 0
    last[:, :3], last[:, 3:6] = both / 4, -both / 4
    set_middle(vae.post_quant_conv, torch.eye(4))
    set_middle(decoder.conv_in, weight, torch.tensor([0.0] * 6 + [-0.5, 0.5]))
    attention = decoder.mid_block.attentions[0]
    nn.init.zeros_(attention.to_q.weight)
    nn.init.eye_(attention.to_v.weight)
    attention.to_out[0].weight.data = spread
    nn.init.constant_(decoder.conv_norm_out.weight, 4.0)
    set_middle(decoder.conv_out, last)


def small_pipeline(
    folder: Path,
    *,
    seed: int = 0,
    side: int = 4,
    channels: tuple[int, int] = (32, 64),
    has_contrast: bool = False,
) -> StableDiffusionPipeline:
    """The pipeline, with the tokenizer's files in `folder` and mosaics of `side` x `side` tiles.

    With `has_contrast` the mean of a latent's fourth channel is the contrast of its picture.
    """
    torch.manual_seed(seed)
    blocks = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    unet = UNet2DConditionModel(
        block_out_channels=channels, layers_per_block=1, sample_size=side, in_channels=4, out_channels=4,
        down_block_types=blocks[0], up_block_types=blocks[1], cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    vae = mosaic_decoder(side)
    if has_contrast:
        let_contrast_follow(vae)
    text = CLIPTextConfig(
        vocab_size=54, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=TOKENS, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, set_alpha_to_one=False, steps_offset=1
    )  # fmt: skip
    parts: dict[str, Any] = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    return StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer(folder), unet=unet, scheduler=scheduler, **parts
    )  # fmt: skip
