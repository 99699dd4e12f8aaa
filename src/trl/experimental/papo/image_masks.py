"""Images of which a part is hidden: blackened pixels, squares, or all of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

PATCH = 14  # pixels: the side of a patch of common vision towers, as in the paper


def masked_image(
    image: "Image.Image | np.ndarray", kind: str, ratio: float, draws: np.random.Generator
) -> "Image.Image":
    """An image of the same size in RGB whose hidden part is black.

    "random" hides single pixels, "patch" squares of 14 x 14 pixels (cut off at the right and lower edge), each drawn at
    random without repeats until a share of `ratio` of them is hidden, at least one; "grid" hides squares at regular
    places, the same in every image; "blackout" hides all. Source: Wang et al. 2025, PAPO (arXiv:2507.06448), whose
    random masking is "patch".
    """
    from PIL import Image
    from transformers.image_transforms import to_pil_image

    shown = image if isinstance(image, Image.Image) else to_pil_image(image)
    pixels = np.array(shown.convert("RGB"))
    pixels[MASKS[kind](pixels.shape[:2], ratio, draws)] = 0
    return Image.fromarray(pixels)


def _patches(size: tuple[int, int], ratio: float, draws: np.random.Generator) -> np.ndarray:
    rows, columns = (-(-length // PATCH) for length in size)
    chosen = _chosen((rows, columns), ratio, draws)
    return chosen.repeat(PATCH, axis=0).repeat(PATCH, axis=1)[: size[0], : size[1]]


def _grid(size: tuple[int, int], ratio: float, draws: np.random.Generator) -> np.ndarray:
    """Squares on every n-th diagonal: a checkerboard for a ratio of 0.5."""
    row, column = np.indices(size) // PATCH
    return np.floor((row + column + 1) * ratio) > np.floor((row + column) * ratio)


def _chosen(size: tuple[int, int], ratio: float, draws: np.random.Generator) -> np.ndarray:
    """A share of `ratio` of the places of a table, at least one."""
    places = size[0] * size[1]
    hidden = np.zeros(places, dtype=bool)
    hidden[draws.permutation(places)[: max(1, round(ratio * places))]] = True
    return hidden.reshape(size)


MASKS: dict[str, Callable[[tuple[int, int], float, np.random.Generator], np.ndarray]] = {
    "random": _chosen,
    "patch": _patches,
    "grid": _grid,
    "blackout": lambda size, ratio, draws: np.ones(size, dtype=bool),
}
