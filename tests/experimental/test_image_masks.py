"""Hidden parts of images: how much, where, and that they follow from the draws alone."""

import numpy as np
import pytest
from PIL import Image

from trl.experimental.papo.image_masks import masked_image

WHITE = Image.fromarray(np.full((28, 42, 3), 255, dtype=np.uint8))


def hidden(kind, ratio, seed=0, image=WHITE):
    found = masked_image(image, kind, ratio, np.random.default_rng(seed))
    assert found.size == image.size and found.mode == "RGB"
    return (np.array(found) == 0).all(axis=2)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_shares(ratio):
    assert hidden("random", ratio).mean() == ratio
    squares = hidden("patch", ratio).reshape(2, 14, 3, 14)
    assert (squares.all(axis=(1, 3)) == squares.any(axis=(1, 3))).all(), "whole squares"
    assert squares.all(axis=(1, 3)).sum() == round(6 * ratio)
    assert hidden("blackout", ratio).all()


def test_a_grid_is_regular():
    """A checkerboard at half; about the share of the squares otherwise; nothing is drawn."""
    found = hidden("grid", 0.5)[::14, ::14]
    assert found.tolist() == [[False, True, False], [True, False, True]]
    large = Image.fromarray(np.full((280, 280, 3), 255, dtype=np.uint8))
    assert hidden("grid", 0.3, image=large).mean() == pytest.approx(0.3, abs=0.02)
    assert (hidden("grid", 0.3, seed=1) == hidden("grid", 0.3, seed=2)).all() and hidden("grid", 1.0).all()


def test_draws_decide_and_something_is_always_hidden():
    assert (hidden("patch", 0.5, seed=1) == hidden("patch", 0.5, seed=1)).all()
    assert (hidden("patch", 0.5, seed=1) != hidden("patch", 0.5, seed=3)).any()
    assert hidden("random", 1e-9).sum() == 1 and hidden("patch", 1e-9).sum() == 14 * 14
