"""Log-probabilities and entropies of target tokens straight from hidden states and an output head.

The matrix of logits `(tokens, vocabulary)` is never built: chunks of tokens pass through one buffer, and
the backward pass computes each chunk's logits again, or reads them back where all of them are small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl.tensors.heads import Head, HeadGradients, Scoring, check_shapes, chunks
from trl.tensors.softmax_rows import LogitRule, RowScores, Statistics, row_slopes_

# Logits of a call that are smaller than this together wait for the backward pass instead of being
# computed again: one matrix product of four.
KEEP_BYTES = 64 * 2**20

PLAIN_LOGITS = LogitRule()
NOTHING_ELSE = Statistics()


class TokenScores(NamedTuple):
    """Per token `(N,)`: log-probability and entropy in nats, and whether the arg-max is the target.

    Without gradient: `log_collision`, `log sum_v p(v)^2` in nats, and `mean_logits`, over the vocabulary, of the logits
    before the temperature divides them.
    """

    logps: Tensor
    entropies: Tensor | None = None
    correct: Tensor | None = None
    log_collision: Tensor | None = None
    mean_logits: Tensor | None = None

    @property
    def constants(self) -> list[Tensor]:
        """Those of the scores that have no gradient."""
        return [x for x in (self.correct, self.log_collision, self.mean_logits) if x is not None]


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
    check_shapes(hidden, weight, targets, bias)
    scoring = Scoring.over(hidden, weight, rule=rule, wanted=wanted, chunk_size=chunk_size)
    return TokenScores(*_TokenScores.apply(hidden, weight, bias, targets, scoring, torch.is_grad_enabled()))


@torch.no_grad()
def token_entropies(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN_LOGITS,
    chunk_size: int | None = None,
) -> Tensor:
    """Entropy in nats of the next-token distribution at each row, without gradient; `(N, H) -> (N,)`.

    >>> token_entropies(torch.zeros(1, 3), torch.ones(4, 3)).exp()
    tensor([4.])
    """
    nowhere = torch.zeros(hidden.shape[:1], dtype=torch.long, device=hidden.device)
    wanted = Statistics(entropy=True)
    scores = token_scores(hidden, weight, nowhere, bias=bias, rule=rule, wanted=wanted, chunk_size=chunk_size)
    assert scores.entropies is not None
    return scores.entropies


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
        may_keep = with_gradient and any(ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            scores, kept = _score_chunks(hidden, weight, bias, targets, scoring, may_keep=may_keep)
        ctx.scoring = scoring
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, *kept)
        ctx.mark_non_differentiable(*scores.constants)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *kept = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _gradients(
                hidden, weight, bias, targets, kept, slopes[:2], ctx.scoring, wanted=ctx.needs_input_grad[:3]
            )
        dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return (*gradients.cast(*dtypes), None, None, None)


def _score_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scoring: Scoring,
    *,
    may_keep: bool,
) -> tuple[TokenScores, list[Tensor]]:
    """Scores of every row, and the logits of each chunk if they may be kept and are small."""
    count, vocabulary, exact = len(hidden), len(weight), scoring.exact_dtype
    head = Head.cast(weight, bias, scoring.product_dtype)
    keep = may_keep and count * vocabulary * exact.itemsize < KEEP_BYTES
    scores, kept = empty_scores(hidden, scoring), []
    space = scoring.workspace(hidden, vocabulary, own_logits=not keep)
    for rows in chunks(count, scoring.chunk_size):
        part = space.first(rows.stop - rows.start)
        if keep:
            part = part._replace(logits=torch.empty_like(part.logits))
            kept.append(part.logits)
        head.logits_into(part.logits, hidden[rows], scoring.rule)
        write_scores(scores, rows, scoring.score(part, targets[rows]))
    return scores, kept


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    kept: list[Tensor],
    slopes: tuple[Tensor | None, ...],
    scoring: Scoring,
    *,
    wanted: tuple[bool, bool, bool],
) -> HeadGradients:
    """Gradients of hidden states, weight and bias from the slopes over log-probs and entropies."""
    logps_slope, entropies_slope = slopes
    if logps_slope is None:
        logps_slope = torch.zeros(len(hidden), dtype=scoring.exact_dtype, device=hidden.device)
    scoring = scoring.for_slopes(entropies_slope)
    head = Head.cast(weight, bias, scoring.product_dtype)
    gradients = HeadGradients.empty(hidden, weight, bias, wanted=wanted, dtype=scoring.exact_dtype)
    space = scoring.workspace(hidden, len(weight), own_logits=not kept, for_gradient=True)
    for number, rows in enumerate(chunks(len(hidden), scoring.chunk_size)):
        part = space.first(rows.stop - rows.start)
        if kept:
            part = part._replace(logits=kept[number])
        else:
            head.logits_into(part.logits, hidden[rows], scoring.rule)
        scores = scoring.score(part, targets[rows])
        factors = row_slopes_(
            part,
            scores,
            targets[rows],
            scoring.rule,
            logps_slope=logps_slope[rows],
            entropies_slope=None if entropies_slope is None else entropies_slope[rows],
        )
        gradients.add(rows, part.exps, factors, hidden[rows], head, scoring.gradient_dtype)
    return gradients


def empty_scores(hidden: Tensor, scoring: Scoring) -> TokenScores:
    """Unwritten scores for every row of `hidden`."""
    count, dtype, wanted = len(hidden), scoring.exact_dtype, scoring.wanted
    return TokenScores(
        hidden.new_empty(count, dtype=dtype),
        hidden.new_empty(count, dtype=dtype) if wanted.entropy else None,
        hidden.new_empty(count, dtype=torch.bool) if wanted.correct else None,
        hidden.new_empty(count, dtype=dtype) if wanted.collision else None,
        hidden.new_empty(count, dtype=dtype) if wanted.mean_logit else None,
    )


def write_scores(scores: TokenScores, rows: slice, chunk: RowScores) -> None:
    """Write one chunk's scores to its rows."""
    for whole, part in zip(scores, chunk[: len(scores)], strict=True):
        if whole is not None and part is not None:
            whole[rows] = part
