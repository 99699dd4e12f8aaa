"""The data sets of a trainer, prepared in one way for training and evaluation before the first step."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from trl.data.formats import StoredOrStream
from trl.data.pipeline import Preparation, PreparationReport, prepare_dataset
from trl.data.ragged import list_lengths, table_blocks
from trl.data.rendering import ProcessingClass

logger = logging.getLogger(__name__)

RowSet = Dataset | IterableDataset | TorchDataset


class DataSets(ABC):
    """The training and evaluation sets of one trainer: those of its constructor, and those given later."""

    shuffle_seed: int | None = None  # of the order of the training set's rows; None: as they come
    _of_constructor: tuple[RowSet, ...] = ()  # prepared

    def train(self, dataset: object) -> RowSet:
        rows = check_kind(dataset, "train_dataset")
        if self.shuffle_seed is not None and isinstance(rows, (Dataset, IterableDataset)):
            rows = rows.shuffle(seed=self.shuffle_seed)
        prepared = self.prepared(rows, "train", is_training=True)
        self._of_constructor = (*self._of_constructor, prepared)
        return prepared

    def evaluation(self, dataset: object) -> RowSet | dict[str, RowSet]:
        if isinstance(dataset, dict):
            parts = {name: check_kind(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}
        else:
            parts = {"eval": check_kind(dataset, "eval_dataset")}
        prepared = {name: self.prepared(part, name) for name, part in parts.items()}
        self._of_constructor = (*self._of_constructor, *prepared.values())
        return prepared if isinstance(dataset, dict) else prepared["eval"]

    def later(self, dataset: Any) -> Any:
        """A set that is given to `evaluate` or `predict`: prepared now, unless it is already."""
        is_rows = isinstance(dataset, (Dataset, IterableDataset))
        is_ready = any(dataset is rows for rows in self._of_constructor)
        return self.prepared(dataset, "eval") if is_rows and not is_ready and not self.is_prepared(dataset) else dataset

    def is_prepared(self, dataset: StoredOrStream) -> bool:
        """Whether a set is ready for the collator."""
        return False

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

    `train_settings`: those of the training set, where they are others. `check_lengths(lengths, dataset_name=...)` is
    given the tokens of each row's longest sequence, or of each document of packed rows. `reports`: by name of the set.
    """

    settings: Preparation
    processing_class: ProcessingClass
    check_lengths: Callable[..., None]
    train_settings: Preparation | None = None
    shuffle_seed: int | None = None
    reports: dict[str, PreparationReport] = field(default_factory=dict)

    def is_prepared(self, dataset: StoredOrStream) -> bool:
        return self.settings.is_prepared(dataset)

    def prepared(self, dataset: RowSet, name: str, *, is_training: bool = False) -> RowSet:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        settings = self.train_settings if is_training and self.train_settings is not None else self.settings
        with PartialState().main_process_first():
            prepared, report = prepare_dataset(dataset, self.processing_class, settings, name=name)  # type: ignore[type-var]
        self.reports[name] = report
        if isinstance(prepared, Dataset):
            logger.info(report.summary())
            self.check_lengths(sequence_lengths(prepared, settings), dataset_name=name)
        return prepared

    def row_tokens(self, dataset: object) -> list[int] | None:
        names = {name for sequence in self.settings.sequences for name in sequence}
        if not isinstance(dataset, Dataset) or names - set(dataset.column_names):
            return None
        return list_lengths(dataset, *names).tolist()


def sequence_lengths(dataset: Dataset, settings: object = Preparation) -> np.ndarray:
    """Tokens of the longest sequence of each row that `settings` prepared, or of each document of packed ones."""
    if "seq_lengths" in dataset.column_names:
        flat: Callable[..., Any] = pc.list_flatten  # type: ignore[attr-defined]
        return np.concatenate([flat(block["seq_lengths"]).to_numpy() for block in table_blocks(dataset)])
    sequences = getattr(settings, "sequences", Preparation.sequences)
    present = [names for names in sequences if set(names) <= set(dataset.column_names)]
    lengths = [list_lengths(dataset, *names) for names in present]
    if (others := getattr(settings, "other_prompts", None)) in dataset.column_names:
        longer = list_lengths(dataset, others) - list_lengths(dataset, sequences[-1][0])  # NaN for the same prompt
        lengths[-1] += np.nan_to_num(longer).astype(np.int64)
    return np.max(lengths, axis=0) if lengths else np.zeros(0, np.int64)
