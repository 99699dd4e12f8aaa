"""A loss made of terms of several kinds, each divided by its own count over the optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from trl.tensors.reduce import LossTerms

LOSS_PARTS = "loss per "


class Outcome(NamedTuple):
    """What a batch came to.

    `terms` add up to the loss, each divided by the step's number of its own units. `predictions` `(B, ...)` and `labels`
    `(B, ...)` are what `compute_metrics` is given; None where nobody knows them. `local`: the sum of the losses of the terms' tokens whose gradient was taken
    in the scoring forward; the terms know their value alone.
    """

    terms: Sequence[LossTerms]
    predictions: Any
    labels: Any
    aux_loss: Tensor | None = None
    local: Tensor | None = None
