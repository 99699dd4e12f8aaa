"""Numbers of all rows of an optimiser step, over its micro-batches and all processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from trl.tensors.reduce import Weighted


class Processes:
    """Numbers of all processes. Every process must make the same calls at the same time."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def rows(self, table: Tensor) -> tuple[Tensor, int]:
        """The rows `(n, k)` of every process, one process after another, and where this process's begin.

        Processes may have different numbers of rows.
        """
        if self._accelerator.num_processes == 1:
            return table, 0
        tables = [part.to(table.device) for part in gather_object([table.detach().cpu()])]
        return torch.cat(tables), sum(len(part) for part in tables[: self._accelerator.process_index])

    def sum(self, parts: Sequence[Weighted]) -> Weighted:
        """The sum of all parts of all processes."""
        total, count = (torch.stack(part).sum() for part in zip(*parts, strict=True))
        if self._accelerator.num_processes == 1:
            return Weighted(total, count)
        both = self._accelerator.reduce(torch.stack([total, count.to(total)]), reduction="sum")
        return Weighted(*both)  # type: ignore[misc]

    def extremes(self, parts: Sequence[Tensor]) -> Tensor:
        """The smallest and the largest value of tensors of any shapes: `(2,)`; infinities where there is none."""
        values = torch.cat([part.flatten() for part in parts]) if parts else torch.zeros(0)
        values = values.to(self._accelerator.device)
        nothing = torch.tensor([math.inf, -math.inf], dtype=values.dtype, device=values.device)
        found = torch.stack(values.aminmax()) if len(values) else nothing
        table, _ = self.rows(found[None])
        return torch.stack([table[:, 0].min(), table[:, 1].max()])


class RunningMean:
    """The mean of everything counted so far in a run; part of every checkpoint.

    >>> mean = RunningMean()
    >>> mean.add(Weighted(torch.tensor(3.0), torch.tensor(2.0)))
    >>> mean.value
    1.5
    """

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0.0

    @property
    def value(self) -> float:
        """The mean; 0 before anything was counted."""
        return self.total / self.count if self.count else 0.0

    def add(self, more: Weighted) -> None:
        """Count more: the same on every process."""
        self.total += float(more.total)
        self.count += float(more.count)

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"total": self.total, "count": self.count}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from `state`."""
        self.total, self.count = state["total"], state["count"]
