"""The loaders of a trainer's rows, and in which order they are visited: one that seed and epoch alone decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from trl.data.formats import column_names
from trl.data.ragged import list_lengths
from trl.data.streams import CountedStream, RepeatedStream, is_stream

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class RowLoaders(_Trainer):
    """Mixin in front of `transformers.Trainer`."""

    def get_train_dataloader(self) -> DataLoader:
        """The training batches; a stream starts again when it ends, so that every step is whole."""
        dataset = self.train_dataset
        if not is_stream(dataset) or isinstance(dataset, RepeatedStream):
            loader = super().get_train_dataloader()
            _check_not_dropped(self.args, loader, dataset)
            return loader
        with holding(self, "train_dataset", RepeatedStream(dataset)):
            return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The batches of an evaluation set.

        With `dataloader_persistent_workers` the parent keeps the loaders of the trainer's own sets, and takes that of one set
        for any other: a set that is given gets a loader, and workers, of its own.
        """
        if eval_dataset is None or isinstance(eval_dataset, str) or eval_dataset is self.eval_dataset:
            return super().get_eval_dataloader(eval_dataset)
        with holding(self.args, "dataloader_persistent_workers", False):
            return super().get_eval_dataloader(eval_dataset)

    def _get_dataloader(self, dataset: Any, *, is_training: bool = False, **given: Any) -> DataLoader:
        if not is_training:
            return self._evaluation_loader(dataset, **given)
        loader: Any = super()._get_dataloader(dataset, is_training=True, **given)
        if self.args.dataloader_persistent_workers:
            # Workers are started once by a run, and again by one that goes on: neither may take from the process's own stream.
            inner = getattr(loader, "base_dataloader", loader)  # accelerate's
            inner.generator = torch.Generator().manual_seed(self._order_seed())
        return loader

    def _evaluation_loader(self, dataset: Any, **given: Any) -> DataLoader:
        """Batches of all rows: `dataloader_drop_last` is for training, whose epochs leave out others each time."""
        if is_stream(dataset) and (self.args.world_size > 1 or has_length(dataset)):
            dataset = CountedStream(
                dataset
            )  # which hides a length that counts other rows (ConstantLengthDataset)
        with holding(self.args, "dataloader_drop_last", False):
            return super()._get_dataloader(dataset, is_training=False, **given)

    def own_rows(self) -> int:
        """The rows of the current evaluation batch that accelerate did not repeat to fill it."""
        state, rows = self.accelerator.gradient_state, self.args.per_device_eval_batch_size
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader:
            return rows
        self._count_stream(state.active_dataloader)
        if state.remainder <= 0:
            return rows
        return min(max(state.remainder - self.accelerator.process_index * rows, 0), rows)

    def _count_stream(self, loader: Any) -> None:
        """Tell accelerate how many rows the last batch of all processes has, which it does not know of a stream."""
        counted = self.streamed_rows(loader)
        if counted:
            loader.remainder = counted % (
                self.args.per_device_eval_batch_size * self.accelerator.num_processes
            )

    def streamed_rows(self, loader: Any) -> int:
        """How many rows the stream of an evaluation by several processes had, once it was read; 0 where it is not known."""
        stream = getattr(getattr(loader, "dataset", None), "dataset", None)
        # A loader's workers count in processes of their own.
        return stream.count if isinstance(stream, CountedStream) else 0

    def row_lengths(self, dataset: Any) -> list[int] | None:
        """The number of tokens of each row, where the rows' columns say it: by `length_column_name`, or by `input_ids`."""
        names = column_names(dataset) if hasattr(dataset, "column_names") else []
        if self.args.length_column_name in names:
            return list(dataset[self.args.length_column_name])
        return lengths_of_ids(dataset)

    def _run_epoch(self, *, epoch: int, **given: Any) -> None:
        # The parent does not find the sampler where several processes skip what an earlier run has seen.
        order: Any = self._order
        if hasattr(order, "set_epoch"):
            order.set_epoch(epoch)
        super()._run_epoch(epoch=epoch, **given)

    _order: Sampler | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        self._order = self._sampler_of(train_dataset)
        return self._order

    def _sampler_of(self, train_dataset: Any) -> Sampler | None:
        dataset = self.train_dataset  # `train_dataset` has lost the columns that no batch needs
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(dataset, Dataset):
            return super()._get_train_sampler(train_dataset)
        lengths = self.row_lengths(dataset)
        if lengths is None:
            raise ValueError(
                "train_sampling_strategy='group_by_length' needs the length of each row: its tokens, or a column "
                f"{self.args.length_column_name!r}, and prepared rows have {dataset.column_names}. Use 'random'."
            )
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return GroupedByLength(rows, lengths, seed=self._order_seed())

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """Rows are evaluated in their order, so that predictions are, too, however rows are trained on."""
        if not has_length(eval_dataset) or self.args.world_size > 1:
            return None
        return SequentialSampler(eval_dataset)

    def _order_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed


def _check_not_dropped(args: TrainingArguments, loader: Any, dataset: Any) -> None:
    """Raise ValueError where `dataloader_drop_last` leaves no batch."""
    if args.dataloader_drop_last and has_length(loader) and not len(loader):
        raise ValueError(
            f"dataloader_drop_last=True drops all {len(dataset)} training rows: they do not fill a batch of "
            f"{args.train_batch_size * args.world_size} (per_device_train_batch_size times processes). Set it to False, or lower "
            "per_device_train_batch_size."
        )


@contextmanager
def holding(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value, within."""
    kept = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, kept)


def lengths_of_ids(dataset: Any) -> list[int] | None:
    """The number of tokens of each row that has `input_ids`; None for other rows."""
    is_tokenised = isinstance(dataset, Dataset) and "input_ids" in dataset.column_names
    return list_lengths(dataset, "input_ids").tolist() if is_tokenised else None


class GroupedByLength(LengthGroupedSampler):
    """Rows of like lengths side by side, longest first, in groups that are drawn anew in each epoch.

    The parent draws them from the process's random stream, which a run that goes on within an epoch no longer has.
    """

    def __init__(self, rows: int, lengths: list[int], *, seed: int) -> None:
        super().__init__(rows, lengths=lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw those of this epoch, counted from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return super().__iter__()


class OwnRows:
    """Gathers, in place of `Accelerator.gather_for_metrics`, what the evaluation loop of transformers gathers of one batch.

    That one counts rows of the data set, to leave out those that accelerate repeated at the end; packed ones are several rows
    of logits. First the loop gathers the loss, repeated as often as a batch has rows; then inputs, logits and labels,
    `(S, ...)` each, of whose rows the first `own` (None: all) are this process's own.
    """

    def __init__(self, accelerator: Accelerator, own: int | None) -> None:
        self._accelerator, self._own, self._loss_is_next = accelerator, own, True

    def __call__(self, values: Any) -> Any:
        """The values of all processes, one after another."""
        if self._loss_is_next:
            self._loss_is_next = False
            return self._accelerator.gather_for_metrics(values)
        return recursively_apply(self._gathered, values)

    def _gathered(self, values: Tensor) -> Tensor:
        own = values[: self._own]
        if self._accelerator.num_processes == 1:
            return own
        counts: Any = self._accelerator.gather(torch.tensor([len(own)], device=own.device))
        whole: Any = self._accelerator.gather(self._accelerator.pad_across_processes(own, dim=0))
        most = int(counts.max())
        parts = zip(whole.split(most), counts.tolist(), strict=True) if most else []
        return torch.cat([part[:count] for part, count in parts]) if most else own
