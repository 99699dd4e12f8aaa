"""What the trainers of preferences share: terms of several kinds, each divided by its own count over the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trl.models.layout import IGNORED, first_rows, padded_rows
from trl.models.reference import Reference
from trl.trainer.base_trainer import BaseTrainer, shard_streams_by_row, use_one_device
from trl.trainer.evaluation_samples import log_evaluation_samples
from trl.trainer.held_reference import HoldsReference
from trl.trainer.pairs import row_count
from trl.trainer.policy import Policy
from trl.trainer.precompute import ReferencePass, has_reference_columns, precompute_ref_log_probs
from trl.trainer.prepared_sets import PreparedSets
from trl.trainer.row_loaders import BY_LENGTH
from trl.trainer.terms import LossOfTerms
from trl.trainer.terms import Outcome as Outcome

logger = logging.getLogger(__name__)


class PreferenceTrainer(HoldsReference, LossOfTerms, BaseTrainer):
    """Base of the trainers that learn from judged completions.

    The order of a step: the micro-batches are drawn and counted, `prepare_step` finds what a loss must know of all of
    them, and each then gives its `outcome`: terms, which are divided by the step's counts and added.

    A method's trainer says what its loss is counted in (`units`, `count_units`) and overrides `outcome`.
    """

    _columns: ClassVar[tuple[str, ...]] = ()
    reference: Reference | AskedInAdvance | None = None

    def __init__(
        self,
        policy: Policy,
        args: Any,
        *,
        sets: PreparedSets,
        train_dataset: Any,
        eval_dataset: Any,
        train_sets: PreparedSets | None = None,
        **given: Any,
    ) -> None:
        """Prepare the data sets, those for training as `train_sets` says where it is given, and those of later, too.

        `given` are further arguments of `transformers.Trainer`.
        """
        self._sets = sets
        if train_dataset is not None:
            train_dataset = (train_sets or sets).train(train_dataset)
        if eval_dataset is not None:
            eval_dataset = sets.evaluation(eval_dataset)
        _check_foreign_settings(args)
        _check_order(args, sets, train_dataset)
        shard_streams_by_row(args)
        use_one_device(args)
        super().__init__(
            model=policy.model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=policy.processing_class,
            **given,
        )

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
        given, inputs = inputs, self.take_batch(self._prepare_inputs(inputs))
        if "inputs" in self.args.include_for_metrics:  # the caller looks for them in the batch that it gave
            given["input_ids"] = self.tokens_of_rows(inputs)
        own, rows = self.own_rows(), self.evaluated_at_once()
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

    def tokens_of_rows(self, batch: Mapping[str, Any]) -> Tensor:
        """What `compute_metrics` is given of each row as `inputs`: its tokens `(B, T)`, of a pair those of chosen and rejected
        `(B, T, 2)`; -100 where there is none."""
        rows = padded_rows(batch, pad_token_id=IGNORED)
        real = rows.get("attention_mask")
        ids = rows["input_ids"] if real is None else rows["input_ids"].masked_fill(real == 0, IGNORED)
        count = row_count(batch, per_row=2 if "pair" in self.units else 1)
        several = ids.view(count, -1, ids.shape[1]).transpose(1, 2)
        return several[..., 0] if several.shape[2] == 1 else several

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


def _check_foreign_settings(args: Any) -> None:
    """Say which of transformers' own settings do nothing here."""
    why = {
        "label_smoothing_factor": "it smooths transformers' own loss of language models. What DPOConfig and CPOConfig have for "
        "noisy preferences is label_smoothing",
        "average_tokens_across_devices": "a step's loss is divided by what all processes train in it",
        "eval_use_gather_object": "predictions and labels are tensors",
        "label_names": "compute_metrics is given the labels that the trainer's documentation names",
    }
    chosen = {
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "average_tokens_across_devices": not args.average_tokens_across_devices and args.world_size > 1,
        "eval_use_gather_object": args.eval_use_gather_object,
        "label_names": args.label_names not in (None, ["labels"]),
    }
    for name in (name for name, is_chosen in chosen.items() if is_chosen):
        logger.warning("%s=%s has no effect: %s. Leave it out.", name, getattr(args, name), why[name])
    args.eval_use_gather_object = False  # accelerate would take each row of a tensor for an object


def _check_order(args: Any, sets: PreparedSets, train_dataset: Any) -> None:
    """Raises ValueError for rows that cannot be ordered by their length, because they have no tokens yet."""
    if args.train_sampling_strategy not in BY_LENGTH or not isinstance(train_dataset, Dataset):
        return
    names = train_dataset.column_names
    if args.length_column_name in names or sets.row_tokens(train_dataset) is not None:
        return
    raise ValueError(
        f"train_sampling_strategy={args.train_sampling_strategy!r} needs the length of each row: its tokens, or a column "
        f"{args.length_column_name!r}, and prepared rows have {names}. Use 'random'."
    )


def _filled_up(values: Tensor, rows: int) -> Tensor:
    """The values with rows of zeros up to at least `rows`."""
    missing = max(rows - len(values), 0)
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
