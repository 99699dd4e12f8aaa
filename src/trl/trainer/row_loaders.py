"""Orders of a trainer's rows that seed and epoch alone decide, and what evaluations gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor
from transformers.trainer_pt_utils import LengthGroupedSampler


@contextmanager
def holding(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value, within."""
    kept = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, kept)


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

    That one counts rows of the data set to leave out repeated ones, and packed rows have several rows of logits. The loop
    first gathers the loss, then inputs, logits and labels `(S, ...)`, whose first `own` rows (None: all) count.
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
