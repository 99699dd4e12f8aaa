"""Rewards of images: the aesthetic score with a CLIP model from a config, and the size as JPEG."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel

from tests.tiny_diffusion import text_config
from trl.rewards.images import (
    MLP,
    AestheticScorer,
    aesthetic_scorer,
    jpeg_compressibility,
    jpeg_incompressibility,
)

SIDE, WIDTH = 32, 16


def tiny_clip():
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": SIDE,
        "patch_size": 8,
    }  # fmt: skip
    text = text_config().to_dict()
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))


def known_head():
    """Layers that pass two numbers on, and add up 2 of the first, 5 of the second and 1."""
    head = MLP(WIDTH)
    for layer in head.layers:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.eye_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
    head.layers[-1].weight.data[0, :2] = torch.tensor([2.0, 5.0])
    head.layers[-1].bias.data[:] = 1.0
    return head


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of a head in both formats; CLIP is the tiny one."""
    head = known_head()
    torch.save(head.state_dict(), tmp_path / "head.pth")
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    monkeypatch.setattr(CLIPModel, "from_pretrained", lambda name: tiny_clip())
    return str(tmp_path)


@pytest.mark.parametrize("file", ["head.pth", "head.safetensors"])
def test_the_score_by_hand(file, folder):
    """The image's features are a multiple of (3, 4, 0, ...), normalised to plus or minus (0.6, 0.8, 0, ...)."""
    scorer = AestheticScorer(dtype=torch.float32, model_id=folder, model_filename=file)
    weight = scorer.clip.visual_projection.weight
    directions = torch.zeros(WIDTH, 1)
    directions[:2, 0] = torch.tensor([3.0, 4.0])
    weight.data = directions * torch.randn(1, weight.shape[1])
    for score in scorer(torch.rand(3, 3, SIDE, SIDE)).tolist():
        assert score == pytest.approx(6.2 if score > 0 else -4.2, rel=1e-5)


def test_images_of_any_shape_and_the_gradient(folder):
    """They are clamped, resized by the shorter side, and cut to the centre; the scorer itself is not trained."""
    scorer = AestheticScorer(dtype=torch.float32, model_id=folder, model_filename="head.pth")
    square = torch.rand(2, 3, SIDE, SIDE, requires_grad=True)
    wide = torch.nn.functional.pad(square, (8, 8, 0, 0), value=0.5)
    torch.testing.assert_close(scorer(wide), scorer(square))
    torch.testing.assert_close(scorer(2 * wide - 0.5), scorer((2 * square - 0.5).clamp(0, 1)))
    large = square.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    assert scorer(large).shape == (2,)
    pixels = (square - torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)) / torch.tensor(
        [0.26862954, 0.26130258, 0.27577711]
    ).view(3, 1, 1)
    features = scorer.clip.get_image_features(pixels)
    features = getattr(features, "pooler_output", features)
    first, second = (features / features.norm(dim=1, keepdim=True))[:, :2].unbind(1)
    torch.testing.assert_close(scorer(square), 2 * first + 5 * second + 1)
    scorer(square).sum().backward()
    assert square.grad.abs().amax(dim=(1, 2, 3)).min() > 0
    assert all(parameter.grad is None for parameter in scorer.parameters()) and not scorer.training
    reward = aesthetic_scorer(folder, "head.safetensors")
    assert reward(square, ("a", "b"), ({}, {}))[1] == {}


def test_a_head_that_is_not_there(folder):
    with pytest.raises(FileNotFoundError):
        AestheticScorer(dtype=torch.float32, model_id=folder, model_filename="other.pth")
    with pytest.raises(FileNotFoundError, match="find"):
        AestheticScorer(dtype=torch.float32, model_id="no/such-model", model_filename="head.pth")


def test_noise_is_larger_as_jpeg_than_a_plane():
    images = torch.stack([torch.full((3, 64, 64), 0.5), torch.rand(3, 64, 64)]).half()
    (plane, noise), metadata = jpeg_incompressibility(images)
    assert 0.5 < plane < 1 < 5 * plane < noise and metadata == {}
    assert jpeg_compressibility(images)[0] == [-plane, -noise]
