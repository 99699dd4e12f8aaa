"""The mathematics of a method, without a trainer: what its loss is counted in, and its terms.

A method is handed batches, what was scored of them, and a `Step`. What its loss must know of a whole optimiser step is
the context that `prepare` makes for each of the step's batches; it travels in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from trl.models.packed.layout import FILLS_UP
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf, ScoreOptions
from trl.reporting.metrics import Processes, RunningMean
from trl.tensors.reduce import LossTerms, Unit, Weighted, reduce_terms, share_of_step, weighted

LOSS_PARTS = "loss per "
CONTEXT = "context of the step"
"""The entry of a batch that holds what `Method.prepare` found for it, as a `Context`."""


@dataclass(frozen=True)
class Context:
    """What `Method.prepare` found for a batch; in this form nothing that moves or casts a batch's tensors changes
    it.
    """

    value: Any


class Outcome(NamedTuple):
    """Terms of a batch, and what is measured of it.

    `terms` add up to the loss, each divided by the step's number of its own units. `predictions` `(B, ...)` and
    `labels` `(B, ...)` are what `compute_metrics` is given; None where they are not known. `local`: the sum of the
    losses whose gradient was taken in the scoring forward; the terms of these losses have no gradient. `extremes`:
    values of which a log shows the smallest (names that begin with `min`) or the largest.
    """

    terms: Sequence[LossTerms]
    predictions: Any
    labels: Any
    aux_loss: Tensor | None = None
    local: Tensor | None = None
    extremes: Mapping[str, Tensor] = {}

    def totals(self, units: Sequence[Unit], own: Tensor, *, router_weight: float) -> list[Tensor]:
        """Summed losses for each kind of unit; the router's of a mixture of experts counts for the batch's `own`
        units.
        """
        totals = [torch.zeros(()) for _ in units]
        if self.local is not None:
            totals[0] = self.local
        if self.aux_loss is not None:
            loss = self.aux_loss.to(torch.promote_types(self.aux_loss.dtype, torch.float32))
            totals[0] = totals[0] + router_weight * loss * own[0]
        for terms in self.terms:
            if self.local is None or terms.values.requires_grad:  # others are summed up in `local`
                unit = units.index(terms.per) if len(units) > 1 else 0
                totals[unit] = totals[unit] + reduce_terms(terms, 1.0)
        return totals

    def loss(self, units: Sequence[Unit], own: Tensor, step: Tensor, *, router_weight: float) -> Tensor:
        """The batch's part of the step's loss: its totals over the step's number of each kind of unit."""
        totals = self.totals(units, own, router_weight=router_weight)
        if len(step) != len(units):
            raise ValueError(
                f"num_items_in_batch must have the step's numbers of {', '.join(units)}, got {step.tolist()}. Leave it out for "
                "the loss of this batch alone."
            )
        return sum(map(share_of_step, totals, step), start=torch.zeros(()))


@dataclass(frozen=True)
class Step:
    """What a method is given of the step that a batch belongs to.

    `score(batch)` scores under the policy without gradient, dropout and noise. `add_reference(batch)` puts the
    reference's log-probs into a batch, if they are not there yet. `context` is what `prepare` made for the batch; None
    for a batch by itself.
    """

    training: bool
    processes: Processes
    score: Callable[[Mapping[str, Any]], Scored]
    add_reference: Callable[[Any], None]
    context: Any = None


def counted(batch: Mapping[str, Any], values: Tensor) -> Weighted:
    """The sum of values of a batch and their number; 0 where the batch only fills up."""
    return weighted(values, torch.full_like(values, FILLS_UP not in batch))


class Method:
    """Base of the methods that learn from rows of a data set."""

    units: ClassVar[tuple[Unit, ...]] = ("pair",)
    """What the terms are counted in; `count` gives as many numbers."""

    def options(self, *, statistics: bool) -> ScoreOptions:
        """What is scored of a batch beside log-probs; `statistics`: whether costly ones will be logged."""
        return ScoreOptions()

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """How many of each unit a batch has, int64 `(len(units),)`."""
        raise TypeError(f"{type(self).__name__} must override count.")

    def learned(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a batch that is scored with gradient."""
        return batch

    def local(self, batch: Mapping[str, Any]) -> LossOf | None:
        """The loss of each scored token, where it follows from the token's own log-prob; None where it does not."""
        return None

    def prepare(self, batches: Sequence[Mapping[str, Any]], step: Step) -> Sequence[Any]:
        """What the terms of each micro-batch of an optimiser step must know of the whole step. All processes call
        it.
        """
        return [None] * len(batches)

    def terms(self, batch: Mapping[str, Any], scored: Any, step: Step) -> Outcome:
        """The terms of a batch, from what was scored of its `learned` part."""
        raise TypeError(f"{type(self).__name__} must override terms.")

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics to log, from the means of those recorded."""
        return means

    mean_reward: RunningMean | None = None
    """The mean of the rewards counted so far in the run, for methods whose loss takes it."""

    def state(self) -> dict[str, Any]:
        """What the method carries from one step to the next, as plain values: part of every checkpoint."""
        return {} if self.mean_reward is None else {"rewards": self.mean_reward.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`."""
        if self.mean_reward is not None and "rewards" in state:
            self.mean_reward.load_state(state["rewards"])
