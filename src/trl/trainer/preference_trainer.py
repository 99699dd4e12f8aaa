"""What the trainers of preferences share: terms of several kinds, each divided by its own count over the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trl.data.prepared_sets import DataSets
from trl.legacy.interface import GIVEN, LOSSES, NOT_CALLED, REFERENCES, WHOLE_BATCH, call_with, takes
from trl.models.packed.layout import first_rows
from trl.models.policy import Policy
from trl.models.reference import Reference
from trl.reporting.metrics import MetricSums
from trl.tensors.reduce import LossTerms
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.evaluation_samples import log_evaluation_samples
from trl.trainer.inherited_settings import settle_inherited
from trl.trainer.method import Outcome as Outcome
from trl.trainer.precompute import ReferencePass, has_reference_columns, precompute_ref_log_probs
from trl.trainer.row_loaders import holding


class PreferenceTrainer(BaseTrainer):
    """Base of the trainers that learn from judged completions.

    The order of a step: the micro-batches are drawn and counted, `prepare_step` finds what a loss must know of all of
    them, and each then gives its `outcome`: terms, which are divided by the step's counts and added.

    Where a subclass overrides `get_batch_loss_metrics`, that gives the loss.
    """

    _not_called = NOT_CALLED
    _columns: ClassVar[tuple[str, ...]] = ()
    reference: Reference | AskedInAdvance | None = None

    def __init__(
        self,
        policy: Policy,
        args: Any,
        *,
        sets: DataSets,
        train_dataset: Any,
        eval_dataset: Any,
        train_sets: DataSets | None = None,
        **given: Any,
    ) -> None:
        """Prepare the data sets, those for training as `train_sets` says where it is given, and those of later, too.

        `given` are further arguments of `transformers.Trainer`.
        """
        self._sets = sets
        settle_inherited(args, "pairs")
        if getattr(args, "precompute_ref_log_probs", False) and self.overridden(*REFERENCES):
            raise ValueError(
                f"precompute_ref_log_probs=True does not call {' or '.join(REFERENCES)}, which {type(self).__name__} overrides. "
                "Set it to False."
            )
        if train_dataset is not None:
            train_dataset = (train_sets or sets).train(train_dataset)
        if eval_dataset is not None:
            eval_dataset = sets.evaluation(eval_dataset)
        super().__init__(
            model=policy.model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=policy.processing_class,
            **given,
        )

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on the device; the reference's log-probs keep their precision, also under DeepSpeed, which casts floats."""
        found = super()._prepare_inputs(inputs)
        known = {
            name: value.to(self.args.device) for name, value in inputs.items() if name.startswith("ref_")
        }
        return {**found, **known} if known else found

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
        given = self._prepare_inputs(inputs)
        batch: Any = self.take_batch(given)
        own, rows = self.own_rows(), self.args.per_device_eval_batch_size
        if own < rows:
            given = batch = first_rows(batch, max(own, 1), of=rows)
        batch = self._prepare_inputs(self.handed_out(batch, given))
        with torch.no_grad(), nullcontext() if own else self.unrecorded():
            if prediction_loss_only:
                return self.compute_loss(model, batch).detach(), None, None
            loss, outputs = self.compute_loss(model, batch, return_outputs=True)
        if "predictions" not in outputs:  # of an overridden method, which gives metrics
            with torch.no_grad(), self.unrecorded():
                found = self.outcome(model, self.take_batch(batch))
            outputs = {"predictions": found.predictions, "labels": found.labels}
        whole = [
            _filled_up(outputs[name].detach(), rows if own < rows else 0)
            for name in ("predictions", "labels")
        ]
        return loss.detach(), whole[0], whole[1]

    def adopt(self) -> None:
        """Begin to count, and check what is overridden."""
        if not isinstance(getattr(self, "_sets", None), DataSets):
            super().adopt()
        self.check_overrides()
        self._sums = {"train": MetricSums(), "eval": MetricSums()}

    # ---- overridden methods

    def handed_out(self, own: Any, given: Any) -> Any:
        """The batch, where methods are overridden with the columns that these read."""
        if not self.overridden("compute_loss", *WHOLE_BATCH, *REFERENCES):
            return own
        columns = self.recorded_columns(own) if "rows" in given else given
        return {**columns, **own, GIVEN: {**own, **columns} if "rows" in given else given}

    def recorded_columns(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the method's batches had at 0.26, padded, of a batch of the trainer's own collator."""
        return {}

    def outcome(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        """The terms of a batch; with the losses of an overridden method such as `dpo_loss`, if a subclass has one."""
        if not self.overridden(*LOSSES):
            return super().outcome(model, batch)
        self.add_reference(batch)
        return self.recorded_outcome(model, batch, self.score_learned(model, batch))

    def recorded_outcome(self, model: nn.Module, batch: dict[str, Any], scored: Any) -> Outcome:
        """The outcome with the losses of the overridden method."""
        raise TypeError(f"{type(self).__name__} must override recorded_outcome.")

    def judged_batch(self, model: nn.Module, batch: Any, **given: Any) -> Outcome:
        """The outcome that is trained with: that of an overridden `get_batch_loss_metrics`, which logs through
        `store_metrics`, or the trainer's."""
        if not self.overridden(*WHOLE_BATCH):
            return super().judged_batch(model, batch, **given)
        name = next((name for name in WHOLE_BATCH if self.overridden(name)), "")
        name = name if name in WHOLE_BATCH[:2] else WHOLE_BATCH[0]
        mode: dict[str, Any] = {"train_eval": self.mode}
        if takes(self._own_methods[name], "do_train"):  # BCO's
            mode = {"do_train": self.mode == "train"}
        loss, metrics = call_with(getattr(self, name), model, batch.get(GIVEN, batch), **mode)
        rows = self.count_units(batch)[:1]
        with holding(self, "_rows_stored", float(rows)):
            self.store_metrics(metrics, train_eval=self.mode)  # type: ignore[attr-defined]
        values = loss.reshape(1).expand(int(rows))
        return Outcome([LossTerms(values, torch.ones_like(values), self.units[0], {})], None, None)

    _rows_stored = 1.0  # of what `store_metrics` is given

    def begin_evaluation(self, dataloader: DataLoader, prefix: str) -> None:
        """With `generate_during_eval`, show what policy and reference make of some prompts."""
        super().begin_evaluation(dataloader, prefix)
        if getattr(self.args, "generate_during_eval", False):
            log_evaluation_samples(self, dataloader.dataset, prefix=prefix)

    # ---- the data

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of an evaluation set; rows that are not tokenised yet are prepared as those of the constructor."""
        return super().get_eval_dataloader(self._prepared(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches to predict on; rows that are not tokenised yet are prepared as those of the constructor."""
        return super().get_test_dataloader(self._prepared(test_dataset))

    def _prepared(self, dataset: Any) -> Any:
        return self._sets.later(dataset)

    def row_lengths(self, dataset: Any) -> list[int] | None:
        """The number of tokens of each row, in all its sequences."""
        return super().row_lengths(dataset) or self._sets.row_tokens(dataset)

    # ---- the reference

    def take_reference(self, columns: Sequence[str], scoring: ReferencePass | None = None) -> None:
        """Bring the reference to the device, let callbacks move it, and with `scoring` ask it about all rows now.

        Call it at the end of the constructor. `columns` are those in which rows may bring its log-probs themselves.

        Raises: ValueError for rows that have some of them, and for rows that have them where the reference moves.
        """
        if self.reference is None or isinstance(self.reference, AskedInAdvance):
            return
        self.settle_reference()
        self._check_own_columns(columns)
        if scoring is not None:
            assert self.model is not None
            self._ask_in_advance(scoring, self.reference.fingerprint(self.model))

    def _check_own_columns(self, columns: Sequence[str]) -> None:
        fixed = [
            name
            for name, part in self._named_sets().items()
            if isinstance(part, (Dataset, IterableDataset)) and has_reference_columns(part, columns, name)
        ]
        if self._moved_reference is not None and fixed:
            raise ValueError(
                f"{fixed[0]} dataset has the reference's log-probabilities, columns {list(columns)}, and the reference moves while "
                "training (sync_ref_model, or a callback): these numbers would stay as they are. Remove the columns, or let the "
                "reference stand still."
            )

    def _named_sets(self) -> dict[str, Any]:
        evaluation = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        return {**evaluation, "train": self.train_dataset}

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

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self._columns)


class AskedInAdvance:
    """What is left of a reference whose log-probs are columns of the data sets."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns

    def cast(self, dtype: torch.dtype) -> None:
        """Columns stay as they are."""

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
