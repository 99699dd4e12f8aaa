"""What the trainers of preferences share: terms of several kinds, each divided by its own count over the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trl.models.layout import first_rows
from trl.models.reference import FrozenModel, Reference
from trl.tensors.reduce import LossTerms, Unit, Weighted, count_units, reduce_terms, where_counted
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.callbacks.reference_moves import lend_reference
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback
from trl.trainer.evaluation_samples import log_evaluation_samples
from trl.trainer.precompute import ReferencePass, precompute_ref_log_probs

LOSS_PARTS = "loss per "


class Outcome(NamedTuple):
    """What a batch came to.

    `terms` add up to the loss, each divided by the step's number of its own units. `predictions` `(B, ...)` and `labels`
    `(B, ...)` are what `compute_metrics` is given.
    """

    terms: Sequence[LossTerms]
    predictions: Tensor
    labels: Tensor
    aux_loss: Tensor | None = None


class PreferenceTrainer(BaseTrainer):
    """Base of the trainers that learn from judged completions.

    The order of a step: the micro-batches are drawn and counted, `prepare_step` finds what a loss must know of all of
    them, and each then gives its `outcome`: terms, which are divided by the step's counts and added.

    A method's trainer says what its loss is counted in (`units`, `count_units`) and overrides `outcome`.
    """

    units: ClassVar[tuple[Unit, ...]] = ("pair",)
    _columns: ClassVar[tuple[str, ...]] = ()
    reference: Reference | AskedInAdvance | None = None
    _moved_reference: FrozenModel | None = None
    _sets: Any = None
    """How data sets are prepared: those of the constructor, and others `later`."""

    def outcome(self, model: nn.Module, batch: Mapping[str, Any]) -> Outcome:
        """Score a batch and judge it."""
        raise TypeError(f"{type(self).__name__} must override outcome.")

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
        inputs = self.take_batch(inputs)
        self.count_seen(inputs)
        own = self.count_units(inputs)
        step = own.clamp(min=1) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        found = self.outcome(model, inputs)
        loss = self.loss_of(found, own, step)
        self._record(found, own)
        if num_items_in_batch is not None:
            loss = self.scale(loss)
        outputs = {"predictions": found.predictions, "labels": found.labels}
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    def loss_of(self, found: Outcome, own: Tensor, step: Tensor) -> Tensor:
        """A batch's part of the step's loss: its terms over the step's number of each kind of unit; `own`: the batch's."""
        loss = torch.stack(
            [reduce_terms(terms, step[self.units.index(terms.per)]) for terms in found.terms]
        ).sum()
        if found.aux_loss is not None:
            loss = loss + self._router_weight() * found.aux_loss * (own[0] / step[0])
        return loss

    def _router_weight(self) -> float:
        return self.scorer.core.config.get_text_config().router_aux_loss_coef

    def _record(self, found: Outcome, own: Tensor) -> None:
        for terms in found.terms:
            for name, value in terms.metrics.items():
                self.record(name, value)
            if self.mode == "eval":
                total = (where_counted(terms.values, terms.weights) * terms.weights).sum()
                self.record(LOSS_PARTS + terms.per, Weighted(total.detach(), count_units(terms)))
        if found.aux_loss is not None:
            self.record("aux_loss", Weighted(found.aux_loss.detach(), torch.ones(())))
            if self.mode == "eval":
                value = self._router_weight() * found.aux_loss.detach() * own[0]
                self.record(LOSS_PARTS + "router", Weighted(value, own[0]))

    def derived_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The loss of an evaluation from its parts, each a mean over units of its own."""
        parts = [means.pop(name) for name in list(means) if name.startswith(LOSS_PARTS)]
        return {"loss": sum(parts), **means} if parts else means

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, and on request predictions and labels, of one evaluation batch.

        Rows that accelerate repeats at the end count nowhere; their predictions are zeros, which the caller drops.
        """
        inputs = self.take_batch(self._prepare_inputs(inputs))
        own, rows = self.own_rows(), self.args.per_device_eval_batch_size
        if own < rows:
            inputs = first_rows(inputs, max(own, 1), of=rows)
        with torch.no_grad(), nullcontext() if own else self.unrecorded():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        whole = [
            _filled_up(outputs[name].detach(), rows if own < rows else 0)
            for name in ("predictions", "labels")
        ]
        return loss.detach(), whole[0], whole[1]

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate; with `generate_during_eval`, show first what policy and reference make of some prompts."""
        if getattr(self.args, "generate_during_eval", False):
            log_evaluation_samples(self, dataloader.dataset, prefix=metric_key_prefix)
        return super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
        )

    # ---- the data

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of an evaluation set; rows that are not tokenised yet are prepared as those of the constructor."""
        return super().get_eval_dataloader(self._prepared(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches to predict on; rows that are not tokenised yet are prepared as those of the constructor."""
        return super().get_test_dataloader(self._prepared(test_dataset))

    def _prepared(self, dataset: Any) -> Any:
        return dataset if self._sets is None else self._sets.later(dataset)

    # ---- the reference

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference, where it is a model of its own."""
        return self.reference.module if isinstance(self.reference, FrozenModel) else None

    def take_reference(self, scoring: ReferencePass | None = None) -> None:
        """Bring the reference to the device, let callbacks move it, and with `scoring` ask it about all rows now.

        Call it at the end of the constructor.
        """
        if self.reference is None or isinstance(self.reference, AskedInAdvance):
            return
        self.reference.prepare(self.accelerator)
        if getattr(self.args, "sync_ref_model", False):
            self.add_callback(SyncRefModelCallback(None, self.accelerator))
        self._moved_reference = lend_reference(self.callback_handler.callbacks, self.reference)
        if scoring is not None:
            assert self.model is not None
            self._ask_in_advance(scoring, self.reference.fingerprint(self.model))

    def _ask_in_advance(self, scoring: ReferencePass, fingerprint: str) -> None:

        def known(dataset: Any, name: str) -> Any:
            return precompute_ref_log_probs(
                dataset,
                scoring,
                reference_fingerprint=fingerprint,
                accelerator=self.accelerator,
                dataset_name=name,
            )

        if self.train_dataset is not None:
            self.train_dataset = known(self.train_dataset, "train")
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: known(part, name) for name, part in self.eval_dataset.items()}
        elif self.eval_dataset is not None:
            self.eval_dataset = known(self.eval_dataset, "eval")
        self.reference = AskedInAdvance(scoring.columns)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._moved_reference is not None:
            self._moved_reference.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._moved_reference is not None and checkpoint is not None:
            self._moved_reference.load(checkpoint)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self._columns)


class AskedInAdvance:
    """What is left of a reference whose log-probs are columns of the data sets."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns

    def score(self, policy: nn.Module, batch: Mapping[str, Any], forward: Any) -> Any:
        """Raises ValueError: the reference is gone."""
        raise ValueError(
            f"rows without {' and '.join(self.columns)}: the reference was asked before the first step "
            "(precompute_ref_log_probs=True) and is gone. Pass the data set to the constructor, or add these columns."
        )


def _filled_up(values: Tensor, rows: int) -> Tensor:
    """The values with rows of zeros up to at least `rows`."""
    missing = max(rows - len(values), 0)
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
