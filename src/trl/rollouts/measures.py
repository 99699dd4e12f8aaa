"""Metrics of completions in groups: lengths, rewards, and clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.objectives.group_advantages import Scale, reward_statistics
from trl.objectives.group_policy import EXTREMES
from trl.rewards.result import reward_metrics, source_means, source_table
from trl.rollouts.experience import LENGTH, REWARD, STOPPED, TOOL_OUTPUT, Experience
from trl.tensors.reduce import Weighted, weighted


def of_all_processes(experience: Experience, accelerator: Any) -> dict[str, Tensor]:
    """The columns per row and `length` (sampled tokens) of all processes: float64 `(N,)` on the CPU.

    Every process must have the same number of rows.
    """
    columns = {**experience.per_row, LENGTH: sampled_lengths(experience)}
    table = torch.stack([column.double() for column in columns.values()], dim=1)
    if accelerator.num_processes > 1:
        table = accelerator.gather(table.to(accelerator.device)).cpu()
    return dict(zip(columns, table.unbind(dim=1), strict=True))


def sampled_lengths(experience: Experience) -> Tensor:
    """Tokens of each completion without those of tools: int64 `(B,)`."""
    lengths = experience.completions.lengths
    if TOOL_OUTPUT not in experience.per_token:
        return lengths
    from_tool = experience.per_token[TOOL_OUTPUT].long()
    return lengths - torch.zeros_like(lengths).index_add_(0, experience.completions.row_index, from_tool)


def measured_groups(
    rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int, *, scale: Scale, share: float
) -> dict[str, Weighted]:
    """`completions/*`, `rewards/*`, `reward`, `reward_std` and `frac_reward_zero_std` of rows of all processes.

    Means are over rows; minima, maxima and deviations are averaged over batches. This process logs a `share` of them.
    """
    found = source_means(rows, sources)
    for name, value in reward_metrics(sources, torch.stack(source_table(rows, sources), dim=1)).items():
        if name.endswith("/std") and not math.isnan(value):
            found[name] = _once(value)
    found |= reward_statistics(rows[REWARD], group_size, scale=scale)
    return {**measured_lengths(rows, share=share), **_shared(found, share)}


def _shared(found: Mapping[str, Weighted], share: float) -> dict[str, Weighted]:
    return {name: Weighted(value.total * share, value.count * share) for name, value in found.items()}


def measured_lengths(rows: Mapping[str, Tensor], *, share: float) -> dict[str, Weighted]:
    """`completions/*` of rows of all processes, of which this process logs a `share`."""
    lengths, stopped = rows[LENGTH], rows[STOPPED] != 0
    found = {"completions/clipped_ratio": weighted((~stopped).double())}
    for name, own in (("", lengths), ("_terminated", lengths[stopped])):
        if len(own):
            found[f"completions/mean{name}_length"] = weighted(own)
            found[f"completions/min{name}_length"] = _once(own.min())
            found[f"completions/max{name}_length"] = _once(own.max())
    return _shared(found, share)


def _once(value: Any) -> Weighted:
    return Weighted(torch.as_tensor(value, dtype=torch.float64), torch.ones(()))


def extremes_of_processes(own: Mapping[str, Tensor]) -> dict[str, Weighted]:
    """Minima (names that end with `/min`) and maxima over all processes, each of which must call it, without any with an empty dict."""
    every = gather_object([{name: float(value) for name, value in own.items()}])
    names = dict.fromkeys(name for each in every for name in each)
    return {
        name: _once((min if name.endswith("/min") else max)(each[name] for each in every if name in each))
        for name in names
    }


class EvaluationExtremes:
    """Minima and maxima over an evaluation, of metrics with `min` or `max` in their names.

    >>> extremes, one = EvaluationExtremes(), torch.ones(())
    >>> [extremes.rest({"lengths/max_length": Weighted(one * n, one), "reward": Weighted(one, one)}) for n in (2, 5, 3)][0].keys()
    dict_keys(['reward'])
    >>> extremes.drain()
    {'lengths/max_length': 5.0}
    """

    def __init__(self) -> None:
        self._found: dict[str, float] = {}

    def rest(self, metrics: Mapping[str, Weighted]) -> dict[str, Weighted]:
        """Record the extremes among the metrics of a batch (of all processes), and return the others."""
        rest = dict(metrics)
        for name in metrics:
            kind = {"min": min, "max": max}.get(name.rpartition("/")[2][:3])
            if kind is not None:
                value = float(rest.pop(name).mean)
                self._found[name] = kind(value, self._found.get(name, value))
        return rest

    def drain(self) -> dict[str, float]:
        """The extremes since the last call."""
        found, self._found = self._found, {}
        return found


class ClippedExtremes:
    """Means of micro-batches, of which the extremes over processes are logged."""

    def __init__(self) -> None:
        self._means: dict[str, list[Tensor]] = {}

    def add(self, metrics: Mapping[str, Weighted], *, counted: bool = True) -> None:
        """Record a micro-batch in all processes; one that is not `counted` is a placeholder."""
        for name, (source, _) in EXTREMES.items():
            if source in metrics:
                mean = metrics[source].mean.detach().double()
                self._means.setdefault(name, []).append(mean if counted else mean * math.nan)

    def drain(self, accelerator: Any) -> dict[str, float]:
        """Means over micro-batches of the extremes over processes, since the last call. All processes must call it."""
        means, self._means = self._means, {}
        found = {}
        for name, own in means.items():
            table = torch.stack(own)[None]
            if accelerator.num_processes > 1:
                table = accelerator.gather(table.to(accelerator.device))
            worst = math.inf if EXTREMES[name][1] is torch.min else -math.inf
            extremes = table.nan_to_num(worst).aminmax(dim=0)[worst < 0]
            if extremes.isfinite().any():
                found[name] = float(extremes[extremes.isfinite()].mean())
        return found

    def state(self) -> dict[str, list[float]]:
        """The recorded means as plain values."""
        return {name: torch.stack(values).tolist() for name, values in self._means.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore `state`."""
        self._means = {
            name: list(torch.tensor(values, dtype=torch.float64)) for name, values in state.items()
        }

    def __bool__(self) -> bool:
        return bool(self._means)
