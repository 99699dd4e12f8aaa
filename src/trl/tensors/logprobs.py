"""Log-probabilities and entropies of target tokens straight from hidden states and an output head.

The matrix of logits `(tokens, vocabulary)` is never built: chunks of tokens pass through one buffer, and
the backward pass computes each chunk's logits again, or reads them back where all of them are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from trl.tensors.heads import (
    NOTHING_ELSE,
    PLAIN_LOGITS,
    Head,
    HeadGradients,
    Scoring,
    chunk_size_of_any_head,
    without_autocast,
)
from trl.tensors.softmax_rows import LogitRule, Statistics, TokenScores, row_slopes_, wide_scores

# Logits of a call that are smaller than this together wait for the backward pass instead of being
# computed again: one matrix product of four.
KEEP_BYTES = 64 * 2**20

AnyHead = Callable[[Tensor], Tensor]
"""Hidden states `(C, H)` -> head products `(C, V)`, before scale, soft cap and temperature."""


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN_LOGITS,
    wanted: Statistics = NOTHING_ELSE,
    chunk_size: int | None = None,
) -> TokenScores:
    """Log-probs of `targets` under `softmax(rule(hidden @ weight.T + bias))`, with gradient.

    Shapes `hidden (N, H)`, `weight (V, H)`, `bias (V,)`, `targets (N,)` in `[0, V)`. Results are float32, or
    float64 for float64 inputs; `wanted` names what else to compute, of which entropies carry a gradient too.
    `chunk_size` is in tokens (None: by size).
    Products run in the autocast dtype where autocast is on. Raises ValueError where shapes do not fit.

    >>> hidden, weight = torch.eye(2), torch.log(torch.tensor([[0.25, 0.5], [0.75, 0.5]]))
    >>> token_scores(hidden, weight, torch.tensor([1, 0])).logps.exp()
    tensor([0.7500, 0.5000])
    """
    scoring = Scoring.over(hidden, weight, targets, bias, rule=rule, wanted=wanted, chunk_size=chunk_size)
    return TokenScores(*_TokenScores.apply(hidden, weight, bias, targets, scoring, torch.is_grad_enabled()))


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scoring: Scoring,
        with_gradient: bool,
    ) -> tuple[Tensor | None, ...]:
        small = len(hidden) * len(weight) * scoring.exact_dtype.itemsize < KEEP_BYTES
        kept: list[Tensor] | None = [] if small and with_gradient and any(ctx.needs_input_grad) else None
        scores = scoring.empty_scores(hidden)
        with without_autocast(hidden):
            space = scoring.workspace(hidden, len(weight), own_logits=kept is None)
            head = Head.cast(weight, bias, scoring.product_dtype)
            for rows, _, chunk in scoring.passes(hidden, targets, head, space, kept):
                scores.write(rows, chunk.scores)
        ctx.scoring = scoring
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, *(kept or []))
        ctx.mark_non_differentiable(*(x for x in scores[2:] if x is not None))
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *kept = ctx.saved_tensors
        along_logps, along_entropies = slopes[:2]
        scoring: Scoring = ctx.scoring.for_slopes(along_entropies)
        exact = scoring.exact_dtype
        if along_logps is None:
            along_logps = hidden.new_zeros(len(hidden), dtype=exact)
        with without_autocast(hidden):
            head = Head.cast(weight, bias, scoring.product_dtype)
            sums = HeadGradients.empty(hidden, weight, bias, wanted=ctx.needs_input_grad[:3], dtype=exact)
            space = scoring.workspace(hidden, len(weight), own_logits=not kept, for_gradient=True)
            for rows, part, chunk in scoring.passes(hidden, targets, head, space, kept or None):
                factors = row_slopes_(
                    part,
                    chunk,
                    targets[rows],
                    scoring.rule,
                    logps_slope=along_logps[rows],
                    entropies_slope=None if along_entropies is None else along_entropies[rows],
                )
                sums.add(rows, part.exps, factors, hidden[rows], head, scoring.gradient_dtype)
        return (*sums.cast(hidden, weight, bias), None, None, None)


def token_scores_through(
    head: AnyHead,
    hidden: Tensor,
    targets: Tensor,
    *,
    rule: LogitRule = PLAIN_LOGITS,
    wanted: Statistics = NOTHING_ELSE,
    chunk_size: int | None = None,
) -> TokenScores:
    """`token_scores` for a head that is no plain `(weight, bias)`: wrapped by LoRA or DoRA, quantised, or custom.

    The head is called on chunks of hidden states, and again in the backward pass (activation checkpointing), so its own
    autograd and hooks work and one chunk's logits exist at a time.

    >>> head = torch.nn.Linear(2, 4, bias=False)
    >>> token_scores_through(head, torch.zeros(1, 2), torch.tensor([3])).logps.exp()
    tensor([0.2500], grad_fn=<ExpBackward0>)
    """

    def scores(states: Tensor, labels: Tensor) -> tuple[Tensor | None, ...]:
        products = head(states)
        with without_autocast(hidden):
            return tuple(wide_scores(rule.logits(products), labels, rule=rule, wanted=wanted))

    size = chunk_size or chunk_size_of_any_head(hidden)
    parts = [
        cast(tuple, checkpoint(scores, *chunk, use_reentrant=False))
        if torch.is_grad_enabled()
        else scores(*chunk)
        for chunk in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return TokenScores._make(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))
