"""Rewards of images: an aesthetic score, and the size of the image as JPEG."""

import inspect
import io
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from torch import Tensor, nn

from trl.rewards.functions import FunctionSource, accepted
from trl.rewards.result import RewardInputs

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP = "openai/clip-vit-large-patch14"
JPEG_QUALITY = 95


class MLP(nn.Module):
    """The head of the aesthetic scorer: five linear layers without activations, `(B, D) -> (B, 1)`."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2),
            nn.Linear(128, 64), nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1),
        )  # fmt: skip

    def forward(self, embed: Tensor) -> Tensor:
        return self.layers(embed)


class AestheticScorer(nn.Module):
    """Aesthetic scores of images, about 1 to 10, differentiable: a linear head on CLIP's normalised image features.

    `model_id` is a Hub name or folder, `model_filename` the head's weights in it; `clip_model` names CLIP. Source:
    LAION's improved aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor).
    """

    def __init__(self, *, dtype: torch.dtype, model_id: str, model_filename: str, clip_model: str = CLIP) -> None:
        super().__init__()
        from transformers import CLIPModel

        self.clip: Any = CLIPModel.from_pretrained(clip_model)
        self.mlp = MLP(self.clip.config.projection_dim)
        folder = Path(model_id)
        file = str(folder / model_filename if folder.is_dir() else hf_hub_download(model_id, model_filename))
        is_safe = file.endswith(".safetensors")
        self.mlp.load_state_dict(load_file(file) if is_safe else torch.load(file, "cpu", weights_only=True))
        self.dtype, self.target_size = dtype, self.clip.config.vision_config.image_size
        self.to(dtype).eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `(B,)` of images `(B, 3, H, W)` in 0..1: resized by the shorter side, and cut to the centre."""
        images, size = images.to(next(self.parameters()).device, self.dtype).clamp(0, 1), self.target_size
        scale = size / min(images.shape[-2:])
        shape = [max(round(side * scale), size) for side in images.shape[-2:]]
        images = nn.functional.interpolate(images, shape, mode="bilinear", antialias=True)
        top, left = ((side - size) // 2 for side in shape)
        mean, std = (images.new_tensor(channels).view(1, 3, 1, 1) for channels in (CLIP_MEAN, CLIP_STD))
        pixels = (images[..., top : top + size, left : left + size] - mean) / std
        features = self.clip.visual_projection(self.clip.vision_model(pixel_values=pixels).pooler_output)
        return self.mlp(features / features.norm(dim=-1, keepdim=True)).squeeze(1)


def aesthetic_scorer(hub_model_id: str, model_filename: str) -> Callable[..., tuple[Tensor, dict]]:
    """A reward function `(images, prompts, metadata) -> (scores, {})` of the `AestheticScorer`."""
    scorer = AestheticScorer(dtype=torch.float32, model_id=hub_model_id, model_filename=model_filename)

    def aesthetic_score(images: Tensor, prompts: object = None, metadata: object = None) -> tuple[Tensor, dict]:
        return scorer.to(images.device)(images), {}

    return aesthetic_score


def as_picture(image: Tensor) -> "Image":
    from PIL.Image import fromarray

    return fromarray((image.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())


def jpeg_kilobytes(images: Iterable[Tensor]) -> list[float]:
    """The size of each image as a JPEG of quality 95, in kB; `(B, 3, H, W)` in 0..1, or a list of images."""
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        as_picture(image).save(buffer, format="JPEG", quality=JPEG_QUALITY)
        sizes.append(buffer.tell() / 1000)
    return sizes


def jpeg_compressibility(
    images: Iterable[Tensor], prompts: object = None, metadata: object = None
) -> tuple[list[float], dict]:
    """Reward: less the size as JPEG in kB. Source: Black et al. 2023, section 5.1 (arXiv:2305.13301)."""
    return [-size for size in jpeg_kilobytes(images)], {}


def jpeg_incompressibility(
    images: Iterable[Tensor], prompts: object = None, metadata: object = None
) -> tuple[list[float], dict]:
    return jpeg_kilobytes(images), {}


class ImageFunctionSource(FunctionSource):
    """A function of `images` `(B, 3, H, W)`, `prompts` and columns as a source; it may also return metadata."""

    def score(self, inputs: RewardInputs) -> Any:
        """What the function returns, without metadata."""
        images, columns = torch.stack(list(inputs.completions)), inputs.columns
        rows = zip(*columns.values(), strict=True) if columns else [()] * len(images)
        metadata = tuple(dict(zip(columns, row, strict=True)) for row in rows)  # as DDPO gives it
        arguments = {"metadata": metadata, "completions": images, **columns}
        arguments |= {"images": images, "prompts": tuple(inputs.prompts)}
        answer = self.function(**accepted(arguments, self._parameters))
        return _awaited(answer) if inspect.isawaitable(answer) else _rewards_of(answer)

    def check_columns(self, columns: Collection[str]) -> None:
        super().check_columns({*columns, "images", "metadata"})


def _rewards_of(answer: object) -> object:
    return answer[0] if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict) else answer


async def _awaited(answer: Awaitable[object]) -> object:
    return _rewards_of(await answer)


def _scores_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that runs a module on images in float32, where they are and without gradient."""
    module.eval()

    def scores(images: Tensor) -> Tensor:
        module.to(images.device)
        with torch.inference_mode():
            return module(images.float())

    return scores


def image_sources(reward_funcs: Any) -> list[Any]:
    """Functions and image-scoring modules as sources; judges and sources stay. Raises: TypeError for anything else."""
    scorers = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    sources = []
    for scorer in scorers:
        if isinstance(scorer, nn.Module):
            scorer = ImageFunctionSource(_scores_of(scorer), name=type(scorer).__name__)
        elif callable(scorer) and not hasattr(scorer, "check_columns") and not isinstance(scorer, type):
            scorer = ImageFunctionSource(scorer)
        elif isinstance(scorer, (str, type)):
            raise TypeError(f"reward_funcs holds {scorer!r}, expected functions, modules that score images, or judges.")
        sources.append(scorer)
    return sources
