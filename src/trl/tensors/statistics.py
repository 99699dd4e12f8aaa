"""Statistics that skip NaN or masked entries, and functions of logits that are at hand."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from trl.tensors.reduce import where_counted

Value = TypeVar("Value")


def nanmin(tensor: Tensor) -> Tensor:
    """Smallest entry that is not NaN, 0-dim; NaN where there is none.

    >>> nanmin(torch.tensor([float("nan"), 2.0, 1.0]))
    tensor(1.)
    """
    return -nanmax(-tensor)


def nanmax(tensor: Tensor) -> Tensor:
    """Largest entry that is not NaN, 0-dim; NaN where there is none.

    >>> nanmax(torch.tensor([float("nan"), 2.0, 1.0]))
    tensor(2.)
    """
    known = tensor[~tensor.isnan()]
    return known.max() if known.numel() else tensor.new_tensor(math.nan)


def nanstd(tensor: Tensor) -> Tensor:
    """Sample standard deviation (over count - 1) of the entries that are not NaN, 0-dim; NaN for fewer than two.

    >>> nanstd(torch.tensor([1.0, float("nan"), 3.0]))
    tensor(1.4142)
    """
    known = tensor[~tensor.isnan()]
    return known.std() if known.numel() > 1 else tensor.new_tensor(math.nan)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of the entries whose mask is not 0, over all of them or along `axis`; NaN where there is none.

    >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0]))
    tensor(1.5000)
    """
    mask = mask.expand_as(values)
    kept, count = where_counted(values, mask), mask != 0
    return kept.sum() / count.sum() if axis is None else kept.sum(axis) / count.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the entries whose mask is not 0; `unbiased` divides by count - 1. Raises: ValueError for too few.

    >>> masked_var(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
    tensor(2.)
    """
    count = int((mask.expand_as(values) != 0).sum())
    needed = 2 if unbiased else 1
    if count < needed:
        raise ValueError(f"mask must keep at least {needed} entries for a variance, got {count}.")
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to unit variance and, with `shift_mean`, to zero mean, as measured where the mask is not 0.

    >>> masked_whiten(torch.tensor([1.0, 3.0]), torch.tensor([1, 1]))
    tensor([-0.7071,  0.7071])
    """
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """`masked_whiten` of all values.

    >>> whiten(torch.tensor([1.0, 3.0]))
    tensor([-0.7071,  0.7071])
    """
    return masked_whiten(values, torch.ones_like(values), shift_mean)


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """`x` cut to the range between two bounds, each a number or a tensor of the shape of `x`.

    >>> clip_by_value(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 1.0]), 3.0)
    tensor([1., 3.])
    """
    low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in (tensor_min, tensor_max))
    return torch.maximum(torch.minimum(x, high), low)


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probs of chosen entries of logits that exist already; for hidden states, `logprobs.token_scores`.

    `logits (..., V)` with `index (...)` or `index (..., K)`; the result has the shape of `index` and the dtype
    of the logits, computed in float32 or wider.

    >>> selective_log_softmax(torch.log(torch.tensor([[0.25, 0.75]])), torch.tensor([1])).exp()
    tensor([0.7500])
    """
    positions = index.unsqueeze(-1) if index.ndim == logits.ndim - 1 else index
    flat = positions.reshape(-1, positions.size(-1))
    parts = [
        chunk.gather(-1, chosen) - chunk.logsumexp(dim=-1, keepdim=True)
        for chunk, chosen in zip(_wide_chunks(logits, _ROWS), flat.split(_ROWS), strict=True)
    ]
    return torch.cat(parts).view(index.shape).to(logits.dtype)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropy in nats of the softmax of logits that exist already, `(..., V) -> (...)`; `chunk_size` in rows.

    >>> entropy_from_logits(torch.zeros(2, 8)).exp()
    tensor([8.0000, 8.0000])
    """
    parts = []
    for chunk in _wide_chunks(logits, chunk_size):
        logps = chunk.log_softmax(dim=-1)
        parts.append(torch.special.entr(logps.exp()).sum(dim=-1))
    return torch.cat(parts).view(logits.shape[:-1]).to(logits.dtype)


def logprobs_from_logits(logits: Tensor, labels: Tensor | None, gather: bool = True) -> Tensor:
    """Log-probs of `labels` `(B, T)` under `logits` `(B, T, V)`, or of the whole vocabulary without `gather`.

    >>> logprobs_from_logits(torch.zeros(1, 1, 4), torch.tensor([[2]])).exp()
    tensor([[0.2500]])
    """
    if not gather or labels is None:
        return logits.log_softmax(dim=-1)
    return selective_log_softmax(logits, labels)


def get_exp_cap(value: Tensor, decimal: int = 4) -> Tensor:
    """Largest exponent whose exp still fits the dtype of `value`, rounded down to `decimal` places, `(1,)`.

    >>> get_exp_cap(torch.ones(1))
    tensor([88.7228])
    """
    steps = 10**decimal
    largest = math.log(torch.finfo(value.dtype).max)
    cap = torch.tensor([math.floor(largest * steps) / steps], dtype=value.dtype, device=value.device)
    # A coarse dtype may round the cap up again, past what exp can hold.
    return cap if torch.isfinite(cap.exp()) else torch.nextafter(cap, torch.zeros_like(cap))


def cap_exp(value: Tensor, cap: Tensor | float = -1) -> Tensor:
    """`exp(value)` with the exponent cut at `cap`; a negative cap means the largest that does not overflow.

    >>> cap_exp(torch.tensor([0.0, 1e3]), cap=1.0)
    tensor([1.0000, 2.7183])
    """
    cap = get_exp_cap(value) if cap < 0 else torch.as_tensor(cap, dtype=value.dtype, device=value.device)
    return torch.minimum(value, cap).exp()


def identity(x: Value) -> Value:
    """Its argument, unchanged.

    >>> identity(3)
    3
    """
    return x


def randn_tensor(
    shape: Sequence[int], generator: torch.Generator | list[torch.Generator] | None = None,
    device: torch.device | str | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Normal noise on `device`, drawn where the generator is; of a list of generators, each draws one row.

    >>> randn_tensor((2, 3), [torch.Generator().manual_seed(seed) for seed in (0, 1)]).shape
    torch.Size([2, 3])
    """
    if isinstance(generator, list):
        rows = [randn_tensor(tuple(shape[1:]), row_generator, device, dtype) for row_generator in generator]
        return torch.stack(rows)
    source = device if generator is None else generator.device
    return torch.randn(tuple(shape), generator=generator, device=source, dtype=dtype).to(device or source)


_ROWS = 128  # of logits at a time: keeps temporary copies small beside the logits themselves


def _wide_chunks(logits: Tensor, size: int) -> Iterator[Tensor]:
    """Rows of `(..., V)` logits, `size` at a time, in float32 or wider."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    for chunk in logits.reshape(-1, logits.size(-1)).split(size):
        yield chunk.to(dtype)
