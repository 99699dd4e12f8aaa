"""Token scores through a head that is no plain `(weight, bias)`: wrapped by LoRA or DoRA, quantised, or custom.

The head is called on chunks of hidden states, and again in the backward pass (activation checkpointing), so
its own autograd and hooks work and one chunk's logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from trl.tensors.heads import ACCELERATOR_CHUNK_ROWS, CPU_CHUNK_ROWS, Scoring, chunks
from trl.tensors.local_loss import LocalLoss, LossOf
from trl.tensors.logprobs import NOTHING_ELSE, PLAIN_LOGITS, TokenScores
from trl.tensors.softmax_rows import LogitRule, Statistics, row_slopes_

AnyHead = Callable[[Tensor], Tensor]
"""Hidden states `(C, H)` -> head products `(C, V)`, before scale, soft cap and temperature."""


def token_scores_through(
    head: AnyHead,
    hidden: Tensor,
    targets: Tensor,
    *,
    rule: LogitRule = PLAIN_LOGITS,
    wanted: Statistics = NOTHING_ELSE,
    chunk_size: int | None = None,
) -> TokenScores:
    """`token_scores` for any head; what the head's autograd reaches gets its gradient.

    >>> head = torch.nn.Linear(2, 4, bias=False)
    >>> token_scores_through(head, torch.zeros(1, 2), torch.tensor([3])).logps.exp()
    tensor([0.2500], grad_fn=<ExpBackward0>)
    """
    size = _chunk_size(hidden, chunk_size)
    parts = [
        _score_chunk(head, states, chunk, rule, wanted)
        for states, chunk in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return TokenScores._make(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))


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
    scores = token_scores_through(head, hidden, targets, rule=rule, wanted=wanted, chunk_size=chunk_size)
    size = _chunk_size(hidden, chunk_size)
    values = [loss_of(scores.logps[rows], rows) for rows in chunks(len(hidden), size)]
    per_token = torch.cat(values) if values else torch.zeros_like(scores.logps)
    return LocalLoss(
        per_token.sum(), per_token.detach(), TokenScores._make(x if x is None else x.detach() for x in scores)
    )


def _chunk_size(hidden: Tensor, chunk_size: int | None) -> int:
    """The fewest rows that keep the products efficient: the vocabulary is unknown until the head ran."""
    fewest = (CPU_CHUNK_ROWS if hidden.device.type == "cpu" else ACCELERATOR_CHUNK_ROWS)[0]
    return fewest if chunk_size is None else chunk_size


def _score_chunk(
    head: AnyHead, hidden: Tensor, targets: Tensor, rule: LogitRule, wanted: Statistics
) -> TokenScores:
    def scores(hidden: Tensor) -> tuple[Tensor | None, ...]:
        products = head(hidden)
        scoring = Scoring(rule, wanted, len(hidden), products.dtype)
        return _ScoreProducts.apply(products, targets, scoring)

    if torch.is_grad_enabled():
        return TokenScores._make(cast(tuple, checkpoint(scores, hidden, use_reentrant=False)))
    return TokenScores._make(scores(hidden))


class _ScoreProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, targets: Tensor, scoring: Scoring) -> tuple[Tensor | None, ...]:
        logits = scoring.rule.apply_(products.to(scoring.exact_dtype, copy=True))
        space = scoring.workspace(logits, logits.shape[1], own_logits=False)
        with torch.autocast(logits.device.type, enabled=False):
            scores = scoring.score(space._replace(logits=logits), targets)
        ctx.scoring, ctx.dtype = scoring, products.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets)
        tokens = TokenScores._make(scores[: len(TokenScores._fields)])
        ctx.mark_non_differentiable(*tokens.constants)
        return tuple(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets = ctx.saved_tensors
        scoring = ctx.scoring.for_slopes(slopes[1])
        space = scoring.workspace(logits, logits.shape[1], own_logits=False, for_gradient=True)
        space = space._replace(logits=logits)
        with torch.autocast(logits.device.type, enabled=False):
            scores = scoring.score(space, targets)
        factors = row_slopes_(
            space,
            scores,
            targets,
            scoring.rule,
            logps_slope=logits.new_zeros(len(logits)) if slopes[0] is None else slopes[0],
            entropies_slope=slopes[1],
        )
        return space.exps.mul_(factors).to(ctx.dtype), None, None
