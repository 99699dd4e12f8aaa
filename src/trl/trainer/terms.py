"""A loss made of terms of several kinds, each divided by its own count over the optimiser step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trl.tensors.reduce import (
    LossTerms,
    Unit,
    Weighted,
    count_units,
    reduce_terms,
    share_of_step,
    where_counted,
)

if TYPE_CHECKING:
    from trl.trainer.base_trainer import BaseTrainer as _Trainer
else:
    _Trainer = object

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


class LossOfTerms(_Trainer):
    """Mixin in front of `BaseTrainer`: the loss of a micro-batch from its `outcome`.

    A method says what its loss is counted in (`units`, `count_units`) and overrides `outcome`.
    """

    units: ClassVar[tuple[Unit, ...]] = ("pair",)

    def outcome(self, model: nn.Module, batch: Mapping[str, Any]) -> Outcome:
        """Score a batch and judge it."""
        raise TypeError(f"{type(self).__name__} must override outcome.")

    def judged_batch(self, model: nn.Module, batch: Any) -> Outcome:
        """The outcome that is trained with."""
        return self.outcome(model, batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's part of the optimiser step's loss.

        `num_items_in_batch` holds the step's number of each kind of unit (all micro-batches, all processes); without it
        the loss is that of this batch alone. `return_outputs` also gives predictions and labels.
        """
        num_items_in_batch = self.units_of_step(num_items_in_batch)
        inputs = self.take_batch(inputs)
        self.count_seen(inputs)
        own = self.count_units(inputs)
        step = own.clamp(min=1) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        found = self.judged_batch(model, inputs)
        loss = self.loss_of(found, own, step)
        if found.local is not None:
            loss = loss + share_of_step(found.local - found.local.detach(), step.view(-1)[0])
        self._record(found, own)
        if num_items_in_batch is not None:
            loss = self.scale(loss)
        outputs = (
            {} if found.predictions is None else {"predictions": found.predictions, "labels": found.labels}
        )
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    def loss_of(self, found: Outcome, own: Tensor, step: Tensor) -> Tensor:
        """A batch's part of the step's loss: its terms over the step's number of each kind of unit; `own`: the batch's."""
        loss = torch.stack(
            [reduce_terms(terms, step[self.units.index(terms.per)]) for terms in found.terms]
        ).sum()
        return loss + self.router_part(found, own, step)

    def router_part(self, found: Outcome, own: Tensor, step: Tensor) -> Tensor | float:
        """What the router of a mixture of experts adds to it: its loss, by this batch's share of the step."""
        return 0.0 if found.aux_loss is None else self._router_weight() * found.aux_loss * (own[0] / step[0])

    def _router_weight(self) -> float:
        return self.scorer.core.config.get_text_config().router_aux_loss_coef

    def _record(self, found: Outcome, own: Tensor) -> None:
        for terms in found.terms:
            for name, value in terms.metrics.items():
                self.record(name, value)
            if self.mode == "eval":
                total = (where_counted(terms.values, terms.weights) * terms.weights).sum()
                self.record(LOSS_PARTS + terms.per, Weighted(total.detach(), count_units(terms)))
        self.record_router(found, own)

    def record_router(self, found: Outcome, own: Tensor) -> None:
        """Log the router's loss."""
        if found.aux_loss is not None:
            self.record("aux_loss", Weighted(found.aux_loss.detach(), torch.ones(())))
            if self.mode == "eval":
                value = self._router_weight() * found.aux_loss.detach() * own[0]
                self.record(LOSS_PARTS + "router", Weighted(value, own[0]))

    def derived_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The loss of an evaluation from its parts, each a mean over units of its own."""
        parts = [means.pop(name) for name in list(means) if name.startswith(LOSS_PARTS)]
        return {"loss": sum(parts), **means} if parts else means
