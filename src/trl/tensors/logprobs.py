"""Log-probabilities and entropies of target tokens, and losses over them, from hidden states and an output head.

The logits `(tokens, vocabulary)` are never held: chunks of tokens pass through one buffer. The backward pass of
`token_scores` computes each chunk's logits again, or reads them back if they are small. `local_loss` is for losses
whose gradient is local to a token (cross-entropy, clipped surrogates, KL estimates): each chunk's gradients are taken
while its logits are at hand, three matrix products instead of four.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from trl.tensors.heads import NOTHING_ELSE, PLAIN_LOGITS, Scoring, chunk_size_of_any_head, chunks, without_autocast
from trl.tensors.softmax_rows import LogitRule, Statistics, TokenScores, wide_scores

# Logits of a call that are smaller than this wait for the backward pass: one matrix product of four less.
KEEP_BYTES = 64 * 2**20

AnyHead = Callable[[Tensor], Tensor]
"""Hidden states `(C, H)` -> head products `(C, V)`, before scale, soft cap and temperature."""


def token_scores(
    hidden: Tensor, weight: Tensor | AnyHead, targets: Tensor, *, bias: Tensor | None = None,
    rule: LogitRule = PLAIN_LOGITS, wanted: Statistics = NOTHING_ELSE, chunk_size: int | None = None,
) -> TokenScores:  # fmt: skip
    """Log-probs of `targets` under `softmax(rule(hidden @ weight.T + bias))`, with gradient.

    Shapes `hidden (N, H)`, `weight (V, H)`, `bias (V,)`, `targets (N,)` in `[0, V)`. Results are float32, or float64
    for float64 inputs; `wanted` names what else to compute, of which entropies carry a gradient too. `chunk_size` is in
    tokens (None: by size). Products run in the autocast dtype where autocast is on. A function as `weight`:
    `token_scores_through`.

    >>> hidden, weight = torch.eye(2), torch.log(torch.tensor([[0.25, 0.5], [0.75, 0.5]]))
    >>> token_scores(hidden, weight, torch.tensor([1, 0])).logps.exp()
    tensor([0.7500, 0.5000])
    """
    if not isinstance(weight, Tensor):
        return token_scores_through(weight, hidden, targets, rule=rule, wanted=wanted, chunk_size=chunk_size)
    scoring = Scoring.over(hidden, weight, rule=rule, wanted=wanted, chunk_size=chunk_size)
    return TokenScores(*_TokenScores.apply(hidden, weight, bias, targets, scoring, torch.is_grad_enabled()))


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scoring: Scoring,
        with_gradient: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        small = len(hidden) * len(weight) * scoring.exact_dtype.itemsize < KEEP_BYTES
        kept: list[Tensor] | None = [] if small and with_gradient and any(ctx.needs_input_grad) else None
        scores, _ = scoring.run(hidden, weight, bias, targets, kept=kept)
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
        scoring: Scoring = replace(ctx.scoring, wanted=Statistics(entropy=along_entropies is not None))
        if along_logps is None:
            along_logps = hidden.new_zeros(len(hidden), dtype=scoring.exact_dtype)

        def slopes_of(_: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            return along_logps[rows], None if along_entropies is None else along_entropies[rows]

        wants = ctx.needs_input_grad[:3]
        _, sums = scoring.run(hidden, weight, bias, targets, wants=wants, slopes_of=slopes_of, kept=kept or None)
        return (*sums.cast(hidden, weight, bias), None, None, None)


def token_scores_through(
    head: AnyHead, hidden: Tensor, targets: Tensor, *, rule: LogitRule = PLAIN_LOGITS,
    wanted: Statistics = NOTHING_ELSE, chunk_size: int | None = None,
) -> TokenScores:  # fmt: skip
    """`token_scores` for a head that is no plain `(weight, bias)`: wrapped by LoRA or DoRA, quantised, or custom.

    The head is called on chunks of hidden states, and again in the backward pass (activation checkpointing), so its own
    autograd and hooks work and one chunk's logits exist at a time.

    >>> head = torch.nn.Linear(2, 4, bias=False)
    >>> token_scores_through(head, torch.zeros(1, 2), torch.tensor([3])).logps.exp()
    tensor([0.2500], grad_fn=<ExpBackward0>)
    """

    def scores(states: Tensor, labels: Tensor) -> tuple[Tensor | None, ...]:
        products = head(states)
        with without_autocast(hidden.device.type):
            return tuple(wide_scores(rule.logits(products), labels, rule=rule, wanted=wanted))

    size = chunk_size or chunk_size_of_any_head(hidden)
    parts = [
        cast(tuple, checkpoint(scores, *chunk, use_reentrant=False)) if torch.is_grad_enabled() else scores(*chunk)
        for chunk in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return TokenScores._make(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))


LossOf = Callable[[Tensor, slice], Tensor]
"""(log-probs of a chunk (C,), which tokens these are) -> each token's weighted loss (C,)."""


