"""Padding, shifting, cutting and splitting of tensors whose rows have different lengths."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # label of a position that is not trained

# Image columns that are a list with one entry per row, once split.
_PER_ROW = ("pixel_values", "image_grid_thw")


def pad(
    tensors: list[Tensor], padding_value: int = 0, padding_side: str = "right", pad_to_multiple_of: int | None = None
) -> Tensor:
    """Stack tensors of one rank and different sizes into one, `B x (S_b, ...) -> (B, S, ...)`.

    `padding_side` and `pad_to_multiple_of` concern the first dimension of each tensor; others are padded on the right.
    Raises: ValueError for an unknown side, for no tensors, for mixed ranks.

    >>> pad([torch.tensor([1, 2, 3]), torch.tensor([4])], padding_side="left")
    tensor([[1, 2, 3],
            [0, 0, 4]])
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}.")
    ranks = {tensor.ndim for tensor in tensors}
    if len(ranks) != 1:
        raise ValueError(f"tensors must be one or more of the same rank, got ranks {sorted(ranks)}.")
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    if pad_to_multiple_of is not None:
        shape[0] += -shape[0] % pad_to_multiple_of
    padded = tensors[0].new_full((len(tensors), *shape), padding_value)
    for row, tensor in zip(padded, tensors, strict=True):
        start = shape[0] - tensor.shape[0] if padding_side == "left" else 0
        first = slice(start, start + tensor.shape[0])
        row[(first, *(slice(size) for size in tensor.shape[1:]))] = tensor
    return padded


def pad_to_length(tensor: Tensor, length: int, pad_value: int | float, dim: int = -1) -> Tensor:
    """Fill `tensor` up to `length` at the end of dimension `dim`; one that is long enough is returned as it is.

    >>> pad_to_length(torch.tensor([[1, 2]]), 4, pad_value=0)
    tensor([[1, 2, 0, 0]])
    """
    missing = length - tensor.size(dim)
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=dim)


def flush_left(mask: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Roll each row so that its first masked-in column comes first, then drop the columns no row needs.

    `mask` and `tensors` are `(B, T)`; holes between masked-in columns stay. Returns the new mask, and with
    `tensors` a tuple of the mask and them.

    >>> mask, ids = flush_left(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]), torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9]]))
    >>> mask, ids
    (tensor([[1, 1, 0],
            [1, 1, 1]]), tensor([[5, 6, 0],
            [7, 8, 9]]))
    """
    width = mask.shape[1]
    leading = (mask != 0).int().argmax(dim=1, keepdim=True) if width else 0
    columns = (torch.arange(width, device=mask.device) + leading) % max(width, 1)
    rolled = [tensor.gather(1, columns.expand(len(mask), width)) for tensor in (mask, *tensors)]
    used = (rolled[0] != 0).any(dim=0).nonzero()
    kept = int(used.max()) + 1 if len(used) else 0
    shortened = tuple(tensor[:, :kept] for tensor in rolled)
    return shortened if tensors else shortened[0]


def flush_right(mask: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """`flush_left` seen in a mirror: each row's last masked-in column comes last.

    >>> flush_right(torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]))
    tensor([[1, 1],
            [0, 1]])
    """
    flushed = flush_left(mask.flip(1), *(tensor.flip(1) for tensor in tensors))
    return flushed.flip(1) if isinstance(flushed, Tensor) else tuple(tensor.flip(1) for tensor in flushed)


def split_tensor_dict(tensor_dict: dict[str, Tensor | None], num_chunks: int) -> list[dict[str, Tensor | None]]:
    """Cut every tensor into `num_chunks` equal parts along its first dimension.

    None values and 0-dim tensors go into every part. Raises ValueError where the rows cannot be divided evenly.

    >>> split_tensor_dict({"x": torch.arange(4), "y": None}, 2)
    [{'x': tensor([0, 1]), 'y': None}, {'x': tensor([2, 3]), 'y': None}]
    """
    parts: dict[str, Sequence[Tensor | None]] = {}
    for name, tensor in tensor_dict.items():
        if tensor is None or tensor.ndim == 0:
            parts[name] = [tensor] * num_chunks
            continue
        size = exact_div(len(tensor), num_chunks, f"rows of {name!r} over num_chunks")
        parts[name] = [tensor[start * size : (start + 1) * size] for start in range(num_chunks)]
    return [{name: values[part] for name, values in parts.items()} for part in range(num_chunks)]


def shuffle_sequence_dict(seq_dict: Mapping[str, Sequence | Tensor | None]) -> dict[str, object]:
    """Reorder all sequences and tensors by one random permutation of their rows; None values stay None.

    The permutation comes from torch's global generator. Raises ValueError for unequal lengths.

    >>> shuffle_sequence_dict({"x": torch.tensor([7]), "y": ["a"], "z": None})
    {'x': tensor([7]), 'y': ['a'], 'z': None}
    """
    lengths = {name: len(values) for name, values in seq_dict.items() if values is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all sequences must have one length, got {lengths}. Shuffle unlike ones apart.")
    order = torch.randperm(next(iter(lengths.values()), 0))

    def shuffled(values: Sequence | Tensor | None) -> object:
        if isinstance(values, Tensor):
            return values[order.to(values.device)]
        return None if values is None else [values[i] for i in order.tolist()]

    return {name: shuffled(values) for name, values in seq_dict.items()}


def exact_div(a: int, b: int, custom_error_message: str = "") -> int:
    """`a // b`; raises ValueError, opening with `custom_error_message`, where a remainder is left.

    >>> exact_div(12, 4)
    3
    """
    if a % b:
        opening = f"{custom_error_message}: " if custom_error_message else ""
        raise ValueError(f"{opening}{a} is not a multiple of {b} ({a} / {b} = {a / b}). Change one.")
    return a // b


def listify_batch(tensor: Tensor) -> list[Tensor]:
    """The rows of a batch as a list.

    >>> listify_batch(torch.tensor([1, 2]))
    [tensor(1), tensor(2)]
    """
    return list(tensor)


def pad_to_size(tensor: Tensor, size: int, dim: int = 1, padding: int = 50256) -> Tensor:
    """`pad_to_length` of a dimension, 1 or the last; the default `padding` is GPT-2's end token.

    >>> pad_to_size(torch.tensor([[1, 2]]), 4, padding=0)
    tensor([[1, 2, 0, 0]])
    """
    return pad_to_length(tensor, size, padding, dim=dim)


def first_true_indices(bools: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Index of each row's first True, or the row length where there is none, `(..., T) -> (...)`.

    >>> first_true_indices(torch.tensor([[False, True, True], [False, False, False]]))
    tensor([1, 3])
    """
    length = bools.size(-1)
    if length == 0:
        return torch.zeros(bools.shape[:-1], dtype=dtype, device=bools.device)
    positions = torch.arange(length, dtype=dtype, device=bools.device)
    return torch.where(bools.bool(), positions, length).amin(dim=-1)


