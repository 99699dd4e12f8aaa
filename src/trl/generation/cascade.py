"""Cascade attention: each row over its prompt, read once for all rows of the prompt, and over its own tokens.

The two parts are softmaxes of their own, merged by their log-sum-exps (Juravsky et al. 2024,
arXiv:2402.05099, section 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and the log-sum-exp of its scores.

    `query (B, heads, M, D)`, `key`, `value` `(B, heads, K, D)`, `bias` broadcastable to `(B, heads, M, K)` ->
    `(B, heads, M, D)` and `(B, heads, M)`, both at least float32.
    """
    batch, heads, rows, _ = query.shape
    query, key, value = (part.flatten(0, 1) for part in (query, key, value))
    scores = _products(query, key, scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.view(batch, heads, rows, -1).add_(bias)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    output = torch.bmm(weights.to(value.dtype), value).to(total.dtype) / total
    return output.view(batch, heads, rows, -1), (peak + total.log()).view(batch, heads, rows)


def _products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`scale * query @ key^T`, at least float32: scores in half precision would cost percents of weights."""
    key = key.transpose(1, 2)
    if query.dtype.itemsize >= 4:
        return torch.baddbmm(query.new_empty(1), query, key, beta=0, alpha=scale)
    if query.is_cuda:
        return torch.bmm(query, key, out_dtype=torch.float32).mul_(scale)
    return torch.bmm(query.float(), key.float()).mul_(scale)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """One attention from two over disjoint keys: outputs `(..., D)` with their log-sum-exps `(...)`."""
    share = torch.sigmoid(second[1] - first[1])
    return torch.lerp(first[0], second[0], share[..., None])


def visibility_bias(visible: Tensor) -> Tensor:
    """0 where `visible`, else what no score outweighs; finite, so that a part with no keys is no NaN."""
    hidden = torch.finfo(torch.float32).min / 2
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, hidden)
