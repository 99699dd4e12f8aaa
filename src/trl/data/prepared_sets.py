"""The data sets of a trainer, prepared in one way for training and evaluation before the first step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from trl.data.formats import StoredOrStream, column_names
from trl.data.image_rows import refuse_images
from trl.data.pipeline import Preparation, PreparationReport
from trl.data.ragged import list_lengths
from trl.data.rendering import ProcessingClass
from trl.data.token_rows import mask_columns

logger = logging.getLogger(__name__)

RowSet = Dataset | IterableDataset | TorchDataset

Prepare = Callable[..., tuple[Any, PreparationReport]]
"""(data set, processing class, settings, name=...) -> (prepared data set, report)."""


class DataSets(ABC):
    """The training and evaluation sets of one trainer: those of its constructor, and those given later."""

    _own: tuple[RowSet, ...] = ()  # those of the constructor, prepared

    def train(self, dataset: object) -> RowSet:
        """The training set."""
        return self._kept(check_kind(dataset, "train_dataset"), "train", is_training=True)

    def evaluation(self, dataset: object) -> RowSet | dict[str, RowSet]:
        """The evaluation set, or several by name."""
        if isinstance(dataset, dict):
            parts = {name: check_kind(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}
            return {name: self._kept(part, name) for name, part in parts.items()}
        return self._kept(check_kind(dataset, "eval_dataset"), "eval")

    def later(self, dataset: Any) -> Any:
        """A set that is given to `evaluate` or `predict`: prepared now, unless it is already."""
        is_given = isinstance(dataset, (Dataset, IterableDataset))
        return self.prepared(dataset, "eval") if is_given and not self.is_prepared(dataset) else dataset

    def is_prepared(self, dataset: StoredOrStream) -> bool:
        """Whether a set is ready for the collator."""
        return any(dataset is own_set for own_set in self._own)

    def _kept(self, dataset: RowSet, name: str, *, is_training: bool = False) -> RowSet:
        prepared = self.prepared(dataset, name, is_training=is_training)
        self._own = (*self._own, prepared)
        return prepared

    @abstractmethod
    def prepared(self, dataset: RowSet, name: str, *, is_training: bool = False) -> RowSet:
        """A set made ready for the collator."""

    def row_tokens(self, dataset: object) -> list[int] | None:
        """Tokens of each prepared row, in all its sequences; None where they are not known before a batch is made."""
        return None


def check_kind(dataset: object, argument: str) -> RowSet:
    """The data set. Raises: TypeError for what is none, saying how to make one of it."""
    if isinstance(dataset, (Dataset, IterableDataset, TorchDataset)):
        return dataset
    remedy = "Make a datasets.Dataset of its rows."
    if isinstance(dataset, dict):
        remedy = f"Give one of its splits: {argument}=dataset[name], name one of {sorted(map(str, dataset))}."
    elif isinstance(dataset, list):
        remedy = "Make one with Dataset.from_list(rows)."
    elif isinstance(dataset, str):
        remedy = f"Load it first, for example with load_dataset({dataset!r}, split='train')."
    raise TypeError(f"{argument} must be a (Iterable)Dataset, got {type(dataset).__name__}. {remedy}")


@dataclass
class PreparedSets(DataSets):
    """Tokenises data sets before the first step, each on the main process first.

    `check_lengths(lengths, dataset_name=...)` is given the tokens of each row's longest sequence.
    """

    prepare: Prepare
    settings: Preparation
    processing_class: ProcessingClass
    check_lengths: Callable[..., None]

    def is_prepared(self, dataset: StoredOrStream) -> bool:
        columns = column_names(dataset)
        return set(self.settings.prepared_columns) <= set(columns) and not mask_columns(columns)

    def prepared(self, dataset: RowSet, name: str, *, is_training: bool = False) -> RowSet:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        refuse_images(dataset, name=name)
        with PartialState().main_process_first():
            prepared, report = self.prepare(dataset, self.processing_class, self.settings, name=name)
        if isinstance(prepared, Dataset):
            logger.info(report.summary())
            self.check_lengths(np.max(self._lengths(prepared), axis=0), dataset_name=name)
        return prepared

    def row_tokens(self, dataset: object) -> list[int] | None:
        names = {name for sequence in self.settings.sequences for name in sequence}
        if not isinstance(dataset, Dataset) or names - set(dataset.column_names):
            return None
        return np.sum([list_lengths(dataset, name) for name in names], axis=0).tolist()

    def _lengths(self, dataset: Dataset) -> list:
        """Tokens of each sequence of the rows."""
        sequences = self.settings.sequences
        return [sum(list_lengths(dataset, name) for name in sequence) for sequence in sequences]