class LocalLoss(NamedTuple):
    """`total`, the sum of all tokens' losses, with gradient; per token, detached: `values (N,)`, `scores`."""

    total: Tensor
    values: Tensor
    scores: TokenScores


def local_loss(
    hidden: Tensor, weight: Tensor | AnyHead, targets: Tensor, loss_of: LossOf, *, bias: Tensor | None = None,
    rule: LogitRule = PLAIN_LOGITS, wanted: Statistics = NOTHING_ELSE, chunk_size: int | None = None,
) -> LocalLoss:  # fmt: skip
    """Sum of `loss_of(logps, rows)` over chunks of tokens, its gradients computed in the same pass.

    Shapes as in `token_scores`. `loss_of` gets the log-probs `(C,)` of the tokens `rows` (a slice of `N`) and returns
    each one's already weighted loss `(C,)`. A token's loss may depend on that token alone, and only hidden states,
    weight and bias get gradients. These wait, summed, for the backward pass, which can run once. A function as
    `weight`: `local_loss_through`.

    >>> hidden, weight = torch.zeros(3, 2), torch.ones(4, 2)
    >>> loss = local_loss(hidden, weight, torch.tensor([0, 1, 2]), lambda logps, rows: -logps)
    >>> loss.total, loss.values
    (tensor(4.1589), tensor([1.3863, 1.3863, 1.3863]))
    """
    if not isinstance(weight, Tensor):
        options: dict[str, Any] = {"rule": rule, "wanted": wanted, "chunk_size": chunk_size}
        return local_loss_through(weight, hidden, targets, loss_of, **options)
    scoring = Scoring.over(hidden, weight, rule=rule, wanted=wanted, chunk_size=chunk_size)
    total, values, *scores = _LocalLoss.apply(hidden, weight, bias, targets, loss_of, scoring, torch.is_grad_enabled())
    return LocalLoss(total, values, TokenScores(*scores))


class _LocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss_of: LossOf,
        scoring: Scoring, with_gradient: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        wants = ctx.needs_input_grad[:3] if with_gradient else (False, False, False)
        values = hidden.new_empty(len(hidden), dtype=scoring.exact_dtype)

        def slopes_of(logps: Tensor, rows: slice) -> tuple[Tensor, None]:
            with torch.set_grad_enabled(any(wants)):
                leaf = logps.detach().requires_grad_(any(wants))
                losses = loss_of(leaf, rows)
                if losses.shape != logps.shape:
                    raise ValueError(f"loss_of must return {tuple(logps.shape)}, got {tuple(losses.shape)}.")
                values[rows] = losses.detach()
                if not losses.requires_grad:
                    return torch.zeros_like(logps), None
                return torch.autograd.grad(losses.sum(), leaf, allow_unused=True, materialize_grads=True)[0], None

        scores, sums = scoring.run(hidden, weight, bias, targets, wants=wants, slopes_of=slopes_of)
        ctx.sums, ctx.inputs = sums, [None if x is None else x.new_empty(0) for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(values, *(x for x in scores if x is not None))
        return values.sum(), values, *scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise RuntimeError("local_loss goes backward once. Use token_scores with retain_graph=True.")
        # Without another reference autograd takes the sums over as gradients instead of copying them.
        sums, ctx.sums = ctx.sums, None
        return (*sums.cast(*ctx.inputs, slope=slope), None, None, None, None)


def local_loss_through(
    head: AnyHead, hidden: Tensor, targets: Tensor, loss_of: LossOf, *, rule: LogitRule = PLAIN_LOGITS,
    wanted: Statistics = NOTHING_ELSE, chunk_size: int | None = None,
) -> LocalLoss:  # fmt: skip
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
