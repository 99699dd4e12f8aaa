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

from trl.data.formats import column_names
from trl.data.image_rows import refuse_images
from trl.data.pipeline import Preparation
from trl.data.ragged import list_lengths
from trl.data.token_rows import mask_columns

logger = logging.getLogger(__name__)

Prepare = Callable[..., tuple[Any, Any]]
"""(data set, processing class, settings, name=...) -> (prepared data set, report)."""


class DataSets(ABC):
    """The training and evaluation sets of one trainer: those of its constructor, and those given later."""

    _own: tuple[Any, ...] = ()  # those of the constructor, prepared

    def train(self, dataset: Any) -> Any:
        """The training set."""
        check_kind(dataset, "train_dataset")
        return self._kept(dataset, "train", is_training=True)

    def evaluation(self, dataset: Any) -> Any:
        """The evaluation set, or several by name."""
        if isinstance(dataset, dict):
            for name, part in dataset.items():
                check_kind(part, f"eval_dataset[{name!r}]")
            return {name: self._kept(part, name) for name, part in dataset.items()}
        check_kind(dataset, "eval_dataset")
        return self._kept(dataset, "eval")

    def later(self, dataset: Any) -> Any:
        """A set that is given to `evaluate` or `predict`: prepared now, unless it is already."""
        is_given = isinstance(dataset, (Dataset, IterableDataset))
        return self.prepared(dataset, "eval") if is_given and not self.is_prepared(dataset) else dataset

    def is_prepared(self, dataset: Any) -> bool:
        """Whether a set is ready for the collator."""
        return any(dataset is own_set for own_set in self._own)

    def _kept(self, dataset: Any, name: str, *, is_training: bool = False) -> Any:
        prepared = self.prepared(dataset, name, is_training=is_training)
        self._own = (*self._own, prepared)
        return prepared

    @abstractmethod
    def prepared(self, dataset: Any, name: str, *, is_training: bool = False) -> Any:
        """A set made ready for the collator."""

    def row_tokens(self, dataset: Any) -> list[int] | None:
        """Tokens of each prepared row, in all its sequences; None where they are not known before a batch is made."""
        return None


def check_kind(dataset: Any, argument: str) -> None:
    """Raise TypeError for what is no data set, saying how to make one of it."""
    if isinstance(dataset, (Dataset, IterableDataset, TorchDataset)):
        return
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
    processing_class: Any
    check_lengths: Callable[..., None]

    def is_prepared(self, dataset: Any) -> bool:
        columns = column_names(dataset)
        return set(self.settings.prepared_columns) <= set(columns) and not mask_columns(columns)

    def prepared(self, dataset: Any, name: str, *, is_training: bool = False) -> Any:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        refuse_images(dataset, name=name)
        with PartialState().main_process_first():
            prepared, report = self.prepare(dataset, self.processing_class, self.settings, name=name)
        if isinstance(prepared, Dataset):
            logger.info(report.summary())
            self.check_lengths(np.max(self._lengths(prepared), axis=0), dataset_name=name)
        return prepared

    def row_tokens(self, dataset: Any) -> list[int] | None:
        names = {name for sequence in self.settings.sequences for name in sequence}
        if not isinstance(dataset, Dataset) or names - set(dataset.column_names):
            return None
        return np.sum([list_lengths(dataset, name) for name in names], axis=0).tolist()

    def _lengths(self, dataset: Dataset) -> list[Any]:
        """Tokens of each sequence of the rows."""
        sequences = self.settings.sequences
        return [sum(list_lengths(dataset, name) for name in sequence) for sequence in sequences]
