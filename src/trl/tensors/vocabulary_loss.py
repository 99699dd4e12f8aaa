"""Losses over the whole distribution of each token, of one model or two, without `[tokens, vocabulary]` of either.

A chunk's gradients are taken while its logits are at hand, as in `local_loss`: three matrix products per chunk, and
nothing of it is kept. So what the other model's head needs (weights gathered for its forward) is only used there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl.tensors.heads import chunks, default_chunk_size

LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states `(C, H)` -> logits `(C, V)`, differentiable."""
Losses = Tensor | tuple[Tensor, Tensor]
"""Losses per token `(C,)`, or these and statistics `(C, M)` of each token, which get no gradient."""
LossOfLogits = Callable[[Tensor, Any, slice], Losses]
"""(logits (C, V), the other model's logits (C, V') or None, which tokens these are) -> their weighted losses."""


class VocabularyLoss(NamedTuple):
    """`total`, the sum of the losses, with gradient; `values (N,)`, detached; a router's loss; statistics `(N, M)`."""

    total: Tensor
    values: Tensor
    aux_loss: Tensor | None = None
    statistics: Tensor | None = None


def vocabulary_loss(
    hidden: Tensor, logits_of: LogitsOf, loss_of: LossOfLogits, *, parameters: Iterable[Tensor], vocabulary: int,
    others: Callable[[slice], Tensor] | None = None, chunk_size: int | None = None,
    parts: Sequence[slice] | None = None,
) -> VocabularyLoss:  # fmt: skip
    """Sum of `loss_of(logits, other logits, rows)` over chunks of tokens, its gradients computed in the same pass.

    `hidden (N, H)` and the `parameters` that `logits_of` uses get gradients; whatever else `loss_of` reads is a
    constant, `others(rows)`, the other model's logits, too. A token's loss may depend on that token alone, or on those
    of its part if `parts` gives the chunks. The backward pass can run once. `chunk_size` is in tokens (None: by
    `vocabulary`). Raises: ValueError for losses of another shape.

    >>> def entropy(logits, _, rows):
    ...     return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    >>> vocabulary_loss(torch.zeros(3, 4), torch.nn.Identity(), entropy, parameters=[], vocabulary=4).total
    tensor(4.1589)
    """
    itemsize = torch.promote_types(hidden.dtype, torch.float32).itemsize
    size = chunk_size or default_chunk_size(vocabulary, itemsize=itemsize, device=hidden.device)
    parts = (list(chunks(len(hidden), size)) if parts is None else parts) or [slice(0, 0)]
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def chunk_loss(states: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            other = None if others is None else others(rows)
        losses = loss_of(logits_of(states), other, rows)
        values, statistics = losses if isinstance(losses, tuple) else (losses, losses.new_empty(len(losses), 0))
        if values.shape != states.shape[:1]:
            raise ValueError(f"loss_of must return {tuple(states.shape[:1])}, got {tuple(values.shape)}.")
        return values, statistics

    total, *measures = _VocabularyLoss.apply(hidden, chunk_loss, parts, torch.is_grad_enabled(), *trained)
    return VocabularyLoss(total, measures[0], statistics=measures[1])


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, chunk_loss: Callable[[Tensor, slice], tuple[Tensor, Tensor]], parts: Sequence[slice],
        with_gradient: bool, *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        wants_hidden = with_gradient and ctx.needs_input_grad[0]
        with_gradient = wants_hidden or (with_gradient and bool(trained))
        measured, slopes = [], torch.zeros_like(hidden)
        sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in trained]
        for rows in parts:
            with torch.set_grad_enabled(with_gradient):
                states = hidden[rows].detach().requires_grad_(wants_hidden)
                losses, statistics = chunk_loss(states, rows)
                total = losses.sum()
            measured.append((losses.detach(), statistics.detach()))
            if not total.requires_grad:
                continue
            inputs = [*([states] if wants_hidden else []), *trained]
            gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
            if wants_hidden:
                slopes[rows], *gradients = gradients
            for whole, gradient in zip(sums, gradients, strict=True):
                whole += gradient
        ctx.gradients = (slopes if wants_hidden else None, sums, [x.dtype for x in trained])
        values, statistics = (torch.cat(column) for column in zip(*measured, strict=True))
        ctx.mark_non_differentiable(values, statistics)
        return values.sum(), values, statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a loss over chunks goes backward once. Score the batch again.")
        slopes, sums, dtypes = ctx.gradients
        ctx.gradients = None  # autograd then takes the sums over instead of copying them
        parts = [x.mul_(slope).to(dtype) for x, dtype in zip(sums, dtypes, strict=True)]
        return (None if slopes is None else slopes.mul_(slope), None, None, None, *parts)
