"""Metrics: sums with their own counts, so that means over processes are true means; accuracy."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import EvalPrediction

from trl.tensors.padding import IGNORED
from trl.tensors.reduce import Weighted

logger = logging.getLogger(__name__)
Numbers = dict[str, Any]  # floats, or pairs of them


class MetricSums:
    """Running totals and counts by name, kept on the device until they are asked for.

    >>> sums = MetricSums()
    >>> sums.add({"accuracy": Weighted(torch.tensor(3.0), torch.tensor(4))})
    >>> sums.add({"accuracy": Weighted(torch.tensor(0.0), torch.tensor(2))})
    >>> sums.drain()
    {'accuracy': 0.5}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Weighted] = {}, extremes: Mapping[str, Tensor] = {}) -> None:
        """Add totals and their counts (scalars, on any device).

        Of `extremes` keep the smallest value of a name with the word `min`, such as `low_min`, else the largest; not
        NaN.
        """
        for name, extreme in extremes.items():
            scalar, known = _scalar(extreme), self._extremes.get(name)
            choose = torch.fmin if extreme_of(name) == "min" else torch.fmax  # which ignore NaN
            self._extremes[name] = scalar if known is None else choose(known.to(scalar.device), scalar)
        for name, value in values.items():
            total, known = _scalar(value.total), self._sums.get(name)
            pair = torch.stack([total, _scalar(value.count).to(total.device)])
            self._sums[name] = pair if known is None else known + pair.to(known.device)

    def drain(self, accelerator: Accelerator | None = None) -> dict[str, float]:
        """Means over all processes since the last call, then extremes; all processes must call it together."""
        sums, self._sums = self._sums, {}
        every, self._extremes = [self.state()["extremes"]], {}
        if accelerator is not None and accelerator.num_processes > 1:
            # A process may have names that another has not.
            all_names = list(dict.fromkeys(name for local_names in gather_object([list(sums)]) for name in local_names))
            zero = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
            if all_names:
                table = torch.stack([sums.get(name, zero).to(zero) for name in all_names])
                reduced = accelerator.reduce(table, reduction="sum")
                sums = dict(zip(all_names, reduced.unbind(), strict=True))  # type: ignore[union-attr]
            every = gather_object(every)
        means = {name: total / count for name, (total, count) in _as_floats(sums).items() if count}
        names = dict.fromkeys(name for extremes in every for name in extremes)
        return means | {
            name: (min if extreme_of(name) == "min" else max)(extremes[name] for extremes in every if name in extremes)
            for name in names
        }

    def state(self) -> dict[str, Numbers]:
        """The sums and extremes of this process, for a checkpoint; floats keep every bit."""
        extremes = {name: value for name, value in _as_floats(self._extremes).items() if not math.isnan(value)}
        return {"sums": _as_floats(self._sums), "extremes": extremes}

    def load_state(self, state: Mapping[str, Numbers], device: torch.device | str = "cpu") -> None:
        """Resume from `state`."""
        self._sums, self._extremes = (
            {name: torch.tensor(numbers, dtype=torch.float64, device=device) for name, numbers in state[part].items()}
            for part in ("sums", "extremes")
        )


def extreme_of(name: str) -> str | None:
    """The word min or max behind the last slash of a metric's name; None for a mean, as rewards by function are.

    >>> extreme_of("clip_ratio/low_min"), extreme_of("completions/max_length"), extreme_of("rewards/min_words")
    ('min', 'max', None)
    """
    group, _, last = name.rpartition("/")
    words = [] if group.endswith("rewards") else last.split("_")
    return next((word for word in ("min", "max") if word in words), None)


def _scalar(value: Tensor) -> Tensor:
    return value.detach().reshape(()).to(torch.float32 if value.device.type == "mps" else torch.float64)


def _as_floats(values: Mapping[str, Tensor]) -> Numbers:
    if not values:
        return {}
    device = next(iter(values.values())).device
    table = torch.stack([value.to(device) for value in values.values()]).tolist()
    return dict(zip(values, table, strict=True))


class Processes(NamedTuple):
    """Numbers of all processes. Every process must make the same calls at the same time."""

    accelerator: Accelerator
    copies: int = 1  # neighbouring processes that have the same numbers

    def rows(self, table: Tensor) -> tuple[Tensor, int]:
        """The rows `(n, k)` of every process (n may differ), in their order, and where this process's begin."""
        if self.accelerator.num_processes == 1:
            return table, 0
        tables = [part.to(table.device) for part in gather_object([table.detach().cpu()])][:: self.copies]
        return torch.cat(tables), sum(len(part) for part in tables[: self.accelerator.process_index // self.copies])

    def once(self, total: Tensor) -> Tensor:
        """A sum over all processes with the numbers of copies counted once; counts stay whole numbers."""
        return total / self.copies if total.is_floating_point() else total // self.copies

    def sum(self, parts: Sequence[Weighted]) -> Weighted:
        """The sum of all parts of all processes."""
        total, count = (torch.stack(part).sum() for part in zip(*parts, strict=True))
        if self.accelerator.num_processes == 1:
            return Weighted(total, count)
        both = self.accelerator.reduce(torch.stack([total, count.to(total)]), reduction="sum")
        return Weighted(*self.once(both))  # type: ignore[arg-type]


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
        """Go on from `state`; from an empty one, begin anew."""
        self.total, self.count = state.get("total", 0.0), state.get("count", 0.0)


def compute_accuracy(eval_pred: EvalPrediction | tuple[ArrayLike, ArrayLike]) -> dict[str, float]:
    """Share of predictions whose largest value stands at the label: `{"accuracy": ...}`, for `compute_metrics`.

    `predictions (..., C)` and `labels (...)`: the two rewards of each pair with label 0, or the logits of each token
    with its class. Labels of -100 and rows whose largest value stands twice (a warning) do not count. NaN for none.

    >>> compute_accuracy(EvalPrediction(np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([0, 0])))
    {'accuracy': 0.5}
    """
    predictions, labels, *_ = map(np.asarray, eval_pred)
    if predictions.shape[:-1] != labels.shape:
        shapes = f"{labels.shape} for predictions of {predictions.shape}"
        raise ValueError(f"labels must have the shape of predictions but for their last dimension, got {shapes}.")
    predictions, labels = predictions[labels != IGNORED], labels[labels != IGNORED]
    tied = (predictions == predictions.max(axis=-1, keepdims=True)).sum(axis=-1) > 1
    if tied.any():
        logger.warning("%d of %d predictions are ties, which accuracy leaves out.", tied.sum(), len(tied))
    right = (predictions.argmax(axis=-1) == labels)[~tied]
    return {"accuracy": float(right.mean()) if len(right) else float("nan")}
