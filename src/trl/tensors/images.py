"""Image patches of several rows in one tensor, and per row."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

# What one list entry per row holds, once split.
_PER_ROW = ("pixel_values", "image_grid_thw")


def split_pixel_values_by_grid(batch: dict[str, Tensor]) -> dict[str, Tensor | list[Tensor]]:
    """Cut the patches and grids of a batch into one tensor per row, so that rows can be shuffled and split.

    `pixel_values (patches, D)`, `image_grid_thw (images, 3)`, whose products count each image's patches, and
    `num_images`, images per row (absent: one each). A batch without patches or grids is returned as it is.
    Raises ValueError where grids, images and patches do not add up.

    >>> batch = {"pixel_values": torch.arange(6.0).view(6, 1), "image_grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2]])}
    >>> [len(part) for part in split_pixel_values_by_grid(batch)["pixel_values"]]
    [2, 4]
    """
    if any(batch.get(name) is None for name in _PER_ROW):
        return {**batch}
    patches, grids = batch["pixel_values"], batch["image_grid_thw"]
    lengths = grids.prod(dim=-1).tolist()
    images = torch.as_tensor(batch.get("num_images", [1] * len(grids))).tolist()
    if sum(images) != len(grids) or sum(lengths) != len(patches):
        raise ValueError(
            f"image_grid_thw must hold one grid per image and as many patches as pixel_values, got {len(grids)} grids "
            f"for {sum(images)} images and {sum(lengths)} patches for {len(patches)} in pixel_values. "
            "Check that the processor saw the same images."
        )
    sections = [sum(lengths[start:stop]) for start, stop in pairwise([0, *accumulate(images)])]
    return {
        **batch,
        "pixel_values": list(patches.split(sections)),
        "image_grid_thw": list(grids.split(images)),
    }


def unsplit_pixel_values_by_grid(batch: dict[str, Tensor | list[Tensor]]) -> dict[str, Tensor]:
    """Undo `split_pixel_values_by_grid`: join the lists of patches and grids into one tensor each.

    >>> unsplit_pixel_values_by_grid({"pixel_values": [torch.ones(2, 1), torch.ones(4, 1)]})["pixel_values"].shape
    torch.Size([6, 1])
    """
    joined: dict[str, Tensor] = {}
    for name, value in batch.items():
        joined[name] = torch.cat(value) if name in _PER_ROW and isinstance(value, list) else value  # pyright: ignore[reportArgumentType]
    return joined