def truncate_right(input_ids: Tensor, stop_token_id: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Replace what follows each row's first stop token by padding; also the mask of what is left.

    `(B, T) -> (B, T), (B, T)`; the mask is 1 up to and including the stop token, in the dtype of the ids.

    >>> truncate_right(torch.tensor([[5, 2, 7], [5, 6, 7]]), stop_token_id=2, pad_token_id=0)
    (tensor([[5, 2, 0],
            [5, 6, 7]]), tensor([[1, 1, 0],
            [1, 1, 1]]))
    """
    stop = first_true_indices(input_ids == stop_token_id).unsqueeze(-1)
    after = torch.arange(input_ids.size(-1), device=input_ids.device) > stop
    return input_ids.masked_fill(after, pad_token_id), (~after).to(input_ids.dtype)


def truncate_response(stop_token_id: int, pad_token_id: int, responses: Tensor) -> Tensor:
    """Responses `(B, T)` with everything after the first stop token replaced by padding.

    >>> truncate_response(2, 0, torch.tensor([[5, 2, 7]]))
    tensor([[5, 2, 0]])
    """
    return truncate_right(responses, stop_token_id, pad_token_id)[0]


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
        fits = f"{sum(images)} images, {len(patches)} rows of pixel_values"
        raise ValueError(f"image_grid_thw ({len(grids)} grids) must fit {fits}.")
    sections = [sum(lengths[start:stop]) for start, stop in pairwise([0, *accumulate(images)])]
    return {**batch, "pixel_values": list(patches.split(sections)), "image_grid_thw": list(grids.split(images))}


def unsplit_pixel_values_by_grid(batch: dict[str, Tensor | list[Tensor]]) -> dict[str, Tensor]:
    """Undo `split_pixel_values_by_grid`: join the lists of patches and grids into one tensor each.

    >>> unsplit_pixel_values_by_grid({"pixel_values": [torch.ones(2, 1), torch.ones(4, 1)]})["pixel_values"].shape
    torch.Size([6, 1])
    """
    lists: Any = {name: x for name, x in batch.items() if name in _PER_ROW and isinstance(x, list)}
    whole: Any = batch
    return {**whole, **{name: torch.cat(value) for name, value in lists.items()}}
