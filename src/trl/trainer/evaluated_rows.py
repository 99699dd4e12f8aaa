"""What an evaluation hands to `compute_metrics`: the rows of all processes, each once, in their order."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor


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
