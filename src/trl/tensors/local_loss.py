"""Losses whose gradient is local to a token: head gradients in the same pass as the scores.

For cross-entropy, clipped surrogates or KL estimates, the slope of the loss over a token's log-prob is
known as soon as the log-prob is. So each chunk's gradients are taken while its logits are at hand: three
matrix products where scoring first and going back later takes four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl.tensors.heads import (
    NOTHING_ELSE,
    PLAIN_LOGITS,
    Head,
    HeadGradients,
    Scoring,
    chunk_size_of_any_head,
    chunks,
    without_autocast,
)
from trl.tensors.logprobs import AnyHead, token_scores_through
from trl.tensors.softmax_rows import LogitRule, Statistics, TokenScores, row_slopes_

LossOf = Callable[[Tensor, slice], Tensor]
"""(log-probs of a chunk (C,), which tokens these are) -> each token's weighted loss (C,)."""


class LocalLoss(NamedTuple):
    """`total`, the sum of all tokens' losses, with gradient; per token, detached: `values (N,)`, `scores`."""

    total: Tensor
    values: Tensor
    scores: TokenScores


def local_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_of: LossOf,
    *,
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN_LOGITS,
    wanted: Statistics = NOTHING_ELSE,
    chunk_size: int | None = None,
) -> LocalLoss:
    """Sum of `loss_of(logps, rows)` over chunks of tokens, its gradients computed in the same pass.

    Shapes as in `token_scores`. `loss_of` gets the log-probs `(C,)` of the tokens `rows` (a slice of `N`) and
    returns each one's already weighted loss `(C,)`. A token's loss may depend on that token alone, and only hidden
    states, weight and bias get gradients: whatever else `loss_of` reads is a constant.

    The gradients wait, already summed, for the backward pass, which can run once. Where no input needs a
    gradient, none is computed.

    >>> hidden, weight = torch.zeros(3, 2), torch.ones(4, 2)
    >>> loss = local_loss(hidden, weight, torch.tensor([0, 1, 2]), lambda logps, rows: -logps)
    >>> loss.total, loss.values
    (tensor(4.1589), tensor([1.3863, 1.3863, 1.3863]))
    """
    scoring = Scoring.over(hidden, weight, targets, bias, rule=rule, wanted=wanted, chunk_size=chunk_size)
    total, values, *scores = _LocalLoss.apply(
        hidden, weight, bias, targets, loss_of, scoring, torch.is_grad_enabled()
    )
    return LocalLoss(total, values, TokenScores(*scores))


class _LocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        loss_of: LossOf,
        scoring: Scoring,
        with_gradient: bool,
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3] if with_gradient else (False, False, False)
        exact = scoring.exact_dtype
        sums = HeadGradients.empty(hidden, weight, bias, wanted=wanted, dtype=exact)
        scores, values = scoring.empty_scores(hidden), hidden.new_empty(len(hidden), dtype=exact)
        with without_autocast(hidden):
            head = Head.cast(weight, bias, scoring.product_dtype)
            space = scoring.workspace(hidden, len(weight), for_gradient=any(wanted))
            for rows, part, chunk in scoring.passes(hidden, targets, head, space):
                scores.write(rows, chunk.scores)
                values[rows], slopes = _losses(loss_of, chunk.scores.logps, rows, with_slopes=any(wanted))
                if any(wanted):
                    factors = row_slopes_(part, chunk, targets[rows], scoring.rule, logps_slope=slopes)
                    sums.add(rows, part.exps, factors, hidden[rows], head, scoring.gradient_dtype)
        ctx.sums, ctx.inputs = sums, [None if x is None else x.new_empty(0) for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(values, *(x for x in scores if x is not None))
        return values.sum(), values, *scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise RuntimeError(
                "local_loss can go backward once, got a second backward pass. "
                "Use token_scores where the graph must be kept (retain_graph=True)."
            )
        # Let go of the sums: autograd then takes them over as gradients instead of copying them.
        sums, ctx.sums = ctx.sums, None
        return (*sums.scaled_(slope).cast(*ctx.inputs), None, None, None, None)


def _losses(loss_of: LossOf, logps: Tensor, rows: slice, *, with_slopes: bool) -> tuple[Tensor, Tensor]:
    """Losses `(C,)` of one chunk and their slopes over the log-probs."""
    with torch.set_grad_enabled(with_slopes):
        leaf = logps.detach().requires_grad_(with_slopes)
        values = loss_of(leaf, rows)
        if values.shape != logps.shape:
            raise ValueError(
                f"loss_of must return one loss per token, shape {tuple(logps.shape)}, got {tuple(values.shape)}. Leave the "
                "sum to local_loss."
            )
        if not values.requires_grad:
            return values, torch.zeros_like(logps)
        slopes = torch.autograd.grad(values.sum(), leaf, allow_unused=True, materialize_grads=True)[0]
    return values.detach(), slopes


def local_loss_through(
    head: AnyHead,
    hidden: Tensor,
    targets: Tensor,
    loss_of: LossOf,
    *,
    rule: LogitRule = PLAIN_LOGITS,
    wanted: Statistics = NOTHING_ELSE,
    chunk_size: int | None = None,
) -> LocalLoss:
    """`local_loss` for any head: the same contract, with one more product per chunk.

    >>> loss = local_loss_through(torch.nn.Identity(), torch.zeros(2, 4), torch.tensor([0, 1]), lambda x, rows: -x)
    >>> loss.total
    tensor(2.7726)
    """
    size = chunk_size or chunk_size_of_any_head(hidden)
    scores = token_scores_through(head, hidden, targets, rule=rule, wanted=wanted, chunk_size=size)
    values = [loss_of(scores.logps[rows], rows) for rows in chunks(len(hidden), size)]
    losses = torch.cat(values) if values else torch.zeros_like(scores.logps)
    detached = TokenScores._make(x if x is None else x.detach() for x in scores)
    return LocalLoss(losses.sum(), losses.detach(), detached)
