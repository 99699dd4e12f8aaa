"""Sums of metrics between two logs: totals with their own counts, so that means over ranks are true means."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from trl.tensors.reduce import Weighted


class MetricSums:
    """Running totals and counts by name, kept on the device until they are asked for.

    >>> sums = MetricSums()
    >>> sums.add("accuracy", Weighted(torch.tensor(3.0), torch.tensor(4)))
    >>> sums.add("accuracy", Weighted(torch.tensor(0.0), torch.tensor(2)))
    >>> sums.drain()
    {'accuracy': 0.5}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, float] = {}

    def add_extremes(self, values: Mapping[str, Tensor]) -> None:
        """Keep the smallest values by names that begin with `min`, and the largest by others; they are no part of `state`."""
        for name, value in values.items():
            self._extremes[name] = _extreme(name)(float(value), self._extremes.get(name, float(value)))

    def add(self, name: str, value: Weighted) -> None:
        """Add a total and its count (scalars, on any device)."""
        total = _scalar(value.total)
        pair = torch.stack([total, _scalar(value.count).to(total.device)])
        known = self._sums.get(name)
        self._sums[name] = pair if known is None else known + pair.to(known.device)

    def add_all(self, values: Mapping[str, Weighted]) -> None:
        """`add` for each item."""
        for name, value in values.items():
            self.add(name, value)

    def drain(self, accelerator: Accelerator | None = None) -> dict[str, float]:
        """Means over all processes since the last call, in order of first use, then extremes; names whose count is 0 are left out.

        Every process must call it at the same time.
        """
        sums, self._sums = self._sums, {}
        every, self._extremes = [self._extremes], {}
        if accelerator is not None and accelerator.num_processes > 1:
            sums, every = _over_processes(sums, accelerator), gather_object(every)
        means = {name: total / count for name, (total, count) in _as_floats(sums).items() if count}
        names = dict.fromkeys(name for own in every for name in own)
        return means | {name: _extreme(name)(own[name] for own in every if name in own) for name in names}

    def state(self) -> dict[str, tuple[float, float]]:
        """The sums of this process, for a checkpoint; floats keep every bit."""
        return _as_floats(self._sums)

    def load_state(
        self, state: Mapping[str, tuple[float, float]], device: torch.device | str = "cpu"
    ) -> None:
        """Go on from `state`."""
        self._sums = {
            name: torch.tensor(pair, dtype=torch.float64, device=device) for name, pair in state.items()
        }


def _extreme(name: str) -> Callable[..., float]:
    return min if name.startswith("min") else max


def _scalar(value: Tensor) -> Tensor:
    return value.detach().reshape(()).to(torch.float32 if value.device.type == "mps" else torch.float64)


def _as_floats(sums: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    table = torch.stack([pair.to(device) for pair in sums.values()]).tolist()
    return {name: (total, count) for name, (total, count) in zip(sums, table, strict=True)}


def _over_processes(sums: dict[str, Tensor], accelerator: Accelerator) -> dict[str, Tensor]:
    """The sums of all processes; a process may know names that another does not."""
    every = gather_object([list(sums)])
    names = list(dict.fromkeys(name for known in every for name in known))
    if not names:
        return {}
    zero = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    table = torch.stack([sums.get(name, zero).to(zero) for name in names])
    reduced = accelerator.reduce(table, reduction="sum")
    return dict(zip(names, reduced.unbind(), strict=True))  # type: ignore[union-attr]
