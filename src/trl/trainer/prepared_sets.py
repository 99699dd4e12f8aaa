"""The data sets of a trainer, prepared in one way for training and evaluation before the first step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from trl.data.formats import column_names
from trl.data.image_rows import IMAGE_COLUMNS
from trl.data.ragged import list_lengths
from trl.models.policy import Policy
from trl.models.setup import check_positions
from trl.trainer.sft_images import has_images

logger = logging.getLogger(__name__)

Prepare = Callable[..., tuple[Any, Any]]
"""(data set, processing class, settings, name=...) -> (prepared data set, report)."""


class DataSets(ABC):
    """The training and evaluation sets of one trainer: those of its constructor, and those given later."""

    def train(self, dataset: Any) -> Any:
        """The training set."""
        check_kind(dataset, "train_dataset")
        return self.prepared(dataset, "train", is_training=True)

    def evaluation(self, dataset: Any) -> Any:
        """The evaluation set, or several by name."""
        if isinstance(dataset, dict):
            for name, part in dataset.items():
                check_kind(part, f"eval_dataset[{name!r}]")
            return {name: self.prepared(part, name) for name, part in dataset.items()}
        check_kind(dataset, "eval_dataset")
        return self.prepared(dataset, "eval")

    @abstractmethod
    def prepared(self, dataset: Any, name: str, *, is_training: bool = False) -> Any:
        """A set made ready for the collator."""

    @abstractmethod
    def later(self, dataset: Any) -> Any:
        """A set that is given to `evaluate` or `predict`: prepared now, unless it is already."""

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
    raise TypeError(
        f"{argument} must be a datasets.Dataset or IterableDataset, got a {type(dataset).__name__}. {remedy}"
    )


@dataclass
class PreparedSets(DataSets):
    """Tokenises data sets before the first step, each on the main process first.

    `columns` are those of prepared rows. `parts` name the columns that make up one sequence, for each sequence of a row:
    their lengths may not exceed the model's positions.
    """

    prepare: Prepare
    settings: Any
    policy: Policy
    columns: Sequence[str]
    parts: Sequence[Sequence[str]]

    def later(self, dataset: Any) -> Any:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        has = column_names(dataset)
        return dataset if all(column in has for column in self.columns) else self.evaluation(dataset)

    def tokenised(self, dataset: Any, name: str) -> tuple[Any, Any]:
        """The rows of a data set as tokens, and the report."""
        return self.prepare(dataset, self.policy.processing_class, self.settings, name=name)

    def prepared(self, dataset: Any, name: str, *, is_training: bool = False) -> Any:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        if has_images(dataset):
            raise ValueError(
                f"{name} dataset has a column of images ({' or '.join(IMAGE_COLUMNS)}), but this trainer takes text. SFTTrainer "
                "and DPOTrainer take images, if the data sets given to their constructor have them; or remove the column to "
                "use the text alone."
            )
        with PartialState().main_process_first():
            prepared, report = self.tokenised(dataset, name)
        if isinstance(prepared, Dataset):
            logger.info(report.summary())
            check_positions(self.policy.model, self._lengths(prepared), dataset_name=name)
        return prepared

    def row_tokens(self, dataset: Any) -> list[int] | None:
        names = list(dict.fromkeys(name for part in self.parts for name in part))
        if not names or not isinstance(dataset, Dataset) or set(names) - set(dataset.column_names):
            return None
        return np.sum([list_lengths(dataset, name) for name in names], axis=0).tolist()

    def _lengths(self, dataset: Dataset) -> np.ndarray:
        """Tokens of the longest sequence of each row."""
        counts: dict[str, Any] = {
            name: list_lengths(dataset, name) for name in {name for part in self.parts for name in part}
        }
        return np.max([sum(counts[name] for name in part) for part in self.parts], axis=0)
