"""The data sets of a trainer, prepared in one way for training and evaluation before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset

from trl.data.formats import column_names
from trl.data.image_rows import IMAGE_COLUMNS
from trl.data.ragged import list_lengths
from trl.models.setup import check_positions
from trl.trainer.sft_data import check_kind
from trl.trainer.sft_images import has_images

logger = logging.getLogger(__name__)

Prepare = Callable[[Any, str], tuple[Any, Any]]
"""(data set, its name) -> (prepared data set, report)."""


@dataclass
class PreparedSets:
    """Prepares the training and evaluation sets of one trainer, each on the main process first.

    `columns` are those of prepared rows. `parts` name the columns that make up one sequence, for each sequence of a row:
    their lengths are held to what the model has positions for.
    """

    prepare: Prepare
    columns: Sequence[str]
    parts: Sequence[Sequence[str]]
    model: Any

    def train(self, dataset: Any) -> Any:
        """The training set."""
        check_kind(dataset, "train_dataset")
        return self._prepared(dataset, "train")

    def evaluation(self, dataset: Any) -> Any:
        """The evaluation set, or several by name."""
        if isinstance(dataset, dict):
            for name, part in dataset.items():
                check_kind(part, f"eval_dataset[{name!r}]")
            return {name: self._prepared(part, name) for name, part in dataset.items()}
        check_kind(dataset, "eval_dataset")
        return self._prepared(dataset, "eval")

    def later(self, dataset: Any) -> Any:
        """A set that is given to `evaluate` or `predict`: prepared now, unless it is already."""
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        has = column_names(dataset)
        return dataset if all(column in has for column in self.columns) else self.evaluation(dataset)

    def _prepared(self, dataset: Any, name: str) -> Any:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        _refuse_images(dataset, name)
        with PartialState().main_process_first():
            prepared, report = self.prepare(dataset, name)
        if isinstance(prepared, Dataset):
            logger.info(report.summary())
            check_positions(self.model, self._lengths(prepared), dataset_name=name)
        return prepared

    def row_tokens(self, dataset: Any) -> list[int] | None:
        """Tokens of each prepared row, in all its sequences; None where its columns hold none."""
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


def _refuse_images(dataset: Any, name: str) -> None:
    if has_images(dataset):
        raise ValueError(
            f"{name} dataset has a column of images ({' or '.join(IMAGE_COLUMNS)}), but this trainer takes text. SFTTrainer "
            "and DPOTrainer take images, if the data sets given to their constructor have them; or remove the column to "
            "use the text alone."
        )
