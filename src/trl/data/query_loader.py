"""The queries of a step-level loop: shuffled by seed and epoch, shared out over processes, resumable between two batches."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Sampler

logger = logging.getLogger(__name__)

_OWN_COLUMNS = ("label", "query", "response")


class ShuffledShares(Sampler[int]):
    """This process's rows of every batch, in an order that depends on seed and epoch alone; what is left over is dropped."""

    def __init__(self, rows: int, batch_size: int, *, seed: int, rank: int, processes: int) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.processes = rank, processes
        self.epoch, self.first_batch = 0, 0

    @property
    def batches(self) -> int:
        """Whole batches of an epoch."""
        return self.rows // (self.batch_size * self.processes)

    def __len__(self) -> int:
        return (self.batches - self.first_batch) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        used = order[: self.batches * self.batch_size * self.processes]
        own = used.view(self.batches, self.processes, self.batch_size)[self.first_batch :, self.rank]
        yield from own.flatten().tolist()


class QueryLoader(DataLoader):
    """A data loader that knows how far it is: `epoch` passes are over, and `position` batches of this one were handed out.

    A pass begins anew with each `for`, except for the first one after `load_state_dict`, which goes on where the state was
    taken: take it between two batches.
    """

    def __init__(
        self, dataset: Any, shares: ShuffledShares, *, collate_fn: Callable, device: torch.device
    ) -> None:
        own = (
            torch.Generator()
        )  # the global one would be drawn from at the begin of each pass, a resumed one too
        super().__init__(
            dataset,
            batch_size=shares.batch_size,
            sampler=shares,
            collate_fn=collate_fn,
            drop_last=True,
            generator=own,
        )
        self.shares, self.device = shares, device
        self.epoch, self.position = 0, 0
        self._resumed = False

    def __len__(self) -> int:
        return self.shares.batches

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._resumed:
            self.epoch, self.position = self.epoch + (self.position > 0), 0
        self._resumed = False
        self.shares.epoch, self.shares.first_batch = self.epoch, self.position
        for batch in super().__iter__():
            self.position += 1
            yield send_to_device(batch, self.device)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where it is; the end of a pass is the beginning of the next."""
        over = self.position >= len(self)
        return {"epoch": self.epoch + over, "position": 0 if over else self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._resumed = True


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    collate_fn: Callable | None,
    seed: int,
    accelerator: Any,
    keep: Any | None,
) -> QueryLoader:
    """A loader of whole batches, `batch_size` rows per process.

    Columns of a `datasets.Dataset` that neither the model `keep` reads nor a loop needs are left out; with `keep` None all
    stay.

    Raises: TypeError for a data set without rows by number, ValueError for fewer rows than a batch.
    """
    if isinstance(dataset, dict) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"dataset must have a length and rows by number, got {type(dataset).__name__}. Take one split of a DatasetDict, or "
            "bring a loader of your own for a stream."
        )
    if isinstance(dataset, datasets.Dataset) and keep is not None:
        dataset = _with_used_columns(dataset, keep)
    shares = ShuffledShares(
        len(dataset),
        batch_size,
        seed=seed,
        rank=accelerator.process_index,
        processes=accelerator.num_processes,
    )
    if not shares.batches:
        raise ValueError(
            f"dataset must have at least batch_size * processes = {batch_size} * {accelerator.num_processes} rows, got "
            f"{len(dataset)}. Lower batch_size, or add rows."
        )
    return QueryLoader(dataset, shares, collate_fn=collate_fn or lists_of_columns, device=accelerator.device)


def lists_of_columns(rows: list[Any]) -> Any:
    """Rows as a dict of lists, token ids among them as tensors; rows that are no dicts as torch would collate them.

    >>> lists_of_columns([{"query": "a", "input_ids": [1]}, {"query": "b", "input_ids": [2, 3]}])
    {'query': ['a', 'b'], 'input_ids': [tensor([1]), tensor([2, 3])]}
    """
    if not isinstance(rows[0], dict):
        return torch.utils.data.default_collate(rows)
    found = {name: [row[name] for row in rows] for name in rows[0]}
    for values in found.values():
        for place, value in enumerate(values):
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                values[place] = torch.tensor(value)
    return found


def _with_used_columns(dataset: datasets.Dataset, model: Any) -> datasets.Dataset:
    inner = getattr(model, "pretrained_model", model)
    core = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    used = {*inspect.signature(core.forward).parameters, *_OWN_COLUMNS}
    unused = [name for name in dataset.column_names if name not in used]
    if len(unused) == len(dataset.column_names):
        raise ValueError(
            f"dataset has no column that is used: it has {unused}, allowed are 'query', 'response', 'label' and those that "
            "the model takes ('input_ids'). Rename a column, or set remove_unused_columns=False."
        )
    if unused:
        logger.info("Columns %s of the dataset are left out (remove_unused_columns).", ", ".join(unused))
    return dataset.remove_columns(unused)
