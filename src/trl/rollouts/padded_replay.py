"""Groups in padded tensors that give way to earlier ones, for programs with batches of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trl.tensors.padding import pad

REQUIRED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
OPTIONAL = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
IMAGES = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes")
_MASKS = {
    **dict.fromkeys(("prompt_ids", "prompt_mask"), "prompt_mask"),
    **dict.fromkeys(("completion_ids", "completion_mask", *OPTIONAL), "completion_mask"),
}


def padded_batch(
    required: Sequence[Tensor], optional: Sequence[Tensor | float | None], images: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a batch `(B, ...)` by name; raises ValueError for images that are not one entry per row."""
    found: dict[str, Tensor] = dict(zip(REQUIRED, required, strict=True))
    found["advantages"] = found["advantages"].reshape(-1)
    rows = len(ids := found["prompt_ids"])
    for name, value in zip(OPTIONAL, optional, strict=True):
        if value is not None:
            found[name] = (
                value if isinstance(value, Tensor) else torch.full((rows, 1), value, device=ids.device)
            )
    for name, value in images.items():
        if name not in IMAGES or not isinstance(value, Tensor) or len(value) != rows:
            raise ValueError(
                f"forward_kwargs holds {name}, expected only {', '.join(IMAGES)}, as tensors with one entry for each of the {rows} "
                "completions. Leave it out."
            )
    return {**found, **images}


def slice_group(data: Tensor, mask: Tensor, group: int, *, size: int) -> tuple[Tensor, Tensor]:
    """Rows of a group and their mask, both `(B, T) -> (size, T')`, without the outer columns that none of its rows uses.

    >>> slice_group(torch.tensor([[0, 5, 6], [0, 0, 7]]), torch.tensor([[0, 1, 1], [0, 0, 1]]), 1, size=1)
    (tensor([[7]]), tensor([[1]]))
    """
    rows = slice(group * size, (group + 1) * size)
    used = mask[rows].bool().any(dim=0).nonzero()
    columns = slice(int(used.min()), int(used.max()) + 1) if len(used) else slice(0)
    return data[rows, columns], mask[rows, columns]


def scored_groups(
    batch: Mapping[str, Tensor], chosen: Tensor, *, std_rewards: Tensor, size: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """The `chosen (G,)` groups of `size` rows, and scores: the sum of `|advantage|` times the deviation of rewards."""
    scores = (batch["advantages"].view(-1, size).abs() * std_rewards.reshape(len(chosen), -1)).sum(dim=1)
    groups = []
    for place in chosen.nonzero()[:, 0].tolist():
        group = {name: value[place * size : (place + 1) * size] for name, value in batch.items()}
        for name in group.keys() & _MASKS.keys():
            group[name] = slice_group(batch[name], batch[_MASKS[name]], place, size=size)[0]
        groups.append({name: value.clone() for name, value in group.items()})
    return scores[chosen].tolist(), groups


def with_groups(
    batch: Mapping[str, Tensor], groups: Mapping[int, Mapping[str, Tensor]], *, size: int, pad_token_id: int
) -> dict[str, Tensor]:
    """A batch with other groups at some places: prompts are padded on the left, all else on the right."""
    found = {}
    for name, value in batch.items():
        rows = list(value)
        for place, group in groups.items():
            rows[place * size : (place + 1) * size] = group[name]
        padding = pad_token_id if name.endswith("_ids") else 0
        side = "left" if name.startswith("prompt_") else "right"
        found[name] = pad(rows, padding, side) if value.ndim > 1 else torch.stack(rows)
    return found
