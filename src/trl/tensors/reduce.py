"""Unreduced loss terms, and the one division that turns them into a loss.

An objective says what its values are counted in; it never sees a denominator. The reducer divides by the
count over the whole optimiser step (all micro-batches, all processes), which is handed in from outside. So
gradients do not depend on how a step was cut.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Unit = Literal["token", "sequence", "pair", "group", "constant"]


class Weighted(NamedTuple):
    """A detached sum and the count behind it (both 0-dim): sums over ranks and steps keep means true."""

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """`total / count`; NaN where nothing was counted."""
        return self.total / self.count

    def plus(self, other: "Weighted") -> "Weighted":
        """Both together.

        >>> (weighted(torch.tensor([1.0, 2.0])).plus(weighted(torch.tensor([6.0])))).mean
        tensor(3.)
        """
        return Weighted(self.total + other.total, self.count + other.count)


class LossTerms(NamedTuple):
    """Unreduced losses of one micro-batch.

    `values` `(B, T)` per token, `(B,)` per sequence, pair or group, with gradient; `weights` the same shape, 0
    where nothing is trained; `per` what the loss is a mean over; `metrics` by name, detached.
    """

    values: Tensor
    weights: Tensor
    per: Unit
    metrics: Mapping[str, Weighted]


def where_counted(values: Tensor, weights: Tensor) -> Tensor:
    """`values` where the weight is not 0, else 0, so that a NaN at an untrained position goes nowhere.

    >>> where_counted(torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 0.0]))
    tensor([1., 0.])
    """
    return torch.where(weights != 0, values, torch.zeros((), dtype=values.dtype, device=values.device))


def weighted(values: Tensor, mask: Tensor | None = None) -> Weighted:
    """Sum of `values` where `mask` (same shape, any dtype; None: everywhere) is not 0, and how many those are.

    >>> weighted(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0]))
    Weighted(total=tensor(3.), count=tensor(2.))
    """
    values = values.detach()
    if not values.is_floating_point():
        values = values.float()
    if mask is None:
        return Weighted(values.sum(), torch.tensor(float(values.numel()), device=values.device))
    return Weighted(where_counted(values, mask).sum(), (mask != 0).sum().to(torch.float32))


def count_units(terms: LossTerms | Tensor) -> Tensor:
    """The number of trained units: of weights that are not 0, as a 0-dim int64 tensor.

    `per="constant"` terms are counted the same way; whoever gives the denominator may prefer its constant.

    >>> count_units(torch.tensor([[1.0, 0.0], [0.5, 2.0]]))
    tensor(3)
    """
    weights = terms.weights if isinstance(terms, LossTerms) else terms
    return (weights != 0).sum()


def reduce_terms(terms: LossTerms, denominator: Tensor | float) -> Tensor:
    """Loss of one micro-batch, a share of the step's: the weighted sum of the values over `denominator`.

    `denominator` is the number of units in the whole optimiser step (or the constant, for `per="constant"`). Shares add
    up to the step's loss; a denominator of 0 gives 0 with zero gradient. Raises ValueError for shapes that differ.

    >>> terms = LossTerms(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]), "token", {})
    >>> reduce_terms(terms, denominator=4)
    tensor(1.)
    """
    if terms.values.shape != terms.weights.shape:
        shapes = f"{tuple(terms.values.shape)} and {tuple(terms.weights.shape)}"
        raise ValueError(f"values and weights must have one shape, got {shapes}.")
    total = (where_counted(terms.values, terms.weights) * terms.weights).sum()
    return share_of_step(total, denominator)


def share_of_step(total: Tensor, denominator: Tensor | float) -> Tensor:
    """`total / denominator`, or 0 with zero gradient where the denominator is 0.

    >>> share_of_step(torch.tensor(3.0), 0)
    tensor(0.)
    """
    units = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    nothing = units == 0
    return torch.where(nothing, torch.zeros_like(total), total) / torch.where(nothing, 1.0, units)
