"""Finding where a sequence stops, and blanking what follows."""

from __future__ import annotations

import torch
from torch import Tensor


def first_true_indices(bools: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Index of each row's first True along the last dimension, or the row length where there is none.

    `(..., T) -> (...)`.

    >>> first_true_indices(torch.tensor([[False, True, True], [False, False, False]]))
    tensor([1, 3])
    """
    length = bools.size(-1)
    positions = torch.arange(length, dtype=dtype, device=bools.device)
    if length == 0:
        return torch.zeros(bools.shape[:-1], dtype=dtype, device=bools.device)
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
